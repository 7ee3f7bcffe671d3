"""One server for all; a copy of the migrated database for each module; empty tables for each test."""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url

from jsworker.ownership.database import Database
from jsworker.ownership.upgrading import upgrade_database
from tests.support.servers import TEMPLATE, TestServers

from .rows import Sql, ago, empty_tables, insert_job
from .winner import Winner

_SERVER_VARIABLE = "JSWORKER_TEST_DATABASE_URL"


class TestDatabases:
    """Makes databases on one server."""

    __test__ = False

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._made: list[str] = []

    def create(self, template: str | None = None) -> str:
        """Create a database, a copy of ``template`` or an empty one, and return its URL."""
        name = f"test_{os.getpid()}_{len(self._made)}"
        self._made.append(name)
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(
                SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(
                    Identifier(name), Identifier(template or "template0")
                )
            )
        return make_url(self._server_url).set(database=name).render_as_string(hide_password=False)

    def create_full(self, template: str, *statements: str, **values: Any) -> str:
        """Create a database whose large tables autovacuum leaves alone, fill it and return its URL."""
        url = self.create(template)
        # The client fills in the values: several statements in one string take no parameters of the server's.
        with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
            for table in ("jobs", "job_events", "job_steps", "refused_rows"):
                connection.execute(f"ALTER TABLE jsworker.{table} SET (autovacuum_enabled = off)".encode())
            for statement in statements:
                connection.execute(statement.encode(), values if "%(" in statement else None)
        return url

    def create_copy(self, url: str) -> str:
        """Create a copy of a database to which nobody is connected, and return its URL."""
        return self.create(make_url(url).database)

    def create_analyzed(self, url: str) -> str:
        """Create such a copy, with statistics, and return its URL."""
        copy = self.create_copy(url)
        with psycopg.connect(copy, autocommit=True) as connection:
            connection.execute("ANALYZE")
        return copy

    def drop(self) -> None:
        """Drop what was made; the server may not be ours alone."""
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            for name in self._made:
                connection.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> str:
    """The session's PostgreSQL server; JSWORKER_TEST_DATABASE_URL names another one."""
    running = os.environ.get(_SERVER_VARIABLE)
    if running is None:
        servers: TestServers = request.getfixturevalue("servers")
        running = servers.postgres.url
    return running


@pytest.fixture(scope="session")
def databases(server_url: str) -> Iterator[TestDatabases]:
    made = TestDatabases(server_url)
    yield made
    made.drop()


@pytest.fixture(scope="session")
def migrated(databases: TestDatabases) -> str:
    """The name of a template that was migrated once."""
    if _SERVER_VARIABLE not in os.environ:
        return TEMPLATE
    url = databases.create()
    upgrade_database(url)
    return str(make_url(url).database)


@pytest.fixture(scope="module")
def database_url(databases: TestDatabases, migrated: str) -> str:
    return databases.create(migrated)


@pytest.fixture(scope="module")
def observer(database_url: str) -> Iterator[Sql]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def sql(observer: Sql) -> Sql:
    """A connection of the test's own, on empty tables."""
    empty_tables(observer)
    return observer


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    """Plain connections, one statement per transaction unless a test begins its own."""
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


@pytest_asyncio.fixture
async def database(database_url: str, sql: Sql) -> AsyncIterator[Database]:
    """The door under test, on empty tables."""
    opened = Database(database_url, statement_timeout=10.0)
    await opened.migrated_to()
    yield opened
    await opened.close()


@pytest.fixture
def winner(engine: Engine, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> Iterator[Winner]:
    # On a busy machine it may last more than the second for which an operator's statement is tried again.
    monkeypatch.setattr("jsworker.ownership.refusals._PAUSES", (0.02, *[0.1] * 600))
    with Winner(engine, sql) as opened:
        yield opened


@pytest.fixture
def running(sql: Sql) -> UUID:
    """A job that ``WORKER`` runs with token 1, silent for twice its threshold."""
    return insert_job(sql, "processing", last_activity_at=ago(60))
