"""``jsworker workers``: lists workers; ``--stack`` asks one over NATS where its runs and threads are."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Final
from uuid import UUID

from rich.table import Column

from jsworker.cli.options import Json, Limit, Stack, argument, new_app, option
from jsworker.cli.output import (
    cell,
    folded,
    print_json,
    print_line,
    print_table,
    remark_next_page,
    right,
    seconds_in_words,
    since,
)
from jsworker.cli.selection import ask_database, find_job
from jsworker.core.errors import JsworkerError
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.settings import load_settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workers import get_worker, list_workers
from jsworker.stream.liveness import Answer, Reply, ask_stacks

_SECONDS: Final = 5.0
_IN_THREADS: Final = "to_thread"
"""The function of asyncio in which a coroutine waits for a thread."""
_NO_STACK: Final = "the worker answered with something that is no stack"

app = new_app()


class NoStack(JsworkerError):
    """It is not known where the run or the worker is."""


@app.command()
def workers(
    worker_id: Annotated[str | None, argument("ID", "The worker that --stack asks.")] = None,
    *,
    stack: Stack = False,
    limit: Limit = 50,
    after: Annotated[str | None, option("ID", "Go on behind this worker.")] = None,
    as_json: Json = False,
) -> None:
    """List workers, the last seen first.

    BUSY is the jobs that a worker runs and its job slots, and behind a + those that it has claimed ahead;
    SEEN the time since its last heartbeat. STATE is "silent" when it has not stopped and was not seen for
    four heartbeats: it was killed, or cannot reach PostgreSQL.

    `jsworker workers ID --stack` asks one worker over NATS, with the login of a worker, and shows at which
    places of the code its runs, its threads and its own tasks are at this moment.

    Example: `jsworker workers --limit 10`
    """
    if (worker_id is None) is stack:
        raise WrongUsage("--stack goes with the id of a worker, and an id with --stack")
    if worker_id is not None:
        _show_worker(worker_id, as_json=as_json)
        return
    found = ask_database(partial(list_workers, limit=limit, after=after))
    if as_json:
        print_json(found)
        return
    kinds = folded("KINDS", at_least=12)
    columns: list[str | Column] = ["ID", "STATE", right("BUSY"), right("SEEN"), right("UP"), "VERSION", kinds]
    print_table(columns, map(_row, found), spare=("VERSION", "UP"))
    if len(found) == limit:
        remark_next_page(found[-1]["id"])


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


def show_run(named: str, *, as_json: bool) -> None:
    """Print where the run of a job is."""
    job, worker = ask_database(partial(_job_and_worker, named=named))
    answer = _ask(job["worker_id"], worker, job["id"])
    if answer["job"] is None:
        raise NoStack(
            f"worker {cell(job['worker_id'])} does not have job {job['id']} in hand: it has just ended, or "
            "its claim was never answered and the worker gives it back within a minute"
        )
    _show(answer, _of_run(answer["job"], was_asked=True), as_json=as_json)


async def _job_and_worker(
    database: Database, named: str
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    job = await find_job(database, named)
    if job["status"] != "processing":
        raise NoStack(f"job {job['id']} is {job['status']}: only a job that runs has a stack")
    return job, await get_worker(database, job["worker_id"])


def _show_worker(worker_id: str, *, as_json: bool) -> None:
    worker = ask_database(partial(get_worker, worker_id=worker_id))
    if worker is None:
        raise NoStack(f"no worker has id {cell(worker_id)}: `jsworker workers` lists them")
    answer = _ask(worker_id, worker, None)
    _show(answer, _of_all(answer), as_json=as_json)


def _ask(worker_id: str, worker: Mapping[str, Any] | None, job_id: UUID | None) -> Mapping[str, Any]:
    reply = asyncio.run(ask_stacks(load_settings(), worker_id, job_id=job_id, seconds=_SECONDS))
    if reply.answer is not Answer.ALIVE:
        raise NoStack(_why_not(reply, worker_id, worker))
    try:
        answer = json.loads(reply.content)
        if isinstance(answer, dict) and ("jobs" if job_id is None else "job") in answer:
            return answer
    except ValueError:
        pass
    raise NoStack(_NO_STACK)


def _show(answer: Mapping[str, Any], lines: Iterator[str], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    try:
        print_line(f"worker {cell(answer['worker_id'])}, pid {cell(answer['pid'])}")
        for line in lines:
            print_line(line)
    except (KeyError, TypeError, ValueError):
        raise NoStack(_NO_STACK) from None


def _why_not(reply: Reply, worker_id: str, worker: Mapping[str, Any] | None) -> str:
    name = f"worker {cell(worker_id)}"
    if reply.reason is not None:
        return f"{name} could not be asked, which takes the login of a worker: {cell(reply.reason)}"
    seen = "it is not registered" if worker is None else f"last heartbeat {since(worker['last_seen_at'])} ago"
    if reply.answer is Answer.NO_RESPONDERS:
        return (
            f"nothing listens for {name} on NATS ({seen}): its process has ended, it is cut off from NATS, "
            "or its version has no stacks to show. What a dead worker held goes back to the queue by itself"
        )
    return (
        f"{name} is connected and did not answer within {_SECONDS:g} s ({seen}): its event loop is blocked, "
        "by something that computes or waits inside `async def process`, or its process stands still. Under "
        "`jsworker run` the stacks of its threads are written to its log, and it is ended, "
        "JSWORKER_WATCHDOG_TIMEOUT after the last tick"
    )


def _of_all(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["waiting"]:
        yield f"{int(answer['waiting'])} jobs claimed ahead, which wait for a job slot"
    for run in answer["jobs"]:
        yield ""
        yield from _of_run(run, was_asked=False)
    for title, stacks in (("thread", answer["threads"]), ("task of the worker", answer["tasks"])):
        for stack in stacks:
            yield ""
            yield from _of_stack(stack, title)
    if answer["left_out"]:
        yield f"\n{int(answer['left_out'])} more stacks were left out: ask for a job by its id"


def _of_run(run: Mapping[str, Any], *, was_asked: bool) -> Iterator[str]:
    begun = "" if run["seconds"] is None else f", running for {seconds_in_words(float(run['seconds']))}"
    stop = f", asked to stop: {cell(run['told_to_stop'])}" if run["told_to_stop"] else ""
    name = f"job {cell(run['job_id'])} of kind {cell(run['kind'])}"
    yield f"{name}, attempt {cell(run['attempt'])}{begun}{stop}"
    if run["phase"] == "waiting":
        yield "  claimed ahead: it has not begun, and waits for a job slot"
        return
    if run["phase"] == "settling":
        yield "  its processor has returned; its outcome is being written to PostgreSQL"
    if run["stacks"] is None:
        blocked = "which did not answer: its event loop is blocked"
        why = blocked if was_asked else "which is asked by the job's id"
        yield f"  it runs alone in a process of its own, {why}"
        return
    for stack in run["stacks"]:
        yield from _of_stack(stack, {"task": "task that it waits for"}.get(stack["of"], stack["of"]))


def _of_stack(stack: Mapping[str, Any], title: str) -> Iterator[str]:
    alone = f", waiting for {cell(stack['waits_for'])}" if stack.get("waits_for") else ""
    yield f"  {cell(title)}{alone}, the innermost call last:"
    for file, number, function in stack["places"]:
        yield f"    {cell(file)}:{int(number)} in {cell(function)}"
    if any(function == _IN_THREADS for _, _, function in stack["places"]):
        yield "    it waits for a thread: `jsworker workers ID --stack` shows all of them"
