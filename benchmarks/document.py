"""``python -m benchmarks.document RESULTS FILE`` writes docs/performance.md from the results of runs."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import Figure

_HEAD = """# Performance, measured

This page is written by `make bench` (`python -m benchmarks.document`); do not edit it. PostgreSQL and
nats-server are the benchmark's own, on the same machine and the same cores as everything that is measured;
fsync is on, and no server is set for speed. Rounds of all systems are interleaved; a ratio to the raw loop is
the median of the rounds' own ratios. The raw loop pulls up to 500 messages, claims them with one statement,
completes them with another and acks, two batches at once: no heartbeat, no fencing, no recovery. It is as
fast as we can write it.

![Benchmarks](benchmarks.png)
"""


def document(held: Mapping[str, Any]) -> str:
    """Return the page."""
    pages = [_measure(letter, told, held) for letter, told in held.get("measures", {}).items()]
    return "\n".join([_HEAD, *pages])


def _measure(letter: str, told: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    machine, versions = told["machine"], told["versions"]
    lines = [
        f"## ({letter}) {told['title']}",
        "",
        f"{told['date']}, rounds: {told['rounds']}; {machine['cpus']} cores ({machine['cpu_model']}).",
        f"Python {told['python']}, PostgreSQL {versions['PostgreSQL']}, nats {versions['nats-server']}.",
        "",
    ]
    figures = report.figures_of(held, letter)
    for name in dict.fromkeys(figure.name for figure in figures):
        lines += _table(name, report.best_first([figure for figure in figures if figure.name == name]))
    lines += [f"- {system}: {note}" for system, note in _notes(figures)]
    lines += [f"- **{line}**" for line in told["failures"]]
    return "\n".join([*lines, ""])


def _table(name: str, rows: list[Figure]) -> list[str]:
    ratios = [report.ratio_text(figure, rows) for figure in rows]
    compared = any(ratios)
    lines = [
        f"| {name} | median | min – max |" + " × raw loop |" * compared,
        "|---|---|---|" + "---|" * compared,
    ]
    for figure, ratio in zip(rows, ratios, strict=True):
        low, high = report.number(min(figure.values)), report.number(max(figure.values))
        line = f"| {figure.system} | {report.number(figure.median)} {figure.unit} | {low} – {high} |"
        lines.append(line + f" {ratio} |" * compared)
    return [*lines, ""]


def _notes(figures: list[Figure]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((figure.system, figure.note) for figure in figures if figure.note))


def main() -> None:
    """Write the page."""
    results, page = map(Path, sys.argv[1:3])
    page.write_text(document(report.read(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
