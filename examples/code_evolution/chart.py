"""The chart: lines by language over time as stacked areas, one SVG and one PNG per repository."""

import logging
import re
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from code_evolution.outcome import OTHER, RepositoryLines

NAMED_LANGUAGES = 8

# Neighbours differ in hue and in lightness, so that they stay apart in print and for the colour-blind.
_COLOURS = ("#2f5d8a", "#e9a23b", "#4f9d8f", "#c8553d", "#8bb8dd", "#7a5195", "#b7c86b", "#d98fa3")
_OTHER_COLOUR = "#b9bec4"
_INK, _QUIET_INK, _GRID = "#22272e", "#69727d", "#dde1e6"
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
    "font.size": 10,
    "svg.hashsalt": "jsworker",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": _INK,
    "xtick.color": _QUIET_INK,
    "ytick.color": _QUIET_INK,
}
_SIZE_INCHES, _PNG_DPI = (11.0, 6.2), 150
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.085, 0.765, 0.08, 0.85
_NUMBERS_END = (0.975 - _LEFT) / (_RIGHT - _LEFT)
_LABEL_GAP = 0.05
_TITLE_CHARACTERS = 36
# Formats of the ticks if the axis is divided into years, months, days, hours, minutes, seconds.
_TICKS = ["%Y", "%b %Y", "%d %b", "%H:%M", "%H:%M", "%H:%M:%S"]
_ROUND_TICKS = ["%Y", "%b %Y", "%d %b", "%d %b", "%H:%M", "%H:%M"]


class ChartNotWritten(Exception):
    """The chart could not be written."""


def draw_charts(repositories: Sequence[RepositoryLines], folder: Path) -> list[tuple[Path, Path]]:
    """Draw ``<name>.svg`` and ``<name>.png`` for each repository with its samples; return their paths.

    Raises:
        ChartNotWritten: the folder or a file cannot be written.
    """
    # At its first use matplotlib logs that it looks up fonts, which is of no use to readers.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    written: list[tuple[Path, Path]] = []
    for stem, repository in zip(file_stems([each.name for each in repositories]), repositories, strict=True):
        svg, png = folder / f"{stem}.svg", folder / f"{stem}.png"
        with mpl.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # it is drawn as a box
            figure = draw(repository)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": "jsworker"})
                figure.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": "jsworker"})
            except OSError as error:
                raise ChartNotWritten(f"chart {error.filename or svg}: {error.strerror}") from error
        written.append((svg, png))
    return written


def file_stems(names: Sequence[str]) -> list[str]:
    """Return plain, short file names, which differ even if upper and lower case are not distinguished."""
    stems: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "repository"
        numbered = [plain, *(f"{plain}-{number}" for number in range(2, len(names) + 1))]
        taken = {stem.lower() for stem in stems}
        stems.append(next(stem for stem in numbered if stem.lower() not in taken))
    return stems


def draw(repository: RepositoryLines) -> Figure:
    """Return the chart of one repository."""
    # Dates of commits may go back along a history; on the axis they must not.
    samples = sorted(repository.samples, key=lambda sample: sample.date)
    first, last = samples[0], samples[-1]
    languages = repository.languages()[:NAMED_LANGUAGES]
    layers = {language: [sample.lines.get(language, 0) for sample in samples] for language in languages}
    others = [sample.other_than(languages) for sample in samples]
    if any(others):
        layers[OTHER] = others
    figure = Figure(figsize=_SIZE_INCHES, facecolor="white")
    name = repository.name
    if len(name) > _TITLE_CHARACTERS:
        name = f"{name[: _TITLE_CHARACTERS // 2]}…{name[-_TITLE_CHARACTERS // 2 + 1 :]}"
    figure.text(0.03, 0.93, name, fontsize=17, fontweight="bold", va="baseline")
    lines = f"{first.total:,} on {_day(first.date)}, {last.total:,} on {_day(last.date)}"
    subtitle = f"Lines of code and text, blank ones left out: {lines} · {len(samples)} commits"
    figure.text(0.03, 0.885, subtitle, fontsize=10.5, color=_QUIET_INK, va="baseline")
    axes = figure.add_axes((_LEFT, _BOTTOM, _RIGHT - _LEFT, _TOP - _BOTTOM))
    if layers:
        _style_axes(axes)
        _draw_areas(axes, [sample.date for sample in samples], layers)
        _label_areas(axes, layers)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no lines in a known language", transform=axes.transAxes, ha="center")
    return figure


def _style_axes(axes: Axes) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda lines, _place: f"{lines:,.0f}"))
    axes.tick_params(length=0, pad=8)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_areas(axes: Axes, days: Sequence[datetime], layers: dict[str, list[int]]) -> None:
    calendar: Any = dates  # it carries no types
    heights = list(layers.values())
    if days[0] == days[-1]:  # one moment, as with a single commit, is drawn as wide as the chart
        places = [place / max(1, len(days) - 1) for place in range(max(2, len(days)))]
        heights = [lines if len(lines) > 1 else lines * 2 for lines in heights]
        axes.set_xticks([0.5], [_day(days[0])])
    else:
        places = [float(calendar.date2num(day)) for day in days]
        locator = calendar.AutoDateLocator(minticks=3, maxticks=9, tz=UTC)
        ticks = {"formats": _TICKS, "zero_formats": _ROUND_TICKS, "show_offset": False}
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(calendar.ConciseDateFormatter(locator, tz=UTC, **ticks))
    colours = [_colour(layer, place) for place, layer in enumerate(layers)]
    axes.stackplot(places, *heights, colors=colours, edgecolor="white", linewidth=0.4)
    axes.set_xlim(places[0], places[-1])
    axes.set_ylim(0, 1.04 * max(map(sum, zip(*heights, strict=True))))


def _label_areas(axes: Axes, layers: dict[str, list[int]]) -> None:
    """Name each area at its right end, where it is seen without a legend."""
    top = axes.get_ylim()[1]
    below, middles = 0, []
    for lines in layers.values():
        middles.append((below + lines[-1] / 2) / top)
        below += lines[-1]
    places = spread(middles, gap=_LABEL_GAP, low=0.015, high=0.985)
    style: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline", "fontsize": 9.5}
    for number, (layer, lines) in enumerate(layers.items()):
        ends, colour = [middles[number], places[number]], _colour(layer, number)
        axes.plot([1.006, 1.026], ends, transform=axes.transAxes, clip_on=False, color=colour, linewidth=2)
        axes.text(1.034, places[number], layer, fontweight="bold", **style)
        axes.text(_NUMBERS_END, places[number], f"{lines[-1]:,}", color=_QUIET_INK, ha="right", **style)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ascending positions at least ``gap`` apart, and between ``low`` and ``high`` if all fit in."""
    places: list[float] = []
    for position in wanted:
        places.append(max(position, places[-1] + gap if places else low))
    ceiling = high
    for index in reversed(range(len(places))):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - gap
    return places


def _colour(layer: str, place: int) -> str:
    return _OTHER_COLOUR if layer == OTHER else _COLOURS[place]


def _day(date: datetime) -> str:
    return f"{date.day} {date:%b %Y}"
