"""The ownership story of a job as a picture, with a lane for each worker on a time axis, and as a table.

A run of a millisecond and a wait of hours must both be visible. If a scale in proportion to time would hide
something, each stretch between two moments gets a least width, to which the logarithm of its length is added,
and a label with its length.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from jsworker.core.names import printable
from jsworker.dashboard.charts import rect, text, titled
from jsworker.dashboard.filters import duration, moment
from jsworker.dashboard.timeline_story import SIGNS, Sign, Story, StoryMark, StoryRun, Wait
from jsworker.dashboard.visit import TEMPLATES
from jsworker.ownership.queries.listing import MOST_EVENTS

_LEFT: Final = 150
"""Left edge of the drawing: the names of the lanes are left of it."""
_RIGHT: Final = 24
_TOP: Final = 14
_LEAST_WIDTH: Final = 900
_ROOM_FOR_MOMENT: Final = 26
"""Units of width for each moment, if the picture would else be too narrow."""
_READABLE: Final = 16
"""Least units between two moments for a scale in proportion to time."""
_QUEUE_HEIGHT: Final = 54
_LANE_HEIGHT: Final = 54
_AXIS_HEIGHT: Final = 30
_BAR: Final = 22
_CHARACTER: Final = 6.3
"""Usual width of a character of a label."""
_MOST_LANES: Final = 10
_SAME_SECONDS: Final = 0.0002
"""Moments that are closer than this are drawn as one: a statement writes its times one after another."""
_LANE_NAME: Final = 20
_WORTH_CUTTING: Final = 14
"""Least room, in characters, for a label that is cut off."""
_KEY: Final = (
    ("completed", "completed"),
    ("failed", "failed"),
    ("lost", "taken back"),
    ("processing", "running"),
    ("queued", "in the queue"),
    ("scheduled", "waits for a time"),
    ("held", "held"),
    ("cancelled", "cancelled"),
)
"""The looks of runs and waits, in the order of the legend, with the words for them."""
_TEMPLATE: Final[Any] = TEMPLATES.get_template("timeline.html").module


class _Scale:
    """Maps times to places: in proportion to time, or with room between all moments."""

    def __init__(self, moments: Sequence[datetime]) -> None:
        times = sorted({moment.timestamp() for moment in moments})
        kept = [times[0]]
        kept += [b for a, b in pairwise(times) if b - a > _SAME_SECONDS]
        self.times = kept
        self.width = max(_LEAST_WIDTH, _LEFT + _RIGHT + _ROOM_FOR_MOMENT * len(kept))
        room = self.width - _LEFT - _RIGHT
        lengths = [b - a for a, b in pairwise(kept)]
        whole = sum(lengths)
        self.is_true = all(length / whole * room >= _READABLE for length in lengths)
        if self.is_true:
            shares = [length / whole for length in lengths]
        else:
            grown = [1 + math.log10(1 + length * 1_000) for length in lengths]
            shares = [each / sum(grown) for each in grown]
        self._places = [float(_LEFT)]
        for share in shares:
            self._places.append(self._places[-1] + share * room)

    def x(self, time: datetime) -> float:
        """Return the place of a time; a time outside the scale is at its edge."""
        at = time.timestamp()
        after = bisect_right(self.times, at)
        if after == 0:
            return self._places[0]
        if after == len(self.times):
            return self._places[-1]
        begin, end = self.times[after - 1], self.times[after]
        left, right = self._places[after - 1], self._places[after]
        return left + (at - begin) / (end - begin) * (right - left)

    def stretches(self) -> Iterator[tuple[float, float, float]]:
        """Yield the two ends of each stretch between two moments, and its length in seconds."""
        for (left, right), (begin, end) in zip(pairwise(self._places), pairwise(self.times), strict=True):
            yield left, right, end - begin


@dataclass(slots=True)
class _Lane:
    name: str
    top: float
    anchors: list[float] = field(default_factory=list)
    """Places where labels begin, from left to right."""

    @property
    def middle(self) -> float:
        return self.top + 18

    def label(self, x: float, edge: float, looks: str, *words: str) -> Markup:
        """Return a label: the first of ``words``, cut to fit; with little room, the first that fits whole."""
        room = next((each for each in self.anchors if each > x + 1), edge) - x - 6
        most = int(room / _CHARACTER)
        found = next((each for each in words if len(each) <= most), "")
        if most >= _WORTH_CUTTING:
            found = printable(words[0], most)
        return text(f"timeline-label {looks}", x, self.middle + 25, found) if found else Markup("")


def timeline_picture(story: Story) -> Markup:
    """Return the story of a job as an SVG element in a region that can be scrolled."""
    scale = _Scale(_moments(story))
    lanes = _lanes(story)
    for run in story.runs:
        lanes[run.worker].anchors.append(scale.x(run.begin))
    for mark in story.marks:
        if mark.worker is not None and mark.sign.late_label:
            lanes[mark.worker].anchors.append(scale.x(mark.at) - 8)
    for lane in lanes.values():
        lane.anchors.sort()
    height = _TOP + _QUEUE_HEIGHT + _LANE_HEIGHT * len(set(map(id, lanes.values()))) + _AXIS_HEIGHT
    parts = [_background(story, scale, lanes, height), *_names(lanes)]
    parts += [_wait(wait, scale) for wait in story.waits]
    parts += list(_handovers(story, scale, lanes))
    parts += [_refused_write(mark, story, scale, lanes) for mark in story.marks if mark.name == "rejected"]
    parts += [_run(run, scale, lanes[run.worker]) for run in story.runs]
    parts += list(_all_marks(story, scale, lanes))
    svg = Markup(
        '<svg class="timeline" viewBox="0 0 {} {}" width="{}" height="{}" role="img"><title>{}</title>'
        '<desc>{}</desc><defs><pattern id="timeline-silence" width="6" height="6" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path class="timeline-hatch" d="M0 0V6"/></pattern></defs>{}</svg>'
    ).format(
        scale.width,
        height,
        scale.width,
        height,
        "Timeline of the job",
        _summary(story),
        Markup("").join(parts),
    )
    notes = [] if scale.is_true else ["Not to scale: each column says how long it took."]
    if story.left_out:
        notes.append(f"{story.left_out} runs and events are left out here; the table has them.")
    if story.is_cut:
        notes.append(f"Only the last {MOST_EVENTS:,} entries of the timeline were read.")
    used = {run.look for run in story.runs} | {wait.look for wait in story.waits}
    marks = {mark.name for mark in story.marks}
    figure: Markup = _TEMPLATE.figure(
        svg,
        looks=[(look, words) for look, words in _KEY if look in used],
        is_silent=any(run.silent_since is not None for run in story.runs),
        signs=[(sign.legend, _sign(sign)) for name, sign in SIGNS.items() if sign.legend and name in marks],
        notes=notes,
    )
    return figure


def timeline_table(story: Story) -> Markup:
    """Return the story as a table: the time, the time since it was enqueued, the run, and what happened."""
    table: Markup = _TEMPLATE.table(story)
    return table


def _moments(story: Story) -> list[datetime]:
    moments = [story.begin, story.end]
    moments += [moment for run in story.runs for moment in (run.begin, run.end)]
    moments += [mark.at for mark in story.marks if mark.name != "step"]
    moments += [moment for wait in story.waits for moment in (wait.begin, wait.end)]
    if max(moments) == min(moments):
        moments.append(datetime.fromtimestamp(min(moments).timestamp() + 1, UTC))
    return moments


def _lanes(story: Story) -> dict[str, _Lane]:
    """Return the lane of each worker, in the order of appearance; from the tenth on they share one."""
    seen = sorted(story.runs, key=lambda run: run.begin)
    names = [run.worker for run in seen] + [mark.worker for mark in story.marks if mark.worker is not None]
    lanes: dict[str, _Lane] = {}
    for name in names:
        if name in lanes:
            continue
        if len(lanes) < _MOST_LANES:
            lanes[name] = _Lane(name or "unknown", _TOP + _QUEUE_HEIGHT + _LANE_HEIGHT * len(lanes))
        else:
            lanes[name] = list(lanes.values())[_MOST_LANES - 1]
            lanes[name].name = "other workers"
    return lanes


def _background(story: Story, scale: _Scale, lanes: dict[str, _Lane], height: float) -> Markup:
    parts = []
    bottom = height - _AXIS_HEIGHT
    for number, (left, right, seconds) in enumerate(scale.stretches()):
        if not scale.is_true and number % 2 == 0:
            parts.append(rect("timeline-band", left, _TOP - 6, right - left, bottom - _TOP + 6))
        words = str(duration(seconds))
        if right - left >= len(words) * _CHARACTER + 4:
            parts.append(text("timeline-tick", (left + right) / 2, bottom + 18, words, "middle"))
        parts.append(
            Markup('<path class="timeline-grid" d="M{:.1f} {}V{}"/>').format(right, _TOP - 6, bottom + 4)
        )
    parts += [
        Markup('<path class="timeline-lane" d="M0 {}H{}"/>').format(lane.top - 4, scale.width)
        for lane in lanes.values()
    ]
    parts.append(Markup('<path class="timeline-lane" d="M0 {}H{}"/>').format(bottom, scale.width))
    begin = f"{story.begin.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    parts.append(text("timeline-tick", 4, bottom + 18, begin))
    return Markup("").join(parts)


def _names(lanes: dict[str, _Lane]) -> Iterator[Markup]:
    yield text("timeline-name", 4, _TOP + 22, "queue")
    for lane in {id(lane): lane for lane in lanes.values()}.values():
        name = printable(lane.name, 200)
        short = name if len(name) <= _LANE_NAME else f"{name[:8]}…{name[9 - _LANE_NAME :]}"
        yield titled(f"worker {name}", text("timeline-name", 4, lane.middle + 4, short))


def _wait(wait: Wait, scale: _Scale) -> Markup:
    left, right = scale.x(wait.begin), scale.x(wait.end)
    took = str(duration(wait.end - wait.begin))
    words = f"{wait.words} for {took}"
    bar = rect(f"timeline-wait look-{wait.look}", left, _TOP + 14, max(right - left, 1), 8, rounded=4)
    label = Markup("")
    for each in (words, took):
        if right - left >= len(each) * _CHARACTER:
            label = text("timeline-label", (left + right) / 2, _TOP + 37, printable(each, 100), "middle")
            break
    return titled(words, bar, label)


def _run(run: StoryRun, scale: _Scale, lane: _Lane) -> Markup:
    left, right = scale.x(run.begin), scale.x(run.end)
    width = max(right - left, 3.0)
    top = lane.middle - _BAR / 2
    took = str(duration(run.end - run.begin))
    parts = [rect(f"timeline-run look-{run.look}", left, top, width, _BAR, rounded=5)]
    if run.silent_since is not None:
        begin = scale.x(run.silent_since)
        silent = Markup(
            '<rect fill="url(#timeline-silence)" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"/>'
        )
        seconds = duration(run.end - run.silent_since)
        drawn = silent.format(begin, top, max(right - begin, 2), _BAR)
        parts.append(titled(f"no heartbeat for {seconds}", drawn))
    if run.outcome == "running":
        parts.append(
            Markup('<path class="timeline-goes-on" d="M{:.1f} {:.1f}l8 {}l-8 {}"/>').format(
                left + width, top, _BAR / 2, _BAR / 2
            )
        )
    name = f"run {run.token}"
    fitting = int((width - 12) / _CHARACTER)
    inside = next((each for each in (f"{name} · {took}", name) if len(each) <= fitting), None)
    labels = [run.label]
    if inside is not None:
        parts.append(text("timeline-inside", left + 7, lane.middle + 4, inside))
    else:
        labels = [f"{name} · {took} · {run.label}", f"{name} · {took}", name]
    parts.append(lane.label(left, scale.width - 4, f"look-{run.look}", *labels))
    return titled(f"{run.words} (from {moment(run.begin)} UTC, {took})", *parts)


def _handovers(story: Story, scale: _Scale, lanes: dict[str, _Lane]) -> Iterator[Markup]:
    """Yield an arrow from each run to the next one, in another colour from a run that was taken back."""
    for run, following in pairwise(story.runs):
        if following.token != run.token + 1:
            continue
        x1, y1 = scale.x(run.end), lanes[run.worker].middle
        x2, y2 = scale.x(following.begin), lanes[following.worker].middle
        bend = max((x2 - x1) / 2, 10)
        look = "timeline-handover" + (" timeline-lost" if run.outcome == "reset" else "")
        yield Markup(
            '<path class="{}" d="M{:.1f} {:.1f}C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}"/>'
        ).format(look, x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2)


def _refused_write(mark: StoryMark, story: Story, scale: _Scale, lanes: dict[str, _Lane]) -> Markup:
    """Return the line from the end of a run to a late write of its worker, which was refused."""
    ends = [run.end for run in story.runs if run.token == mark.token]
    if not ends or mark.worker is None or ends[0] >= mark.at:
        return Markup("")
    lane = lanes[mark.worker]
    return Markup('<path class="timeline-ghost" d="M{:.1f} {:.1f}H{:.1f}"/>').format(
        scale.x(ends[0]), lane.middle, scale.x(mark.at)
    )


def _all_marks(story: Story, scale: _Scale, lanes: dict[str, _Lane]) -> Iterator[Markup]:
    for mark in story.marks:
        x = scale.x(mark.at)
        lane = None if mark.worker is None else lanes[mark.worker]
        y = _TOP + 18 if lane is None else lane.middle
        if mark.name == "cancel_requested" and lane is not None:
            y -= _BAR / 2  # not over the words within the bar
        if mark.name == "step":
            drawn = Markup('<circle class="timeline-step" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(
                x, y + _BAR / 2
            )
        else:
            place = Markup('<g transform="translate({:.1f} {:.1f})">{}</g>')
            drawn = place.format(x, y, _sign(mark.sign))
        if lane is not None and mark.sign.late_label:
            drawn += lane.label(x - 8, scale.width - 4, "look-lost", mark.sign.late_label)
        yield titled(f"{mark.words} ({moment(mark.at)} UTC)", drawn)


def _sign(sign: Sign) -> Markup:
    return Markup(
        '<circle class="timeline-mark look-{}" r="8"/><path class="timeline-glyph" d="{}"/>'
    ).format(sign.look, sign.glyph)


def _summary(story: Story) -> str:
    """Return the picture in words, for screen readers."""
    took = duration(story.end - story.begin)
    runs = [f"{run.words}." for run in story.runs]
    return " ".join([f"{len(story.runs)} runs within {took}.", *runs, "The table beside it has every event."])
