"""One attempt at a job: from its row to the outcome, in the worker's own process or in quarantine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from jsworker.core import strict_json
from jsworker.core.job import Job
from jsworker.core.processor import read_payload_text
from jsworker.worker.pipeline import outcomes
from jsworker.worker.pipeline.invocation import process
from jsworker.worker.pipeline.outcomes import Outcome
from jsworker.worker.pipeline.run import Run, Stop
from jsworker.worker.pipeline.run_ownership import LeaseServices, RunLease


def open_job(run: Run, services: LeaseServices) -> Job[Any]:
    """Return what the processor gets.

    Raises:
        InvalidPayload, InvalidJson: the row cannot be read.
        ValueError: its payload has not been fetched.
    """
    claimed = run.claimed
    if claimed.payload is None:
        raise ValueError(f"the payload of job {claimed.id} has not been fetched")
    job: Job[Any] = Job(
        id=claimed.id,
        kind=claimed.kind,
        payload=read_payload_text(type(run.kind.processor), claimed.payload),
        attempt=claimed.attempt,
        fencing_token=claimed.fencing_token,
        cleared=claimed.cleared,
        clear_reason=claimed.clear_reason,
        deadline=claimed.deadline,
        checkpoint=None if claimed.checkpoint is None else strict_json.loads(claimed.checkpoint),
        _ownership=RunLease(run, services),
    )
    run.unread = False
    return job


async def process_job(run: Run, job: Job[Any], max_result_bytes: int) -> Outcome:
    """Have the processor do the job.

    Raises:
        BaseException: whatever the processor raised.
    """
    return outcomes.returned(run, await process(run, job), max_result_bytes)


async def judged(
    run: Run, work: Awaitable[Outcome], *, loop_ends: Callable[[], bool] = lambda: False
) -> tuple[Outcome, BaseException | None]:
    """Return the outcome of ``work``, with the error behind it.

    Args:
        run: the run.
        work: has the processor do the job.
        loop_ends: whether whoever ends the event loop has cancelled all of its tasks.

    Raises:
        CancelledError: the run was abandoned; nobody may settle it.
    """
    try:
        return await work, None
    except asyncio.CancelledError as cancelled:
        if run.abandoned:
            raise
        if run.stop is None and loop_ends():
            run.stop = Stop.SHUTDOWN
        # Handing it back although nobody asked for a stop would run it again and again, and count nothing.
        told = run.stop is not None or run.is_handed_back
        return outcomes.stopped(run) if told else outcomes.cancelled_itself(run, cancelled), cancelled
    except GeneratorExit:  # the event loop is gone
        raise
    except BaseException as raised:  # noqa: BLE001 -- sys.exit() in a job must not end the worker either
        return outcomes.raised(run, raised), raised
