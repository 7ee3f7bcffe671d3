"""The pool: whose plans are kept, how many connections stay, and what is never lent again."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership import pool
from jsworker.ownership.database import Database
from tests.support.proxy import proxied

from .calls import opened
from .polling import answered, eventually
from .rows import Sql

PREPARED = text("SELECT count(*)::int AS prepared FROM pg_prepared_statements")
MODE = text("SELECT current_setting('plan_cache_mode') AS plans, current_setting('enable_seqscan') AS scans")
KEEPALIVES = text("""
SELECT current_setting('tcp_keepalives_idle') AS idle, current_setting('tcp_keepalives_interval') AS interval,
  current_setting('tcp_keepalives_count') AS count, current_setting('tcp_user_timeout') AS unanswered
""")
JIT = text("SELECT current_setting('jit') AS jit")
PID = text("SELECT pg_backend_pid() AS pid")
SLEEP = text("SELECT pg_sleep(0.1)")
GIVE_UP = """
import asyncio, sys
from sqlalchemy import text
from jsworker.core.errors import DatabaseTimeout
from jsworker.ownership.database import Database
from tests.support.proxy import proxied

async def main(url):
    async with proxied(url) as (proxy, url), Database(url, statement_timeout=30.0) as database:
        await database.run(text("SELECT 1"))
        proxy.black_hole()
        try:
            await database.run(text("SELECT pg_sleep(60)"), seconds=0.2)
        except DatabaseTimeout:
            await asyncio.sleep(0.1)  # it begins to cancel

asyncio.run(main(sys.argv[1]))
"""
BACKENDS = """
SELECT count(*) AS n FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'jsworker'
"""

_BACKEND_KEY = b"K\x00\x00\x00\x0c"


def backends(sql: Sql) -> int:
    return int(sql.execute(BACKENDS).fetchall()[0]["n"])


class Pooler:
    """A relay that tells clients another backend's number, as a pooler does."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._ways: set[asyncio.Task[None]] = set()
        self.greeted = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        ways = {
            asyncio.create_task(self._copy(reader, server_writer, is_answer=False)),
            asyncio.create_task(self._copy(server_reader, writer, is_answer=True)),
        }
        self._ways |= ways
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, server_writer):
            end.close()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while data := await source.read(65536):
            sink.write(self._disguised(data) if is_answer else data)
            await sink.drain()

    def _disguised(self, data: bytes) -> bytes:
        place = data.find(_BACKEND_KEY)
        if place < 0:
            return data
        self.greeted += 1
        start = place + len(_BACKEND_KEY)
        return data[:start] + (2_000_000_001).to_bytes(4, "big") + data[start + 4 :]

    async def close(self) -> None:
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)


@asynccontextmanager
async def pooled(database_url: str) -> AsyncIterator[tuple[Pooler, str]]:
    """Run a pooler before a database and give its URL through the pooler."""
    url = make_url(database_url)
    pooler = Pooler(url.host or "127.0.0.1", url.port or 5432)
    listener = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield pooler, url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
    finally:
        listener.close()
        await pooler.close()
        await listener.wait_closed()


async def test_statements_by_key_are_prepared_and_never_read_a_whole_table(database: Database) -> None:
    assert await database.run_by_key(MODE, {}) == [("force_generic_plan", "off")]
    await database.run_by_key(PREPARED, {})
    [(prepared,)] = await database.run_by_key(PREPARED, {})
    assert prepared == 2  # this one and the one before


async def test_all_others_are_planned_each_time(database: Database) -> None:
    for _ in range(3):
        [row] = await database.run(PREPARED)
        assert row.prepared == 0
    [mode] = await database.run(MODE)
    assert tuple(mode) == ("auto", "on")


async def test_postgresql_looks_for_hosts_that_are_gone(database: Database) -> None:
    for run in (database.run, database.run_heartbeat):
        assert [tuple(row) for row in await run(KEEPALIVES)] == [("5", "3", "3", "14000")]
    assert await database.run_by_key(KEEPALIVES, {}) == [("5", "3", "3", "14000")]


async def test_postgresql_compiles_no_statement(database: Database) -> None:
    """Where it was built with LLVM it would, for half a second, whenever held jobs are looked for."""
    for run in (database.run, database.run_heartbeat):
        assert [tuple(row) for row in await run(JIT)] == [("off",)]
    assert await database.run_by_key(JIT, {}) == [("off",)]


async def test_nor_does_it_in_the_sessions_of_a_pooler(database_url: str) -> None:
    async with pooled(database_url) as (_, url), opened(url) as database:
        assert await database.run_by_key(JIT, {}) == [("off",)]
        reads = database.for_reading(seconds=5.0)
        for run in (database.run_along_index, reads.run, reads.run_along_index):
            assert [tuple(row) for row in await run(JIT, {})] == [("off",)]
        assert [tuple(row) for row in await database.run(JIT)] == [
            ("on",)
        ]  # the session itself is not changed


