"""The chart of the figures: a panel each for throughput, enqueueing and latency, as SVG and PNG."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import JSWORKER, RAW, Figure
from benchmarks.measures.latency import figure_name
from benchmarks.report import best_first, figures_of, number, ratio_text
from benchmarks.systems import NO_OWNERSHIP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_OURS, _PEER, _RAW, _UNOWNED, _UNOWNED_LINES = "#2f5d8a", "#8bb8dd", "#69727d", "#e6e9ed", "#9aa3ad"
_INK, _QUIET_INK, _GRID = "#22272e", "#69727d", "#dde1e6"
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
    "font.size": 11,
    "svg.hashsalt": "jsworker",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "text.color": _INK,
    "hatch.linewidth": 0.7,
}
_WIDTH_INCHES, _PNG_DPI = 11.0, 150
_ROW_INCHES, _PANEL_HEAD_INCHES, _HEAD_INCHES, _FOOT_INCHES = 0.34, 0.62, 0.85, 0.6
_LEFT, _RIGHT = 0.14, 0.86
_BAR = 0.68


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a panel.

    Attributes:
        system: its name.
        length: the length of the solid bar.
        far: where the pale bar behind it ends; the same as ``length`` if there is none.
        words: the text at its end.
        owned: False for systems in which nobody owns a job.
    """

    system: str
    length: float
    far: float
    words: str
    owned: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """A group of bars with its heading."""

    title: str
    remark: str
    bars: Sequence[Bar]


