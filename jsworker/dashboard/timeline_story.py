"""The ownership story of a job: its runs, its waits and other events, from its row and its timeline.

The row has the first claim, the last message and the end; the timeline has everything between.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard

from jsworker.client.job_info import JobDetails, JobEvent
from jsworker.client.job_timeline import (
    ENDS,
    entry_line,
    entry_lines,
    readable,
    run_line,
    run_owner,
    taken_over,
)
from jsworker.core.names import printable
from jsworker.ownership.queries.listing import MOST_EVENTS

MOST_RUNS: Final = 24
"""Most runs that are drawn: if there are more, the first four and the last ones."""
MOST_MARKS: Final = 120
"""Most marks of one sort that are drawn: steps, or everything else that is not a run."""
_FIRST_RUNS: Final = 4
_LONGEST_LABEL: Final = 60
_LONGEST_SILENCE: Final = 1e9
_SILENT_SECONDS: Final = 10.0

Look: TypeAlias = Literal[
    "completed", "failed", "cancelled", "processing", "queued", "scheduled", "held", "lost", "plain"
]

_RUN_LOOKS: Final[dict[str, Look]] = {
    "completed": "completed",
    "error": "failed",
    "failed": "failed",
    "cancelled": "cancelled",
    "released": "queued",
    "snoozed": "scheduled",
    "reset": "lost",
    "running": "processing",
}
_SHORT_CAUSES: Final = {
    "stale": "taken back: silent for too long",
    "crashed": "taken back: silent, and no process answers",
    "dead": "taken back: its process is proven dead",
    "operator": "taken back: an operator said so",
}


class Sign(NamedTuple):
    """How an event is drawn.

    Attributes:
        legend: its name in the legend; None: it has none.
        look: the class of the style sheet for it.
        glyph: a path within a disc of radius 8.
        of_run: whether it is drawn in the lane of the worker that wrote it.
        late_label: what is written beside it there.
    """

    legend: str | None = None
    look: Look = "plain"
    glyph: str = "M0-3.5V1M0 3V3.6"
    of_run: bool = False
    late_label: str | None = None


_CROSS: Final = "M-3-3L3 3M3-3L-3 3"
_PAUSE: Final = "M-2-3.5V3.5M2-3.5V3.5"
_SEND: Final = "M-4 0H3M0-3L3 0L0 3"
_STOP: Final = "M-3.5-3.5H3.5V3.5H-3.5Z"
SIGNS: Final = {
    "enqueued": Sign("enqueued", glyph="M-4 0H4M0-4V4"),
    "published": Sign("last message stored", glyph=_SEND),
    "republished": Sign("published again", "queued", _SEND),
    "retried": Sign("retried by hand", "queued", "M3 3.5H-1A3 3 0 0 1-1-2.5H3M1-4.5L3.5-2.5L1-.5"),
    "held": Sign("held", "held", _PAUSE),
    "deferred": Sign("waits for its key", "held", _PAUSE),
    "woken": Sign("woken", "queued", "M-2-4L3.5 0L-2 4Z"),
    "child_jobs": Sign("enqueued jobs", "queued", "M-4 0H0M0-3V3M0-3H4M0 3H4", of_run=True),
    "sleep": Sign("sleeps", "scheduled", "M-3-3.5H3L-3 3.5H3", of_run=True),
    "fenced": Sign(
        "stopped itself", "lost", _STOP, of_run=True, late_label="stopped itself: no heartbeat was answered"
    ),
    "rejected": Sign("late write refused", "lost", "M-4 4L4-4", of_run=True, late_label="late write refused"),
    "error_after_completion": Sign("error after completion", "failed", _CROSS, of_run=True),
    "skipped": Sign("skipped a message", glyph="M-4 2A4 4 0 0 1 4 2M4 2L4.5-2M4 2L.5 1", of_run=True),
    "cancel_requested": Sign("asked to stop", "cancelled", _STOP),
    "cancelled": Sign("cancelled", "cancelled", _CROSS),
    "priority_set": Sign("priority set", glyph="M0 4V-4M-3-1L0-4L3-1"),
    "rescheduled": Sign("rescheduled", glyph="M0-3.5V0L3 2"),
    "failed": Sign(None, "failed", _CROSS),
    "step": Sign(None, "completed", of_run=True),
}
"""The sign of each event, in the order of the legend."""
OTHER: Final = Sign()


@dataclass(frozen=True, slots=True)
class StoryRun:
    """A run as it is drawn.

    Attributes:
        token: its fencing token.
        worker: the worker that ran it; empty: not known.
        begin, end: of a run that goes on, ``end`` is now.
        outcome: completed, error, failed, cancelled, released, snoozed, reset, running or unknown.
        label: the outcome in a few words.
        words: the whole run in words.
        silent_since: the time since which no heartbeat came; None: no silence is known.
    """

    token: int
    worker: str
    begin: datetime
    end: datetime
    outcome: str
    label: str
    words: str
    silent_since: datetime | None = None

    @property
    def look(self) -> Look:
        """The class of the style sheet for its outcome."""
        return _RUN_LOOKS.get(self.outcome, "plain")


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which no worker ran the job."""

    begin: datetime
    end: datetime
    look: Look
    words: str


