"""The job's own transaction: business rows and the completion are committed together or not at all."""

import asyncio
import threading
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import NoResultFound
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from jsworker import JobClient
from jsworker.core.errors import OwnershipLost, UsageError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.pipeline import child_jobs
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, LATER, Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker, lose_job

BOOK = text("INSERT INTO bookings VALUES (:job_id)")


@pytest.fixture(autouse=True)
async def _bookings(rows: Rows) -> None:
    await rows.query("CREATE TABLE bookings (job_id uuid PRIMARY KEY)")


async def booked(rows: Rows) -> list[Any]:
    return [row["job_id"] for row in await rows.query("SELECT job_id FROM bookings")]


async def only_entry(rows: Rows, job_id: UUID) -> dict[str, Any]:
    """Wait until a job's timeline has an entry and return it."""

    async def is_there() -> dict[str, Any]:
        timeline = await rows.timeline(job_id)
        assert len(timeline) == 1
        return timeline[0]

    return await eventually(is_there)


def plain(job: Job[Any]) -> None:
    with job.sync.transaction(result=lambda: {"by": "thread"}) as session:
        session.execute(BOOK, {"job_id": job.id})


async def coroutine(job: Job[Any]) -> None:
    async with job.transaction(result={"by": "coroutine"}) as session:
        await session.execute(BOOK, {"job_id": job.id})


@pytest.mark.parametrize("process", [coroutine, plain], ids=["coroutine", "thread"])
async def test_rows_and_completion_are_one_commit_and_returning_writes_nothing_more(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    processor = scripted(process)
    running = await start(processor)
    settle = running.worker._components.pipeline.settler.settle
    settled: list[Any] = []

    async def noted_settle(*arguments: Any) -> Any:
        settled.append(arguments)
        return await settle(*arguments)

    running.worker._components.pipeline.settler.settle = noted_settle  # type: ignore[assignment, method-assign]  # looks on
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"by": "thread" if process is plain else "coroutine"}
    assert await booked(rows) == [job.id]
    one_commit = "SELECT j.xmin = b.xmin FROM jsworker.jobs AS j JOIN bookings AS b ON b.job_id = j.id"
    assert await rows.value(one_commit) is True
    await running.events.told("job.completed")
    await running.stream_is_empty()
    assert settled == []
    assert (await rows.job(job.id)) == row
    assert await rows.told(job.id) == []
    assert not processor.lost
    assert not processor.failed


