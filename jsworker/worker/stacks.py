"""Where runs, tasks and threads are at this moment: code places alone, no values.

To be called on the event loop, where nothing else runs meanwhile: coroutines wait, only threads go on.
"""

import asyncio
import gc
import json
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextvars import Context
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.tracebacks import is_ours
from jsworker.telemetry.logs import bound_facts
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.run import Phase, Run

_MOST_PLACES: Final = 60
"""Of one stack: the innermost ones."""
_MOST_BYTES: Final = 48 * 1024
"""Of an answer; a server may be set up for messages of 64 KiB."""
_THREADING: Final = threading.__file__
_RESUMABLE: Final[Mapping[type, tuple[str, str]]] = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}
"""What stands still at a place in its code: where it holds its frame, and what it awaits. Nothing else is
asked for attributes: a stranger's may run code."""

Stack = dict[str, Any]
"""``of``: coroutine, task or thread; ``places``: file, line and function, innermost last; ``waits_for``: the
type of what the innermost one awaits."""


class Stacks:
    """Tells where a worker's runs are, and what else it does."""

    def __init__(
        self, context: WorkerContext, ask_isolated: Callable[[Run], Awaitable[list[Stack] | None]]
    ) -> None:
        """Prepare.

        Args:
            context: the worker's.
            ask_isolated: asks the process in which a run is isolated for its stacks; None: no answer.
        """
        self._facts = {"worker_id": context.worker_id, "pid": os.getpid()}
        self._in_flight = context.in_flight
        self._ask_isolated = ask_isolated

    async def answer(self, question: bytes) -> bytes:
        """Return a JSON object: for a job's id as question where its run is, else where everything is."""
        if not question:
            return json.dumps(self._facts | self._of_all()).encode()
        try:
            run = self._in_flight.runs.get(UUID(question.decode()))
        except ValueError:
            run = None
        told = None if run is None else await self._of_run(run)
        return json.dumps(self._facts | {"job": told}).encode()

    async def _of_run(self, run: Run) -> dict[str, Any]:
        if run.quarantined and run.phase is Phase.RUNNING:
            return _facts_of(run) | {"stacks": await self._ask_isolated(run)}
        return _facts_of(run) | {"stacks": within_bounds(of_run(run))}

    def _of_all(self) -> dict[str, Any]:
        runs = [run for run in self._in_flight.runs.values() if run.phase is not Phase.WAITING]
        runs += self._in_flight.given_up
        runs.sort(key=lambda run: run.began_at)
        told: dict[str, Any] = {"jobs": [], "threads": [], "tasks": [], "left_out": 0}
        told["waiting"] = len(self._in_flight.runs) + len(self._in_flight.given_up) - len(runs)
        room = _MOST_BYTES
        for what, each in self._each(runs):
            room -= len(json.dumps(each))
            if room > 0:
                told[what].append(each)
            else:
                told["left_out"] += 1
        return told

    def _each(self, runs: Collection[Run]) -> Iterator[tuple[str, dict[str, Any]]]:
        of_runs: set[asyncio.Task[Any]] = set()
        for run in runs:
            of_runs |= set(_tasks_of(run))
            yield "jobs", _facts_of(run) | {"stacks": None if run.quarantined else of_run(run)}
        shown = {run.thread_id for run in runs} | {threading.get_ident()}
        for ident in sys._current_frames().keys() - shown:  # noqa: SLF001 -- the documented way
            yield from (("threads", stack) for stack in _of_thread(ident))
        for task in asyncio.all_tasks() - of_runs:
            if task is not asyncio.current_task():
                yield "tasks", _of_task(task, "task")


def of_run(run: Run) -> list[Stack]:
    """Return the stacks of a run of this process: its coroutine or thread, then the tasks it waits for."""
    if run.thread_id is not None and run.phase is Phase.RUNNING:  # else the thread has ended
        return _of_thread(run.thread_id)
    return [_of_task(task, "task" if n else "coroutine") for n, task in enumerate(_tasks_of(run))]


def within_bounds(stacks: Sequence[Stack]) -> list[Stack]:
    """Return as many of them as one answer may hold, the run's own first."""
    room = _MOST_BYTES
    told: list[Stack] = []
    for stack in stacks:
        room -= len(json.dumps(stack))
        if room < 0:
            break
        told.append(stack)
    return told


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
    places: list[tuple[str, int, str]] = []
    seen: set[int] = set()
    awaited: object = task.get_coro()
    waits_for = ""
    while awaited is not None and id(awaited) not in seen:
        seen.add(id(awaited))
        if (names := _RESUMABLE.get(type(awaited))) is not None:
            frame = getattr(awaited, names[0])
            if frame is not None:
                places.append(_place(frame))
            awaited = getattr(awaited, names[1])
        else:
            waits_for = type(awaited).__qualname__.replace("FutureIter", "Future")
            awaited = _behind(awaited)
    return _stack(what, places) | {"waits_for": waits_for}


def _behind(awaited: object) -> object:
    """Return what is awaited through something that does not tell it: a task, an asynchronous generator."""
    for held in gc.get_referents(awaited):
        if issubclass(type(held), asyncio.Task):
            return held.get_coro()
        if type(held) in _RESUMABLE:
            return held
    return None


def _of_thread(ident: int) -> list[Stack]:
    frame = sys._current_frames().get(ident)  # noqa: SLF001 -- the documented way
    places: list[tuple[str, int, str]] = []
    while frame is not None:
        places.append(_place(frame))
        frame = frame.f_back
    return [_stack("thread", places[::-1])] if places else []


def _stack(what: str, places: list[tuple[str, int, str]]) -> Stack:
    """Return a stack without the frames by which it was called: they are jsworker's and Python's own."""
    own = next((n for n, place in enumerate(places) if not is_ours(place[0]) and place[0] != _THREADING), 0)
    return {"of": what, "places": places[own:][-_MOST_PLACES:]}


def _place(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname
