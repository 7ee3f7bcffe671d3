"""The chart of the demo: lines by language over time as stacked areas, one SVG and one PNG per repository."""

import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsworker.core.errors import JsworkerError
from jsworker.demo.chart_labels import fitted, spread
from jsworker.demo.samples import OTHER, RepositoryLines, Sample, other_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED_LANGUAGES = 8

# Neighbours differ in hue and in lightness, so that they stay apart in print and for the colour-blind.
_COLOURS = ("#2f5d8a", "#e9a23b", "#4f9d8f", "#c8553d", "#8bb8dd", "#7a5195", "#b7c86b", "#d98fa3")
_OTHER_COLOUR = "#b9bec4"
_INK, _QUIET_INK, _GRID = "#22272e", "#69727d", "#dde1e6"

_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
    "font.size": 10,
    "svg.hashsalt": "jsworker",
    "svg.fonttype": "path",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": _INK,
    "axes.labelcolor": _QUIET_INK,
    "xtick.color": _QUIET_INK,
    "ytick.color": _QUIET_INK,
}
_WIDTH_INCHES, _HEIGHT_INCHES, _PNG_DPI = 11.0, 6.2, 150
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.085, 0.765, 0.08, 0.85
_NUMBERS_END = (0.975 - _LEFT) / (_RIGHT - _LEFT)
_LABEL_GAP = 0.05


class ChartNotWritten(JsworkerError):
    """The chart could not be written."""


class MatplotlibMissing(JsworkerError):
    """The chart needs matplotlib: pip install "jsworker[demo]"."""


# By what the axis is divided into: years, months, days, hours, minutes, seconds.
_TICKS = ["%Y", "%b %Y", "%d %b", "%H:%M", "%H:%M", "%H:%M:%S"]
_ROUND_TICKS = ["%Y", "%b %Y", "%d %b", "%d %b", "%H:%M", "%H:%M"]


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    colour: str
    lines: list[int]


