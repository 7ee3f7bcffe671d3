"""``jsworker workers``: who works here, or did."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Column

from jsworker.cli.connection import connected_database
from jsworker.cli.failures import WrongUsage
from jsworker.cli.options import Json, Limit, Stack, new_app
from jsworker.cli.output import print_json, print_table
from jsworker.cli.remarks import tell
from jsworker.cli.words import cell, since
from jsworker.ownership.transitions.workers import list_workers

app = new_app()


@app.command()
def workers(
    worker_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The worker that --stack asks.", show_default=False)
    ] = None,
    *,
    stack: Stack = False,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List workers, the last seen first.

    BUSY is the jobs that a worker runs and its job slots, and behind a + those that it has claimed ahead;
    SEEN the time since its last heartbeat. STATE is "silent" when it has not stopped and was not seen for
    four heartbeats: it was killed, or cannot reach PostgreSQL.

    `jsworker workers ID --stack` asks one worker over NATS, with the login of a worker, and shows at which
    places of the code its runs, its threads and its own tasks are at this moment.
    """
    if (worker_id is None) is stack:
        raise WrongUsage("--stack goes with the id of a worker, and an id with --stack")
    if worker_id is not None:
        from jsworker.cli.stack import show_worker  # noqa: PLC0415 -- nobody else needs NATS here

        show_worker(worker_id, as_json=as_json)
        return
    found = asyncio.run(_workers(limit))
    if as_json:
        print_json(found)
        return
    columns = [
        Column("ID", no_wrap=True),
        Column("STATE", no_wrap=True),
        Column("BUSY", no_wrap=True, justify="right"),
        Column("SEEN", no_wrap=True, justify="right"),
        Column("UP", no_wrap=True, justify="right"),
        Column("VERSION", no_wrap=True),
        Column("KINDS", overflow="fold", min_width=12),
    ]
    print_table(columns, map(_row, found))
    if len(found) == limit:
        tell(f"these are the {limit} last seen; --limit shows more")


async def _workers(limit: int) -> list[dict[str, Any]]:
    async with connected_database() as database:
        return await list_workers(database, limit=limit)


def _row(worker: Mapping[str, Any]) -> list[str]:
    owned, slots = worker["processing"], worker["concurrency"]
    ahead = f" +{owned - slots}" if owned > slots else ""
    return [
        cell(worker["id"]),
        "silent" if worker["state"] != "stopped" and not worker["alive"] else cell(worker["state"]),
        f"{min(owned, slots)}/{slots}{ahead}",
        since(worker["last_seen_at"]),
        since(worker["started_at"]),
        cell(worker["version"]),
        cell(", ".join(worker["kinds"])),
    ]
