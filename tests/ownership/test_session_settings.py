"""Sessions have the settings that jsworker needs, whatever the database sets for its sessions."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier
from sqlalchemy import text
from sqlalchemy.engine import make_url

from jsworker.core.errors import DatabaseRefused, DatabaseTimeout, OwnershipLost
from jsworker.core.settings import Settings
from jsworker.doctor import postgresql_checks
from jsworker.ownership.database import REVISIONS, Database
from jsworker.ownership.pool import Row, Transaction
from jsworker.ownership.queries.server_report import read_server
from jsworker.ownership.session_settings import SESSION_SETTINGS
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions import dead_messages
from jsworker.ownership.transitions.dead_messages import NewDeadMessage
from jsworker.ownership.transitions.settle import Completion
from jsworker.ownership.upgrading import _migrating, upgrade_database

from .calls import opened
from .conftest import TestDatabases
from .polling import eventually
from .rows import Sql, insert_job
from .test_errors import waiting
from .test_pool import pooled

UNFIT = {
    "default_transaction_isolation": "repeatable read",
    "array_nulls": "off",
    "client_encoding": "SQL_ASCII",
    "DateStyle": "German, DMY",
    "IntervalStyle": "iso_8601",
}
FOUND = text("SELECT " + ", ".join(f"current_setting('{name}') AS {name}" for name in SESSION_SETTINGS))
URL = "postgresql://localhost/jobs"
SHORT = {"statement_timeout": "500ms", "transaction_timeout": "900ms"}
LIMITS = text("SELECT current_setting('statement_timeout') AS a, current_setting('transaction_timeout') AS b")
COUNT = text("SELECT count(*) FROM jsworker.jobs")
NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC)
VALUES = text("""
SELECT (CAST(:texts AS text[]))[1], (CAST('{NULL}' AS text[]))[1],
  CAST(:at AS timestamptz), interval '1 day 2 hours'
