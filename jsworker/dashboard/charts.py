"""Time series as inline SVG, drawn by the server: lines and stacked bars, without any script.

Colours come from classes, so that the style sheet decides them in light and dark. All text is escaped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from markupsafe import Markup

from jsworker.core.names import printable
from jsworker.dashboard.filters import duration

Form: TypeAlias = Literal["lines", "bars"]
Unit: TypeAlias = Literal["", "s"]

_WIDTH: Final = 480
_HEIGHT: Final = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_TICKS: Final = 4
_STEPS_SECONDS: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1_800),
    *(3_600, 7_200, 10_800, 21_600, 43_200),
    *(86_400, 172_800, 604_800),
)
_LONGEST_NAME: Final = 60


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or colour of the bars.

    Attributes:
        name: in the legend.
        values: one for each time, in the chart's unit; None: not known.
        look: class of the style sheet for its colour, as in ``look-failed``.
    """

    name: str
    values: Sequence[float | None]
    look: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where times and values are placed in the drawing."""

    first: float
    last: float
    top: float

    def x(self, time: datetime) -> float:
        share = (time.timestamp() - self.first) / (self.last - self.first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)


def time_chart(
    title: str,
    times: Sequence[datetime],
    series: Sequence[Series],
    *,
    form: Form = "lines",
    unit: Unit = "",
) -> Markup:
    """Return a chart as an SVG element, with its legend.

    Bars are stacked in the order of the series. If no value is known, the chart says so.

    Args:
        title: its name, also for screen readers.
        times: those of the values, at least two, in their order, within a day; for bars, when each begins.
        series: each with a value for every time.
        form: how the series are drawn.
        unit: ``"s"`` for durations in seconds, empty for numbers.
    """
    layers = _layers(series, is_stacked=form == "bars")
    known = [value for _, high in layers for value in high if value is not None]
    top = round_steps(max(known, default=0.0), unit)[-1]
    frame = _Frame(times[0].timestamp(), times[-1].timestamp(), top)
    parts = [_values_axis(frame, unit)]
    if known:
        parts += [_times_axis(frame)]
        drawn = zip(series, layers, strict=True)
        parts += [_drawn(form, frame, times, each.look, layer) for each, layer in drawn]
        parts += [_columns(frame, times, series, unit)]
    else:
        parts.append(text("chart-empty", _WIDTH / 2, _HEIGHT / 2, "no data yet", "middle"))
    svg = Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(_WIDTH, _HEIGHT, title, _summary(times, series, unit), Markup("").join(parts))
    return Markup('<figure class="chart-figure"><figcaption>{}{}</figcaption>{}</figure>').format(
        title, _legend(series) if len(series) > 1 else "", svg
    )


Layer: TypeAlias = tuple[list[float | None], list[float | None]]


def _layers(series: Sequence[Series], *, is_stacked: bool) -> list[Layer]:
    """Return the bounds of each series at each time; a value below 0 or not finite counts as not known."""
    layers: list[Layer] = []
    low: list[float | None] = [0.0] * len(series[0].values)
    for each in series:
        found = [v if v is not None and math.isfinite(v) and v >= 0 else None for v in each.values]
        if is_stacked:
            high = [(a or 0.0) + v if v is not None else None for a, v in zip(low, found, strict=True)]
            layers.append((low, high))
            low = [h if h is not None else a for a, h in zip(low, high, strict=True)]
        else:
            layers.append((low, found))
    return layers


def round_steps(most: float, unit: Unit) -> list[float]:
    """Return round numbers from 0 to at least ``most``, some five of them; only seconds have fractions."""
    if most <= 0:
        most = 1.0
    if unit and _TICKS < most <= _TICKS * _STEPS_SECONDS[-1]:
        step = float(next(seconds for seconds in _STEPS_SECONDS if seconds * _TICKS >= most))
    else:
        power = 10.0 ** math.floor(math.log10(most / _TICKS))
        step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * _TICKS >= most)
    if not unit:
        step = max(step, 1.0)
    count = max(math.ceil(most / step - 1e-9), 1)
    return [step * n for n in range(count + 1)]


def round_times(first: float, last: float, most: int) -> list[float]:
    """Return at most ``most`` round times within a span, as seconds since 1970."""
    step = next(s for s in _STEPS_SECONDS if (last - first) / s < most)
    begin = math.ceil(first / step) * step
    return [float(begin + step * n) for n in range(int((last - begin) // step) + 1)]


def number(value: float, unit: Unit = "") -> str:
    """Return a value for an axis: ``1.5k``, ``2M``, and a duration in seconds with its unit."""
    if unit and value:
        return str(duration(value))
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"


def _values_axis(frame: _Frame, unit: Unit) -> Markup:
    parts = []
    for value in round_steps(frame.top, unit):
        y = frame.y(value)
        parts.append(Markup('<path class="chart-grid" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT))
        parts.append(text("chart-tick", _LEFT - 6, y + 4, number(value, unit), "end"))
    return Markup("").join(parts)


def _times_axis(frame: _Frame) -> Markup:
    parts = []
    for tick in round_times(frame.first, frame.last, 5):
        time = datetime.fromtimestamp(tick, UTC)
        x = frame.x(time)
        anchor = "end" if x > _WIDTH - 30 else "middle"
        parts.append(text("chart-tick", x, _HEIGHT - 6, f"{time:%H:%M}", anchor))
    return Markup("").join(parts)


def _drawn(
    form: Form,
    frame: _Frame,
    times: Sequence[datetime],
    look: str,
    layer: Layer,
) -> Markup:
    points = [
        (frame.x(time), frame.y(top), frame.y(bottom or 0.0)) if top is not None else None
        for time, bottom, top in zip(times, *layer, strict=True)
    ]
    if form == "bars":
        width = (_WIDTH - _LEFT - _RIGHT) / len(times) * 0.8
        bars = [
            f"M{min(max(x - width / 2, _LEFT), _WIDTH - _RIGHT - width):.1f} {bottom:.1f}"
            f"v{top - bottom:.1f}h{width:.1f}V{bottom:.1f}z"
            for x, top, bottom in filter(None, points)
            if bottom > top
        ]
        return Markup('<path class="chart-bars {}" d="{}"/>').format(look, "".join(bars))
    parts = []
    for run in _without_gaps(points):
        line = "L".join(f"{x:.1f} {top:.1f}" for x, top, _ in run)
        if len(run) == 1:
            x, top, _ = run[0]
            parts.append(
                Markup('<circle class="chart-dot {}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(look, x, top)
            )
            continue
        parts.append(Markup('<path class="chart-line {}" d="M{}"/>').format(look, line))
    return Markup("").join(parts)


_Point: TypeAlias = tuple[float, float, float]


def _without_gaps(points: Sequence[_Point | None]) -> list[list[_Point]]:
    runs: list[list[_Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _columns(frame: _Frame, times: Sequence[datetime], series: Sequence[Series], unit: Unit) -> Markup:
    """Return invisible columns, each of which shows the values of its time under the mouse."""
    places = [frame.x(time) for time in times]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(places)), _WIDTH - _RIGHT]
    parts = []
    for n, time in enumerate(times):
        found = [
            f"{_name(each)}: {number(value, unit)}"
            for each in series
            if (value := each.values[n]) is not None and math.isfinite(value)
        ]
        words = "\n".join([f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC", *(found or ["not known"])])
        box = Markup(
            '<rect class="chart-column" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}</title></rect>'
        )
        parts.append(
            box.format(edges[n], _TOP, max(edges[n + 1] - edges[n], 0.5), _HEIGHT - _TOP - _BOTTOM, words)
        )
    return Markup("").join(parts)


def _legend(series: Sequence[Series]) -> Markup:
    item = Markup(
        '<span class="legend-item"><svg class="legend-mark {}" viewBox="0 0 10 10" aria-hidden="true">'
        '<rect width="10" height="10" rx="2"/></svg>{}</span>'
    )
    items = Markup(" ").join(item.format(each.look, _name(each)) for each in series)
    return Markup('<span class="legend">{}</span>').format(items)


def _summary(times: Sequence[datetime], series: Sequence[Series], unit: Unit) -> str:
    """Return a chart in words: of each series the last, the least and the greatest value."""
    parts = []
    for each in series:
        known = [value for value in each.values if value is not None and math.isfinite(value)]
        if known:
            last, least, most = (number(value, unit) for value in (known[-1], min(known), max(known)))
            parts.append(f"{_name(each)}: last {last}, least {least}, most {most}.")
    if not parts:
        return "No data yet."
    span = (
        f"From {times[0].astimezone(UTC):%Y-%m-%d %H:%M} to {times[-1].astimezone(UTC):%Y-%m-%d %H:%M} UTC."
    )
    return " ".join([span, *parts])


def _name(series: Series) -> str:
    return printable(series.name, _LONGEST_NAME)


def text(look: str, x: float, y: float, words: str, anchor: str = "start") -> Markup:
    """Return a text as SVG; ``anchor`` is the part of it that is at ``x``: start, middle or end."""
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        look, x, y, anchor, words
    )


def rect(look: str, x: float, y: float, width: float, height: float, *, rounded: int = 0) -> Markup:
    """Return a rectangle as SVG."""
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="{}"/>').format(
        look, x, y, width, height, rounded
    )


def titled(words: str, *parts: Markup) -> Markup:
    """Return parts of a drawing with words that are shown under the mouse."""
    return Markup("<g><title>{}</title>{}</g>").format(words, Markup("").join(parts))
