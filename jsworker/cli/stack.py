"""Where a run or a worker is at this moment: asked over NATS, told as code places."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from jsworker.cli.connection import connected_database
from jsworker.cli.output import print_json, print_line
from jsworker.cli.selection import find_job
from jsworker.cli.words import cell, seconds_in_words, since
from jsworker.core.errors import JobNotFound, JsworkerError
from jsworker.core.settings import Settings, load_settings
from jsworker.ownership.queries import listing
from jsworker.ownership.transitions.workers import get_worker
from jsworker.stream.liveness import Answer, Reply, ask_stacks

_SECONDS: Final = 5.0
_IN_THREADS: Final = "to_thread"
"""The function of asyncio behind which a coroutine waits for a thread."""


class NoStack(JsworkerError):
    """Nobody told where it is."""


def show_run(named: str, *, as_json: bool) -> None:
    """Print where the run of a job is.

    Raises:
        JobNotFound: no job has this id.
        NoStack: it does not run, or its owner did not tell.
        SettingsError, StreamUnavailable, StreamRefused, DatabaseUnavailable: somebody could not be asked.
    """
    told = asyncio.run(_of_job(named))
    if as_json:
        print_json(told)
        return
    for line in _lines_of(told, _of_run(told["job"], was_asked=True)):
        print_line(line)


def show_worker(worker_id: str, *, as_json: bool) -> None:
    """Print where the runs, threads and tasks of a worker are, with the errors of ``show_run``."""
    told = asyncio.run(_of_worker(worker_id))
    if as_json:
        print_json(told)
        return
    for line in _lines_of(told, _of_all(told)):
        print_line(line)


async def _of_job(named: str) -> Mapping[str, Any]:
    settings = load_settings()
    async with connected_database() as database:
        job_id = await find_job(database, named)
        job = await listing.get_job(database, job_id)
        if job is None:
            raise JobNotFound(f"no job has id {job_id}")
        if job["status"] != "processing":
            raise NoStack(f"job {job_id} is {job['status']}: only a job that runs has a stack")
        worker = await get_worker(database, job["worker_id"])
    told = await _ask(settings, job["worker_id"], worker, job_id)
    if told["job"] is None:
        owner = cell(job["worker_id"])
        why = (
            "it has just ended, or its claim was never answered and the worker gives it back within a minute"
        )
        raise NoStack(f"worker {owner} does not have job {job_id} in hand: {why}")
    return told


async def _of_worker(worker_id: str) -> Mapping[str, Any]:
    settings = load_settings()
    async with connected_database() as database:
        worker = await get_worker(database, worker_id)
    if worker is None:
        raise NoStack(f"no worker has id {cell(worker_id)}: `jsworker workers` lists them")
    return await _ask(settings, worker_id, worker, None)


async def _ask(
    settings: Settings, worker_id: str, worker: Mapping[str, Any] | None, job_id: UUID | None
) -> Mapping[str, Any]:
    reply = await ask_stacks(settings, worker_id, job_id=job_id, seconds=_SECONDS)
    if reply.answer is not Answer.ALIVE:
        raise NoStack(_why_not(reply, worker_id, worker))
    try:
        told = json.loads(reply.content)
        if isinstance(told, dict) and ("job" in told if job_id is not None else "jobs" in told):
            return told
    except ValueError:
        pass
    raise NoStack(f"worker {cell(worker_id)} answered with something that is no stack")


def _why_not(reply: Reply, worker_id: str, worker: Mapping[str, Any] | None) -> str:
    name = f"worker {cell(worker_id)}"
    if reply.reason is not None:
        return f"{name} could not be asked, which takes the login of a worker: {cell(reply.reason)}"
    seen = "it is not registered" if worker is None else f"last heartbeat {since(worker['last_seen_at'])} ago"
    if reply.answer is Answer.NO_RESPONDERS:
        return (
            f"nobody listens for {name} on NATS ({seen}): its process has ended, it is cut off from NATS, or "
            "its version tells no stacks. What a dead worker held goes back to the queue by itself"
        )
    return (
        f"{name} is connected and did not answer within {_SECONDS:g} s ({seen}): its event loop is blocked, "
        "by something that computes or waits inside `async def process`, or its process stands still. Under "
        "`jsworker run` the stacks of its threads are written to its log, and it is ended, "
        "JSWORKER_WATCHDOG_TIMEOUT after the last tick"
    )


def _lines_of(told: Mapping[str, Any], lines: Iterator[str]) -> Iterator[str]:
    try:
        yield f"worker {cell(told['worker_id'])}, pid {cell(told['pid'])}"
        yield from lines
    except (KeyError, TypeError, ValueError):
        raise NoStack("the worker answered with something that is no stack") from None


def _of_all(told: Mapping[str, Any]) -> Iterator[str]:
    if told["waiting"]:
        yield f"{int(told['waiting'])} jobs claimed ahead, which wait for a job slot"
    for run in told["jobs"]:
        yield ""
        yield from _of_run(run, was_asked=False)
    for title, stacks in (("thread", told["threads"]), ("task of the worker", told["tasks"])):
        for stack in stacks:
            yield ""
            yield from _of_stack(stack, title)
    if told["left_out"]:
        yield ""
        yield f"{int(told['left_out'])} more stacks were left out: ask for a job by its id"


def _of_run(run: Mapping[str, Any], *, was_asked: bool) -> Iterator[str]:
    begun = "" if run["seconds"] is None else f", running for {seconds_in_words(float(run['seconds']))}"
    stop = f", told to stop: {cell(run['told_to_stop'])}" if run["told_to_stop"] else ""
    name = f"job {cell(run['job_id'])} of kind {cell(run['kind'])}"
    yield f"{name}, attempt {cell(run['attempt'])}{begun}{stop}"
    if run["phase"] == "waiting":
        yield "  claimed ahead: it has not begun, and waits for a job slot"
        return
    if run["phase"] == "settling":
        yield "  its processor has returned; its outcome is being written to PostgreSQL"
    if run["stacks"] is None:
        why = (
            "which did not answer: its event loop is blocked"
            if was_asked
            else "which is asked by the job's id"
        )
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
