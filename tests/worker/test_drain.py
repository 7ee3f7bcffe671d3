"""Drained workers: they claim nothing, go on with what they run, and say so, until they are undrained."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from jsworker import Job, JobClient, Limit, TransitionRefused
from jsworker.core.settings import Settings
from jsworker.worker.pipeline import intake
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


async def drain(client: JobClient, running: Running) -> None:
    """Drain a worker, and wait until it knows."""
    await client.drain_worker(running.worker.id, actor="ann")
    running.worker._components.beats.wake()
    await running.events.told("worker.drained")


async def state_becomes(rows: Rows, running: Running, state: str) -> None:
    async def is_so() -> None:
        found = await rows.value("SELECT state FROM jsworker.workers WHERE id = %s", running.worker.id)
        assert found == state

    await eventually(is_so)


async def test_a_drained_worker_goes_on_with_its_runs_and_claims_nothing_until_undrained(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    first = await client.enqueue(KIND, {})
    await gate.met()
    await drain(client, running)
    assert running.events.of("worker.drained") == [{"worker_id": running.worker.id, "in_hand": 1}]
    status = running.worker.status()
    assert status is not None
    assert (status.readiness.drained, status.readiness.pulling) == (True, True)
    await state_becomes(rows, running, "drained")

    other = await start(scripted(echo))
    for job in await client.enqueue_many(KIND, [{}] * 20):
        row = await rows.becomes(job.id, "completed")
        assert row["completed_by"] == other.worker.id
    await other.end()

    gate.open()
    assert (await rows.becomes(first.id, "completed"))["completed_by"] == running.worker.id
    left = await client.enqueue(KIND, {})
    await client.undrain_worker(running.worker.id, actor="ann")
    await running.events.told("worker.undrained")
    assert (await rows.becomes(left.id, "completed"))["completed_by"] == running.worker.id
    await state_becomes(rows, running, "running")
    assert [(each.action, each.actor, each.changed) for each in await client.audit()] == [
        ("undrain", "ann", 1),
        ("drain", "ann", 1),
    ]


async def test_what_was_claimed_ahead_is_handed_back_at_once(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    gate = Gate()
    # For so long it keeps, without a drain, what it has claimed ahead.
    settings = make_settings(heartbeat_interval=20.0)
    running = await start(scripted(gate.process, concurrency=1), with_settings=settings)
    running.expects_short_runs(KIND)
    jobs = await client.enqueue_many(KIND, [{}] * 4)

    async def claimed_ahead() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'processing'") > 1

    await eventually(claimed_ahead)
    await drain(client, running)
    other = await start(scripted(echo))

    async def others_have_the_rest() -> None:
        by = "SELECT count(*) FROM jsworker.jobs WHERE completed_by = %s"
        assert await rows.value(by, other.worker.id) == 3

    await eventually(others_have_the_rest)
    released = [
        (event["worker_id"], event["detail"]["reason"])
        for job in jobs
        for event in await rows.timeline(job.id)
        if event["event"] == "released"
    ]
    assert (running.worker.id, "an operator drains this worker") in released
    assert await rows.value("SELECT max(errors + stalls) FROM jsworker.jobs") == 0
    gate.open()
    for job in jobs:
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()


async def test_a_key_that_a_drained_worker_frees_is_left_to_others(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process, limit=Limit(1)))
    first, second = await client.enqueue_many(KIND, [{}] * 2)
    met = await gate.met()
    held = second if met.id == first.id else first
    await running.events.told("job.held")
    await drain(client, running)
    gate.open()
    await rows.becomes(met.id, "completed")
    await rows.becomes(held.id, "queued")
    other = await start(scripted(echo, limit=Limit(1)))
    assert (await rows.becomes(held.id, "completed"))["completed_by"] == other.worker.id


async def test_a_row_that_was_locked_until_the_worker_was_drained_is_left_to_others(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_LOCKED_TRIES", 1_000_000)
    job = await client.enqueue(KIND, {})
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [job.id])
        running = await start(scripted(echo))
        consumer = running.worker._components.pipeline.of_kind[KIND]

        async def is_asked_for_again() -> None:
            assert consumer._waiting_for_locks

        await eventually(is_asked_for_again)
        await drain(client, running)

        async def is_given_back() -> None:
            assert not consumer.claiming

        # While it is locked: a claim that was on its way before would find it unlocked, rightly.
        await eventually(is_given_back)
        holder.rollback()

    assert (await rows.job(job.id))["fencing_token"] == 0
    other = await start(scripted(echo))
    assert (await rows.becomes(job.id, "completed"))["completed_by"] == other.worker.id


async def test_a_drained_worker_takes_no_rows_from_the_table(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    ran: list[Job[Any]] = []

    def process(job: Job[Any]) -> None:
        ran.append(job)

    running = await start(scripted(process))
    await drain(client, running)
    job = await client.enqueue(KIND, {}, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'queued', run_at = NULL, dispatch = 1,"
        " queued_at = now() - interval '1 hour' WHERE id = %s",
        job.id,
    )
    poll, consumer = running.worker._components.poll, running.worker._components.pipeline.of_kind[KIND]

    async def is_found() -> None:
        poll._pace.hurry()
        await poll.step()
        assert consumer.has_rows

    await eventually(is_found)
    await consumer.flush()
    assert not ran
    await client.undrain_worker(running.worker.id)
    await rows.becomes(job.id, "completed")


async def test_a_worker_whose_row_was_deleted_stays_drained(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    await drain(client, running)
    await state_becomes(rows, running, "drained")
    await rows.query("DELETE FROM jsworker.workers")

    async def is_back() -> None:
        found = await rows.query("SELECT state, drained_at IS NOT NULL AS wanted FROM jsworker.workers")
        assert found == [{"state": "drained", "wanted": True}]

    await eventually(is_back)
    assert not running.events.of("worker.undrained")


async def test_only_workers_that_are_there_are_drained(client: JobClient, start: StartWorker) -> None:
    running = await start(scripted(echo))
    with pytest.raises(TransitionRefused, match=rf"^worker {running.worker.id} is not drained$"):
        await client.undrain_worker(running.worker.id)
    for call in (client.drain_worker, client.undrain_worker):
        with pytest.raises(TransitionRefused, match=r"^no worker has id gone\\x1b$"):
            await call("gone\x1b")
    await running.worker.close()
    with pytest.raises(TransitionRefused, match=rf"^worker {running.worker.id} has stopped$"):
        await client.drain_worker(running.worker.id)
    assert not await client.audit()
