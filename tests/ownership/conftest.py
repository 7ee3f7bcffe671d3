"""One server for all; a copy of the migrated database for each module; empty tables for each test."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url

from jsworker.ownership.database import Database, upgrade_database
from tests.support.servers import start_test_servers

from .rows import Sql

TEMPLATE = "migrated"


class TestDatabases:
    """Makes databases on one server."""

    __test__ = False

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._made = 0

    def create(self, template: str | None = None) -> str:
        """Create a database, a copy of ``template`` or an empty one, and return its URL."""
        self._made += 1
        return self.create_named(f"test_{os.getpid()}_{self._made}", template)

    def create_named(self, name: str, template: str | None = None) -> str:
        """Create a database of this name, once more if it is there, and return its URL."""
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
            connection.execute(
                SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY WAL_LOG").format(
                    Identifier(name), Identifier(template or "template0")
                )
            )
        return make_url(self._server_url).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server; JSWORKER_TEST_DATABASE_URL names one that runs already."""
    running = os.environ.get("JSWORKER_TEST_DATABASE_URL")
    if running:
        yield running
        return
    folder: Path = tmp_path_factory.mktemp("servers")
    servers = start_test_servers(folder)
    yield servers.postgres.url
    servers.stop()


@pytest.fixture(scope="session")
def databases(server_url: str) -> TestDatabases:
    return TestDatabases(server_url)


@pytest.fixture(scope="session")
def migrated(databases: TestDatabases) -> str:
    """The name of the template that was migrated once."""
    name = f"{TEMPLATE}_{os.getpid()}"
    upgrade_database(databases.create_named(name))
    return name


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
    # A hundred times faster than TRUNCATE, which makes new files for each table and index.
    for table in ("jobs", "job_events", "workers", "installation", "dead_messages"):
        observer.execute(SQL("DELETE FROM jsworker.{}").format(Identifier(table)))
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
    yield opened
    await opened.close()
