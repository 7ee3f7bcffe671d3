"""``job.transaction()``: the job's own rows and its completion are one commit, or none."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from uuid import UUID

import pytest
import pytest_asyncio
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions import control, heartbeat, reset, settle
from jsworker.ownership.transitions.settle import Completion, Settled
from tests.support.proxy import proxied

from .rows import WORKER, Sql, ago, insert_job, read_events, read_job, read_value
from .winner import Winner

ADD_LINE = text("INSERT INTO lines VALUES (1)")
Process = Callable[..., Coroutine[None, None, None]]


@pytest.fixture
def winner(engine: Engine, sql: Sql) -> Iterator[Winner]:
    with Winner(engine, sql) as opened:
        yield opened


@pytest_asyncio.fixture
async def sessions(database: Database, sql: Sql) -> AsyncIterator[Sessions]:
    """Sessions of ``WORKER``, and a table of the user's own."""
    sql.execute("CREATE TABLE lines (count integer PRIMARY KEY)")
    opened = Sessions(database, worker_id=WORKER, size=2, lock_seconds=5.0)
    yield opened
    await opened.close()
    sql.execute("DROP TABLE lines")


def lines(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM lines"))


async def write(sessions: Sessions, job_id: UUID, token: int = 1) -> None:
    """Do what a processor does, in an AsyncSession."""
    async with sessions.transaction(lambda: Completion(job_id, token, '"async"')) as session:
        await session.execute(ADD_LINE)


async def write_in_thread(sessions: Sessions, job_id: UUID, token: int = 1) -> None:
    """Do the same as a plain function would, in a thread."""

    def process() -> None:
        with sessions.sync_transaction(lambda: Completion(job_id, token, '"sync"')) as session:
            session.execute(ADD_LINE)

    await asyncio.to_thread(process)


BOTH = pytest.mark.parametrize("process", [write, write_in_thread])


@BOTH
async def test_both_are_committed(sessions: Sessions, sql: Sql, running: UUID, process: Process) -> None:
    await process(sessions, running)
    job = read_job(sql, running)
    assert (job["status"], job["result"]) == ("completed", "async" if process is write else "sync")
    assert lines(sql) == 1


async def test_postgresql_ends_the_session_of_a_host_that_is_gone(sessions: Sessions, running: UUID) -> None:
    """And the locks of its transaction with it: the next run would wait for them."""
    idle = text("SELECT current_setting('tcp_keepalives_idle'), current_setting('tcp_user_timeout')")
    async with sessions.transaction(lambda: Completion(running, 1, None)) as session:
        assert (await session.execute(idle)).one() == ("5", "14000")
    with suppress(OwnershipLost), sessions.sync_transaction(lambda: Completion(running, 1, None)) as plain:
        assert plain.execute(idle).one() == ("5", "14000")


@BOTH
async def test_a_connection_that_died_between_two_jobs_costs_neither(
    sessions: Sessions, sql: Sql, running: UUID, process: Process
) -> None:
    second = insert_job(sql, "processing", last_activity_at=ago(60))
    await process(sessions, running)
    sql.execute("DELETE FROM lines")
    sql.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await process(sessions, second)
    assert read_job(sql, second)["status"] == "completed"


@BOTH
async def test_the_loser_of_a_reset_waits_and_is_rolled_back(
    sessions: Sessions, sql: Sql, winner: Winner, running: UUID, process: Process
) -> None:
    winner.resets(running)
    processing = asyncio.create_task(process(sessions, running))
    await winner.blocks()
    winner.commit()
    lost = rf"^job {running}: token 1 no longer owns it; the transaction is rolled back$"
    with pytest.raises(OwnershipLost, match=lost):
        await processing
    assert lines(sql) == 0
    assert (read_job(sql, running)["status"], read_job(sql, running)["result"]) == ("queued", None)


@BOTH
async def test_a_reset_that_is_undone_costs_nothing(
    sessions: Sessions, sql: Sql, winner: Winner, running: UUID, process: Process
) -> None:
    winner.resets(running)
    processing = asyncio.create_task(process(sessions, running))
    await winner.blocks()
    winner.rollback()
    await processing
    assert (lines(sql), read_job(sql, running)["status"]) == (1, "completed")


@BOTH
async def test_a_newer_token_wins(sessions: Sessions, sql: Sql, process: Process) -> None:
    job_id = insert_job(sql, "processing", fencing_token=2)
    with pytest.raises(OwnershipLost):
        await process(sessions, job_id, 1)
    assert (lines(sql), read_job(sql, job_id)["status"]) == (0, "processing")


async def test_while_the_transaction_is_open_the_job_lives(
    sessions: Sessions, database: Database, sql: Sql, running: UUID
) -> None:
    """The row is locked by the last statement only: heartbeats, a cancel and progress pass before it."""
    async with sessions.transaction(lambda: Completion(running, 1, "{}")) as session:
        await session.execute(ADD_LINE)
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
        assert (beat.alive, beat.locked) == (frozenset({(running, 1)}), frozenset())
        assert (await control.cancel(database, [running])).requested == [running]
    assert (lines(sql), read_job(sql, running)["status"]) == (1, "completed")


async def test_an_operators_reset_while_the_transaction_is_open_wins(
    sessions: Sessions, database: Database, sql: Sql, running: UUID
) -> None:
    with pytest.raises(OwnershipLost):  # noqa: PT012 -- the reset must happen inside the block
        async with sessions.transaction(lambda: Completion(running, 1, "{}")) as session:
            await session.execute(ADD_LINE)
            await reset.reset_by_operator(database, seen=[(running, 1)], reason="deploy")
    assert (lines(sql), read_job(sql, running)["status"]) == (0, "queued")


@pytest.mark.parametrize("in_thread", [False, True])
async def test_an_error_of_the_processor_rolls_back_and_keeps_the_job(
    sessions: Sessions, sql: Sql, running: UUID, *, in_thread: bool
) -> None:
    asked: list[int] = []

    def completion() -> Completion:
        asked.append(1)
        return Completion(running, 1, "{}")

    with suppress(ZeroDivisionError):
        if in_thread:
            with sessions.sync_transaction(completion) as session:
                session.execute(ADD_LINE)
                raise ZeroDivisionError
        async with sessions.transaction(completion) as async_session:
            await async_session.execute(ADD_LINE)
            raise ZeroDivisionError
    assert (lines(sql), read_job(sql, running)["status"], asked) == (0, "processing", [])


@pytest.mark.parametrize("where", ["between statements", "in a statement", "at the end"])
async def test_a_run_that_is_cancelled_beside_a_silent_server_ends(
    database_url: str, sql: Sql, running: UUID, where: str
) -> None:
    """As the fence does, cancel twice: a polite rollback would wait for an answer that never comes."""
    async with proxied(database_url) as (proxy, url):
        sessions = Sessions(Database(url, statement_timeout=5.0), worker_id=WORKER, size=2, lock_seconds=5.0)
        reached = asyncio.Event()

        async def process() -> None:
            async with sessions.transaction(lambda: Completion(running, 1, "{}")) as session:
                await session.execute(text("SELECT 1"))
                proxy.black_hole()
                reached.set()
                if where == "between statements":
                    await asyncio.Event().wait()
                elif where == "in a statement":
                    await session.execute(text("SELECT 2"))

        task = asyncio.create_task(process())
        await reached.wait()
        for _ in range(2):
            await asyncio.wait({task}, timeout=0.2)  # so that it waits for the server, or has ended
            task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=4.0)  # the driver waits for 5 s for each of its cancels
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        proxy.restore()
        await sessions.close()
    assert read_job(sql, running)["status"] == "processing"


