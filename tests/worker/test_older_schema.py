"""Workers on the schema of the previous minor version, and schemas that change beneath them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from jsworker import JobClient
from jsworker.core.errors import DatabaseRefused
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import OLDEST_REVISION, REVISIONS, Database, upgrade_advice
from jsworker.ownership.queries.job_report import KIND_SETTINGS
from jsworker.ownership.transitions import workers
from jsworker.ownership.upgrading import upgrade_database
from jsworker.worker.recovery.earlier_lives import identify
from tests.support.polling import eventually
from tests.support.servers import TEMPLATE, TestServers, copy_database, drop_database
from tests.worker.processors import KIND, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

SECONDS = 60.0

pytestmark = pytest.mark.skipif(
    not REVISIONS[REVISIONS.index(OLDEST_REVISION) + 1 :],
    reason="no migration was added since the previous minor version",
)


@pytest.fixture(scope="module")
def older_database(servers: TestServers) -> Iterator[str]:
    """Name of a database that the previous minor version migrated; schema ``newest`` is this version's."""
    name = f"older_{secrets.token_hex(6)}"
    url = copy_database(servers.postgres, name, TEMPLATE)
    upgrade_database(url)
    with psycopg.connect(url) as connection:
        connection.execute("ALTER SCHEMA jsworker RENAME TO newest")
    upgrade_database(url, OLDEST_REVISION)
    yield name
    drop_database(servers.postgres, name)


@pytest.fixture
def database_url(servers: TestServers, older_database: str) -> Iterator[str]:
    name = f"older_{secrets.token_hex(6)}"
    yield copy_database(servers.postgres, name, older_database)
    drop_database(servers.postgres, name)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[JobClient]:
    async with JobClient(settings) as opened:
        yield opened


async def process(job: Job[None]) -> str:
    return f"run {job.attempt}"


async def test_a_worker_works_on_it_and_is_restored_by_the_upgrade(
    start: StartWorker, client: JobClient, database: Database, rows: Rows, database_url: str
) -> None:
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert await job.result(timeout=SECONDS) == "run 1"
    assert await rows.value("SELECT state FROM jsworker.workers") == "running"
    assert await database.run(KIND_SETTINGS, {"kinds": [KIND]}) == []
    [degraded] = await running.events.told("worker.degraded", seconds=SECONDS)
    assert (degraded["what"], degraded["reason"]) == ("schema", upgrade_advice(OLDEST_REVISION))
    assert readiness(running) == (OLDEST_REVISION, None)

    await asyncio.to_thread(upgrade_database, database_url)
    [restored] = await running.events.told("worker.restored", seconds=SECONDS)
    assert restored["what"] == "schema"
    assert readiness(running) == (REVISIONS[-1], None)

    async def what_was_left_out_is_written() -> None:
        found = await database.run(KIND_SETTINGS, {"kinds": [KIND]})
        assert [row.workers for row in found] == [1]

    await eventually(what_was_left_out_is_written, seconds=SECONDS)
    job = await client.enqueue(KIND, {})
    assert await job.result(timeout=SECONDS) == "run 1"


async def test_a_schema_that_goes_back_beneath_a_worker(
    start: StartWorker, client: JobClient, rows: Rows, database_url: str
) -> None:
    """As a backup does it that is restored."""
    exchange(database_url, kept="older", taken="newest")
    running = await start(scripted(process))
    exchange(database_url, kept="newest", taken="older")
    [degraded] = await schema_events(running, "worker.degraded", 1)
    assert degraded["reason"] == upgrade_advice(OLDEST_REVISION)
    job = await client.enqueue(KIND, {})
    assert await job.result(timeout=SECONDS) == "run 1"

    too_old = REVISIONS[REVISIONS.index(OLDEST_REVISION) - 1]
    await rows.query("UPDATE jsworker.alembic_version SET version_num = %s", too_old)
    _, worse = await schema_events(running, "worker.degraded", 2)
    assert f"at migration {too_old}, this version needs {OLDEST_REVISION} or later" in worse["reason"]
    assert await schema_events(running, "worker.restored", 0) == []


async def test_a_heartbeat_that_meets_an_older_schema_learns_of_it(
    database: Database, settings: Settings, database_url: str
) -> None:
    exchange(database_url, kept="older", taken="newest")
    await database.migrated_to()
    me = identify(settings, [KIND])
    await workers.seen(database, me, state="running")
    exchange(database_url, kept="newest", taken="older")
    with pytest.raises(DatabaseRefused, match="kind_settings"):
        await workers.seen(database, me, state="running")
    await workers.seen(database, me, state="running")


def exchange(database_url: str, *, kept: str, taken: str) -> None:
    """Rename schema jsworker to ``kept`` and ``taken`` to jsworker, at once and without locking a table.

    The id of the installation is kept, which the stream has too.
    """
    with psycopg.connect(database_url) as connection:
        for statement in (
            SQL(
                "INSERT INTO {taken}.installation SELECT * FROM jsworker.installation ON CONFLICT DO NOTHING"
            ),
            SQL("ALTER SCHEMA jsworker RENAME TO {kept}"),
            SQL("ALTER SCHEMA {taken} RENAME TO jsworker"),
        ):
            connection.execute(statement.format(kept=Identifier(kept), taken=Identifier(taken)))


def readiness(running: Running) -> tuple[str | None, str | None]:
    """Return which migration a worker sees, and why it cannot work with it."""
    status = running.worker.status()
    assert status is not None
    return status.readiness.migration, status.readiness.schema_mismatch


async def schema_events(running: Running, name: str, count: int) -> list[dict[str, Any]]:
    """Wait until so many events were about the schema, and return them."""

    async def told() -> list[dict[str, Any]]:
        found = [event for event in running.events.of(name) if event["what"] == "schema"]
        assert len(found) == count, running.events.of(name)
        return found

    return await eventually(told, seconds=SECONDS)