async def test_a_statement_along_an_index_is_committed_without_its_client(
    database_url: str, database: Database
) -> None:
    """A process that is blocked or stopped meanwhile would keep the rows locked."""
    async with opened(database_url) as door:
        [(pid,)] = await door.run_along_index(text("SELECT pg_backend_pid()"), {})
        last = text("SELECT query FROM pg_stat_activity WHERE pid = CAST(:pid AS integer)")
        assert await database.run(last, {"pid": pid}) == [("SELECT pg_backend_pid()",)]


async def test_what_somebody_has_set_for_such_hosts_stays(database_url: str) -> None:
    async with opened(f"{database_url}?options=-c%20tcp_keepalives_idle%3D60") as database:
        [(idle, _, _, unanswered)] = await database.run_by_key(KEEPALIVES, {})
        assert (idle, unanswered) == ("60", "0")


async def test_behind_a_pooler_nothing_is_prepared_and_no_session_is_changed(database_url: str) -> None:
    async with pooled(database_url) as (pooler, url), opened(url) as database:
        assert await database.run_by_key(MODE, {}) == [("auto", "off")]  # by index all the same
        first = text("SELECT set_config('application_name', 'first', true)")
        both = text("SELECT current_setting('application_name'), current_setting('enable_seqscan')")
        assert await database.run_by_key(both, {}, first=first) == [("first", "off")]
        assert not await database.run_by_key(text("DELETE FROM jsworker.jobs"), {})  # which returns no rows
        with pytest.raises(DatabaseRefused) as refused:
            await database.run_by_key(text("SELECT 1 / 0"), {})
        assert refused.value.sqlstate == "22012"
        for _ in range(3):
            assert await database.run_by_key(PREPARED, {}) == [(0,)]
        async with database._by_key._lend() as lent:
            assert await (await lent.execute(str(both))).fetchone() == ("jsworker", "on")
            sources = "SELECT DISTINCT source FROM pg_settings WHERE name LIKE 'tcp%'"
            assert await (await lent.execute(sources)).fetchall() == [("default",)]
        await database.run_heartbeat(MODE)
        assert pooler.greeted == 2


