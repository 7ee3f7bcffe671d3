"""``jsworker workers``: lists workers; ``--stack`` asks one over NATS where its runs and threads are."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from rich.table import Column

from jsworker.cli.options import Json, Limit, Stack, argument, new_app, option
from jsworker.cli.output import (
    folded,
    print_json,
    print_line,
    print_table,
    remark,
    remark_next_page,
    right,
    since,
)
from jsworker.cli.selection import ask_database, find_job
from jsworker.client.worker_stacks import NoStack, ask_for_stack, stack_lines
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import cell
from jsworker.core.settings import load_settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workers import get_worker, list_workers, state_in_words

app = new_app()


@app.command()
def workers(
    worker_id: Annotated[str | None, argument("ID", "The worker that --stack asks.")] = None,
    *,
    stack: Stack = False,
    limit: Limit = 50,
    after: Annotated[str | None, option("ID", "Continue the list after this worker.")] = None,
    as_json: Json = False,
) -> None:
    """List workers, the last seen first.

    BUSY is the jobs that a worker runs and its job slots, and behind a + those that it has claimed ahead;
    MEM the memory of its process in MiB; LAG by how much its event loop was late, at most, within half a
    minute; SEEN the time since its last heartbeat; PARENT the pid of its supervisor. STATE is "silent" when
    it has not stopped and was not seen for four heartbeats: it was killed, or cannot reach PostgreSQL.

    `jsworker workers ID --stack` asks one worker over NATS, with the login of a worker, and shows at which
    places of the code its runs, its threads and its own tasks are at this moment.

    Example: `jsworker workers --limit 10`
    """
    if (worker_id is None) is stack:
        raise WrongUsage("--stack goes with the id of a worker, and an id with --stack")
    if worker_id is not None:
        worker = ask_database(partial(get_worker, worker_id=worker_id))
        if worker is None:
            raise NoStack(f"no worker has id {cell(worker_id)}: `jsworker workers` lists them")
        _show(worker_id, worker, None, as_json=as_json)
        return
    found = ask_database(partial(list_workers, limit=limit, after=after))
    if as_json:
        print_json(found)
        return
    kinds = folded("KINDS", at_least=12)
    numbers = map(right, ("BUSY", "MEM", "LAG", "SEEN", "UP", "PARENT"))
    columns: list[str | Column] = ["ID", "STATE", *numbers, "VERSION", kinds]
    print_table(columns, map(_row, found), spare=("PARENT", "LAG", "VERSION", "UP", "MEM"))
    if len(found) == limit:
        remark_next_page(found[-1]["id"])
    if not found:
        remark("there are no workers" if after is None else f"there are no workers behind {cell(after)}")


def _row(worker: Mapping[str, Any]) -> list[str]:
    owned, slots = worker["processing"], worker["concurrency"]
    ahead = f" +{owned - slots}" if owned > slots else ""
    return [
        cell(worker["id"]),
        state_in_words(worker),
        f"{min(owned, slots)}/{slots}{ahead}",
        "" if worker["memory_bytes"] is None else f"{worker['memory_bytes'] / 2**20:.0f}M",
        "" if worker["loop_lag_seconds"] is None else f"{worker['loop_lag_seconds'] * 1000:.0f}ms",
        since(worker["last_seen_at"]),
        since(worker["started_at"]),
        cell(worker["supervisor_pid"]),
        cell(worker["version"]),
        cell(", ".join(worker["kinds"])),
    ]


def show_run(named: str, *, as_json: bool) -> None:
    """Print the stack of a job's run."""
    job, worker = ask_database(partial(_job_and_worker, named=named))
    _show(job["worker_id"], worker, job["id"], as_json=as_json)


async def _job_and_worker(
    database: Database, named: str
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    job = await find_job(database, named)
    if job["status"] != "processing":
        raise NoStack(f"job {job['id']} is {job['status']}: only a job that runs has a stack")
    return job, await get_worker(database, job["worker_id"])


def _show(worker_id: str, worker: Mapping[str, Any] | None, job_id: UUID | None, *, as_json: bool) -> None:
    seen = None if worker is None else since(worker["last_seen_at"])
    answer = asyncio.run(ask_for_stack(load_settings(), worker_id, job_id, seen=seen))
    if as_json:
        print_json(answer)
        return
    for line in stack_lines(answer):
        print_line(line)
