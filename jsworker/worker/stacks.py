"""Where runs, tasks and threads are at this moment: code places alone, no values.

To be called on the event loop, where nothing else runs meanwhile: coroutines wait, only threads go on.
"""

import asyncio
import json
import math
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final, TypeVar
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.tracebacks import frames_of_task, frames_to, is_ours
from jsworker.telemetry.logs import Facts, bound_facts
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


async def answer(worker_id: str, in_flight: InFlight, ask_isolated: AskIsolated, question: bytes) -> bytes:
    """Return a JSON object: for a job's id as question where its run is, else where everything is.

    ``ask_isolated`` asks the process of an isolated run for its stacks; None: no answer.
    """
    facts = {"worker_id": worker_id, "pid": os.getpid()}
    if not question:
        return json.dumps(facts | _of_all(in_flight)).encode()
    run = None
    with suppress(ValueError):
        run = in_flight.runs.get(UUID(question.decode()))
    return json.dumps(facts | {"job": run and await _of_job(run, ask_isolated)}).encode()


async def _of_job(run: Run, ask_isolated: AskIsolated) -> dict[str, Any]:
    in_own_process = run.isolated and run.phase is Phase.RUNNING
    stacks = await ask_isolated(run) if in_own_process else within_bounds(of_run(run))
    return _facts_of(run) | {"stacks": stacks}


def _of_all(in_flight: InFlight) -> dict[str, Any]:
    everything = [*in_flight.runs.values(), *in_flight.given_up]
    runs = [run for run in everything if run.phase is not Phase.WAITING]
    runs.sort(key=lambda run: run.began_at)
    now = _Now()
    tasks = now.tasks - {task for run in runs for task in now.tasks_of(run)} - {asyncio.current_task()}
    threads = now.threads.keys() - {run.thread_id for run in runs}
    kept = within_bounds(_each(now, runs, threads, tasks))
    found: dict[str, Any] = {"jobs": [], "threads": [], "tasks": []}
    for what, facts in kept:
        found[what].append(facts)
    left_out = len(runs) + len(threads) + len(tasks) - len(kept)
    return found | {"left_out": left_out, "waiting": len(everything) - len(runs)}


class _Now:
    """The tasks and the other threads that there are, looked through once for however many runs."""

    def __init__(self) -> None:
        self.tasks = asyncio.all_tasks()
        self.threads = sys._current_frames()  # noqa: SLF001 -- the documented way
        del self.threads[threading.get_ident()]
        self._awaited: defaultdict[Facts | None, list[asyncio.Task[Any]]] = defaultdict(list)
        for task in self.tasks:
            callbacks = getattr(task, "_callbacks", None) or []
            for facts in {context.get(bound_facts) for _, context in callbacks}:
                self._awaited[facts].append(task)

    def tasks_of(self, run: Run) -> list[asyncio.Task[Any]]:
        """Return the run's own task, and those with which something of the run wants to be called back."""
        own = run.left_task or run.task
        others = [task for task in self._awaited.get(run.facts, ()) if task is not own]
        return others if own is None else [own, *others]


def _each(
    now: _Now, runs: Iterable[Run], threads: Iterable[int], tasks: Iterable[asyncio.Task[Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for run in runs:
        yield "jobs", _facts_of(run) | {"stacks": None if run.isolated else list(_of_run(run, now))}
    for ident in threads:
        yield "threads", _of_thread(now.threads[ident])
    for task in tasks:
        yield "tasks", _of_task(task, "task")


def of_run(run: Run) -> Iterator[Stack]:
    """Yield the stacks of a run of this process: its coroutine or thread, then the tasks it waits for."""
    return _of_run(run, _Now())


def _of_run(run: Run, now: _Now) -> Iterator[Stack]:
    if run.thread_id is not None and run.phase is Phase.RUNNING:  # else the thread has ended
        if (frame := now.threads.get(run.thread_id)) is not None:
            yield _of_thread(frame, called_by_us=True)
        return
    for n, task in enumerate(now.tasks_of(run)):
        yield _of_task(task, "task" if n else "coroutine")


def within_bounds(found: Iterable[T]) -> list[T]:
    """Return as many of them as one answer may hold, the first ones; one further is read at most."""
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


def _of_task(task: asyncio.Task[Any], what: str) -> Stack:
    frames, waits_for = frames_of_task(task)
    return _stack(what, frames, called_by_us=what == "coroutine") | {"waits_for": waits_for}


def _of_thread(frame: FrameType, *, called_by_us: bool = False) -> Stack:
    return _stack("thread", frames_to(frame), called_by_us=called_by_us)


def _stack(what: str, frames: Sequence[FrameType], *, called_by_us: bool) -> Stack:
    """Return a stack without the frames by which it was called: they are jsworker's and Python's own.

    Where jsworker has called it, what stands before its frames wraps threads or tasks, as Sentry does.
    """
    places = [(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname) for frame in frames]
    ours = next((n for n, place in enumerate(places) if is_ours(place[0])), 0) if called_by_us else 0
    leads = enumerate(places[ours:], ours)
    own = next((n for n, place in leads if not is_ours(place[0]) and place[0] != _THREADING), 0)
    return {"of": what, "places": places[own:][-_MOST_PLACES_OF_A_STACK:]}