@dataclass(frozen=True, slots=True)
class StoryMark:
    """An event at a moment; without ``worker`` it happened to the job itself."""

    at: datetime
    name: str
    words: str
    worker: str | None = None
    token: int | None = None

    @property
    def sign(self) -> Sign:
        """How it is drawn."""
        return SIGNS.get(self.name, OTHER)


@dataclass(frozen=True, slots=True)
class StoryLine:
    """A line of the table that shows the story in words."""

    at: datetime
    token: int | None
    words: str


@dataclass(frozen=True, slots=True)
class Story:
    """What happened to a job.

    Attributes:
        begin: when it was enqueued; end: when it ended, or now.
        runs, waits, marks: what is drawn.
        lines: all of it in words, oldest first.
        left_out: how many runs and marks are not drawn.
        is_cut: whether the timeline may have earlier entries, which were not read.
    """

    begin: datetime
    end: datetime
    runs: list[StoryRun]
    waits: list[Wait]
    marks: list[StoryMark]
    lines: list[StoryLine]
    left_out: int
    is_cut: bool


def job_story(
    job: JobDetails,
    timeline: Sequence[JobEvent],
    now: datetime | None = None,
    *,
    heartbeat_interval: float = 5.0,
) -> Story:
    """Return the story of a job; a run that has not ended is drawn until ``now``."""
    now = now or datetime.now(UTC)
    events = [readable(_columns(event)) for event in timeline]
    found = _columns(job) | {"heartbeat_interval": heartbeat_interval}
    is_cut = len(timeline) >= MOST_EVENTS
    runs = list(_runs(found, events, now, is_cut=is_cut))
    marks = [*_row_marks(job), *_marks(events)]
    end = job.finished_at or max([now, *(run.end for run in runs)])
    drawn = runs
    if len(runs) > MOST_RUNS:
        drawn = runs[:_FIRST_RUNS] + runs[_FIRST_RUNS - MOST_RUNS :]
    kept = _few([m for m in marks if m.name != "step"]) + _few([m for m in marks if m.name == "step"])
    if drawn is not runs:  # marks in the gap between these runs would fill the picture
        begin, again = drawn[_FIRST_RUNS - 1].end, drawn[_FIRST_RUNS].begin
        kept = [mark for mark in kept if not begin < mark.at < again]
    return Story(
        begin=job.created_at,
        end=max(end, job.created_at),
        runs=drawn,
        waits=list(_waits(job, events, drawn, end, is_cut=is_cut)),
        marks=sorted(kept, key=lambda mark: mark.at),
        lines=_lines(job, events, runs, is_cut=is_cut),
        left_out=len(runs) - len(drawn) + len(marks) - len(kept),
        is_cut=is_cut,
    )


def is_silent(last_activity_at: datetime, now: datetime, heartbeat_interval: float) -> bool:
    """Return whether the last heartbeat of a run is old, for workers that send one so often."""
    return (now - last_activity_at).total_seconds() > max(_SILENT_SECONDS, 2 * heartbeat_interval)


