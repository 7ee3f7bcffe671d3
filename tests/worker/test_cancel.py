"""Cancelling: waiting jobs at once, running ones with their owner's next heartbeat."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.in_flight import Run, StopReason
from tests.support.polling import eventually
from tests.worker.processors import KIND, LATER, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


def count_beats(running: Running) -> list[float]:
    """Note the start of each further heartbeat of a worker."""
    beats: list[float] = []
    step = running.worker._components.beats._step

    async def counted() -> None:
        beats.append(asyncio.get_running_loop().time())
        await step()

    running.worker._components.beats._step = counted
    return beats


async def test_a_waiting_job_is_cancelled_at_once_and_its_message_is_skipped(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    queued = await client.enqueue(KIND, {})
    scheduled = await client.enqueue(KIND, {}, delay=3600.0)
    done = await client.cancel(queued.id, scheduled.id)
    assert set(done.cancelled) == {queued.id, scheduled.id}
    running = await start(scripted(gate.process))
    await running.stream_is_empty()
    for job in (queued, scheduled):
        row = await rows.job(job.id)
        assert (row["status"], row["attempts"], row["needs_publish"]) == ("cancelled", 0, False)
        assert await rows.told(job.id) == ["cancelled"]
    [skipped] = await running.events.told("job.skipped")
    assert (skipped["job_id"], skipped["status"]) == (str(queued.id), "cancelled")
    assert gate.waiting == 0


async def test_a_running_job_learns_of_it_with_the_next_heartbeat(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    seen: list[tuple[bool, bool, int]] = []

    async def process(job: Job[Any]) -> None:
        met.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append((job.cancelled, job.should_stop, len(beats)))
            raise

    met = asyncio.Event()
    processor = scripted(process)
    running = await start(processor)
    beats = count_beats(running)
    job = await client.enqueue(KIND, {})
    await met.wait()
    done = await client.cancel(job.id)
    assert (done.cancelled, done.requested) == ([], [job.id])
    before = len(beats)
    row = await rows.becomes(job.id, "cancelled")
    assert (row["errors"], row["attempts"], row["last_error"]) == (0, 0, None)
    [(cancelled, should_stop, at)] = seen
    assert cancelled
    assert should_stop
    assert at <= before + 1  # the beat that was under way, or the next one
    assert await rows.told(job.id) == ["cancel_requested", "cancelled"]
    await running.events.told("job.cancelled")
    await running.stream_is_empty()
    assert not processor.lost
    assert not processor.failed
    assert "job.failed" not in running.events.names()


async def test_a_run_that_completes_all_the_same_is_completed(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> str:
        met.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done before the cancel came"
        raise AssertionError

    met = asyncio.Event()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await met.wait()
    await client.cancel(job.id)
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["cancel_requested"]) == ("done before the cancel came", True)
    await running.stream_is_empty()
    assert (await client.cancel(job.id)).final == {job.id: "completed"}


async def test_an_error_after_a_cancel_cancels_instead_of_a_retry(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await gate.process(job)
        raise ValueError("of its own")

    gate = Gate()
    running = await start(scripted(process, backoff=LATER))
    await running.worker._components.beats.stop()  # the worker does not know
    job = await client.enqueue(KIND, {})
    await gate.met()
    await client.cancel(job.id)
    gate.open()
    row = await rows.becomes(job.id, "cancelled")
    assert row["last_error"].startswith("ValueError: of its own")
    assert (row["errors"], row["attempts"]) == (0, 0)


async def test_a_cancel_right_before_the_worker_stops_is_not_forgotten(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    gate = Gate()
    # A stopped run has two statement time-outs, in which a busy database answers.
    settings = make_settings(statement_timeout=5.0, heartbeat_interval=6.0)
    running = await start(scripted(gate.process), with_settings=settings)
    job = await client.enqueue(KIND, {})
    await gate.met()
    await running.worker._components.beats.stop()  # the worker does not know
    await client.cancel(job.id)
    assert await running.worker.close(force=True) == 0
    row = await rows.job(job.id)
    assert (row["status"], row["errors"], row["attempts"]) == ("cancelled", 0, 0)
    assert running.events.names(job.id)[-1] == "job.cancelled"


async def test_a_run_that_is_stopped_in_the_moment_of_its_start_is_settled(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled before its first step would settle nothing and stay in hand for ever."""
    running = await start(scripted(echo))
    launch = running.worker._components.pipeline._launch
    launched: list[Run] = []

    def launch_and_stop(run: Run) -> None:
        launch(run)
        if not launched:
            run.signal(StopReason.SHUTDOWN)
        launched.append(run)

    monkeypatch.setattr(running.worker._components.pipeline, "_launch", launch_and_stop)
    job = await client.enqueue(KIND, {"n": 1})
    row = await rows.becomes(job.id, "completed")
    assert (row["fencing_token"], row["attempts"]) == (2, 1)
    assert running.events.names(job.id).count("job.started") == 1
    await running.stream_is_empty()
    assert not running.worker._context.in_flight.runs


async def test_a_job_that_was_claimed_ahead_is_cancelled_without_being_started(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    gate = Gate()
    # Claimed ahead, a job is handed back after so long without a slot.
    settings = make_settings(concurrency=1, heartbeat_interval=20.0)
    running = await start(scripted(gate.process), with_settings=settings)
    running.expects_short_runs(KIND)
    holder = await client.enqueue(KIND, {"n": 1})
    await gate.met()
    waiting = await client.enqueue(KIND, {"n": 2})
    await running.events.told("job.claimed", times=2)
    await client.cancel(waiting.id)
    running.worker._components.beats.wake()

    async def told() -> None:
        run = running.worker._context.in_flight.runs.get(waiting.id)
        assert run is None or run.cancelled

    await eventually(told)
    gate.open()
    await rows.becomes(waiting.id, "cancelled")
    await rows.becomes(holder.id, "completed")
    await running.stream_is_empty()
    assert "job.started" not in running.events.names(waiting.id)
