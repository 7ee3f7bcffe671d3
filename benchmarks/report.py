"""Figures for people, as tables, and for programs, as one JSON file into which every run is merged."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.figures import JSWORKER, RAW, Figure, ratio


def tables(letter: str, title: str, figures: Sequence[Figure]) -> Group:
    """Return a table for each name of a figure, for 80 columns, and the notes on the systems below it."""
    shown: list[RenderableType] = [Text(f"({letter}) {title}", style="bold")]
    measured = [figure for figure in figures if figure.values]
    told: set[tuple[str, str]] = set()
    for name in dict.fromkeys(figure.name for figure in measured):
        rows = best_first([figure for figure in measured if figure.name == name])
        shown.append(_table(name, rows))
        notes = [(row.system, row.note) for row in rows if row.note]
        if not told.issuperset(notes):
            told.update(notes)
            shown += [Text(f"  {system}: {note}", style="dim") for system, note in notes]
        shown.append(Text())
    return Group(*shown)


def _table(name: str, rows: Sequence[Figure]) -> Table:
    shown = Table(title=name, title_justify="left", title_style="italic", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("system", no_wrap=True)
    shown.add_column("median", justify="right", no_wrap=True)
    shown.add_column("min – max", justify="right", no_wrap=True)
    shown.add_column("× raw loop", justify="right", no_wrap=True)
    for figure in rows:
        shown.add_row(
            Text(figure.system, style="bold" if figure.system == JSWORKER else ""),
            f"{number(figure.median)} {figure.unit}",
            f"{number(min(figure.values))} – {number(max(figure.values))}",
            ratio_text(figure, rows),
        )
    return shown


def best_first(figures: Sequence[Figure]) -> list[Figure]:
    """Return figures of one name in the order of their medians."""
    return sorted(figures, key=lambda figure: -figure.median if figure.more_is_better else figure.median)


def failures(figures: Sequence[Figure]) -> list[str]:
    """Return a line for every system that could not be measured."""
    return [f"{figure.system}: {figure.note}" for figure in figures if not figure.values]


def ratio_text(figure: Figure, figures: Sequence[Figure]) -> str:
    """Return the ratio to the raw loop, taken round by round; empty if that was not measured."""
    for other in figures:
        if (
            other.system == RAW
            and (other.measure, other.name, other.unit) == (figure.measure, figure.name, figure.unit)
            and len(other.values) == len(figure.values)
            and all(other.values)
        ):
            return f"{ratio(figure, other):.2f}"
    return ""


def number(value: float) -> str:
    """Return a number with no more decimals than a reader needs."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def read(path: Path) -> dict[str, Any]:
    """Return the content of the file; empty if it does not exist.

    Raises:
        ValueError: it is not a file of benchmarks.
    """
    if not path.exists():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(held, dict) or not isinstance(held.get("measures", {}), dict):
        raise ValueError(f"{path} is no file of benchmarks")  # noqa: TRY004 -- the file's content is wrong
    return held


def merge(
    path: Path,
    letter: str,
    figures: Sequence[Figure],
    *,
    title: str,
    rounds: int,
    facts: Mapping[str, Any],
) -> None:
    """Write a measure into the file; the other measures stay, with the facts of their own run."""
    held = read(path)
    measures = dict(held.get("measures", {}))
    measures[letter] = {
        "title": title,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rounds": rounds,
        **facts,
        "figures": [_written(figure, figures) for figure in figures if figure.values],
        "failures": failures(figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"measures": dict(sorted(measures.items()))}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _written(figure: Figure, figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        "name": figure.name,
        "system": figure.system,
        "unit": figure.unit,
        "median": figure.median,
        "values": list(figure.values),
        "ratio_to_raw_loop": float(ratio_text(figure, figures) or "nan")
        if ratio_text(figure, figures)
        else None,
        "more_is_better": figure.more_is_better,
        "note": figure.note,
    }


def figures_of(held: Mapping[str, Any], letter: str) -> list[Figure]:
    """Return a measure's figures from what ``read`` returned."""
    return [
        Figure(
            letter,
            written["name"],
            written["system"],
            written["unit"],
            tuple(written["values"]),
            written["more_is_better"],
            written["note"],
        )
        for written in held.get("measures", {}).get(letter, {}).get("figures", [])
    ]
