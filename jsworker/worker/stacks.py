"""Where runs, tasks and threads are at this moment: code places alone, no values.

To be called on the event loop, where nothing else runs meanwhile: coroutines wait, only threads go on.
"""

import asyncio
import json
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from types import FrameType
from typing import Any, Final, TypeVar
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.tracebacks import frames_of_task, frames_of_thread, is_ours
from jsworker.telemetry.logs import bound_facts
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import InFlight, Phase, Run

T = TypeVar("T")

_MOST_PLACES_OF_A_STACK: Final = 60
_MOST_BYTES: Final = 48 * 1024
"""Of an answer; a server may be set up for messages of 64 KiB."""
_THREADING: Final = threading.__file__

Stack = dict[str, Any]
"""``of``: coroutine, task or thread; ``places``: file, line and function, innermost last; ``waits_for``: the
type of what the innermost one awaits."""
AskIsolated = Callable[[Run], Awaitable[list[Stack] | None]]


async def answer(context: WorkerContext, ask_isolated: AskIsolated, question: bytes) -> bytes:
    """Return a JSON object: for a job's id as question where its run is, else where everything is.

    ``ask_isolated`` asks the process of an isolated run for its stacks; None: no answer.
    """
    facts = {"worker_id": context.worker_id, "pid": os.getpid()}
    if not question:
        return json.dumps(facts | _of_all(context.in_flight)).encode()
    run = None
    with suppress(ValueError):
        run = context.in_flight.runs.get(UUID(question.decode()))
    return json.dumps(facts | {"job": run and await _of_job(run, ask_isolated)}).encode()


async def _of_job(run: Run, ask_isolated: AskIsolated) -> dict[str, Any]:
    in_own_process = run.isolated and run.phase is Phase.RUNNING
    stacks = await ask_isolated(run) if in_own_process else within_bounds(of_run(run))
    return _facts_of(run) | {"stacks": stacks}


def _of_all(in_flight: InFlight) -> dict[str, Any]:
    everything = [*in_flight.runs.values(), *in_flight.given_up]
    runs = [run for run in everything if run.phase is not Phase.WAITING]
    each = list(_each(sorted(runs, key=lambda run: run.began_at)))
    kept = within_bounds(each)
    found: dict[str, Any] = {"jobs": [], "threads": [], "tasks": []}
    for what, facts in kept:
        found[what].append(facts)
    return found | {"left_out": len(each) - len(kept), "waiting": len(everything) - len(runs)}


def _each(runs: Collection[Run]) -> Iterator[tuple[str, dict[str, Any]]]:
    of_runs: set[asyncio.Task[Any] | None] = {asyncio.current_task()}
    for run in runs:
        of_runs |= set(_tasks_of(run))
        yield "jobs", _facts_of(run) | {"stacks": None if run.isolated else of_run(run)}
    shown = {run.thread_id for run in runs} | {threading.get_ident()}
    for ident in sys._current_frames().keys() - shown:  # noqa: SLF001 -- the documented way
        yield from (("threads", stack) for stack in _of_thread(ident))
    for task in asyncio.all_tasks() - of_runs:
        yield "tasks", _of_task(task, "task")


def of_run(run: Run) -> list[Stack]:
    """Return the stacks of a run of this process: its coroutine or thread, then the tasks it waits for."""
    if run.thread_id is not None and run.phase is Phase.RUNNING:  # else the thread has ended
        return _of_thread(run.thread_id, called_by_us=True)
    return [_of_task(task, "task" if n else "coroutine") for n, task in enumerate(_tasks_of(run))]


def within_bounds(found: Sequence[T]) -> list[T]:
    """Return as many of them as one answer may hold, the first ones."""
    room = _MOST_BYTES
    kept: list[T] = []
    for each in found:
        room -= len(json.dumps(each))
        if room < 0:
            break
        kept.append(each)
    return kept


def _facts_of(run: Run) -> dict[str, Any]:
    began = run.began_at
    return {
        "job_id": str(run.id),
        "kind": run.kind.name,
        "attempt": run.claimed.attempt,
        "phase": run.phase.value,
        "seconds": round(boottime() - began, 1) if math.isfinite(began) else None,
        "told_to_stop": run.stop_in_words or None,
        "alone": run.quarantined,
    }


def _tasks_of(run: Run) -> list[asyncio.Task[Any]]:
    """Return the run's own task, and those with which something of the run wants to be called back."""
    own = run.left_task or run.task
    others = [task for task in asyncio.all_tasks() if task is not own and _is_awaited_by(task, run)]
    return others if own is None else [own, *others]


def _is_awaited_by(task: asyncio.Task[Any], run: Run) -> bool:
    callbacks: list[tuple[object, Context]] = getattr(task, "_callbacks", None) or []
    return any(context.get(bound_facts) == run.facts for _, context in callbacks)


def _of_task(task: asyncio.Task[Any], what: str) -> Stack:
    frames, waits_for = frames_of_task(task)
    return _stack(what, frames, called_by_us=what == "coroutine") | {"waits_for": waits_for}


def _of_thread(ident: int, *, called_by_us: bool = False) -> list[Stack]:
    frames = frames_of_thread(ident)
    return [_stack("thread", frames, called_by_us=called_by_us)] if frames else []


def _stack(what: str, frames: Sequence[FrameType], *, called_by_us: bool) -> Stack:
    """Return a stack without the frames by which it was called: they are jsworker's and Python's own.

    Where jsworker has called it, what stands before its frames wraps threads or tasks, as Sentry does.
    """
    places = [(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname) for frame in frames]
    ours = next((n for n, place in enumerate(places) if is_ours(place[0])), 0) if called_by_us else 0
    leads = enumerate(places[ours:], ours)
    own = next((n for n, place in leads if not is_ours(place[0]) and place[0] != _THREADING), 0)
    return {"of": what, "places": places[own:][-_MOST_PLACES_OF_A_STACK:]}
