"""Where the runs and threads of a worker are at this moment, as it says itself over NATS, in lines."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from jsworker.core.errors import JsworkerError
from jsworker.core.names import cell
from jsworker.core.settings import Settings
from jsworker.stream.liveness import Answer, Reply, ask_stacks

_SECONDS: Final = 5.0
_IN_THREADS: Final = "to_thread"
"""The function of asyncio in which a coroutine waits for a thread."""
_NO_STACK: Final = "the worker answered with something that is no stack"


class NoStack(JsworkerError):
    """It is not known where the run or the worker is."""


async def ask_for_stack(
    settings: Settings, worker_id: str, job_id: UUID | None = None, *, seen: str | None
) -> Mapping[str, Any]:
    """Return where a worker is, or one of its runs.

    ``seen`` is how long ago its last heartbeat was, in words; None: it is not registered.

    Raises:
        NoStack: it does not answer, or does not have that job.
    """
    reply = await ask_stacks(settings, worker_id, job_id=job_id, seconds=_SECONDS)
    if reply.answer is not Answer.ALIVE:
        raise NoStack(_why_not(reply, worker_id, seen))
    try:
        answer = json.loads(reply.content)
    except ValueError:
        raise NoStack(_NO_STACK) from None
    if not isinstance(answer, dict) or ("jobs" if job_id is None else "job") not in answer:
        raise NoStack(_NO_STACK)
    if job_id is not None and answer["job"] is None:
        raise NoStack(
            f"worker {cell(worker_id)} does not have job {job_id} in hand: it has just ended, or "
            "its claim was never answered and the worker gives it back within a minute"
        )
    return answer


def stack_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return an answer in lines; NoStack: it makes no sense."""
    try:
        found = _of_all(answer) if "jobs" in answer else _of_run(answer["job"], was_asked=True)
        return [f"worker {cell(answer['worker_id'])}, pid {cell(answer['pid'])}", *found]
    except (KeyError, TypeError, ValueError):
        raise NoStack(_NO_STACK) from None


def _why_not(reply: Reply, worker_id: str, heard: str | None) -> str:
    name = f"worker {cell(worker_id)}"
    if reply.reason is not None:
        return f"{name} could not be asked, which takes the login of a worker: {cell(reply.reason)}"
    seen = "it is not registered" if heard is None else f"last heartbeat {heard} ago"
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
    begun = "" if run["seconds"] is None else f", running for {_in_words(float(run['seconds']))}"
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


def _in_words(seconds: float) -> str:
    size, unit = next((each for each in ((3_600, "h"), (60, "m")) if seconds >= each[0]), (1, "s"))
    return f"{max(seconds, 0.0) / size:.0f}{unit}"
