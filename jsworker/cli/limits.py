"""``jsworker limits``: how many jobs of a kind or a key may run at once, and begin in a span of time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Column

from jsworker.cli.options import Json, argument, flag, new_app, option
from jsworker.cli.output import cell, print_json, print_line, print_table, remark, right, since, until
from jsworker.client import JobClient
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.limits import Limit, Rate
from jsworker.core.names import check_kind
from jsworker.ownership.transitions.limits import named

T = TypeVar("T")

app = new_app()

Kind = Annotated[str, argument("KIND", "The jobs' kind.")]
Key = Annotated[str | None, option("KEY", "Only jobs with this limit key.")]


@app.callback(invoke_without_command=True)
def _limits(context: typer.Context) -> None:
    """List, set or reset how many jobs may run at once, and how many may begin in a span of time.

    Limits of processors' classes are written by workers when they start; what is set here takes their place
    until it is reset.
    """
    if context.invoked_subcommand is None:
        list_limits()


@app.command("list")
def list_limits(
    *,
    all_keys: Annotated[
        bool, flag("Also keys at rest: nothing runs, is held, set or paused.", "--all")
    ] = False,
    as_json: Json = False,
) -> None:
    """List limits, rates and pauses, with the jobs that run and are held now.

    A line without a KEY is that of a kind: its numbers hold for each key that has none of its own.
    """
    found = call(lambda client: client.limits.list(all_keys=all_keys))
    if as_json:
        print_json(found)
        return
    columns: list[str | Column] = [
        Column("KIND", overflow="fold", max_width=30),
        Column("KEY", overflow="fold", max_width=30),
        right("RUNNING"),
        right("LIMIT"),
        "RATE",
        right("HELD"),
        right("FOR"),
        "SET BY",
        Column("PAUSED", overflow="fold"),
    ]
    print_table(columns, map(_row, found))
    if not found:
        remark("there are no limits")


def _row(limit: Mapping[str, Any]) -> list[str]:
    rate = "" if limit["rate"] is None else f"{limit['rate']} per {limit['per']:g} s"
    held = "" if not limit["held"] else str(limit["held"]) if limit["held"] <= 10_000 else ">10000"
    return [
        cell(limit["kind"]),
        cell(limit["key"]),
        cell(limit["running"]),
        cell(limit["max_running"]),
        rate,
        held,
        since(limit["held_since"]) if held else "",
        cell(limit["set_by"]),
        _pause(limit),
    ]


def _pause(limit: Mapping[str, Any]) -> str:
    if limit["paused_at"] is None:
        return ""
    ends = "" if limit["paused_until"] is None else f", {until(limit['paused_until'])} more"
    why = f": {cell(limit['reason'])}" if limit["reason"] else ""
    return f"for {since(limit['paused_at'])}{ends} by {cell(limit['paused_by'])}{why}"


@app.command("set")
def set_limit(
    kind: Kind,
    *,
    key: Key = None,
    running: Annotated[int | None, option("N", "At most so many run at once.")] = None,
    rate: Annotated[int | None, option("N", "At most so many begin in --per seconds.")] = None,
    per: Annotated[float, typer.Option(metavar="SECONDS", help="The span of --rate.")] = 1.0,
) -> None:
    """Set the numbers of a kind, for each of its keys, or of one key.

    What is left out of a kind's numbers is not limited, what is left out of a key's is as for its kind. Runs
    that are under way go on; a lower limit holds for new ones.
    """
    if running is None and rate is None:
        raise WrongUsage("limits set takes --running N, --rate N or both")
    try:
        numbers = [] if running is None else [Limit(running)]
        both: list[Limit | Rate] = [*numbers, *([] if rate is None else [Rate(rate, per)])]
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    call(lambda client: client.limits.set(check_kind(kind), *both, key=key))
    print_line(f"{named(kind, key or '')} is limited")


@app.command("reset")
def reset_limit(kind: Kind, *, key: Key = None) -> None:
    """Take away what was set here; a class's numbers come back with the next worker that starts."""
    call(lambda client: client.limits.reset(check_kind(kind), key=key))
    print_line(f"{named(kind, key or '')} has no limit of an operator's any more")


def call(act: Callable[[JobClient], Awaitable[T]]) -> T:
    """Return what a call of a client returns."""

    async def with_client() -> T:
        async with JobClient.from_env() as client:
            return await act(client)

    return asyncio.run(with_client())