def _columns(record: JobDetails | JobEvent) -> dict[str, Any]:
    """Return a record by column name; asdict() would also copy its values, which may be large or deep."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _few(marks: list[StoryMark]) -> list[StoryMark]:
    half = MOST_MARKS // 2
    return marks if len(marks) <= MOST_MARKS else marks[:half] + marks[-half:]


def _runs(
    job: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: datetime, *, is_cut: bool
) -> Iterator[StoryRun]:
    by_token: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        by_token.setdefault(event["fencing_token"] or 0, []).append(event)
    last = job["fencing_token"]
    known = {token for token in by_token if 0 < token <= last}
    if last:  # the first claim and a plain completion have no entries
        known |= {last} if is_cut else {1, last}
    for token in sorted(known):
        own = by_token.get(token, [])
        claims = [event for event in by_token.get(token + 1, []) if event["event"] == "claimed"]
        begin = _begin(token, job, own)
        if begin is None:
            continue
        outcome, label, end = _end(token, job, [*own, *claims])
        ended = max(end or now, begin)
        silence = _silence(job, own, outcome, ended)
        yield StoryRun(
            token=token,
            worker=run_owner(token, job, [*own, *claims]) or "",
            begin=begin,
            end=ended,
            outcome=outcome,
            label=label,
            words=run_line(token, job, [*own, *claims]),
            silent_since=None if silence is None else min(max(silence, begin), ended),
        )


def _begin(token: int, job: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> datetime | None:
    """Return when a run began; the row tells it for the first claim, which has no entry in the timeline."""
    begin = next((event["at"] for event in own if event["event"] == "claimed"), None)
    if begin is None and token == job["fencing_token"]:
        begin = job["claimed_at"]
    if begin is None and token == 1:
        begin = job["started_at"]
    return begin or next((event["at"] for event in own), None)


def _end(
    token: int, job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> tuple[str, str, datetime | None]:
    """Return how a run ended, in one word and in a few, and when; None: it has not ended."""
    for event in events:
        if event["fencing_token"] == token and event["event"] in ENDS:
            return event["event"], _label(event), event["at"]
    claim = taken_over(token, events)
    if claim is not None:
        return "reset", "taken over: silent for too long", claim["at"]
    if token != job["fencing_token"]:
        return (
            "unknown",
            "ended without a trace",
            next((e["at"] for e in events if e["fencing_token"] > token), job["claimed_at"]),
        )
    if job["status"] == "processing":
        return "running", "asked to stop" if job["cancel_requested"] else "running", None
    return job["status"], job["status"], job["finished_at"] or job["claimed_at"]


def _label(event: Mapping[str, Any]) -> str:
    detail = event["detail"] or {}
    match event["event"]:
        case "reset":
            return _SHORT_CAUSES.get(str(detail.get("cause")), "taken back")
        case "error" | "failed" as name:
            said = (event["error"] or "").strip().partition("\n")[0]
            return printable(f"{name}: {said}" if said else name, _LONGEST_LABEL)
        case "released" | "snoozed" as name:
            words = {"released": "handed back", "snoozed": "put off"}[name]
            return printable(f"{words}: {detail.get('reason') or ''}".rstrip(": "), _LONGEST_LABEL)
        case name:
            return printable(str(name), _LONGEST_LABEL)


def _silence(
    job: Mapping[str, Any], own: Sequence[Mapping[str, Any]], outcome: str, end: datetime
) -> datetime | None:
    """Return the time since which the heartbeats of a run were missing; None: it is not known.

    A ``fenced`` entry has the length of the silence. Before a reset because of silence, it was at least the
    threshold for this cause; the row has that of the last claim. For other causes it is not known.
    """
    for event in own:
        if event["event"] == "fenced":
            seconds = (event["detail"] or {}).get("seconds_without_heartbeat")
            at: datetime = event["at"]
            return at - timedelta(seconds=seconds) if _is_number(seconds) else None
    if outcome == "running":
        last: datetime = job["last_activity_at"]
        return last if is_silent(last, end, job["heartbeat_interval"]) else None
    if outcome != "reset":
        return None
    causes = {(event["detail"] or {}).get("cause") for event in own if event["event"] == "reset"}
    if causes & {"dead", "operator"}:
        return None
    threshold = job["crash_after"] if "crashed" in causes else job["stale_after"]
    return None if threshold is None else end - threshold


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < _LONGEST_SILENCE


def _row_marks(job: JobDetails) -> Iterator[StoryMark]:
    by = f" by schedule {printable(job.schedule, 100)}" if job.schedule else ""
    yield StoryMark(job.created_at, "enqueued", f"enqueued{by}")
    if job.published_at is not None:
        place = "" if job.stream_seq is None else f" as number {job.stream_seq} of the stream"
        yield StoryMark(job.published_at, "published", f"its last message was stored{place}")


def _marks(events: Sequence[Mapping[str, Any]]) -> Iterator[StoryMark]:
    """Yield a mark for each entry that is not a claim and does not end a run."""
    ended: set[int] = set()
    for event in events:
        name, token = event["event"], event["fencing_token"] or 0
        if name == "claimed":
            continue
        if name in ENDS and token and token not in ended:
            ended.add(token)
            continue
        worker = event["worker_id"] if SIGNS.get(name, OTHER).of_run else None
        if name == "cancel_requested":
            worker = (event["detail"] or {}).get("owner")
        words = entry_line(event, zone=UTC)
        yield StoryMark(event["at"], name, words, str(worker) if worker else None, token or None)


def _waits(
    job: JobDetails,
    events: Sequence[Mapping[str, Any]],
    runs: Sequence[StoryRun],
    end: datetime,
    *,
    is_cut: bool,
) -> Iterator[Wait]:
    """Yield the times in which the job waited, each with what it waited for."""
    begins = sorted(run.begin for run in runs)
    first: _Turn = (None, "", None) if is_cut else _first_wait(job, begins[0] if begins else None)
    turns: list[tuple[datetime, Look | None, str, datetime | None]] = [(job.created_at, *first)]
    turns += [(run.end, *_wait_after(run, events)) for run in runs if run.outcome != "running"]
    for event in events:
        if event["event"] == "held":
            held = (event["detail"] or {}).get("held_by")
            turns.append((event["at"], "held", f"held: {printable(str(held), 20)}", None))
        elif event["event"] in {"woken", "retried", "deferred"}:
            awaited: Look = "held" if event["event"] == "deferred" else "queued"
            turns.append((event["at"], awaited, entry_line(event, zone=UTC), None))
        elif event["event"] in {"cancelled", "failed"}:
            turns.append((event["at"], None, "", None))
    if job.held_at is not None and job.held_by is not None:
        turns.append((job.held_at, "held", f"held: {job.held_by}", None))
    turns.sort(key=lambda turn: turn[0])
    ends = [*(turn[0] for turn in turns[1:]), end]
    for (begin, look, words, until), next_at in zip(turns, ends, strict=True):
        if look is None:
            continue
        stop = min([each for each in begins if each >= begin] + [next_at, end])
        if until is not None and begin < until < stop:
            yield Wait(begin, until, look, words)
            if job.status == "scheduled" and stop == end:
                yield Wait(until, stop, "scheduled", "was due, but not queued")
            else:
                yield Wait(until, stop, "queued", "waited in the queue")
        elif begin < stop:
            yield Wait(begin, stop, look, words)


_Turn: TypeAlias = tuple[Look | None, str, datetime | None]


def _first_wait(job: JobDetails, begin: datetime | None) -> _Turn:
    """Return what a job waited for at first, before its first run, which began at ``begin``.

    The row has only the last times at which it was due and at which it was queued.
    """
    last = begin or datetime.max.replace(tzinfo=UTC)
    if job.batch_id is not None and job.queued_at is not None and job.created_at < job.queued_at <= last:
        return "held", "waited for what it needs", job.queued_at
    if job.run_at is not None and job.created_at < job.run_at <= last:
        return "scheduled", "waited for its time", job.run_at
    return "queued", "waited in the queue", None


def _wait_after(run: StoryRun, events: Sequence[Mapping[str, Any]]) -> _Turn:
    own = (event for event in events if event["fencing_token"] == run.token and event["event"] in ENDS)
    detail = next((event["detail"] for event in own), None) or {}
    if run.outcome in {"failed", "cancelled", "completed", "unknown"} or detail.get("to") in {
        "failed",
        "cancelled",
    }:
        return None, "", None
    try:
        until = datetime.fromisoformat(str(detail.get("run_at")))
    except ValueError:
        until = None
    if until is not None and until.tzinfo is not None:
        return "scheduled", "waited for its back-off", until
    if detail.get("to") == "scheduled":
        return "scheduled", "waited for its back-off", None
    return "queued", "waited in the queue", None


def _lines(
    job: JobDetails, events: Sequence[Mapping[str, Any]], runs: Sequence[StoryRun], *, is_cut: bool
) -> list[StoryLine]:
    lines = [StoryLine(mark.at, mark.token, mark.words) for mark in _row_marks(job)]
    claimed = {event["fencing_token"] for event in events if event["event"] == "claimed"}
    for run in runs:
        if run.token not in claimed and run.outcome != "unknown" and not is_cut:
            by = f" by {printable(run.worker, 300)}" if run.worker else ""
            lines.append(StoryLine(run.begin, run.token, f"claimed{by}"))
    lines += [
        StoryLine(event["at"], event["fencing_token"] or None, line)
        for event, line in zip(events, entry_lines(events, zone=UTC), strict=True)
    ]
    if job.status == "completed" and job.finished_at is not None:
        by = f" by {printable(job.completed_by, 300)}" if job.completed_by else ""
        lines.append(StoryLine(job.finished_at, job.fencing_token, f"completed{by}"))
    return sorted(lines, key=lambda line: line.at)
