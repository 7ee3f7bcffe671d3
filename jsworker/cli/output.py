"""What commands write: one JSON document, or lines and tables for people, with values in words."""

import json
import os
import shlex
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from jsworker.cli.options import arguments
from jsworker.core.exit_codes import DONE, FAILED, OutputFailed, writing_stdout
from jsworker.core.names import cell
from jsworker.core.strict_json import plain
from jsworker.ownership.pool import FarTime
from jsworker.ownership.queries.database_clock import DatabaseClock

_UNCUT = 100_000
"""Columns of a table that is not written to a terminal: it is not cut."""
_GAP = 2
_LEAST_FOLDED = 20
_MANY = 500
database_clock: Final = DatabaseClock()
"""The time by which ages are shown; commands ask the database for it when they connect."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def print_json(value: Any) -> None:
    """Write one JSON document: UUIDs as text, times in ISO 8601 UTC, durations in seconds."""
    print_line(json_text(value))


def json_text(value: Any) -> str:
    """Return the JSON document that ``print_json`` writes."""
    indent = 2 if sys.stdout.isatty() else None
    try:
        return json.dumps(value, default=_json_value, indent=indent, allow_nan=False)
    except ValueError:  # a row may hold an infinity, which JSON has not: as text
        finite = json.loads(json.dumps(value, default=_json_value), parse_constant=str)
        return json.dumps(finite, indent=indent)


def print_line(line: str) -> None:
    """Write one line to stdout."""
    with writing_stdout():
        sys.stdout.write(f"{line}\n")


def print_stored(line: str) -> None:
    """Write at once what names jobs that have been stored; to stderr if stdout cannot be written."""
    try:
        _print_at_once(line)
    except OutputFailed:
        remark(line)
        raise


def remark(line: str) -> None:
    """Write one line for people to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def new_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str | Text]], *, spare: Sequence[str] = ()
) -> Table:
    """Return a table in the common style; columns of ``spare`` are left out, in this order, until it fits.

    A table that does not fit even so keeps its width, and the terminal breaks its lines.
    """
    headers = [Column(each, no_wrap=True) if isinstance(each, str) else each for each in columns]
    cells = [list(row) for row in rows]
    widths = [_width(column, [row[place] for row in cells]) for place, column in enumerate(headers)]
    kept = list(range(len(headers)))
    columns_of_terminal = console().width
    needed = _table_width(widths, kept)
    for name in spare:
        if needed <= columns_of_terminal:
            break
        kept = [place for place in kept if headers[place].header != name]
        needed = _table_width(widths, kept)
    table = Table(
        *(headers[place] for place in kept),
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        header_style="bold",
        width=needed if needed > columns_of_terminal else None,  # else rich cuts the text of every column
    )
    for row in cells:
        table.add_row(*(row[place] for place in kept))
    return table


def _table_width(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[place] + _GAP for place in kept) - _GAP


def _width(column: Column, cells: Iterable[str | Text]) -> int:
    """Return the least width that a column of a table needs, in columns of the terminal."""
    widest = max(len(str(column.header)), *(cell_len(str(each)) for each in cells), 0)
    return widest if column.no_wrap else max(min(widest, _LEAST_FOLDED), column.min_width or 0)


def print_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str | Text]], *, spare: Sequence[str] = ()
) -> None:
    """Write a table: fitted to the terminal and in colour there, whole and plain in a pipe or file."""
    console().print(new_table(columns, rows, spare=spare))


def remark_next_page(after: object) -> None:
    """Write to stderr the command that shows the next page: the present one, with another --after."""
    kept, is_place = list[str](), False
    for each in arguments.get():
        if not (is_place or each == "--after" or each.startswith("--after=")):
            kept.append(each)
        is_place = each == "--after"
    remark(f"there may be more: {shlex.join(['jsworker', *kept, '--after', str(after)])}")


def right(name: str) -> Column:
    """Return a right-aligned column, for numbers and durations."""
    return Column(name, no_wrap=True, justify="right")


def folded(name: str, *, at_least: int | None = None) -> Column:
    """Return a column whose text may continue on the next line where the terminal is too narrow for all."""
    return Column(name, overflow="fold", min_width=at_least)


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        with writing_stdout():
            super().print(*objects, **{"crop": False, **options})


def console(*, piped_columns: int = _UNCUT) -> Console:
    """Return a console on stdout; without a terminal it has no colours and, by default, breaks no lines."""
    fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(width=None if fitted else piped_columns, highlight=False, markup=False, emoji=False)


