"""A run that lost its job: it is stopped, it writes nothing, and everybody who must know is told."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import Fail, OwnershipLost
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.in_flight import StopReason
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker, lose_job
from tests.worker.test_cancel import count_beats


async def test_a_run_whose_job_was_taken_back_is_stopped_with_the_next_heartbeat(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    stopped: list[tuple[bool, int]] = []

    async def process(job: Job[Any]) -> None:
        try:
            await gate.process(job)
        except asyncio.CancelledError:
            stopped.append((job.should_stop, len(beats)))
            raise

    gate = Gate()
    processor = scripted(process)
    running = await start(processor)
    beats = count_beats(running)
    job = await client.enqueue(KIND, {})
    await gate.met()
    await rows.take_back(job.id)
    before, taken = len(beats), await rows.job(job.id)
    [lost] = await running.events.told("job.lost")
    assert (lost["job_id"], lost["fencing_token"]) == (str(job.id), 1)
    [(should_stop, at)] = stopped
    assert should_stop
    assert at <= before + 1
    await running.stream_is_empty()
    assert await rows.job(job.id) == taken
    assert [lost_job.id for lost_job in processor.lost] == [job.id]
    assert processor.failed == []
    assert job.id not in running.worker._context.in_flight


async def test_an_operators_clear_runs_the_job_again_with_the_reason(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> dict[str, Any]:
        if not job.cleared:
            await gate.process(job)
        return {"attempt": job.attempt, "reason": job.clear_reason, "token": job.fencing_token}

    gate = Gate()
    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    await gate.met()
    reset = await client.clear_and_reenqueue(job.id, "stuck since Monday")
    assert (reset.status, reset.owner) == ("queued", running.worker.id)
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"attempt": 1, "reason": "stuck since Monday", "token": 2}
    assert (row["attempts"], row["stalls"], row["errors"]) == (1, 0, 0)
    assert await rows.told(job.id) == ["reset", "claimed"]
    await running.stream_is_empty()
    assert len(processor.lost) == 1


async def ends_late(
    ending: Callable[[], Any], client: JobClient, rows: Rows, start: StartWorker
) -> tuple[Any, dict[str, Any]]:
    """End a run after its job was taken back, before any heartbeat could tell."""

    async def process(job: Job[Any]) -> Any:
        await gate.process(job)
        return ending()

    gate = Gate()
    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    taken = await lose_job(running, rows, job.id, gate)
    await running.stream_is_empty()
    assert await rows.job(job.id) == taken
    assert len(processor.lost) == 1
    assert processor.failed == []
    return job, (await rows.timeline(job.id))[-1]


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        (lambda: "late", "complete"),
        (lambda: _raise(ValueError("late")), "fail"),
        (lambda: _raise(Fail()), "fail"),
    ],
    ids=["returns", "raises", "fails"],
)
async def test_a_late_outcome_is_refused_and_the_refusal_is_kept(
    client: JobClient, rows: Rows, start: StartWorker, ending: Callable[[], Any], write: str
) -> None:
    _, rejected = await ends_late(ending, client, rows, start)
    assert (rejected["event"], rejected["fencing_token"]) == ("rejected", 1)
    assert rejected["detail"] == {"write": write}


async def test_a_late_outcome_never_counts_for_the_next_run(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    """The zombie and the new owner race; whoever holds the newest token wins, however late."""
    zombies, heirs = Gate(), Gate()

    async def zombie(job: Job[Any]) -> str:
        await zombies.process(job)
        return "the zombie's"

    async def heir(job: Job[Any]) -> str:
        await heirs.process(job)
        return "the heir's"

    old = await start(
        scripted(zombie), with_settings=make_settings(concurrency=1)
    )  # no room for its own heir
    job = await client.enqueue(KIND, {})
    await zombies.met()
    await old.worker._components.beats.stop()
    new = await start(scripted(heir))
    await client.clear_and_reenqueue(job.id, "test")
    assert (await heirs.met()).fencing_token == 2
    zombies.open()
    await old.events.told("job.lost")
    assert (await rows.job(job.id))["status"] == "processing"
    heirs.open()
    assert (await rows.becomes(job.id, "completed"))["result"] == "the heir's"
    await new.stream_is_empty()


async def _progress(job: Job[Any]) -> None:
    await job.update_progress(progress=0.5)


async def _checkpoint(job: Job[Any]) -> None:
    await job.save_checkpoint({"page": 2})


async def _quiet(job: Job[Any]) -> None:
    await job.quiet(10.0)


async def _transaction(job: Job[Any]) -> None:
    async with job.transaction(result="never"):
        pass


@pytest.mark.parametrize("call", [_progress, _checkpoint, _quiet, _transaction])
@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
async def test_whatever_a_lost_run_writes_raises_ownership_lost(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    call: Callable[[Job[Any]], Awaitable[None]],
    *,
    swallowed: bool,
) -> None:
    met: list[tuple[str, bool]] = []

    async def process(job: Job[Any]) -> str:
        await gate.process(job)
        try:
            await call(job)
        except OwnershipLost as error:
            met.append((str(error), job.should_stop))
            if not swallowed:
                raise
        return "never"

    gate = Gate()
    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    taken = await lose_job(running, rows, job.id, gate)
    [(error, should_stop)] = met
    assert error.startswith(f"job {job.id}: token 1 no longer owns it")
    assert should_stop
    await running.stream_is_empty()
    assert await rows.job(job.id) == taken
    assert [lost.id for lost in processor.lost] == [job.id]


async def test_ownership_lost_raised_for_something_else_is_an_ordinary_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """Else the job would stay with a worker that no longer runs it."""

    async def process(job: Job[Any]) -> None:
        raise OwnershipLost("of another thing")

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert row["last_error"].startswith("OwnershipLost: of another thing")


async def test_a_lost_run_may_clean_up_undisturbed_by_further_heartbeats(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    cleaned = asyncio.Event()

    async def process(job: Job[Any]) -> None:
        try:
            await gate.process(job)
        finally:
            beats = running.worker._components.beats
            rounds = count_rounds(beats)
            for _ in range(3):
                beats.wake()
                await rounds_pass(rounds, 1)
            cleaned.set()

    gate = Gate()
    # It may take two intervals.
    slow = make_settings(heartbeat_interval=10.0)
    running = await start(scripted(process), with_settings=slow)
    job = await client.enqueue(KIND, {})
    await gate.met()
    await rows.take_back(job.id)
    running.worker._components.beats.wake()
    await running.events.told("job.lost")
    assert cleaned.is_set()


async def test_a_lost_thread_is_told_to_stop_and_its_return_is_refused(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    jobs: list[Job[Any]] = []
    go_on = threading.Event()

    def process(job: Job[Any]) -> str:
        jobs.append(job)
        go_on.wait(30.0)
        return "late"

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})

    async def met() -> None:
        assert jobs

    async def told() -> None:
        assert jobs[0].should_stop

    await eventually(met)
    await rows.take_back(job.id)
    await eventually(told)
    go_on.set()
    await running.events.told("job.lost")
    assert await rows.told(job.id) == ["rejected"]


async def test_a_hook_for_lost_runs_that_raises_is_reported(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def on_lost(self: Any, job: Job[Any]) -> None:
        raise ValueError("no comfort")

    gate = Gate()
    running = await start(scripted(gate.process, on_lost=on_lost))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await rows.take_back(job.id)
    [told] = await running.events.told("job.error")
    assert told["error"] == "in a hook: ValueError: no comfort"


async def test_a_run_that_was_lost_while_it_waited_for_a_job_slot_never_starts(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    gate = Gate()
    # Claimed ahead, a job is handed back after so long without a slot.
    settings = make_settings(concurrency=1, heartbeat_interval=20.0)
    running = await start(scripted(gate.process), with_settings=settings)
    running.expects_short_runs(KIND)
    await client.enqueue(KIND, {})
    await gate.met()
    waiting = await client.enqueue(KIND, {})
    await running.events.told("job.claimed", times=2)
    await rows.take_back(waiting.id)
    running.worker._components.beats.wake()

    async def is_known() -> None:
        assert running.worker._context.in_flight.runs[waiting.id].stop is StopReason.LOST

    await eventually(is_known)
    gate.open()
    await running.events.told("job.lost")
    await running.stream_is_empty()
    assert "job.started" not in running.events.names(waiting.id)
