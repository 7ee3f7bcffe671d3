"""What goes wrong between jsworker and PostgreSQL: one clear line, in time, never a row's content."""

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from jsworker.embedded import EmbeddedPostgres
from jsworker.embedded.ports import free_port
from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership import lease
from jsworker.ownership.database import (
    Database,
    RowRefused,
    current_revision,
    downgrade_database,
    map_error,
    upgrade_database,
)
from jsworker.ownership.enqueue import NewJob, enqueue, enqueue_many, new_job_id
from tests.support.servers import THROWAWAY_SETTINGS

from .deadlocks import deadlocks, hasty_deadlock_detection
from .polling import answered, eventually
from .proxy import proxied
from .rows import KIND, WORKER, Sql, insert_job, read_value

MARGIN = 3.0
"""Seconds that a busy machine may add to a deadline; far less than the driver's own five."""
ONE = text("SELECT 1 AS one")
SECRET = "s3cret-of-a-payload"


@asynccontextmanager
async def opened(url: str, statement_timeout: float = 3.0) -> AsyncIterator[Database]:
    database = Database(url, statement_timeout=statement_timeout)
    try:
        yield database
    finally:
        await database.close()


def everything_said(error: BaseException) -> str:
    return "\n".join([str(error), repr(error), repr(error.args), *traceback.format_exception(error)])


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


class TestDeadline:
    async def test_a_locked_row(self, database_url: str, sql: Sql, engine: Engine) -> None:
        job_id = insert_job(sql, "processing")
        async with opened(database_url, statement_timeout=0.3) as database:
            await answered(lambda: database.run(ONE))
            with engine.begin() as holder:
                holder.execute(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
                started = time.monotonic()
                with pytest.raises(DatabaseUnavailable, match=r" did not answer within 0\.3 s$"):
                    await lease.heartbeat_alone(database, worker_id=WORKER, held=(job_id, 1))
                assert 0.25 < time.monotonic() - started < 0.3 + MARGIN
                await eventually(lambda: waiting(sql) == 0, "the statement is cancelled on the server")
            beat = partial(lease.heartbeat_alone, database, worker_id=WORKER, held=(job_id, 1))
            assert await answered(beat)

    async def test_a_silent_network_does_not_hold_the_caller(self, database_url: str) -> None:
        async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=0.3) as database:
            await answered(lambda: database.run(ONE))
            proxy.answers = proxy.requests = False
            for _ in range(3):  # the pooled connection, then new ones
                started = time.monotonic()
                with pytest.raises(DatabaseUnavailable, match=r" did not answer within 0\.3 s$"):
                    await database.run(ONE)
                assert time.monotonic() - started < 0.3 + MARGIN
            proxy.answers = proxy.requests = True
            assert [row.one for row in await answered(lambda: database.run(ONE))] == [1]

    async def test_a_silent_network_does_not_hold_close(self, database_url: str) -> None:
        async with proxied(database_url) as (proxy, url):
            database = Database(url, statement_timeout=0.2)
            await answered(lambda: database.run(ONE))
            proxy.answers = proxy.requests = False
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
                    lease.heartbeat_alone(database, worker_id=WORKER, held=(job_id, 1))
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
            beats = [lease.heartbeat_alone(database, worker_id=WORKER, held=(job_id, 1)) for _ in range(5)]
            answers = await asyncio.gather(*beats, return_exceptions=True)
        assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 5
        await database.close()

    async def test_heartbeats_have_a_connection_of_their_own(
        self, database_url: str, sql: Sql, engine: Engine
    ) -> None:
        locked, free = insert_job(sql, "processing"), insert_job(sql, "processing")
        database = Database(database_url, statement_timeout=5.0, pool_size=1)
        with engine.begin() as holder:
            holder.execute(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": locked})
            stuck = [
                asyncio.create_task(lease.heartbeat_alone(database, worker_id=WORKER, held=(locked, 1)))
                for _ in range(4)
            ]
            await eventually(lambda: waiting(sql) == 2, "both connections for statements are taken")
            beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(free, 1)])
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
            # Whoever waits last looks for the circle and is its victim; nobody else looks in time.
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
        await eventually(lambda: deadlocks(sql) == 1, "the deadlock is counted")

    async def test_it_gives_up_in_the_end(self, database: Database) -> None:
        victim = text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'deadlock_detected'; END $$")
        with pytest.raises(DatabaseRefused, match=r"again \(SQLSTATE 40P01\)$"):
            await database.run(victim)


