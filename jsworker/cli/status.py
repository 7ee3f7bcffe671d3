"""``jsworker status``: what waits, runs and fails of each kind, how fast, and who works on it."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Final

from rich.console import Group
from rich.text import Text

from jsworker.cli import options
from jsworker.cli.options import new_app, option
from jsworker.cli.output import (
    console,
    folded,
    moment,
    new_table,
    print_json,
    remark,
    remark_next_page,
    right,
    seconds_in_words,
)
from jsworker.cli.selection import ask_database
from jsworker.cli.watching import watch as show_again
from jsworker.core.names import cell
from jsworker.ownership.queries.status import BOUND, KindState, Status, read_status
from jsworker.ownership.schema import HELD_BY

_FEW: Final = 10.0
_NAMED: Final = 5
"""Most kinds that a line names."""

_SPARE: Final = ("IN/MIN", "HELD", "BAD/MIN", "LATER", "DONE/MIN", "OLDEST")

app = new_app()


@app.command()
def status(
    *,
    limit: options.Limit = 50,
    after: Annotated[str | None, option("KIND", "Continue the list after this kind.")] = None,
    watch: options.Watch = False,
    interval: options.Interval = 2.0,
    as_json: options.JsonObject = False,
) -> None:
    """Show waiting, running and failed jobs of each kind, and their workers.

    OLDEST is for how long the first queued job has waited; IN/MIN, DONE/MIN and BAD/MIN (failed for good
    or cancelled) are those of the last five minutes, or of the last 2,000 jobs. LATER are jobs that
    wait for a time, HELD ones for a limit, a rate, a pause or the jobs that they need. Counting ends at
    10,000: 10000+ is at least as many. Completed jobs are not counted, for there is no index of them; a
    kind that has no other jobs and no worker is shown as long as it has a rate. A narrow terminal shows
    less.

    Example: `jsworker status --watch`
    """
    look = partial(read_status, limit=limit, after=after)
    if watch:
        show_again(look, _shown, interval=interval, as_json=as_json)
        return
    found = ask_database(look)
    if as_json:
        print_json(found)
        return
    console().print(_shown(found))
    if found.after is not None:
        remark_next_page(found.after)
    if not found.kinds:
        behind = "" if after is None else f" of a kind behind {cell(after)}"
        remark(f"no job{behind} waits, runs, has failed or ended within five minutes, and no worker is there")


def _shown(found: Status) -> Group:
    numbers = ("QUEUED", "OLDEST", "RUNNING", "LATER", "HELD", "FAILED", "IN/MIN", "DONE/MIN", "BAD/MIN")
    columns = [folded("KIND", at_least=8), *map(right, (*numbers, "WORKERS"))]
    table = new_table(columns, map(_row, found.kinds), spare=_SPARE)
    return Group(table, *map(Text, ["", *_lines(found)]))


def _row(kind: KindState) -> list[Text | str]:
    waits = kind.queued > 0
    bad = kind.per_minute["failed"] + kind.per_minute["cancelled"]
    unserved = kind.workers == 0 and (waits or kind.scheduled > 0 or bool(kind.held))
    return [
        cell(kind.kind),
        _count(kind.queued, "yellow"),
        "" if kind.oldest_seconds is None else seconds_in_words(kind.oldest_seconds),
        _count(kind.running, "cyan"),
        _count(kind.scheduled, "blue"),
        _count(sum(held.jobs for held in kind.held.values()), "blue"),
        _count(kind.failed, "red"),
        _rate(kind.per_minute["enqueued"]),
        _rate(kind.per_minute["completed"]),
        _rate(bad),
        Text(str(kind.workers), "red" if unserved else ""),
    ]


def _count(jobs: int, colour: str) -> Text:
    return Text(_number(jobs), colour if jobs else "dim")


def _number(jobs: int) -> str:
    return f"{jobs}+" if jobs >= BOUND else str(jobs)


def _rate(per_minute: float) -> str:
    if not per_minute:
        return ""
    return f"{per_minute:.1f}" if per_minute < _FEW else f"{per_minute:.0f}"


def _lines(found: Status) -> Iterator[str]:
    """Yield lines below the table: the workers, held jobs and why, pauses, and what needs attention."""
    workers = found.workers
    states = [(state, getattr(workers, state)) for state in ("alive", "drained", "draining", "silent")]
    counted = ", ".join(f"{number} {state}" for state, number in states if number or state == "alive")
    yield f"workers: {counted}; {workers.busy} of {workers.slots} job slots in use"
    for why in HELD_BY:
        of_kind = {kind.kind: kind.held[why] for kind in found.kinds if why in kind.held}
        named = [
            f"{cell(kind)} {_number(held.jobs)} (for {seconds_in_words(held.oldest_seconds)})"
            for kind, held in of_kind.items()
        ]
        more = f" and {len(named) - _NAMED} other kinds" if len(named) > _NAMED else ""
        if named:
            yield f"held by {why}: {', '.join(named[:_NAMED])}{more}"
    for pause in found.paused:
        until = "" if pause.until is None else f", until {moment(pause.until)}"
        reason = f": {cell(pause.reason)}" if pause.reason else ""
        key = f" {cell(pause.key)}" if pause.key else ""
        since = f"since {moment(pause.since)}{until}, by {cell(pause.by)}{reason}"
        yield f"paused: {cell(pause.kind)}{key} {since}"
    if found.unpublished:
        oldest = seconds_in_words(found.unpublished_oldest_seconds)
        yield f"not published: {found.unpublished}, the oldest for {oldest}: `jsworker doctor` tells why"
    if found.dead_messages:
        yield f"dead messages: {found.dead_messages}: `jsworker dead-messages` lists them"
    if found.refused_rows:
        yield f"jobs whose row PostgreSQL refuses: {found.refused_rows}: `jsworker doctor` tells why"
