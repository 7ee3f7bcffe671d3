"""What goes wrong between jsworker and PostgreSQL: one clear line, in time, never a row's content."""

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection
from sqlalchemy import Engine, text

from jsworker.core.errors import DatabaseRefused, DatabaseTimeout, DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import heartbeat
from jsworker.ownership.transitions.enqueue import NewJob, enqueue, enqueue_many, new_job_id
from tests.support.proxy import proxied

from .calls import ONE, everything_said, opened
from .deadlocks import deadlocks, hasty_deadlock_detection
from .polling import answered, eventually
from .rows import KIND, WORKER, Sql, insert_job, read_value

MARGIN = 15.0
"""Seconds that a busy machine may add to a deadline; far less than what the driver takes here."""
DRIVERS_SECONDS = 120.0
SECRET = "s3cret-of-a-payload"


class TestRowRefused:
    async def test_carries_sqlstate_and_constraint(self, database: Database) -> None:
        with pytest.raises(RowRefused) as refused:
            await enqueue(database, "Bad Kind", NewJob(new_job_id(), "{}"), publish_after=0.0)
        assert (refused.value.sqlstate, refused.value.constraint) == ("23514", "jobs_kind")
        assert str(refused.value) == "PostgreSQL refused a row: SQLSTATE 23514, jobs_kind"

    async def test_carries_the_name_of_the_guard(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "completed")
        with pytest.raises(RowRefused) as refused:
            await database.run(
                text("UPDATE jsworker.jobs SET status = 'queued' WHERE id = :id"), {"id": job_id}
            )
        assert (refused.value.sqlstate, refused.value.constraint) == ("23001", "jobs_guard")

    async def test_without_a_constraint(self, database: Database) -> None:
        with pytest.raises(RowRefused) as refused:
            await enqueue(database, KIND, NewJob(new_job_id(), "{"), publish_after=0.0)
        assert (refused.value.sqlstate, refused.value.constraint) == ("22P02", None)
        assert str(refused.value) == "PostgreSQL refused a row: SQLSTATE 22P02"

    @pytest.mark.parametrize(
        ("kind", "payload"),
        [
            ("Bad Kind", f'{{"card": "{SECRET}"}}'),  # the row is in PostgreSQL's DETAIL
            (KIND, f'{{"card": "{SECRET}"'),
            (KIND, f'{{"card": "{SECRET}\\u0000"}}'),
            (KIND, f'{{"card": "{SECRET}\0"}}'),
            (KIND, f'{{"card": "{SECRET}\ud800"}}'),
        ],
        ids=["constraint", "no JSON", "escaped NUL", "NUL", "surrogate"],
    )
    @pytest.mark.usefixtures("copied_or_inserted")
    async def test_never_shows_a_payload(self, database: Database, kind: str, payload: str) -> None:
        for call in (
            enqueue(database, kind, NewJob(new_job_id(), payload), publish_after=0.0),
            enqueue_many(database, kind, [NewJob(new_job_id(), payload)]),
        ):
            with pytest.raises(RowRefused) as refused:
                await call
            assert SECRET not in everything_said(refused.value)

    async def test_leaves_the_connection_usable(self, database: Database) -> None:
        for _ in range(20):
            with pytest.raises(RowRefused):
                await enqueue(database, KIND, NewJob(new_job_id(), "{"), publish_after=0.0)
        assert [row.one for row in await database.run(ONE)] == [1]


class TestRefusedStatement:
    async def test_names_place_and_sqlstate(self, database: Database) -> None:
        with pytest.raises(
            DatabaseRefused, match=r'relation "nowhere" does not exist \(SQLSTATE 42P01\)$'
        ) as refused:
            await database.run(text("SELECT * FROM nowhere"))
        assert refused.value.sqlstate == "42P01"
        assert database.place in str(refused.value)

    @pytest.mark.parametrize("place", ["h:1/d", "[::1]:1/d"])
    def test_the_place_reads_as_in_a_url(self, place: str) -> None:
        assert Database(f"postgresql://u@{place}", statement_timeout=1.0).place == place