class TestUnreachable:
    async def test_port_closed(self) -> None:
        url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
        async with opened(url) as database:
            with pytest.raises(
                DatabaseUnavailable, match=rf"^PostgreSQL at {database.place} is not available: .*refused"
            ) as error:
                await database.run(ONE)
        assert "\n" not in str(error.value)

    async def test_unknown_host(self) -> None:
        async with opened("postgresql://postgres@no-such-host.invalid/postgres") as database:
            with pytest.raises(
                DatabaseUnavailable, match=r"^PostgreSQL at no-such-host\.invalid:5432/postgres "
            ) as error:
                await database.run(ONE)
        assert "\n" not in str(error.value)

    async def test_unknown_database(self, server_url: str) -> None:
        url = make_url(server_url).set(database="nowhere").render_as_string(hide_password=False)
        async with opened(url) as database:
            with pytest.raises(
                DatabaseRefused, match=r'nowhere refused the login: database "nowhere" does not exist$'
            ) as error:
                await database.run(ONE)
        assert error.value.sqlstate is None
        with pytest.raises(DatabaseRefused, match=r'database "nowhere" does not exist$'):
            current_revision(url)

    async def test_unknown_role(self, server_url: str) -> None:
        url = make_url(server_url).set(username="nobody-here").render_as_string(hide_password=False)
        async with opened(url) as database:
            with pytest.raises(DatabaseRefused, match=r'role "nobody-here" does not exist$'):
                await database.migrated_to()

    def test_migrations_say_it_in_the_same_way(self) -> None:
        url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
        for migrate in (upgrade_database, current_revision, lambda dsn: downgrade_database(dsn, "base")):
            with pytest.raises(DatabaseUnavailable, match=r"^PostgreSQL at 127\.0\.0\.1:\d+/postgres is not"):
                migrate(url)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that a test may stop and reconfigure."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("own") / "postgres", settings=THROWAWAY_SETTINGS)
    server.start()
    yield server
    server.discard()


@pytest.fixture(scope="module")
def guarded_url(own_server: EmbeddedPostgres) -> str:
    """A database where the role ``guarded`` needs a password."""
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        access = own_server.cluster / "pg_hba.conf"
        access.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        connection.execute("SELECT pg_reload_conf()")
    return make_url(own_server.url).set(username="guarded").render_as_string()


class TestLogin:
    async def test_right_password(self, guarded_url: str) -> None:
        await eventually_password_needed(guarded_url)
        url = make_url(guarded_url).set(password="right").render_as_string(hide_password=False)
        async with opened(url) as database:
            assert [row.one for row in await database.run(ONE)] == [1]
            assert "right" not in repr(database.url)

    async def test_wrong_password(self, guarded_url: str) -> None:
        await eventually_password_needed(guarded_url)
        url = make_url(guarded_url).set(password="wr0ng-one").render_as_string(hide_password=False)
        async with opened(url) as database:
            with pytest.raises(
                DatabaseRefused,
                match=r'postgres refused the login: password authentication failed for user "guarded"$',
            ) as error:
                await database.run(ONE)
        assert "wr0ng-one" not in everything_said(error.value)


async def eventually_password_needed(url: str) -> None:
    def needed() -> bool:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return True
        return False

    await eventually(needed, "the server has read its new rules")