async def test_connections_that_nobody_needs_any_more_are_closed(
    database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_SPARE_SECONDS", 3600.0)
    database = Database(database_url, statement_timeout=30.0, pool_size=2)
    try:
        await asyncio.gather(*(database.run(SLEEP) for _ in range(9)))  # more than there may be
        for _ in range(3):
            await database.run(SLEEP)
        assert backends(sql) == 4  # the next rush finds them
        monkeypatch.setattr(pool, "_SPARE_SECONDS", 0.0)
        await database.run(SLEEP)
        await eventually(lambda: backends(sql) == 2, "two connections are left")
    finally:
        await database.close()
    await eventually(lambda: backends(sql) == 0, "all are closed")


async def test_whoever_waits_too_long_for_a_connection_is_told(database_url: str) -> None:
    database = Database(database_url, statement_timeout=0.3, pool_size=1)
    try:
        long = [asyncio.create_task(database.run(text("SELECT pg_sleep(1)"), seconds=5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(DatabaseUnavailable, match=r"did not answer within 0\.3 s"):
            await database.run(SLEEP)
        await asyncio.gather(*long)
        await database.run(SLEEP, seconds=5.0)  # and the place is free again
    finally:
        await database.close()


async def test_a_statement_that_is_given_up_costs_no_connection_once_the_server_has_ended_it(
    database_url: str, sql: Sql
) -> None:
    async with Database(database_url, statement_timeout=5.0, pool_size=1) as database:
        [before] = await database.run(PID)
        for _ in range(4):  # there are two places
            with pytest.raises(DatabaseUnavailable):
                await database.run(text("SELECT pg_sleep(60)"), seconds=0.5)
            await eventually(lambda: not database.pools_by_name()["statements"].in_use, "it has come back")
        assert [await database.run(PID) for _ in range(3)] == [
            [before]
        ] * 3  # and no answer of the statement before
        assert backends(sql) == 1


def test_one_that_is_given_up_writes_nothing_to_the_users_stderr(database_url: str) -> None:
    command = [sys.executable, "-c", GIVE_UP, database_url]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


async def test_a_connection_that_is_made_too_late_for_its_statement_serves_the_next(
    database_url: str,
) -> None:
    async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=1.0) as database:
        # Enough for a statement, which goes and comes once; a new connection does so three times.
        proxy.slow_down(0.25)
        with pytest.raises(DatabaseUnavailable, match="did not answer within 1 s"):
            await database.run(PID)
        await answered(lambda: database.run(PID))


async def test_a_login_over_a_long_way_has_most_of_the_time_of_a_statement(database_url: str) -> None:
    async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=20.0) as database:
        proxy.slow_down(0.6)  # each way, and a login goes and comes twice
        [row] = await database.run(PID)
        assert row.pid


@pytest.mark.parametrize(
    ("query", "statement_timeout", "seconds"),
    [
        ("", 3.0, 2),
        ("", 6.0, 4),
        ("", 60.0, 5),
        ("?host=a,b&port=1,2", 9.0, 3),
        ("?host=a:1&host=b:2&host=c:3", 3.0, 2),
        ("?connect_timeout=20", 3.0, "20"),
    ],
)
def test_the_hosts_of_a_url_share_the_time_for_logins(
    query: str, statement_timeout: float, seconds: object
) -> None:
    database = Database(f"postgresql:///jobs{query}", statement_timeout=statement_timeout)
    assert database.arguments()["connect_timeout"] == seconds


def test_where_no_statement_is_given_up_a_login_may_take_longest() -> None:
    assert pool.arguments_of(pool.driver_url("postgresql:///jobs"))["connect_timeout"] == 5


async def test_the_next_host_is_tried_within_a_statement(database_url: str) -> None:
    async with proxied(database_url) as (proxy, url):
        proxy.black_hole()
        silent, answers = (make_url(each) for each in (url, database_url))
        hosts = {
            "host": f"{silent.host},{answers.host}",
            "port": f"{silent.port},{answers.port}",
        }
        both = answers.set(host=None, port=None).update_query_dict(hosts)
        async with opened(both.render_as_string(hide_password=False), statement_timeout=9.0) as database:
            [row] = await database.run(PID)
            assert row.pid


async def test_a_connection_that_comes_back_half_way_is_not_lent_again(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def left_half_way(cursor: psycopg.AsyncCursor[Any], *_: Any) -> None:
        driver = cursor.connection.pgconn
        driver.enter_pipeline_mode()
        driver.send_query_params(b"SELECT 1 FROM pg_sleep(0.2)", None)
        driver.pipeline_sync()
        raise psycopg.OperationalError("cannot exit pipeline mode with uncollected results")

    connections = pool.Pool(partial(pool.arguments_of, pool.driver_url(database_url)), size=1, overflow=0)
    try:
        assert await connections.execute(text("SELECT 0"), None, plain=True) == [(0,)]
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.AsyncCursor, "execute", left_half_way)
            with pytest.raises(psycopg.OperationalError):
                await connections.execute(text("SELECT 1"), None, plain=True)
        # Without an answer of the statement before.
        assert await connections.execute(text("SELECT 2"), None, plain=True) == [(2,)]
    finally:
        await connections.close()


async def test_a_connection_that_cannot_be_prepared_for_use_is_closed(
    database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "BEGIN_SESSION_THAT_KEEPS_PLANS", "SELECT 1 / 0 WHERE %s IS NOT NULL")
    async with opened(database_url) as database:
        with pytest.raises(DatabaseRefused):
            await database.run_by_key(MODE, {})
        await eventually(lambda: backends(sql) == 0, "the connection is closed")


async def test_an_application_name_in_the_url_changes_nothing(database_url: str) -> None:
    async with opened(f"{database_url}?application_name=mine") as database:
        [row] = await database.run(text("SELECT current_setting('application_name') AS name"))
        assert row.name == "jsworker"


@pytest.mark.parametrize("keeps_plans", [False, True])
async def test_a_connection_that_is_being_made_is_closed_when_its_caller_goes_away(
    database_url: str, sql: Sql, *, keeps_plans: bool
) -> None:
    errors: list[BaseException] = []  # kept, as by code that reports them
    gc.disable()
    try:
        for milliseconds in range(30):
            making = pool.Pool(
                partial(pool.arguments_of, pool.driver_url(database_url)),
                size=1,
                overflow=0,
                keeps_plans=keeps_plans,
            )
            caller = asyncio.create_task(kept(errors, making.execute(MODE, None)))
            await asyncio.wait({caller}, timeout=milliseconds / 1000)  # wherever that finds it
            caller.cancel()
            await asyncio.wait({caller})
            await making.close()
        assert errors
        await eventually(lambda: backends(sql) == 0, "all are closed")
    finally:
        gc.enable()


async def kept(errors: list[BaseException], call: Coroutine[Any, Any, object]) -> None:
    try:
        await call
    except BaseException as error:
        errors.append(error)
        raise
