"""``jsworker dead-messages``: messages that could not be read, or that named a job that does not exist."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import typer

from jsworker.cli.options import Json, Limit, Yes, argument, flag, new_app, option
from jsworker.cli.output import (
    ActionOutcome,
    folded,
    print_json,
    print_table,
    refused,
    remark,
    remark_next_page,
    report,
    right,
    since,
)
from jsworker.cli.selection import ask_database, check_choice, confirm, connected_database
from jsworker.client.dead_messages import DeadMessageOutcome, drop, replay
from jsworker.core.exit_codes import DONE, WrongUsage
from jsworker.core.names import cell
from jsworker.core.settings import load_settings
from jsworker.ownership.refusals import needed_right
from jsworker.ownership.transitions import dead_messages as dead
from jsworker.ownership.transitions.audit import os_user
from jsworker.ownership.transitions.dead_messages import KEPT_MESSAGES

app = new_app()

_MOST_ID: Final = 2**63 - 1
"""The largest id that PostgreSQL can store."""


@app.command("dead-messages")
def dead_messages(
    action: Annotated[
        Literal["list", "replay", "drop"], typer.Argument(metavar="ACTION", help="What to do.")
    ] = "list",
    ids: Annotated[list[int] | None, argument("ID", "For replay and drop.", min=0, max=_MOST_ID)] = None,
    *,
    everything: Annotated[bool, flag("All of them, instead of ids.", "--all")] = False,
    yes: Yes = False,
    limit: Limit = 50,
    after: Annotated[
        int | None, option("ID", "Continue the list after this message.", min=0, max=_MOST_ID)
    ] = None,
    as_json: Json = False,
) -> int:
    """List, replay or drop messages that no worker could use.

    A worker puts a message aside when it cannot read it or when no job has its id, with the reason. Jobs are
    not lost by that: they are rows of the database. replay sends a message to its subject again and takes it
    off the list; drop only takes it off the list.

    Example: `jsworker dead-messages replay --all`
    """
    if action == "list":
        if ids or everything:
            raise WrongUsage("dead-messages list takes no ids and no --all")
        return _list(limit, after, as_json=as_json)
    if after is not None:
        raise WrongUsage(f"--after is for dead-messages list, not for {action}")
    check_choice(f"dead-messages {action}", ids, filtered=everything, filters="--all", yes=yes)
    chosen = list(dict.fromkeys(ids)) if ids else _all(action, yes=yes)
    outcomes = _replay(chosen) if action == "replay" else _drop(chosen)
    with needed_right(f"dead-messages {action}", "DELETE on jsworker.dead_messages", "jsworker_operator"):
        return asyncio.run(report(outcomes, as_json=as_json, expected=len(chosen)))


def _list(limit: int, after: int | None, *, as_json: bool) -> int:
    found = ask_database(partial(dead.list_dead, limit=limit, after=after))
    if as_json:
        print_json(found)
        return DONE
    subject = folded("SUBJECT")
    columns = [right("ID"), right("AGE"), subject, right("BYTES"), folded("REASON", at_least=20)]
    print_table(columns, map(_row, found))
    if len(found) == limit:
        remark_next_page(found[-1]["id"])
    if not found:
        remark(f"there are no dead messages{'' if after is None else f' behind {after}'}")
    return DONE


def _row(message: Mapping[str, Any]) -> list[str]:
    return [
        str(message["id"]),
        since(message["at"]),
        cell(message["subject"]),
        f"{'over ' * message['truncated']}{message['bytes']}",
        cell(message["reason"]),
    ]


def _all(action: str, *, yes: bool) -> list[int]:
    messages = ask_database(partial(dead.list_dead, limit=2 * KEPT_MESSAGES))
    ids = [int(message["id"]) for message in messages]
    if not ids:
        remark("there are no dead messages")
    elif not yes:
        confirm(f"{action} {len(ids)} message{'s' * (len(ids) > 1)}?")
    return ids[::-1]


async def _drop(ids: Sequence[int]) -> AsyncGenerator[list[ActionOutcome], None]:
    async with connected_database() as database:
        dropped = await drop(database, ids, actor=os_user())
        yield [_outcome_of(outcome, "dropped") for outcome in dropped]


async def _replay(ids: Sequence[int]) -> AsyncGenerator[list[ActionOutcome], None]:
    async with connected_database() as database:
        outcomes = replay(
            database, load_settings(), ids, client_name="jsworker dead-messages", actor=os_user()
        )
        async for outcome in outcomes:
            yield [_outcome_of(outcome, "replayed")]


def _outcome_of(outcome: DeadMessageOutcome, done: str) -> ActionOutcome:
    if outcome.refusal is not None:
        return refused(outcome.id, outcome.refusal)
    return ActionOutcome(outcome.id, done)