def require_matplotlib() -> None:
    """Check that charts can be drawn, without the time that importing takes.

    Raises:
        MatplotlibMissing: the extra ``demo`` is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MatplotlibMissing


def draw_charts(repositories: Sequence[RepositoryLines], folder: Path) -> list[tuple[Path, Path]]:
    """Draw one chart for each repository.

    Args:
        repositories: each with at least one sample.
        folder: where to write ``<name>.svg`` and ``<name>.png``; made when it is not there.

    Returns:
        The paths of SVG and PNG, in the order of the repositories.

    Raises:
        ChartNotWritten: the folder or a file cannot be written.
        MatplotlibMissing: the extra ``demo`` is not installed.
    """
    require_matplotlib()
    stems = _file_stems([repository.name for repository in repositories])
    return [
        _draw_chart(repository, folder / stem) for repository, stem in zip(repositories, stems, strict=True)
    ]


def _draw_chart(repository: RepositoryLines, stem: Path) -> tuple[Path, Path]:
    # Nobody needs to hear that fonts are looked up when matplotlib is used for the first time.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    import matplotlib as mpl  # noqa: PLC0415 -- half a second that only a chart should cost

    svg, png = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
    with mpl.rc_context(_STYLE):
        figure = _figure(repository)
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": "jsworker demo"})
            figure.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": "jsworker demo"})
        except OSError as error:
            raise ChartNotWritten(f"chart {error.filename or svg}: {error.strerror}") from error
    return svg, png


def _file_stems(names: Sequence[str]) -> list[str]:
    stems: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "repository"
        stem, number = plain, 1
        while stem.lower() in {taken.lower() for taken in stems}:
            number += 1
            stem = f"{plain}-{number}"
        stems.append(stem)
    return stems


def _figure(repository: RepositoryLines) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 -- see _draw_chart

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), facecolor="white")
    axes = figure.add_axes((_LEFT, _BOTTOM, _RIGHT - _LEFT, _TOP - _BOTTOM))
    layers = _layers(repository)
    _write_title(figure, repository)
    _dress_axes(axes)
    if layers:
        _draw_areas(axes, repository, layers)
        _write_end_labels(axes, layers)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no lines in a known language", transform=axes.transAxes, ha="center")
    return figure


def _layers(repository: RepositoryLines) -> list[_Layer]:
    samples = _by_date(repository)
    named = repository.top_languages(NAMED_LANGUAGES)
    layers = [
        _Layer(language, colour, [sample.lines.get(language, 0) for sample in samples])
        for language, colour in zip(named, _COLOURS, strict=False)
    ]
    others = [other_lines(sample, named) for sample in samples]
    if any(others):
        layers.append(_Layer(OTHER, _OTHER_COLOUR, others))
    return layers


def _by_date(repository: RepositoryLines) -> list[Sample]:
    # Clocks of committers may run backwards along a history; time on the axis does not.
    return sorted(repository.samples, key=lambda sample: sample.date)


def _draw_areas(axes: "Axes", repository: RepositoryLines, layers: Sequence[_Layer]) -> None:
    dates = [sample.date for sample in _by_date(repository)]
    heights = [layer.lines for layer in layers]
    places = _date_axis(axes, dates)
    if len(dates) == 1:
        heights = [[lines[0], lines[0]] for lines in heights]
    axes.stackplot(
        places,
        *heights,
        colors=[layer.colour for layer in layers],
        edgecolor="white",
        linewidth=0.4,
    )
    axes.set_xlim(places[0], places[-1])
    axes.set_ylim(0, 1.04 * max(map(sum, zip(*heights, strict=True))))


def _date_axis(axes: "Axes", days: Sequence[datetime]) -> list[float]:
    from matplotlib import dates  # noqa: PLC0415 -- see _draw_chart

    calendar: Any = dates  # it carries no types
    if days[0] == days[-1]:
        axes.set_xticks([0.5], [_day(days[0])])
        return [place / max(1, len(days) - 1) for place in range(max(2, len(days)))]
    locator = calendar.AutoDateLocator(minticks=3, maxticks=9, tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        calendar.ConciseDateFormatter(
            locator, tz=UTC, formats=_TICKS, zero_formats=_ROUND_TICKS, show_offset=False
        )
    )
    return [float(calendar.date2num(date)) for date in days]


def _dress_axes(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: PLC0415 -- see _draw_chart

    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda lines, _place: f"{lines:,.0f}"))
    axes.tick_params(axis="y", length=0, pad=6)
    axes.tick_params(axis="x", length=0, pad=9)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _write_end_labels(axes: "Axes", layers: Sequence[_Layer]) -> None:
    """Name each area at its right end, so that no eye has to travel to a legend and back."""
    top = axes.get_ylim()[1]
    ends, middles = 0, []
    for layer in layers:
        middles.append((ends + layer.lines[-1] / 2) / top)
        ends += layer.lines[-1]
    places = spread(middles, gap=_LABEL_GAP, low=0.015, high=0.985)
    for layer, middle, place in zip(layers, middles, places, strict=True):
        colour = _readable(layer.colour)
        axes.plot(
            [1.006, 1.026],
            [middle, place],
            transform=axes.transAxes,
            clip_on=False,
            color=colour,
            linewidth=0.9,
        )
        words: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline", "fontsize": 9.5}
        axes.text(1.034, place, layer.name, color=colour, fontweight="bold", **words)
        axes.text(_NUMBERS_END, place, f"{layer.lines[-1]:,}", color=_QUIET_INK, ha="right", **words)


def _readable(colour: str) -> tuple[float, float, float]:
    """Darken a colour until words in it stand out from white."""
    from matplotlib.colors import to_rgb  # noqa: PLC0415 -- see _draw_chart

    red, green, blue = to_rgb(colour)
    brightness = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    share = min(1.0, 0.42 / brightness)
    return share * red, share * green, share * blue


def _write_title(figure: "Figure", repository: RepositoryLines) -> None:
    left = 0.03
    room = (1 - 2 * left) * _WIDTH_INCHES * 72
    title = fitted(repository.name, width=room, size=17, weight="bold")
    figure.text(left, 0.93, title, fontsize=17, fontweight="bold", va="baseline")
    figure.text(left, 0.885, _subtitle(repository), fontsize=10.5, color=_QUIET_INK, va="baseline")


def _subtitle(repository: RepositoryLines) -> str:
    samples = _by_date(repository)
    first, last = samples[0], samples[-1]
    if len(samples) == 1:
        return f"{last.total:,} lines of code and text on {_day(last.date)}, blank ones left out"
    if first.date.date() == last.date.date():
        return (
            f"Lines of code and text, blank ones left out: {first.total:,} at first, {last.total:,} at last "
            f"on {_day(last.date)} · {len(samples)} commits"
        )
    return (
        f"Lines of code and text, blank ones left out: {first.total:,} on {_day(first.date)}, "
        f"{last.total:,} on {_day(last.date)} · {len(samples)} commits"
    )


def _day(date: datetime) -> str:
    return f"{date.day} {date:%b %Y}"
