"""``jsworker limits``: how many jobs of a kind or a key may run at once, and begin in a span of time."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import typer
from rich.table import Column

from jsworker.cli import options
from jsworker.cli.client_call import ask_client
from jsworker.cli.options import Json, argument, flag, new_app, option
from jsworker.cli.output import (
    folded,
    moment,
    print_json,
    print_line,
    print_table,
    remark,
    remark_next_page,
    right,
    since,
)
from jsworker.cli.selection import warn_unless_served
from jsworker.client.job_client import JobClient
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.limits import MOST_RUNNING, Limit, Rate
from jsworker.core.names import cell, check_kind, is_kind, shown
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions.limits import MOST_LISTED, Numbers, named

app = new_app()

Kind = Annotated[str, argument("KIND", "The jobs' kind.")]
Key = Annotated[str | None, option("KEY", "Only jobs with this limit key.")]


@app.callback(invoke_without_command=True)
def _limits(context: typer.Context, *, as_json: Json = False) -> None:
    """List, set or reset how many jobs may run at once, or start within a period.

    Limits of processors' classes are written by workers when they start; what is set here takes their place
    until it is reset.
    """
    if context.invoked_subcommand is None:
        list_limits(as_json=as_json)
    elif as_json:
        raise WrongUsage(f"limits --json {context.invoked_subcommand}: give --json behind the subcommand")


@app.command("list")
def list_limits(
    *,
    all_keys: Annotated[
        bool, flag("Also keys at rest: nothing runs, is held, set or paused.", "--all")
    ] = False,
    limit: options.Limit = 1_000,
    after: Annotated[str | None, option("KIND:KEY", "Continue the list after this line.")] = None,
    as_json: Json = False,
) -> None:
    """List limits, rates and pauses, with the jobs that run and are held now.

    The line with the KEY (each key) is that of a kind: its numbers hold for each key that has none of its
    own.

    Example: `jsworker limits list --all`
    """
    place = None if after is None else _place(after)
    found = ask_client(lambda client: _listed(client, all_keys=all_keys, limit=limit + 1, after=place))
    page = found[:limit]
    if as_json:
        print_json(page)
        return
    columns: list[str | Column] = [
        *(folded("KIND"), folded("KEY")),
        *(right("RUNNING"), right("LIMIT"), "RATE", right("HELD"), right("FOR")),
        *("SET BY", folded("PAUSED")),
    ]
    print_table(columns, map(_row, page), spare=("SET BY", "FOR"))
    if len(found) > limit:
        remark_next_page(":".join(_place_of(page[-1])))
    if not found:
        remark("there are no limits" if place is None else f"there are no limits behind {cell(after)}")


def _place(given: str) -> tuple[str, str]:
    kind, colon, key = given.partition(":")
    if not (colon and is_kind(kind)):
        raise WrongUsage(f"--after {shown(given)} must be a kind and a key, with a colon between them")
    return kind, key


def _place_of(limit: Mapping[str, Any]) -> tuple[str, str]:
    return limit["kind"], limit["key"]


async def _listed(
    client: JobClient, *, all_keys: bool, limit: int, after: tuple[str, str] | None
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (size := min(limit - len(found), MOST_LISTED)) > 0:
        page = await client.limits.list(all_keys=all_keys, limit=size, after=after)
        found += page
        if len(page) < size:
            break
        after = _place_of(page[-1])
    return found


def _row(limit: Mapping[str, Any]) -> list[str]:
    rate = "" if limit["rate"] is None else f"{limit['rate']} per {limit['per']:g} s"
    held = "" if not limit["held"] else str(limit["held"]) if limit["held"] <= 10_000 else ">10000"
    return [
        cell(limit["kind"]),
        cell(limit["key"]) or "(each key)",
        cell(limit["running"]),
        cell(limit["max_running"]),
        rate,
        held,
        since(limit["held_since"]) if held else "",
        cell(limit["set_by"]),
        pause_in_words(limit),
    ]


def pause_in_words(limit: Mapping[str, Any]) -> str:
    """Return since when, until when, by whom and why a limit is paused; empty: it is not."""
    if limit["paused_at"] is None:
        return ""
    ends = "" if limit["paused_until"] is None else f", until {moment(limit['paused_until'])}"
    why = f": {cell(limit['reason'])}" if limit["reason"] else ""
    return f"since {moment(limit['paused_at'])}{ends}, by {cell(limit['paused_by'])}{why}"


@app.command("set")
def set_limit(
    kind: Kind,
    *,
    key: Key = None,
    running: Annotated[
        int | None, option("N", "At most so many run at once.", min=1, max=MOST_RUNNING)
    ] = None,
    rate: Annotated[
        int | None, option("N", "At most so many begin in --per seconds.", min=1, max=MOST_RUNNING)
    ] = None,
    per: Annotated[float, typer.Option(metavar="SECONDS", help="The span of --rate.")] = 1.0,
) -> None:
    """Set the limits of a kind, for each of its keys, or of one key.

    They take the place of all numbers of its class: what is left out of a kind's numbers is not limited,
    what is left out of a key's is as for its kind. Runs that are under way go on; a lower limit holds for
    new ones.

    Example: `jsworker limits set send-mail --running 4 --rate 100 --per 60`
    """
    if running is None and rate is None:
        raise WrongUsage("limits set takes --running N, --rate N or both")
    try:
        numbers = [] if running is None else [Limit(running)]
        both: list[Limit | Rate] = [*numbers, *([] if rate is None else [Rate(rate, per)])]
    except ValueError as error:
        raise WrongUsage(str(error).replace("rate per=", "--per ", 1)) from None
    _change(kind, key, lambda client: client.limits.set(check_kind(kind), *both, key=key))
    warn_unless_served(kind)


@app.command("reset")
def reset_limit(kind: Kind, *, key: Key = None) -> None:
    """Remove limits that were set here; a class's limits return with the next worker that starts.

    Example: `jsworker limits reset send-mail --key tenant-7`
    """
    later = ", until a worker with its class starts" if key is None else ", as its kind"
    _change(kind, key, lambda client: client.limits.reset(check_kind(kind), key=key), later)


def _change(kind: str, key: str | None, act: Callable[[JobClient], Awaitable[None]], later: str = "") -> None:
    """Set or reset numbers, and print those that hold now and those that held before."""

    async def change(client: JobClient) -> tuple[Numbers, Numbers]:
        with operators_rights("limits", "UPDATE on jsworker.limits"):
            before = await client.limits.numbers(kind, key=key)
            await act(client)
            return before, await client.limits.numbers(kind, key=key)

    before, now = ask_client(change)
    print_line(f"{named(kind, key or '')}: {_in_words(now)}{later}; before: {_in_words(before)}")


def _in_words(numbers: Numbers) -> str:
    if numbers.max_running is None and numbers.rate is None:
        return "not limited"
    running = "any number" if numbers.max_running is None else f"at most {numbers.max_running}"
    rate = "no rate" if numbers.rate is None else f"{numbers.rate} begin per {numbers.per:g} s"
    return f"{running} at once, {rate}"