def draw(held: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the figures of (a), (c) and (d) in the JSON file.

    Args:
        held: the file's content.
        folder: where ``benchmarks.svg`` and ``benchmarks.png`` are written; made if it does not exist.

    Returns:
        Their paths; none if there is nothing to draw.
    """
    shown = panels(held)
    if not shown:
        return []
    # At its first use matplotlib logs that it looks up fonts, which is of no use here.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    import matplotlib as mpl  # noqa: PLC0415 -- only a chart should cost the import

    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / "benchmarks.svg", folder / "benchmarks.png"
    with mpl.rc_context(_STYLE):
        canvas = _canvas(shown, footer(held))
        canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": "jsworker benchmarks"})
        canvas.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": "jsworker benchmarks"})
    return [svg, png]


def panels(held: Mapping[str, Any]) -> list[Panel]:
    """Return the panels for which there are figures."""
    throughput = figures_of(held, "a")
    enqueued = [figure for figure in figures_of(held, "c") if figure.name.endswith("in one call")]
    how_many = enqueued[0].name if enqueued else ""
    wanted = [
        Panel(
            "Jobs finished per second",
            "no-op jobs, one worker process; beside the number: its ratio to the raw loop",
            _with_failed(held, "a", _rates(throughput)),
        ),
        Panel(
            "Jobs enqueued per second",
            f"{how_many}, durable when it returns; the raw loop's is a bare COPY",
            _with_failed(held, "c", _rates(enqueued)),
        ),
        Panel(
            "Milliseconds until a job starts",
            "20 jobs/s, an otherwise idle worker; dark: median, pale: 99th percentile; less is better",
            _with_failed(held, "d", _latencies(figures_of(held, "d"))),
        ),
    ]
    return [panel for panel in wanted if panel.bars]


def footer(held: Mapping[str, Any]) -> str:
    """Return the machine and the date of the newest measure."""
    newest = max(held["measures"].values(), key=lambda measure: str(measure["date"]))
    machine, versions = newest["machine"], newest["versions"]
    return " · ".join(
        [
            f"{machine['cpus']} cores ({machine['cpu_model']}) and {machine['memory_gib']} GiB for all",
            f"PostgreSQL {versions['PostgreSQL']}, fsync {newest['postgresql_settings']['fsync']}",
            f"nats-server {versions['nats-server']}",
            f"Python {newest['python']}",
            newest["date"],
        ]
    )


def _rates(figures: Sequence[Figure]) -> list[Bar]:
    bars = []
    for figure in best_first(figures):
        ratio = ratio_text(figure, figures)
        words = number(figure.median) + (f"  ({ratio})" if ratio and figure.system != RAW else "")
        bars.append(Bar(figure.system, figure.median, figure.median, words, _owned(figure)))
    return bars


def _latencies(figures: Sequence[Figure]) -> list[Bar]:
    p50 = [figure for figure in figures if figure.name == figure_name("start", 20, "p50")]
    p99 = {
        figure.system: figure.median for figure in figures if figure.name == figure_name("start", 20, "p99")
    }
    return [
        Bar(
            figure.system,
            figure.median,
            p99[figure.system],
            f"{figure.median:.1f} / {p99[figure.system]:.1f}",
            _owned(figure),
        )
        for figure in best_first(p50)
        if figure.system in p99
    ]


def _with_failed(held: Mapping[str, Any], letter: str, bars: list[Bar]) -> list[Bar]:
    """Add a line for every system that could not be measured: a gap would hide it."""
    if not bars:
        return []
    there = {bar.system for bar in bars}
    failed = [line.partition(":")[0] for line in held["measures"][letter]["failures"]]
    return bars + [Bar(system, 0.0, 0.0, "failed", owned=True) for system in failed if system not in there]


def _owned(figure: Figure) -> bool:
    return NO_OWNERSHIP not in figure.note


def _canvas(shown: Sequence[Panel], foot: str) -> "Canvas":
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415 -- see draw

    heights = [_PANEL_HEAD_INCHES + _ROW_INCHES * len(panel.bars) for panel in shown]
    height = _HEAD_INCHES + sum(heights) + _FOOT_INCHES
    canvas = Canvas(figsize=(_WIDTH_INCHES, height), facecolor="white")
    left = 0.025
    canvas.text(
        left, 1 - 0.42 / height, "jsworker beside its peers", fontsize=18, fontweight="bold", va="baseline"
    )
    _legend(canvas, 1 - 0.36 / height, height)
    top = height - _HEAD_INCHES
    for panel, panel_height in zip(shown, heights, strict=True):
        rows = _ROW_INCHES * len(panel.bars)
        canvas.text(left, (top - 0.32) / height, panel.title, fontsize=13, fontweight="bold")
        canvas.text(0.975, (top - 0.32) / height, panel.remark, fontsize=10, color=_QUIET_INK, ha="right")
        bottom = top - panel_height
        axes = canvas.add_axes((_LEFT, (bottom + 0.06) / height, _RIGHT - _LEFT, rows / height))
        _draw_bars(axes, panel.bars)
        top = bottom
    canvas.text(left, 0.22 / height, foot, fontsize=8.5, color=_QUIET_INK)
    return canvas


def _legend(canvas: "Canvas", middle: float, height: float) -> None:
    from matplotlib.patches import Rectangle  # noqa: PLC0415 -- see draw

    place = 0.975
    for words, bar in reversed(
        [
            (RAW, Bar(RAW, 0, 0, "", owned=True)),
            ("owns its jobs", Bar("a peer", 0, 0, "", owned=True)),
            ("delivers only: no ownership, no state", Bar("a peer", 0, 0, "", owned=False)),
        ]
    ):
        label = canvas.text(place, middle, words, fontsize=10, color=_QUIET_INK, ha="right", va="center")
        width = label.get_window_extent().width / canvas.dpi / _WIDTH_INCHES
        place -= width + 0.032
        size = (0.022, 0.17 / height)
        patch = Rectangle((place, middle - size[1] / 2), *size, transform=canvas.transFigure, **_look(bar))
        canvas.add_artist(patch)
        place -= 0.022


def _draw_bars(axes: "Axes", bars: Sequence[Bar]) -> None:
    axes.set_axis_off()
    longest = max(bar.far for bar in bars)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.plot([0, 0], [-0.5, len(bars) - 0.5], color=_GRID, linewidth=1.2, clip_on=False)
    for row, bar in enumerate(bars):
        if bar.far > bar.length:
            axes.barh(row, bar.far, _BAR, alpha=0.35, clip_on=False, **_look(bar))
        axes.barh(row, bar.length, _BAR, clip_on=False, **_look(bar))
        weight = "bold" if bar.system == JSWORKER else "normal"
        axes.annotate(
            bar.system,
            (0, row),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontweight=weight,
            annotation_clip=False,
        )
        axes.annotate(
            bar.words,
            (bar.far, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            fontweight=weight,
            annotation_clip=False,
        )


def _look(bar: Bar) -> dict[str, Any]:
    if bar.system == JSWORKER:
        return {"facecolor": _OURS}
    if not bar.owned:
        return {"facecolor": _UNOWNED, "edgecolor": _UNOWNED_LINES, "hatch": "////", "linewidth": 0}
    return {"facecolor": _RAW if bar.system == RAW else _PEER}
