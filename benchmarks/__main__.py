"""Runs the benchmarks on servers of its own: throughput, enqueueing and latency if nothing else is asked.

That takes less than 15 minutes. The machine should have nothing else to do.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import facts, measures, report
from benchmarks.figures import Figure

_WRONG_USAGE = 2
_FAILED = 1
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG_USAGE, f"benchmarks: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen measures and return the exit code: 0 done, 1 something failed, 2 wrong usage."""
    options = _options(arguments)
    console = Console()
    known = facts.gather()
    failed = False
    with _progress(console, len(options.only)) as (show, step):
        for letter in options.only:
            title, figures = _measured(letter, options.rounds, show)
            failed |= any(not figure.values for figure in figures)
            console.print(report.tables(letter, title, figures))
            for line in report.failures(figures):
                console.print(line, style="red", markup=False, highlight=False)
            if options.json:
                report.merge(options.json, letter, figures, title=title, rounds=options.rounds, facts=known)
            step()
    if options.chart:
        _draw(console, options.json, options.chart)
    return _FAILED if failed else 0


def _measured(letter: str, rounds: int, show: Callable[[str], None]) -> tuple[str, list[Figure]]:
    title = measures.MODULES[letter]
    try:
        measure = measures.measure_of(letter)
        title = measure.TITLE
        return title, measure.measure(rounds, lambda words: show(f"({letter}) {words}"))
    except Exception as error:  # noqa: BLE001 -- one measure's failure is reported, the others still run
        reason = " ".join(str(error).split()) or type(error).__name__
        return title, [Figure(letter, "", f"measure {letter}", "", (), note=f"failed: {reason}")]


@contextmanager
def _progress(console: Console, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Yield two functions: one shows a line, one counts a measure as done. On a terminal there is a bar."""
    if not console.is_terminal:
        yield lambda words: console.print(words, markup=False, highlight=False), lambda: None
        return
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda words: bar.update(task, description=words), lambda: bar.advance(task)


def _draw(console: Console, path: Path, folder: Path) -> None:
    from benchmarks import chart  # noqa: PLC0415 -- half a second that only a chart should cost

    drawn = chart.draw(report.read(path), folder)
    words = " and ".join(map(str, drawn)) or "nothing to draw: the chart shows a, c and d"
    console.print(words, markup=False, highlight=False)


def _options(arguments: Sequence[str] | None) -> Any:
    parser = _Parser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=_letters, metavar="LETTERS", help=_letters_help())
    parser.add_argument("--full", action="store_true", help="every measure; over an hour")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="of every system (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the figures into this file")
    parser.add_argument(
        "--chart", type=Path, metavar="FOLDER", help="draw the chart of the JSON file there; needs --json"
    )
    options = parser.parse_args(arguments)
    if options.only and options.full:
        parser.error("--only and --full exclude each other")
    if options.chart and not options.json:
        parser.error("--chart draws from a file: give --json, too")
    if options.json:
        try:
            report.read(options.json)
        except (ValueError, OSError) as error:
            parser.error(f"--json {options.json}: {error}")
    options.only = options.only or (
        [*filter(_is_there, measures.MODULES)] if options.full else [*measures.DEFAULT]
    )
    return options


def _letters(text: str) -> list[str]:
    letters = [letter for letter in text.replace(",", " ").split() if letter]
    for letter in letters:
        if letter not in measures.MODULES:
            known = ", ".join(measures.MODULES)
            raise argparse.ArgumentTypeError(f"no measure is called {letter!r}; there are {known}")
        if not _is_there(letter):
            raise argparse.ArgumentTypeError(
                f"measure {letter!r}: benchmarks/measures/{measures.MODULES[letter]}.py is not there"
            )
    if not letters:
        raise argparse.ArgumentTypeError("name at least one measure")
    return list(dict.fromkeys(letters))


def _letters_help() -> str:
    names = ", ".join(f"{letter} {name}" for letter, name in measures.MODULES.items())
    return f"these measures, for example a,c ({names})"


def _is_there(letter: str) -> bool:
    return find_spec(f"benchmarks.measures.{measures.MODULES[letter]}") is not None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