async def test_a_callable_gives_the_result_at_the_end_of_the_block(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> str:
        counted: list[int] = []
        async with job.transaction(result=lambda: {"rows": len(counted)}):
            counted.extend([1, 2, 3])
        return "not this one"

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == {"rows": 3}


def plain_error(job: Job[Any]) -> None:
    with job.sync.transaction() as session:
        session.execute(BOOK, {"job_id": job.id})
        raise ValueError("in the block")


async def coroutine_error(job: Job[Any]) -> None:
    async with job.transaction() as session:
        await session.execute(BOOK, {"job_id": job.id})
        raise ValueError("in the block")


@pytest.mark.parametrize("process", [coroutine_error, plain_error], ids=["coroutine", "thread"])
async def test_an_error_in_the_block_rolls_everything_back_and_is_retried(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["last_error"].startswith("ValueError: in the block")
    assert await booked(rows) == []


@pytest.mark.parametrize("result", [float("nan"), "\0", object(), "x" * (2**20 + 1)], ids=range(4))
async def test_a_result_that_cannot_be_stored_rolls_everything_back_and_fails_at_once(
    client: JobClient, rows: Rows, start: StartWorker, result: Any
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction(result=result) as session:
            await session.execute(BOOK, {"job_id": job.id})

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["attempts"]) == ("result", 1)
    assert await booked(rows) == []


@pytest.mark.parametrize("process", [coroutine, plain], ids=["coroutine", "thread"])
async def test_a_lost_job_rolls_everything_back(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    errors: list[BaseException] = []

    async def gated(job: Job[Any]) -> None:
        await gate.process(job)
        try:
            await (asyncio.to_thread(process, job) if process is plain else process(job))
        except OwnershipLost as error:
            errors.append(error)
            raise

    gate = Gate()
    processor = scripted(gated)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    await lose_job(running, rows, job.id, gate)
    assert str(errors[0]).endswith("token 1 no longer owns it; the transaction is rolled back")
    assert await booked(rows) == []
    assert (await rows.job(job.id))["status"] == "scheduled"
    assert len(processor.lost) == 1


async def test_an_error_after_the_transaction_leaves_the_job_completed_and_is_told(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await coroutine(job)
        raise ValueError("afterwards")

    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    [told] = await running.events.told("job.error")
    assert told["error"] == "after its completion: ValueError: afterwards"
    await running.events.told("job.completed")
    await running.stream_is_empty()
    assert await rows.job(job.id) == row
    assert not processor.lost
    assert not processor.failed
    entry = await only_entry(rows, job.id)
    assert (entry["event"], entry["fencing_token"]) == ("error_after_completion", 1)
    assert entry["error"].startswith("ValueError: afterwards\nTraceback")


HOLD_ENTRIES = (
    """CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql
       AS 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END'""",
    "CREATE TRIGGER hold BEFORE INSERT ON jsworker.job_events FOR EACH ROW EXECUTE FUNCTION hold()",
    "SELECT pg_advisory_lock(1)",
)


async def test_an_error_after_the_transaction_is_reported_before_its_entry_is_written(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await coroutine(job)
        raise ValueError("afterwards")

    running = await start(scripted(process))
    for statement in HOLD_ENTRIES:
        await rows.query(statement)
    await client.enqueue(KIND, {})

    async def waits() -> None:
        assert await rows.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")

    await eventually(waits)
    assert len(running.events.of("job.error")) == len(running.events.of("job.completed")) == 1
    await rows.query("SELECT pg_advisory_unlock(1)")


async def loop(job: Job[Any]) -> None:
    for _ in range(2):
        await coroutine(job)


def plain_loop(job: Job[Any]) -> None:
    for _ in range(2):
        plain(job)


@pytest.mark.parametrize("process", [loop, plain_loop], ids=["coroutine", "thread"])
async def test_a_second_transaction_is_refused_and_the_job_stays_completed_with_the_first(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.completed")
    entry = await only_entry(rows, job.id)
    assert entry["error"].startswith(f"UsageError: job {job.id}: a run has one job.transaction()")
    assert (await rows.job(job.id))["status"] == "completed"
    assert await booked(rows) == [job.id]


async def test_a_thread_is_refused_from_the_very_end_of_the_transaction_of_another_one_on(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, errors = threading.Event(), list[BaseException]()
    step = child_jobs._step

    class AtTheEnd:
        get = step.get

        def set(self, value: Any) -> None:
            step.set(value)
            if ending.is_set():
                ending.clear()
                thread = threading.Thread(target=another)
                thread.start()
                thread.join()

    def another() -> None:
        try:
            with opened[0].sync.transaction():
                pass
        except (UsageError, OwnershipLost) as error:
            errors.append(error)

    opened: list[Job[Any]] = []

    def process(job: Job[Any]) -> None:
        opened.append(job)
        with job.sync.transaction() as session:
            session.execute(BOOK, {"job_id": job.id})
            ending.set()

    monkeypatch.setattr(child_jobs, "_step", AtTheEnd())
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.completed")
    assert await booked(rows) == [job.id]
    [error] = errors
    assert isinstance(error, UsageError)


async def in_another(job: Job[Any]) -> None:
    async with job.transaction() as session:
        await session.execute(BOOK, {"job_id": job.id})
        await coroutine(job)


def plain_in_another(job: Job[Any]) -> None:
    with job.sync.transaction() as session:
        session.execute(BOOK, {"job_id": job.id})
        plain(job)


@pytest.mark.parametrize("process", [in_another, plain_in_another], ids=["coroutine", "thread"])
async def test_a_transaction_in_another_is_refused_and_rolls_both_back(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["last_error"].startswith(f"UsageError: job {job.id}: a run has one job.transaction()")
    assert await booked(rows) == []


async def test_a_run_that_goes_on_after_its_transaction_is_neither_lost_nor_stopped(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    async def process(job: Job[Any]) -> None:
        await coroutine(job)
        await asyncio.sleep(3 * settings.heartbeat_interval)
        finished.append(job.should_stop)

    finished: list[bool] = []
    processor = scripted(process)
    running = await start(processor)
    await client.enqueue(KIND, {})
    await running.events.told("job.completed")
    assert finished == [False]
    assert processor.lost == []
    assert not running.events.of("job.lost")


async def test_nor_is_it_fenced_however_long_it_goes_on(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """No heartbeat renews it any more: its row is nobody's."""
    committed, enough = asyncio.Event(), asyncio.Event()

    async def process(job: Job[Any]) -> None:
        await coroutine(job)
        committed.set()
        await enough.wait()
        finished.append(job.should_stop)

    finished: list[bool] = []
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await committed.wait()
    running.worker._context.in_flight.runs[job.id].beaten_at -= 1e6
    await rounds_pass(count_rounds(running.worker._components.fences), 3)
    enough.set()
    await running.events.told("job.completed")
    assert finished == [False]
    assert not running.events.of("job.fenced")


async def test_the_completing_statement_works_in_the_processors_own_session(
    client: JobClient, rows: Rows, start: StartWorker, engine: AsyncEngine, settings: Settings
) -> None:
    async def process(job: Job[Any]) -> str:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(BOOK, {"job_id": job.id})
            (await session.execute(job.complete_statement({"by": "statement"}))).one()
        await asyncio.sleep(3 * settings.heartbeat_interval)  # completed, and nobody told the worker
        return "not this one"

    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    await running.events.told("job.completed")
    assert row["result"] == {"by": "statement"}
    assert await rows.job(job.id) == row
    assert await booked(rows) == [job.id]
    await running.stream_is_empty()
    assert processor.lost == []
    assert not running.events.of("job.lost")
    assert await rows.told(job.id) == []


async def test_the_completing_statement_of_a_lost_job_gives_no_row(
    client: JobClient, rows: Rows, start: StartWorker, engine: AsyncEngine
) -> None:
    async def process(job: Job[Any]) -> None:
        await gate.process(job)
        try:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(BOOK, {"job_id": job.id})
                (await session.execute(job.complete_statement())).one()
        except NoResultFound as error:
            errors.append(error)
            raise

    errors: list[BaseException] = []
    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await lose_job(running, rows, job.id, gate)
    assert len(errors) == 1
    assert await booked(rows) == []
    assert (await rows.job(job.id))["status"] == "scheduled"


async def test_a_transaction_that_holds_the_row_locked_is_not_taken_for_a_loss(
    client: JobClient, rows: Rows, start: StartWorker, engine: AsyncEngine, settings: Settings
) -> None:
    async def process(job: Job[Any]) -> None:
        async with AsyncSession(engine) as session, session.begin():
            (await session.execute(job.complete_statement("slow commit"))).one()
            await asyncio.sleep(3 * settings.heartbeat_interval)

    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == "slow commit"
    await running.events.told("job.completed")
    assert not running.events.of("job.lost")
    assert processor.lost == []
