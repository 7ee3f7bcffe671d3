"""A server's fault inside ``job.transaction()`` is no error of the job; what its own statements raise is."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.processors import KIND, LATER, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

BOOK = text("INSERT INTO bookings VALUES (:job_id)")
PID = text("SELECT pg_backend_pid()")
Kill = Callable[[int], None]
Process = Callable[[Job[Any], Kill], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
async def _bookings(rows: Rows) -> None:
    await rows.query("CREATE TABLE bookings (job_id uuid)")


@pytest.fixture
def kill(settings: Settings) -> Kill:
    """Ends a backend; returns when it has gone."""

    def terminate(pid: int) -> None:
        with psycopg.connect(settings.database_dsn(), autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))

    return terminate


async def booked(rows: Rows) -> list[Any]:
    return [row["job_id"] for row in await rows.query("SELECT job_id FROM bookings")]


def refusing(sqlstate: str) -> Any:
    return text(f"DO $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{sqlstate}'; END $$")


async def gone(rows: Rows, pid: int) -> None:
    async def check() -> None:
        assert await rows.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0

    await eventually(check)


async def in_the_block(job: Job[Any], kill: Kill) -> None:
    async with job.transaction() as session:
        await session.execute(BOOK, {"job_id": job.id})
        kill((await session.execute(PID)).scalar_one())
        await session.execute(BOOK, {"job_id": job.id})


async def at_the_end(job: Job[Any], kill: Kill) -> None:
    async with job.transaction() as session:
        await session.execute(BOOK, {"job_id": job.id})
        kill((await session.execute(PID)).scalar_one())


async def caught_in_the_block(job: Job[Any], kill: Kill) -> None:
    async with job.transaction() as session:
        try:
            kill((await session.execute(PID)).scalar_one())
            await session.execute(BOOK, {"job_id": job.id})
        except DBAPIError:
            pass


async def another_error_in_the_block(job: Job[Any], kill: Kill) -> None:
    async with job.transaction() as session:
        try:
            kill((await session.execute(PID)).scalar_one())
            await session.execute(BOOK, {"job_id": job.id})
        except DBAPIError:
            pass
        raise ValueError("no booking")


async def wrapped_behind_the_block(job: Job[Any], kill: Kill) -> None:
    try:
        await in_the_block(job, kill)
    except DBAPIError as error:
        raise RuntimeError("no booking") from error


async def in_a_group(job: Job[Any], kill: Kill) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(in_the_block(job, kill))


async def in_a_thread(job: Job[Any], kill: Kill) -> None:
    def process() -> None:
        with job.sync.transaction() as session:
            session.execute(BOOK, {"job_id": job.id})
            kill(session.execute(PID).scalar_one())
            session.execute(BOOK, {"job_id": job.id})

    await asyncio.to_thread(process)


@pytest.mark.parametrize(
    "process",
    [
        in_the_block,
        at_the_end,
        caught_in_the_block,
        another_error_in_the_block,
        wrapped_behind_the_block,
        in_a_group,
        in_a_thread,
    ],
)
async def test_a_lost_connection_is_no_error_of_the_job(
    client: JobClient, rows: Rows, start: StartWorker, kill: Kill, process: Process
) -> None:
    runs: list[Job[Any]] = []

    async def first_run_fails(job: Job[Any]) -> None:
        runs.append(job)
        if len(runs) == 1:
            await process(job, kill)

    processor = scripted(first_run_fails, backoff=LATER, max_attempts=1)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    [released] = await running.events.told("job.released")
    row = await rows.becomes(job.id, "completed")  # after its pause of a second
    reason = released["reason"]
    assert reason.startswith("PostgreSQL failed in the job's own transaction: SQLSTATE 57P01")
    assert (row["attempts"], row["errors"], row["stalls"]) == (1, 0, 0)
    assert [run.attempt for run in runs] == [1, 1]
    assert (runs[1].cleared, runs[1].clear_reason) == (True, reason)
    assert await booked(rows) == []
    assert await rows.told(job.id) == ["released", "claimed"]
    [told] = [entry["detail"] for entry in await rows.timeline(job.id) if entry["event"] == "released"]
    assert (told["reason"], told["server_fault"]) == (reason, True)
    assert not running.events.of("job.error")
    assert not processor.failed


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "53300", "57P03", "58030", "08006"])
@pytest.mark.parametrize("is_caught", [False, True])
async def test_what_the_server_refuses_for_now_is_no_error_of_the_job(
    client: JobClient, rows: Rows, start: StartWorker, sqlstate: str, *, is_caught: bool
) -> None:
    async def process(job: Job[Any]) -> None:
        if job.cleared:
            return
        async with job.transaction() as session:
            try:
                await session.execute(refusing(sqlstate))
            except DBAPIError:
                if not is_caught:
                    raise

    running = await start(scripted(process, backoff=LATER, max_attempts=1))
    job = await client.enqueue(KIND, {})
    [released] = await running.events.told("job.released")
    assert released["reason"] == f"PostgreSQL failed in the job's own transaction: SQLSTATE {sqlstate}"
    assert (await rows.becomes(job.id, "completed"))["errors"] == 0


@pytest.mark.parametrize("sqlstate", ["23505", "22012", "P0001", "57014", "25P03"])
async def test_what_the_jobs_own_statements_raise_stays_its_error(
    client: JobClient, rows: Rows, start: StartWorker, sqlstate: str
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction() as session:
            await session.execute(refusing(sqlstate))

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["errors"] == 1


async def test_a_deadlock_that_a_savepoint_has_outlived_excuses_no_later_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction() as session:
            try:
                async with session.begin_nested():
                    await session.execute(refusing("40P01"))
            except DBAPIError:
                pass
            await session.execute(BOOK, {"job_id": job.id})
            raise ValueError("its own")

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["errors"], row["last_error"].split("\n")[0]) == (1, "ValueError: its own")


async def test_a_deadlock_that_a_savepoint_has_outlived_excuses_no_later_statement(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction() as session:
            try:
                async with session.begin_nested():
                    await session.execute(refusing("40P01"))
            except DBAPIError:
                pass
            await session.execute(refusing("23505"))

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["errors"] == 1


@pytest.mark.parametrize("is_caught", [False, True])
async def test_a_transaction_that_was_idle_for_too_long_is_an_error_of_the_job(
    client: JobClient, rows: Rows, start: StartWorker, *, is_caught: bool
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction() as session:
            pid = (await session.execute(PID)).scalar_one()
            # Longer than a busy machine takes to read the answer: libpq reads an error behind it as a notice.
            await session.execute(text("SET LOCAL idle_in_transaction_session_timeout = 2000"))
            await gone(rows, pid)
            try:
                await session.execute(BOOK, {"job_id": job.id})
            except DBAPIError:
                if not is_caught:
                    raise

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["errors"] == 1


async def test_an_error_behind_a_fault_that_was_caught_stays_the_jobs(
    client: JobClient, rows: Rows, start: StartWorker, kill: Kill
) -> None:
    async def process(job: Job[Any]) -> None:
        with suppress(DBAPIError):
            await in_the_block(job, kill)
        raise ValueError("its own")

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["errors"] == 1


async def test_after_ten_minutes_of_faults_in_a_row_they_are_an_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction() as session:
            await rows.query(
                "INSERT INTO jsworker.job_events (job_id, event, detail)"
                """ SELECT %s, 'released', '{"server_fault": true}' FROM generate_series(1, 16)""",
                job.id,
            )
            await session.execute(refusing("53300"))

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["errors"] == 1
    assert "refused" in row["last_error"]
    assert (await rows.told(job.id))[-1] == "error"


def sync_transaction(job: Job[Any]) -> None:
    with job.sync.transaction(result="once") as session:
        session.execute(BOOK, {"job_id": job.id})


async def async_transaction(job: Job[Any]) -> None:
    async with job.transaction(result="once") as session:
        await session.execute(BOOK, {"job_id": job.id})


@pytest.mark.parametrize("transaction", [async_transaction, sync_transaction])
async def test_a_commit_whose_answer_is_lost_is_looked_up(
    make_settings: Callable[..., Settings], rows: Rows, start: StartWorker, transaction: Any
) -> None:
    async with proxied(make_settings().database_dsn()) as (proxy, url), JobClient(make_settings()) as client:
        went_on: list[Job[Any]] = []

        async def process(job: Job[Any]) -> None:
            lost = proxy.lose_next_answer(b"COMMIT\0")  # not BEGIN … READ COMMITTED
            if transaction is sync_transaction:
                await asyncio.to_thread(transaction, job)
            else:
                await transaction(job)
            assert lost.done()
            went_on.append(job)

        running = await start(scripted(process), with_settings=make_settings(database_url=url))
        job = await client.enqueue(KIND, {})
        row = await rows.becomes(job.id, "completed")
        await running.events.told("job.completed")
        assert (row["result"], row["fencing_token"], row["errors"]) == ("once", 1, 0)
        assert await booked(rows) == [job.id]
        assert [run.id for run in went_on] == [job.id]
        assert not running.events.of("job.lost")
        await running.end()


class TestRetry:
    """``job.transaction(retry=True)``: the block runs again in the same run."""

    async def test_until_it_is_committed(
        self, client: JobClient, rows: Rows, start: StartWorker, kill: Kill
    ) -> None:
        tries: list[int] = []

        async def process(job: Job[Any]) -> str:
            async for attempt in job.transaction(lambda: len(tries), retry=True):
                async with attempt as session:
                    tries.append(1)
                    await session.execute(BOOK, {"job_id": job.id})
                    if len(tries) < 3:
                        kill((await session.execute(PID)).scalar_one())
            return "not this one"

        await start(scripted(process, max_attempts=1))
        job = await client.enqueue(KIND, {})
        row = await rows.becomes(job.id, "completed")
        assert (row["result"], row["fencing_token"], len(tries)) == (3, 1, 3)
        assert await booked(rows) == [job.id]

    async def test_in_a_thread(self, client: JobClient, rows: Rows, start: StartWorker, kill: Kill) -> None:
        tries: list[int] = []

        def process(job: Job[Any]) -> None:
            for attempt in job.sync.transaction(lambda: len(tries), retry=True):
                with attempt as session:
                    tries.append(1)
                    session.execute(BOOK, {"job_id": job.id})
                    if len(tries) < 3:
                        kill(session.execute(PID).scalar_one())

        await start(scripted(process, max_attempts=1))
        job = await client.enqueue(KIND, {})
        row = await rows.becomes(job.id, "completed")
        assert (row["result"], row["fencing_token"], len(tries)) == (3, 1, 3)
        assert await booked(rows) == [job.id]

    async def test_an_error_of_the_job_is_not_tried_again(
        self, client: JobClient, rows: Rows, start: StartWorker
    ) -> None:
        tries: list[int] = []

        async def process(job: Job[Any]) -> None:
            async for attempt in job.transaction(retry=True):
                async with attempt:
                    tries.append(1)
                    raise ValueError("its own")

        await start(scripted(process, backoff=LATER))
        job = await client.enqueue(KIND, {})
        row = await rows.becomes(job.id, "scheduled")
        assert (row["errors"], len(tries)) == (1, 1)
        assert row["last_error"].startswith("ValueError: its own")

    async def test_returning_out_of_a_block_that_is_not_committed_completes_nothing(
        self, client: JobClient, rows: Rows, start: StartWorker, kill: Kill
    ) -> None:
        async def leaving(job: Job[Any]) -> str:
            async for attempt in job.transaction(retry=True):
                async with attempt as session:
                    await session.execute(BOOK, {"job_id": job.id})
                    if not job.cleared:
                        kill((await session.execute(PID)).scalar_one())
                    return "left"
            return "ended"

        def leaving_in_a_thread(job: Job[Any]) -> str:
            for attempt in job.sync.transaction(retry=True):
                with attempt as session:
                    session.execute(BOOK, {"job_id": job.id})
                    if not job.cleared:
                        kill(session.execute(PID).scalar_one())
                    return "left"
            return "ended"

        async def other(job: Job[Any]) -> str:
            return await asyncio.to_thread(leaving_in_a_thread, job)

        running = await start(
            scripted(leaving, max_attempts=1), scripted(other, kind="other", max_attempts=1)
        )
        for kind in (KIND, "other"):
            job = await client.enqueue(kind, {})
            row = await rows.becomes(job.id, "completed")
            assert (row["fencing_token"], row["errors"]) == (2, 0)
            assert job.id in await booked(rows)
        assert len(running.events.of("job.released")) == 2

    async def test_an_attempt_that_is_not_entered_is_told(
        self, client: JobClient, rows: Rows, start: StartWorker
    ) -> None:
        async def process(job: Job[Any]) -> None:
            async for _ in job.transaction(retry=True):
                pass

        await start(scripted(process, backoff=LATER))
        job = await client.enqueue(KIND, {})
        assert (
            "enter what job.transaction(retry=True) yields"
            in (await rows.becomes(job.id, "scheduled"))["last_error"]
        )