class TestRestart:
    async def test_unavailable_while_down_and_working_again_afterwards(
        self, own_server: EmbeddedPostgres
    ) -> None:
        async with opened(own_server.url) as database:
            await asyncio.gather(*(database.run(text("SELECT pg_sleep(0.05)")) for _ in range(5)))
            await database.run_heartbeat(ONE)
            own_server.stop()
            for _ in range(8):  # each pooled connection is found dead, then none can be made
                with pytest.raises(DatabaseUnavailable) as error:
                    await database.run(ONE)
                assert "\n" not in str(error.value)
            with pytest.raises(DatabaseUnavailable):
                await database.run_heartbeat(ONE)
            own_server.start()
            assert [row.one for row in await database.run(ONE)] == [1]
            assert [row.one for row in await database.run_heartbeat(ONE)] == [1]

    async def test_one_statement_may_find_the_old_connection_dead(self, own_server: EmbeddedPostgres) -> None:
        async with opened(own_server.url) as database:
            await asyncio.gather(*(database.run(text("SELECT pg_sleep(0.05)")) for _ in range(5)))
            own_server.stop()
            own_server.start()
            with pytest.raises(DatabaseUnavailable):
                await database.run(ONE)
            for _ in range(5):
                await database.run(ONE)

    async def test_a_backend_that_is_terminated_in_a_statement(self, sql: Sql, database: Database) -> None:
        call = asyncio.create_task(database.run(text("SELECT pg_sleep(30)")))
        await eventually(lambda: bool(terminated(sql)), "the backend is found at work")
        with pytest.raises(DatabaseUnavailable, match=r"SQLSTATE 57P01$"):
            await call
        assert [row.one for row in await database.run(ONE)] == [1]


def terminated(sql: Sql) -> int:
    """Terminate the backends of jsworker that sleep; return how many."""
    return sql.execute(
        """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'jsworker' AND wait_event = 'PgSleep'
        """
    ).rowcount


class TestWords:
    """What libpq says at the door; only English words tell whether waiting helps."""

    @pytest.mark.parametrize(
        "reason",
        [
            "the database system is starting up",
            "the database system is shutting down",
            "the database system is in recovery mode",
            "the database system is not yet accepting connections",
            "the database system is not accepting connections",
            "sorry, too many clients already",
            "remaining connection slots are reserved for roles with the SUPERUSER attribute",
            'too many connections for role "jsworker"',
            "terminating connection due to administrator command",
            "no more connections allowed (max_client_conn)",
        ],
    )
    def test_a_refusal_that_ends_by_itself(self, reason: str) -> None:
        error = psycopg.OperationalError(
            f'connection failed: connection to server at "10.0.0.1", port 5432 failed: FATAL:  {reason}'
        )
        mapped = map_error(error, "db:5432/app")
        assert isinstance(mapped, DatabaseUnavailable)
        assert reason in str(mapped)

    def test_a_refusal_behind_an_unreachable_address(self) -> None:
        error = psycopg.OperationalError(
            'connection failed: connection to server at "::1", port 5432 failed: Connection refused\n'
            'connection to server at "127.0.0.1", port 5432 failed: FATAL:  role "x" does not exist'
        )
        mapped = map_error(error, "db:5432/app")
        assert isinstance(mapped, DatabaseRefused)
        assert str(mapped) == 'PostgreSQL at db:5432/app refused the login: role "x" does not exist'

    def test_a_pool_without_a_free_connection(self) -> None:
        mapped = map_error(PoolTimeoutError("QueuePool limit of size 5 overflow 5 reached"), "db:5432/app")
        assert isinstance(mapped, DatabaseUnavailable)
        assert str(mapped) == "no free connection to PostgreSQL at db:5432/app within the statement time-out"

    def test_a_connection_that_says_nothing(self) -> None:
        mapped = map_error(psycopg.OperationalError(), "db:5432/app")
        assert str(mapped) == "PostgreSQL at db:5432/app is not available: OperationalError"


async def test_a_standby_is_not_available(databases_url_read_only: str) -> None:
    async with opened(databases_url_read_only) as database:
        assert [row.one for row in await database.run(ONE)] == [1]
        with pytest.raises(DatabaseUnavailable, match=r"SQLSTATE 25006$"):
            await enqueue(database, KIND, NewJob(new_job_id(), "{}"), publish_after=0.0)


@pytest.fixture
def databases_url_read_only(database_url: str, sql: Sql) -> Iterator[str]:
    """A database that refuses writes as a standby does, after a failover left our connections on it."""
    name = make_url(database_url).database
    statement = psycopg.sql.SQL("ALTER DATABASE {} {} default_transaction_read_only {}").format
    identifier = psycopg.sql.Identifier(name or "")
    sql.execute(statement(identifier, psycopg.sql.SQL("SET"), psycopg.sql.SQL("= on")))
    yield database_url
    sql.execute(statement(identifier, psycopg.sql.SQL("RESET"), psycopg.sql.SQL("")))