def progress_wanted(*, as_json: bool = False) -> bool:
    """Return whether to show a progress bar: stderr is a terminal, and the output is not JSON."""
    return sys.stderr.isatty() and not as_json


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yield the function that advances it.

    The bar stays below the lines that are written meanwhile. Each write redraws it, so callers should write
    many lines at once. No bar is shown for a total of 0; None is a total that is not known.
    """
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown_on = Console(stderr=True)
    # On a terminal, stdout goes through rich, which keeps the bar below it; in a file or pipe it does not.
    on_terminal = sys.stdout.isatty()
    with Progress(
        *columns, console=shown_on, transient=True, redirect_stdout=on_terminal, disable=total == 0
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """The outcome of a command for one job or message.

    ``outcome`` is its new state, in one word, or ``refused``; ``has_changed``: it was left as it is because
    it is no longer as the filter found it (another status, age or run), or its row was just being written.
    """

    id: UUID | int
    outcome: str
    refusal: str | None = None
    has_changed: bool = False


def refused(subject: UUID | int, why: str, *, has_changed: bool = False) -> ActionOutcome:
    """Return the outcome for a job or message that was not changed."""
    return ActionOutcome(subject, "refused", why, has_changed)


async def report(
    batches: AsyncGenerator[Sequence[ActionOutcome], None], *, as_json: bool, expected: int | None = 0
) -> int:
    """Write outcomes, as lines while they come or as one JSON array at the end, and return the exit code.

    A batch holds all outcomes of what is done at once: those count that were done before stdout could not be
    written. Outcomes that came before an error are written too. A bar shows the progress if at least 500
    outcomes are ``expected``, or, with None (not known), the number so far.
    """
    done: list[ActionOutcome] = []
    watched = (expected is None or expected >= _MANY) and progress_wanted(as_json=as_json)
    is_all = False
    try:
        try:
            with progress_bar("done", expected if watched else 0) as advance:
                async with aclosing(batches):
                    async for batch in batches:
                        done += batch
                        advance(len(batch))
                        _print_outcomes(batch, as_json=as_json)
        finally:
            if as_json:
                _print_at_once(json_text([{"id": each.id, "outcome": each.outcome} for each in done]))
        is_all = True
    finally:
        left = sum(each.has_changed for each in done)
        if left == 1:
            remark("1 job was left out: it had changed since it was found")
        elif left:
            remark(f"{left} jobs were left out: they had changed since they were found")
        if done and not is_all:
            changed = f"{sum(each.refusal is None for each in done)}{f' of {expected}' if expected else ''}"
            others = "" if len(done) == expected else "; run the command again for the others"
            remark(f"done for {changed}{others}")
    return FAILED if any(each.refusal is not None for each in done) else DONE


def _print_outcomes(batch: Sequence[ActionOutcome], *, as_json: bool) -> None:
    """Write the lines of a batch together, but for refusals, which come between them on stderr."""
    lines: list[str] = []
    for outcome in batch:
        if outcome.refusal is not None:
            _print_at_once(*lines)
            lines.clear()
            remark(outcome.refusal)
        elif not as_json:
            lines.append(f"{outcome.id} {outcome.outcome}")
    _print_at_once(*lines)


def _print_at_once(*lines: str) -> None:
    if lines:
        with writing_stdout():
            sys.stdout.write("\n".join((*lines, "")))
            sys.stdout.flush()


def seconds_in_words(seconds: float) -> str:
    """Return a duration in its largest unit: ``42s``, ``3m``, ``5h``, ``2d``."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"


def since(time: datetime | None) -> str:
    """Return how long ago something was."""
    if time is None or isinstance(time, FarTime):
        return cell(time)
    return seconds_in_words((database_clock.now() - time).total_seconds())


def until(time: datetime) -> str:
    """Return in how long something will be."""
    if isinstance(time, FarTime):
        return cell(time)
    return seconds_in_words((time - database_clock.now()).total_seconds())


def moment(time: datetime | None, *, milliseconds: bool = False) -> str:
    """Return a time for people, in the local zone, to the second or millisecond.

    In the hour that occurs twice when daylight saving time ends, the offset from UTC tells which one it is.
    """
    if time is None or isinstance(time, FarTime):
        return cell(time)
    local = time.astimezone()
    text = f"{local:%Y-%m-%d %H:%M:%S}"
    if milliseconds:
        text = f"{text}.{local.microsecond // 1000:03d}"
    return f"{text}{local:%z}" if _occurs_twice(local.replace(tzinfo=None)) else text


def _occurs_twice(clock: datetime) -> bool:
    try:
        first, second = (clock.replace(fold=fold).astimezone().utcoffset() for fold in (0, 1))
    except (OverflowError, ValueError):  # within a day of the first or the last date
        return False
    return first != second


def _json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if (found := plain(value)) is value:
        raise TypeError(f"a value of type {type(value).__name__} has no place in JSON output")
    return found