""")
LETTER = NewDeadMessage("jobs.a", None, None, "malformed", b"\x00{\\")
NONE = Completion(UUID(int=0), 1, None)
LOCK = text("SELECT pg_advisory_xact_lock(1)")


def alter(url: str, **settings: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for name, value in settings.items():
            altered = SQL("ALTER DATABASE {} SET {} = {}").format(
                Identifier(make_url(url).database or ""), Identifier(name), value
            )
            connection.execute(altered)


@pytest.fixture
def unfit_url(databases: TestDatabases, migrated: str) -> str:
    url = databases.create(migrated)
    alter(url, **UNFIT)
    return url


@pytest.fixture
async def unfit(unfit_url: str) -> AsyncIterator[Database]:
    async with opened(unfit_url, 30.0) as database:
        yield database


@pytest.fixture
def holder(unfit_url: str) -> Iterator[Sql]:
    with psycopg.connect(unfit_url, autocommit=True, row_factory=dict_row) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        yield connection


def needed(row: Row) -> bool:
    return [value.partition(",")[0] for value in row] == list(SESSION_SETTINGS.values())


async def test_statements_run_with_them(unfit: Database) -> None:
    async def read(transaction: Transaction) -> Row:
        [row] = await transaction.run(FOUND)
        return row

    assert needed(await unfit.in_transaction(read))
    for run in (unfit.run, unfit.run_heartbeat):
        [row] = await run(FOUND)
        assert needed(row)
    [row] = await unfit.run_by_key(FOUND, {})
    assert needed(row)


async def test_transactions_of_jobs_run_with_them(unfit: Database) -> None:
    sessions = Sessions(unfit, worker_id="w", size=1, lock_seconds=1.0)
    rows: list[Row] = []
    try:
        with suppress(OwnershipLost):
            async with sessions.transaction(lambda: NONE) as session:
                rows += await session.execute(FOUND)
        with suppress(OwnershipLost), sessions.sync_transaction(lambda: NONE) as plain:
            rows += plain.execute(FOUND)
    finally:
        await sessions.close()
    assert [needed(row) for row in rows] == [True, True]


@pytest.mark.parametrize("in_transaction", [True, False])
def test_migrations_run_with_them(unfit_url: str, *, in_transaction: bool) -> None:
    found = _migrating(
        unfit_url, lambda connection: connection.execute(FOUND).one(), in_transaction=in_transaction
    )
    assert needed(found)


async def test_a_statement_sees_what_the_holder_of_its_lock_has_committed(
    unfit: Database, holder: Sql
) -> None:
    count = asyncio.create_task(unfit.run_by_key(COUNT, {}, first=LOCK))
    await eventually(lambda: waiting(holder) == 1, "it waits for the lock")
    insert_job(holder)
    holder.execute("SELECT pg_advisory_unlock(1)")
    assert await count == [(1,)]


async def test_values_are_sent_and_read_as_they_are(unfit: Database) -> None:
    values = {"texts": ["☃", None], "at": NEW_YEAR}
    assert await unfit.run_by_key(VALUES, values) == [("☃", None, NEW_YEAR, timedelta(days=1, hours=2))]


async def test_dead_messages_are_kept_as_they_are(databases: TestDatabases, migrated: str) -> None:
    url = databases.create(migrated)
    alter(url, standard_conforming_strings="off", bytea_output="escape")
    async with opened(url, 30.0) as database:
        ids, refused = await dead_messages.keep(database, [LETTER])
        [kept] = await dead_messages.read_dead(database, ids)
    assert (kept.data, refused) == (LETTER.data, [])


async def test_the_order_of_day_and_month_stays(unfit: Database) -> None:
    [row] = await unfit.run(text("SELECT current_setting('DateStyle') AS style"))
    assert row.style == "ISO, DMY"


def test_a_database_is_migrated_whatever_its_sessions_are_like(databases: TestDatabases) -> None:
    url = databases.create()
    alter(url, **UNFIT)
    assert upgrade_database(url) == REVISIONS[-1]


@pytest.mark.parametrize("name", [name for name in UNFIT if name != "client_encoding"])
async def test_a_poolers_sessions_that_have_others_are_refused(
    name: str, databases: TestDatabases, migrated: str
) -> None:
    url = databases.create(migrated)
    alter(url, **{name: UNFIT[name]})
    async with pooled(url) as (_, pooled_url), opened(pooled_url, 30.0) as database:
        with pytest.raises(DatabaseRefused) as refused:
            await database.check_usable()
        found = await read_server(database)
    says = f"{name} is {UNFIT[name]} in the sessions of a pooler, and must be {SESSION_SETTINGS[name]}"
    repair = (
        f"Undo it with ALTER ROLE … RESET {name} or ALTER DATABASE … RESET {name}, or in postgresql.conf, "
        "and reconnect the pooler."
    )
    assert str(refused.value) == f"PostgreSQL at {database.place} cannot be used: {says}. {repair}"
    [finding] = postgresql_checks.sessions(found, Settings(database_url=URL))
    assert (finding.level, finding.says, finding.do) == ("error", says, repair)


async def test_a_time_that_the_driver_cannot_read_is_an_error_of_ours(unfit_url: str) -> None:
    async with pooled(unfit_url) as (_, url), opened(url, 30.0) as database:
        with pytest.raises(DatabaseRefused, match=r"sent what the driver cannot read: .* 'German, DMY'"):
            await database.run(text("SELECT clock_timestamp()"))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_in_another_encoding_is_refused(server_url: str, encoding: str) -> None:
    name = f"test_{encoding.lower()}_{os.getpid()}"
    url = make_url(server_url).set(database=name).render_as_string(hide_password=False)
    says = f"the database's encoding is {encoding}, and must be UTF8"
    with psycopg.connect(server_url, autocommit=True) as administration:
        create = f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        administration.execute(create.encode())
        try:
            with pytest.raises(DatabaseRefused, match=says):
                upgrade_database(url)
            async with opened(url, 30.0) as database:
                with pytest.raises(DatabaseRefused, match=says):
                    await database.check_usable()
                [finding] = postgresql_checks.sessions(
                    await read_server(database), Settings(database_url=URL)
                )
            assert finding.says == says
        finally:
            administration.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def test_direct_sessions_have_no_fault(unfit: Database) -> None:
    await unfit.check_usable()
    assert list(postgresql_checks.sessions(await read_server(unfit), Settings(database_url=URL))) == []


async def test_statements_have_their_own_time_limits_and_not_those_of_the_role(
    databases: TestDatabases, migrated: str
) -> None:
    """Transactions of jobs keep the role's: their statements are the user's."""
    url = databases.create(migrated)
    alter(url, **SHORT)
    async with opened(url, 30.0) as database:
        for run in (database.run, database.run_by_key):
            assert await run(LIMITS, {}) == [("0", "0")]
        assert [*await database.run(text("SELECT pg_sleep(1) IS NOT NULL AS slept"))] == [(True,)]
        assert list(postgresql_checks.sessions(await read_server(database), Settings(database_url=URL))) == []
        sessions = Sessions(database, worker_id="w", size=1, lock_seconds=1.0)
        of_jobs: list[Row] = []
        try:
            with suppress(OwnershipLost):
                async with sessions.transaction(lambda: NONE) as session:
                    of_jobs += await session.execute(LIMITS)
        finally:
            await sessions.close()
    assert of_jobs == [("500ms", "900ms")]


async def test_a_poolers_sessions_that_end_statements_too_soon_are_told(
    databases: TestDatabases, migrated: str
) -> None:
    url = databases.create(migrated)
    alter(url, **SHORT)
    async with pooled(url) as (_, pooled_url), opened(pooled_url, 30.0) as database:
        found = await read_server(database)
        said = r"is not available: canceling statement due to statement timeout \(SQLSTATE 57014\)$"
        with pytest.raises(DatabaseTimeout, match=said):
            await database.run(text("SELECT pg_sleep(60)"), seconds=60.0)
    settings = Settings(database_url=URL, statement_timeout=0.8)
    [finding] = postgresql_checks.sessions(found, settings)
    assert finding.level == "warning"
    assert finding.says == (
        "statement_timeout is 0.5 s in the sessions of a pooler, less than JSWORKER_STATEMENT_TIMEOUT=0.8: "
        "slower statements never succeed"
    )
    assert "ALTER ROLE … RESET statement_timeout" in str(finding.do)
