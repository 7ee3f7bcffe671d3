"""Coroutines that go on although they were told to stop: cancelled again, told, ended, or given up."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import OwnershipLost
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.in_flight import Run, StopReason
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, LATER, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker
from tests.worker.tied import tied


class Swallower:
    """A processor's function that swallows every cancellation until the test lets it end.

    Attributes:
        swallowed: how many it has swallowed.
        refused: the errors of what it wrote at its late end.
    """

    def __init__(self, *, swallows: int = 1_000_000) -> None:
        self.swallowed = 0
        self.refused: list[str] = []
        self._swallows = swallows
        self._end = asyncio.Event()

    async def process(self, job: Job[Any]) -> str:
        """Wait for the end."""
        while not self._end.is_set():
            try:
                await self._end.wait()
            except asyncio.CancelledError:
                if self.swallowed == self._swallows:
                    raise
                self.swallowed += 1
        try:
            await job.save_checkpoint("late")
        except OwnershipLost as refusal:
            self.refused.append(str(refusal))
        return "late"

    def end(self) -> None:
        """Let it come to its end."""
        self._end.set()


LIMITS: dict[str, Any] = {"timeout": 3600.0, "progress_timeout": 1800.0}
"""What a run may be told to have exceeded."""


@pytest.fixture
async def swallower() -> AsyncIterator[Swallower]:
    made = Swallower()
    yield made
    made.end()


def the_run(running: Running) -> Run:
    [run] = running.worker._context.in_flight.runs.values()
    return run


def problems_of(running: Running) -> str:
    """Return what the worker tells about itself where it is asked whether it is ready."""
    status = running.worker.status()
    assert status is not None
    return " ".join(status.readiness.problems)


@pytest.mark.parametrize(
    "reason",
    [StopReason.TIMEOUT, StopReason.NO_PROGRESS, StopReason.CANCELLED, StopReason.LOST, StopReason.FENCED],
)
async def test_its_process_is_ended_where_somebody_can_end_it(
    client: JobClient, settings: Settings, swallower: Swallower, reason: StopReason
) -> None:
    async with tied(scripted(swallower.process, **LIMITS), settings=settings) as (running, supervision):
        job = await client.enqueue(KIND, {})
        await running.events.told("job.started")
        the_run(running).signal(reason)

        async def condemned() -> None:
            assert supervision.condemned

        await eventually(condemned)
        await rounds_pass(count_rounds(running.worker._components.fences), 3)
        _, culprits, why = supervision.condemned[0]
        assert culprits == [(job.id, 1)]
        assert f"job {job.id} went on although it was told to stop: {reason.value}" in why
        [told] = running.events.of("job.stop_ignored")
        assert (told["job_id"], told["stop"], told["cancellations"]) == (str(job.id), reason.value, 2)
        assert str(job.id) in problems_of(running)
        assert swallower.swallowed >= 2
        swallower.end()


async def test_one_that_swallows_a_single_cancellation_ends_with_the_next_one(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    once = Swallower(swallows=1)
    async with tied(scripted(once.process, timeout=0.1, backoff=LATER), settings=settings) as (
        running,
        supervision,
    ):
        job = await client.enqueue(KIND, {})
        row = await rows.becomes(job.id, "scheduled")
        assert (row["last_error"], row["errors"]) == ("timed out after 0.1 s", 1)
        assert supervision.condemned == []
        assert not running.events.of("job.stop_ignored")


async def test_inside_an_application_its_attempt_fails_and_it_keeps_its_slot(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    swallower: Swallower,
) -> None:
    processor = scripted(swallower.process, timeout=0.1, max_attempts=1)
    running = await start(processor, scripted(echo, kind="echo"), with_settings=make_settings(concurrency=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["errors"], row["stalls"]) == ("attempts", 1, 0)
    assert row["last_error"] == "timed out after 0.1 s; it goes on although it was cancelled 2 times"
    [told] = await running.events.told("job.stop_ignored")
    assert (told["job_id"], told["stop"]) == (str(job.id), "timeout")
    assert str(job.id) in problems_of(running)
    await running.stream_is_empty()
    assert len(processor.failed) == 1

    again = swallower.swallowed
    neighbour = await client.enqueue("echo", {})

    async def cancelled_again() -> None:
        assert swallower.swallowed > again + 1

    await eventually(cancelled_again)
    assert (await rows.job(neighbour.id))["fencing_token"] == 0  # the slot is not free, others may take it

    swallower.end()
    await rows.becomes(neighbour.id, "completed")
    await running.events.told("worker.restored")
    assert problems_of(running) == ""
    assert len(swallower.refused) == 1
    after = await rows.job(job.id)
    assert (after["status"], after["checkpoint"], after["result"]) == ("failed", None, None)


async def test_inside_an_application_a_step_in_a_thread_keeps_its_job(
    client: JobClient, rows: Rows, start: StartWorker, swallower: Swallower
) -> None:
    """Given up, its next attempt would call the step again, beside the thread."""
    calls: list[int] = []
    may_end = threading.Event()

    def charge() -> str:
        calls.append(1)
        may_end.wait(120.0)
        return "charged"

    async def process(job: Job[Any]) -> Any:
        try:
            charged = await job.step("charge", charge)
        except asyncio.CancelledError:
            return await swallower.process(job)
        return charged

    running = await start(scripted(process, timeout=3600.0, max_attempts=3))
    job = await client.enqueue(KIND, {})

    async def is_called() -> None:
        assert calls

    await eventually(is_called)
    the_run(running).signal(StopReason.TIMEOUT)
    await running.events.told("job.stop_ignored")
    await rounds_pass(count_rounds(running.worker._components.beats), 5)
    row = await rows.job(job.id)
    assert (row["status"], row["fencing_token"], row["errors"]) == ("processing", 1, 0)
    assert not running.worker._context.in_flight.given_up

    may_end.set()  # what the processor swallows then is not the thread's
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["fencing_token"], row["errors"]) == ("charged", 2, 1)
    assert len(calls) == 1
    assert swallower.swallowed >= 1
    assert len(running.events.of("job.stop_ignored")) == 1
    swallower.end()


async def test_inside_an_application_a_cancelled_job_is_cancelled(
    client: JobClient, rows: Rows, start: StartWorker, swallower: Swallower
) -> None:
    running = await start(scripted(swallower.process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    await client.cancel(job.id)
    row = await rows.becomes(job.id, "cancelled")
    assert row["last_error"].startswith("cancelled on request; it goes on")
    swallower.end()


async def test_inside_an_application_a_fenced_run_has_failed_its_attempt(
    client: JobClient, rows: Rows, start: StartWorker, swallower: Swallower
) -> None:
    processor = scripted(swallower.process, max_attempts=1)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    the_run(running).signal(StopReason.FENCED)
    row = await rows.becomes(job.id, "failed")
    assert row["errors"] == 1
    assert "it goes on although it was cancelled 2 times" in row["last_error"]

    async def told() -> BaseException:
        assert processor.failed
        return processor.failed[0][1]

    error = await eventually(told)
    assert (type(error), str(error)) == (RuntimeError, row["last_error"])  # no time limit has passed
    swallower.end()


async def test_inside_an_application_a_lost_job_is_let_go(
    client: JobClient, rows: Rows, start: StartWorker, swallower: Swallower
) -> None:
    running = await start(scripted(swallower.process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    await rows.take_back(job.id)
    await running.events.told("job.lost")
    assert running.events.of("job.stop_ignored")
    assert not running.worker._context.in_flight.runs
    await running.stream_is_empty()
    swallower.end()


async def test_a_worker_closes_although_a_run_that_it_gave_up_goes_on(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    swallower: Swallower,
) -> None:
    processor = scripted(swallower.process, timeout=0.1, backoff=LATER)
    running = await start(processor, with_settings=make_settings(shutdown_timeout=600.0))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "scheduled")
    [run] = running.worker._context.in_flight.given_up
    assert run.left_task is not None
    assert await asyncio.wait_for(running.worker.close(), 30.0) == 0
    assert not run.left_task.done()
    before = await rows.job(job.id)
    swallower.end()
    await asyncio.wait({run.left_task}, timeout=10.0)
    assert await rows.job(job.id) == before


async def test_nothing_is_kept_of_a_run_that_was_told_about(
    client: JobClient, rows: Rows, start: StartWorker, swallower: Swallower
) -> None:
    running = await start(scripted(swallower.process, timeout=0.1, backoff=LATER))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    left = weakref.ref(the_run(running))
    await rows.becomes(job.id, "scheduled")
    swallower.end()
    await running.events.told("worker.restored")

    async def forgotten() -> None:
        gc.collect()
        assert left() is None

    await eventually(forgotten)