@pytest.fixture
def slow_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver wait for minutes, and not for five seconds, until a server answers its cancellation."""

    async def try_cancel(connection: AsyncConnection[Any], *, timeout: float) -> None:  # noqa: ASYNC109 -- psycopg's
        with suppress(psycopg.Error):
            await connection.cancel_safe(timeout=DRIVERS_SECONDS)

    monkeypatch.setattr(AsyncConnection, "_try_cancel", try_cancel)


class TestDeadline:
    async def test_a_locked_row(self, database_url: str, sql: Sql, engine: Engine) -> None:
        job_id = insert_job(sql, "processing")
        async with opened(database_url, statement_timeout=0.3) as database:
            await answered(lambda: database.run(ONE))
            with engine.begin() as holder:
                holder.execute(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
                started = time.monotonic()
                with pytest.raises(DatabaseUnavailable, match=r" did not answer within 0\.3 s$"):
                    await heartbeat.heartbeat_alone(database, worker_id=WORKER, held=(job_id, 1))
                assert 0.25 < time.monotonic() - started < 0.3 + MARGIN
                await eventually(lambda: waiting(sql) == 0, "the statement is cancelled on the server")
            beat = partial(heartbeat.heartbeat_alone, database, worker_id=WORKER, held=(job_id, 1))
            assert await answered(beat)

    @pytest.mark.usefixtures("slow_driver")
    async def test_a_silent_network_does_not_hold_the_caller(self, database_url: str) -> None:
        async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=0.3) as database:
            await answered(lambda: database.run(ONE))
            proxy.black_hole()
            for _ in range(3):  # the pooled connection, then new ones
                started = time.monotonic()
                with pytest.raises(DatabaseUnavailable, match=r" did not answer within 0\.3 s$"):
                    await database.run(ONE)
                assert time.monotonic() - started < 0.3 + MARGIN
            proxy.restore()
            assert [row.one for row in await answered(lambda: database.run(ONE))] == [1]

    @pytest.mark.usefixtures("slow_driver")
    async def test_a_silent_network_does_not_hold_close(self, database_url: str) -> None:
        async with proxied(database_url) as (proxy, url):
            database = Database(url, statement_timeout=0.2)
            await answered(lambda: database.run(ONE))
            proxy.black_hole()
            with pytest.raises(DatabaseUnavailable):
                await database.run(ONE)
            started = time.monotonic()
            await database.close()
            assert time.monotonic() - started < MARGIN

    async def test_a_cancelled_caller_leaves_at_once(
        self, database_url: str, sql: Sql, engine: Engine
    ) -> None:
        job_id = insert_job(sql, "processing")
        async with opened(database_url, statement_timeout=30.0) as database:
            with engine.begin() as holder:
                holder.execute(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
                call = asyncio.create_task(
                    heartbeat.heartbeat_alone(database, worker_id=WORKER, held=(job_id, 1))
                )
                await eventually(lambda: waiting(sql) == 1, "the statement waits for the lock")
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await eventually(lambda: waiting(sql) == 0, "the statement is cancelled on the server")

    async def test_no_free_connection(self, database_url: str, sql: Sql, engine: Engine) -> None:
        job_id = insert_job(sql, "processing")
        database = Database(database_url, statement_timeout=0.5, pool_size=1)
        with engine.begin() as holder:
            holder.execute(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
            beats = [
                heartbeat.heartbeat_alone(database, worker_id=WORKER, held=(job_id, 1)) for _ in range(5)
            ]
            answers = await asyncio.gather(*beats, return_exceptions=True)
        assert [type(answer) for answer in answers] == [DatabaseTimeout] * 5
        await database.close()

    async def test_an_answer_that_came_while_the_event_loop_was_blocked_is_read(
        self, database_url: str
    ) -> None:
        async with opened(database_url, statement_timeout=2.5) as database:
            await database.run(ONE)
            call = asyncio.create_task(database.run(ONE))
            await asyncio.sleep(0)
            time.sleep(4.0)  # noqa: ASYNC251 -- the fault itself
            assert len(await call) == 1

    async def test_heartbeats_have_a_connection_of_their_own(
        self, database_url: str, sql: Sql, engine: Engine
    ) -> None:
        locked, free = insert_job(sql, "processing"), insert_job(sql, "processing")
        database = Database(database_url, statement_timeout=5.0, pool_size=1)
        with engine.begin() as holder:
            holder.execute(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": locked})
            stuck = [
                asyncio.create_task(heartbeat.heartbeat_alone(database, worker_id=WORKER, held=(locked, 1)))
                for _ in range(4)
            ]
            await eventually(lambda: waiting(sql) == 2, "both connections for statements are taken")
            beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(free, 1)])
            assert beat.alive == {(free, 1)}
        assert await asyncio.gather(*stuck) == [True] * 4
        await database.close()


def waiting(sql: Sql, *, anybody: bool = False) -> int:
    """Return how many statements of jsworker, or of anybody, wait for a row lock in this database."""
    found = read_value(
        sql,
        """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'
          AND (%s OR application_name = 'jsworker')
        """,
        anybody,
    )
    return int(found)


class TestConflict:
    async def test_a_victim_of_a_deadlock_tries_again(
        self, database: Database, sql: Sql, engine: Engine
    ) -> None:
        low, middle, high = sorted(insert_job(sql) for _ in range(3))
        lock = text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE")
        descending = text("SELECT id FROM jsworker.jobs ORDER BY id DESC FOR UPDATE")
        with hasty_deadlock_detection(sql), engine.connect() as other, engine.connect() as third:
            # The one that waits last looks for the circle and is its victim; no other looks in time.
            other.exec_driver_sql("SET LOCAL deadlock_timeout = '60s'")
            other.execute(lock, {"id": low})
            third.execute(lock, {"id": middle})
            call = asyncio.create_task(database.run(descending))
            await eventually(
                lambda: waiting(sql) == 1, "the call holds the high row, waits for the middle one"
            )
            theirs = asyncio.create_task(asyncio.to_thread(other.execute, lock, {"id": high}))
            await eventually(lambda: waiting(sql, anybody=True) == 2, "the other waits for the high row")
            third.commit()
            await theirs
            other.commit()
            assert [row.id for row in await call] == [high, middle, low]
        await database.close()
        await eventually(lambda: deadlocks(sql) >= 1, "the deadlock is counted")

    async def test_it_gives_up_in_the_end(self, database: Database) -> None:
        victim = text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'deadlock_detected'; END $$")
        with pytest.raises(DatabaseRefused, match=r"SQLSTATE 40P01$"):
            await database.run(victim)
