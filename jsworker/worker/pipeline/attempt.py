"""One attempt at a job, from its row to its outcome; the processor runs on the loop or in a thread."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from jsworker.core import strict_json
from jsworker.core.clock import boottime
from jsworker.core.contents import owner_of_payload
from jsworker.core.job import Job
from jsworker.core.processor import read_payload_text
from jsworker.telemetry.logs import bound_facts
from jsworker.worker.pipeline import outcomes
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.pipeline.middleware import call_within, call_within_in_thread, opened
from jsworker.worker.pipeline.outcomes import Outcome
from jsworker.worker.pipeline.run_ownership import RunLease
from jsworker.worker.pipeline.run_writes import LeaseServices
from jsworker.worker.pipeline.threads import start_thread

_LATE_SECONDS: Final = 1.0


def open_job(run: Run, services: LeaseServices) -> Job[Any]:
    """Return the job that the processor gets.

    Raises:
        InvalidPayload, InvalidJson: the row cannot be read.
        KeyMissing, ContentRefused: it cannot be decoded.
        ValueError: the payload has not been fetched.
    """
    claimed, contents = run.claimed, services.contents
    payload, checkpoint = claimed.payload, claimed.checkpoint
    if payload is None:
        raise ValueError(f"the payload of job {claimed.id} has not been fetched")
    if contents.may_be_encoded(payload):
        is_scheduled = claimed.scheduled_for is not None
        owner = owner_of_payload(claimed.id, claimed.waiting_key, is_scheduled=is_scheduled)
        with outcomes.reading_own_content():
            payload = contents.decode(payload, "payload", claimed.kind, owner)
    if checkpoint is not None:
        with outcomes.reading_own_content():
            checkpoint = contents.decode(checkpoint, "checkpoint", claimed.kind, claimed.id)
    return Job(
        id=claimed.id,
        kind=claimed.kind,
        payload=read_payload_text(type(run.kind.processor), payload),
        attempt=claimed.attempt,
        fencing_token=claimed.fencing_token,
        cleared=claimed.cleared,
        clear_reason=claimed.clear_reason,
        deadline=claimed.deadline,
        _checkpoint=None if checkpoint is None else strict_json.loads(checkpoint),
        scheduled_for=claimed.scheduled_for,
        _ownership=RunLease(run, services),
    )


def judge(
    run: Run,
    raised: BaseException,
    *,
    loop_ends: Callable[[], bool] = lambda: False,
    supervised: bool = False,
) -> Outcome | None:
    """Return the outcome of a run that ended in an error; None if it must not be settled.

    ``loop_ends`` returns whether all tasks of the event loop have been cancelled; ``supervised``: only a job
    can have done that, and the supervisor takes the jobs of the ended process back.
    """
    # Not isinstance: that reads ``__class__``, which an error may define so that it raises.
    if not issubclass(type(raised), asyncio.CancelledError):
        return outcomes.raised(run, raised)
    if run.abandoned:
        return None
    if run.stop is None and loop_ends():
        if supervised:
            return None
        run.stop = StopReason.SHUTDOWN
    # If a job that cancels itself were handed back, it would run again and again without a count.
    was_stopped = run.stop is not None or run.is_handed_back
    return outcomes.stopped(run) if was_stopped else outcomes.cancelled_itself(run, raised)


async def process_job(run: Run, job: Job[Any], services: LeaseServices) -> Outcome:
    """Let the processor do the job within its time limits; raises the error that the processor raises."""
    # Set in the context of the run's own task; threads get a copy of it.
    bound = bound_facts.set(run.facts)
    try:
        if run.kind.needs_timers:
            with time_limits(run):
                value = await _call(run, job, services)
        else:
            value = await _call(run, job, services)
        if run.unfinished is not None:  # it left the loop over the tries by break or return
            raise run.unfinished
        if isinstance(value, Coroutine):
            run.refuse_coroutine(value)
        if run.never_awaited is not None:
            run.refuse_never_awaited()
    finally:
        bound_facts.reset(bound)
    return outcomes.returned(run, value, services)


def _call(run: Run, job: Job[Any], services: LeaseServices) -> Awaitable[Any]:
    if run.kind.middleware:
        return _process_within(run, job, services)
    call = run.kind.processor.process
    return call(job) if run.kind.is_async else _process_in_thread(run, partial(call, job), services)


async def _process_within(run: Run, job: Job[Any], services: LeaseServices) -> Any:
    """Have the processor do the job within its middleware, some of which may enter a function's thread."""
    kind = run.kind
    call = partial(kind.processor.process, job)
    contexts = opened(kind.middleware, job, kind.processor)
    if kind.is_async:
        return await call_within(contexts, call)
    inside = partial(call_within_in_thread, [each for each in contexts if each.enters_threads], call)
    outside = [each for each in contexts if not each.enters_threads]
    return await call_within(outside, partial(_process_in_thread, run, inside, services))


async def _process_in_thread(run: Run, call: Callable[[], Any], services: LeaseServices) -> Any:
    """Run a plain function in a thread and wait for its end, also after its stop: it must not run twice.

    A cancellation that is no stop, such as the time-out of a middleware, is raised after the thread's end.
    """
    thread, ended = start_thread(f"jsworker {run.kind.name} {run.id}", call, "the processor")
    run.thread_id, run.has_thread = thread.ident, True
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError as error:
            if ended.done():
                break
            if services.loop_ends():  # the thread goes on: the run must not be settled
                run.abandoned = True
            if run.abandoned:
                raise
            if run.stop is None:
                cancelled = error
            else:
                forget_cancellation()
    value = ended.result()
    if cancelled is not None:
        raise cancelled
    return value


def forget_cancellation(task: "asyncio.Task[Any] | None" = None) -> None:
    """Reset the count of a task's cancellations, so that its later time-outs work as in a new task."""
    task = task or asyncio.current_task()  # called only if needed: it costs a system call
    while task is not None and task.cancelling():
        task.uncancel()


@contextmanager
def time_limits(run: Run) -> Iterator[None]:
    """Signal the run when its time-out has passed, or its job has given no sign of life for too long.

    A limit that is noticed late, because the event loop was blocked, is extended once by as much: whichever
    job blocked the loop, the others could neither end nor report progress meanwhile.
    """
    timers: dict[StopReason, asyncio.TimerHandle] = {}
    loop = asyncio.get_running_loop()
    timeout, progress_timeout = run.kind.limits.timeout, run.kind.progress_timeout

    def watch(reason: StopReason, seconds: float, *, extended: bool = False) -> None:
        timers[reason] = loop.call_later(seconds, end, reason, loop.time() + seconds, extended)

    def end(reason: StopReason, due: float, extended: bool) -> None:  # noqa: FBT001 -- of a timer's arguments
        late, left = loop.time() - due, 0.0
        if reason is StopReason.NO_PROGRESS and progress_timeout is not None:
            left = max(run.sign_at, run.quiet_until) + progress_timeout - boottime()
        if left > 0:
            watch(reason, left)
        elif late > _LATE_SECONDS and not extended:
            watch(reason, late, extended=True)
        else:
            run.signal(reason)

    if timeout is not None:
        watch(StopReason.TIMEOUT, timeout)
    if progress_timeout is not None:
        run.sign_at = boottime()
        watch(StopReason.NO_PROGRESS, progress_timeout)
    try:
        yield
    finally:
        for timer in timers.values():
            timer.cancel()
