"""Calling a processor: a coroutine on the loop or a plain function in a thread, within its time limits."""

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jsworker.core.clock import boottime
from jsworker.core.job import Job
from jsworker.telemetry.logs import bound_facts
from jsworker.worker.pipeline.run import Run, Stop


async def process(run: Run, job: Job[Any]) -> Any:
    """Do the job and return what its processor returned.

    Raises:
        asyncio.CancelledError: the run was told to stop; ``run.stop`` says why.
        BaseException: whatever the processor raised.
    """
    if not run.kind.needs_timers:  # the fence keeps the others
        return await _process(run, job)
    with time_limits(run):
        return await _process(run, job)


async def _process(run: Run, job: Job[Any]) -> Any:
    # In the context of the run's own task, which threads get a copy of.
    bound = bound_facts.set(run.facts)
    try:
        value = await (run.kind.processor.process(job) if run.kind.is_async else _process_in_thread(run, job))
        if run.unfinished is not None:  # it left the loop over its tries by break or return
            raise run.unfinished
        return value
    finally:
        bound_facts.reset(bound)


async def _process_in_thread(run: Run, job: Job[Any]) -> Any:
    """Run a plain function in a thread and wait for its end, also when told to stop.

    A thread cannot be cancelled, and a job must not be handed on while it still runs here.
    """
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    context = contextvars.copy_context()
    # A daemon: a processor that never returns must not keep the process from ending.
    thread = threading.Thread(
        target=context.run,
        args=(_body, run, job, ended),
        name=f"jsworker {run.kind.name} {run.id}",
        daemon=True,
    )
    thread.start()
    run.thread_id = thread.ident
    while True:
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if ended.done():
                return ended.result()
            if run.stop is None:  # somebody ends the event loop; the thread runs on, so nobody may settle
                run.abandoned = True
            if run.abandoned:
                raise
            forget_cancellation()


def _body(run: Run, job: Job[Any], ended: asyncio.Future[Any]) -> None:
    try:
        value = run.kind.processor.process(job)
    except StopIteration as error:  # a future cannot carry it
        _tell(ended, None, RuntimeError(f"the processor raised StopIteration: {error}"))
    except BaseException as error:  # noqa: BLE001 -- handed to the run, which judges it
        _tell(ended, None, error)
    else:
        _tell(ended, value, None)


def _tell(ended: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    def settle() -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(value)
        else:
            ended.set_exception(error)

    loop = ended.get_loop()
    if not loop.is_closed():  # else the worker has gone and the stale rule has the job
        loop.call_soon_threadsafe(settle)


def forget_cancellation(task: "asyncio.Task[Any] | None" = None) -> bool:
    """Note that cancellations of a task have been dealt with, so that its later time-outs count anew.

    Args:
        task: the current one, where it is known; asking for it costs a system call.

    Returns:
        Whether there were any; without one, a CancelledError is of the processor's own making.
    """
    task = task or asyncio.current_task()
    if task is None or not task.cancelling():
        return False
    while task.uncancel():
        continue
    return True


@contextmanager
def time_limits(run: Run) -> Iterator[None]:
    """Signal the run when its time-out has passed, or its job gave no sign of life for too long."""
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()

    def watch_progress(limit: float) -> None:
        left = max(run.sign_at, run.quiet_until) + limit - boottime()
        if left <= 0:
            run.signal(Stop.NO_PROGRESS)
        else:
            timers[-1] = loop.call_later(left, watch_progress, limit)

    if run.kind.timeout is not None:
        timers.append(loop.call_later(run.kind.timeout, run.signal, Stop.TIMEOUT))
    if run.kind.progress_timeout is not None:
        run.sign_at = boottime()
        timers.append(loop.call_later(run.kind.progress_timeout, watch_progress, run.kind.progress_timeout))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
