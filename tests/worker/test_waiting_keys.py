"""Of a key one job runs and one waits: the one that waits begins when the other has ended."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from jsworker import JobClient, enqueue_statement
from jsworker.core.errors import SettingsError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import KIND, LATER, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


async def test_the_second_begins_when_the_first_has_ended(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    first = await client.enqueue(KIND, {"n": 1}, unique_key="a", unique="waiting")
    assert (await gate.met()).id == first.id
    second = await client.enqueue(KIND, {"n": 2}, unique_key="a", unique="waiting")
    assert second.created
    third = await client.enqueue(KIND, {"n": 3}, unique_key="a", unique="waiting")
    assert (third.id, third.created) == (second.id, False)
    row = await rows.becomes(second.id, "scheduled")  # it has left the queue
    assert row["behind"] == first.id
    other = await client.enqueue(KIND, {"n": 4}, unique_key="b", unique="waiting")
    assert (await gate.met()).id == other.id
    # As if nobody looked again for an hour: what ends the first wakes the second.
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = clock_timestamp() + interval '1 hour' WHERE id = %s", second.id
    )
    gate.open()
    for job_id in (first.id, second.id, other.id):
        await rows.becomes(job_id, "completed")
    await running.stream_is_empty()


async def test_a_job_that_sleeps_is_superseded_or_waits_with_its_steps(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()

    async def process(job: Job[Any]) -> None:
        await job.step("read", lambda: job.payload["n"])
        await gate.process(job)
        await job.sleep(3600.0, name="nap")

    await start(scripted(process))
    first = await client.enqueue(KIND, {"n": 1}, unique_key="a", unique="waiting")
    assert (await gate.met()).id == first.id
    second = await client.enqueue(KIND, {"n": 2}, unique_key="a", unique="waiting")
    assert second.created
    gate.open()
    assert (await rows.becomes(first.id, "cancelled"))["failure_reason"] == "superseded"
    assert (await gate.met()).id == second.id

    async def naps() -> None:
        steps = await client.steps(second.id)
        assert [(step.name, step.result) for step in steps] == [("read", 2), ("nap", None)]

    await eventually(naps)
    await rows.becomes(second.id, "scheduled")
    third = await client.enqueue(KIND, {"n": 3}, unique_key="a", unique="waiting")
    assert (third.id, third.created) == (second.id, False)
    await naps()


async def test_runs_of_a_key_never_overlap_beside_two_workers(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    runs: dict[str, int] = {}
    most = 0
    seen: list[int] = []

    async def process(job: Job[Any]) -> None:
        nonlocal most
        key = job.payload["key"]
        runs[key] = runs.get(key, 0) + 1
        most = max(most, runs[key])
        await asyncio.sleep(0)
        seen.append(job.payload["n"])
        runs[key] -= 1
        if job.payload["n"] % 5 == 0 and job.attempt == 1:
            raise RuntimeError("once")

    for _ in range(2):
        await start(scripted(process))
    created = 0
    for n in range(1, 81):
        key = f"k-{n % 3}"
        answer = await client.enqueue(KIND, {"key": key, "n": n}, unique_key=key, unique="waiting")
        created += answer.created

    async def all_ended() -> None:
        live = "SELECT count(*) FROM jsworker.jobs WHERE status IN ('scheduled', 'queued', 'processing')"
        assert await rows.value(live) == 0

    await eventually(all_ended, seconds=120.0)
    assert most == 1
    ended = await rows.query(
        "SELECT status, failure_reason, count(*) AS jobs FROM jsworker.jobs GROUP BY 1, 2"
    )
    assert sum(row["jobs"] for row in ended) == created
    assert {(row["status"], row["failure_reason"]) for row in ended} <= {
        ("completed", None),
        ("cancelled", "superseded"),
    }
    assert len(seen) >= created


async def test_a_superseded_job_is_told_as_cancelled(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()

    async def process(job: Job[Any]) -> None:
        await gate.process(job)
        if job.payload["n"] == 1:
            raise RuntimeError("again")

    running = await start(scripted(process))
    first = await client.enqueue(KIND, {"n": 1}, unique_key="a", unique="waiting")
    await gate.met()
    second = await client.enqueue(KIND, {"n": 2}, unique_key="a", unique="waiting")
    gate.open()
    await rows.becomes(second.id, "completed")
    row = await rows.job(first.id)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "superseded")
    [told] = await running.events.told("job.cancelled")
    assert told["job_id"] == str(first.id)


async def test_a_producers_open_transaction_holds_up_no_other_outcome(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    gate, settings = Gate(), make_settings(statement_timeout=1.5, heartbeat_interval=2.0)

    async def process(job: Job[Any]) -> None:
        await gate.process(job)
        raise RuntimeError("again")

    running = await start(scripted(process, backoff=LATER), with_settings=settings)
    keyed = await client.enqueue(KIND, {}, unique_key="a", unique="waiting")
    others = [await client.enqueue(KIND, {}) for _ in range(3)]
    for _ in range(4):
        await gate.met()
    engine = create_async_engine(settings.database_dsn().replace("postgresql://", "postgresql+psycopg://"))
    async with engine.connect() as producer:
        await producer.execute(enqueue_statement(KIND, {}, unique_key="a", unique="waiting"))
        gate.open()
        for each in others:
            await rows.becomes(each.id, "scheduled")
        await asyncio.sleep(2 * settings.statement_timeout)  # its owner asks again; nobody is taken for dead
        assert (await rows.job(keyed.id))["status"] == "processing"
        await producer.commit()
    await engine.dispose()
    row = await rows.becomes(keyed.id, "cancelled")
    assert row["failure_reason"] == "superseded"
    assert running.events.of("worker.degraded") == []


async def test_a_class_gives_its_jobs_their_scope(client: JobClient, rows: Rows) -> None:
    processor = type(scripted(echo, unique="waiting"))
    one = await client.enqueue(processor, {}, unique_key="a")
    other = await client.enqueue(processor, {}, unique_key="a", unique="live")
    plain, keyed = await client.enqueue_many(processor, [{}, {}], unique_keys=[None, "b"])
    keys = [(await rows.job(each.id))["waiting_key"] for each in (one, other, plain, keyed)]
    assert keys == ["a", None, None, "b"]


@pytest.mark.parametrize("value", ["running", "", None, 1])
async def test_a_class_with_no_such_scope_is_refused(start: StartWorker, value: Any) -> None:
    with pytest.raises(
        SettingsError, match=r"^unique=.* of kind scripted \(Made\) must be 'live' or 'waiting'"
    ):
        await start(scripted(echo, unique=value))