async def test_the_parameters_of_a_processors_statement_are_hidden(sessions: Sessions, running: UUID) -> None:
    insert = text("INSERT INTO lines VALUES (:count)")
    with pytest.raises(IntegrityError) as refused:  # noqa: PT012 -- the commit belongs to it
        async with sessions.transaction(lambda: Completion(running, 1, "{}")) as session:
            await session.execute(insert, {"count": 424242})
            await session.execute(insert, {"count": 424242})
    assert "hide_parameters" in str(refused.value)


async def test_the_result_is_chosen_at_the_end(sessions: Sessions, sql: Sql, running: UUID) -> None:
    result = '"early"'
    async with sessions.transaction(lambda: Completion(running, 1, result)) as session:
        await session.execute(ADD_LINE)
        result = '"late"'
    assert read_job(sql, running)["result"] == "late"


async def test_the_completion_is_the_same_as_the_workers(
    sessions: Sessions, database: Database, sql: Sql, running: UUID
) -> None:
    await write(sessions, running)
    after = read_job(sql, running)
    runs = [Completion(running, 1, '"again"')]
    assert await settle.complete(database, worker_id=WORKER, runs=runs) == [Settled.COMPLETED]
    assert (read_job(sql, running), read_events(sql, running)) == (after, [])


async def test_more_threads_than_connections_take_turns(sessions: Sessions, sql: Sql) -> None:
    ids = [insert_job(sql, "processing") for _ in range(6)]

    def process(job_id: UUID) -> None:
        with sessions.sync_transaction(lambda: Completion(job_id, 1, "{}")) as session:
            session.execute(text("SELECT 1"))

    await asyncio.gather(*(asyncio.to_thread(process, job_id) for job_id in ids))
    assert {read_job(sql, job_id)["status"] for job_id in ids} == {"completed"}


async def test_coroutines_and_threads_keep_a_connection_for_each_job_slot_apart(
    sessions: Sessions, sql: Sql
) -> None:
    """So docs/operating.md and docs/scale-out.md count them, for ``max_connections``."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    ids = [insert_job(sql, "processing") for _ in range(8)]

    async def process(job_id: UUID) -> None:
        async with sessions.transaction(lambda: Completion(job_id, 1, "{}")) as session:
            await session.execute(text("SELECT pg_sleep(0.05)"))

    def process_in_thread(job_id: UUID) -> None:
        with sessions.sync_transaction(lambda: Completion(job_id, 1, "{}")) as session:
            session.execute(text("SELECT pg_sleep(0.05)"))

    before = read_value(sql, count)
    await asyncio.gather(*(process(job_id) for job_id in ids[:4]))
    assert read_value(sql, count) == before + 2
    await asyncio.gather(*(asyncio.to_thread(process_in_thread, job_id) for job_id in ids[4:]))
    assert read_value(sql, count) == before + 4
