"""Workers on the schema of the previous minor version, until it is upgraded beneath them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from jsworker.client import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import OLDEST_REVISION, REVISIONS, upgrade_advice
from jsworker.ownership.upgrading import upgrade_database
from tests.support.polling import eventually
from tests.support.servers import TestServers, drop_database
from tests.worker.processors import KIND, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

SECONDS = 60.0


@pytest.fixture
def database_url(servers: TestServers) -> Iterator[str]:
    """A database that the previous minor version has migrated."""
    name = f"older_{secrets.token_hex(6)}"
    url = servers.postgres.create_database(name)
    upgrade_database(url, OLDEST_REVISION)
    yield url
    drop_database(servers.postgres, name)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[JobClient]:
    async with JobClient(settings) as opened:
        yield opened


async def process(job: Job[None]) -> str:
    return f"run {job.attempt}"


async def test_a_worker_works_on_it_and_is_restored_by_the_upgrade(
    start: StartWorker, client: JobClient, rows: Rows, database_url: str
) -> None:
    running = await start(scripted(process))
    first = await client.enqueue(KIND, {})
    assert await first.result(timeout=SECONDS) == "run 1"
    assert await rows.value("SELECT state FROM jsworker.workers") == "running"
    [degraded] = await running.events.told("worker.degraded", seconds=SECONDS)
    assert (degraded["what"], degraded["reason"]) == ("schema", upgrade_advice(OLDEST_REVISION))
    status = running.worker.status()
    assert status is not None
    assert (status.readiness.migration, status.readiness.misfit) == (OLDEST_REVISION, None)

    await asyncio.to_thread(upgrade_database, database_url)
    [restored] = await running.events.told("worker.restored", seconds=SECONDS)
    assert restored["what"] == "schema"
    status = running.worker.status()
    assert status is not None
    assert status.readiness.migration == REVISIONS[-1]

    async def beats() -> None:
        assert await rows.value(
            "SELECT clock_timestamp() - last_seen_at < interval '5 s' FROM jsworker.workers"
        )

    await eventually(beats, seconds=SECONDS)
    second = await client.enqueue(KIND, {})
    assert await second.result(timeout=SECONDS) == "run 1"


async def test_what_it_does_not_write_is_written_by_its_next_life(
    start: StartWorker, rows: Rows, database_url: str
) -> None:
    await (await start(scripted(process))).end()
    await asyncio.to_thread(upgrade_database, database_url)
    await start(scripted(process))
    written = await rows.query(
        "SELECT kind_settings IS NOT NULL AS written FROM jsworker.workers ORDER BY started_at"
    )
    assert [row["written"] for row in written] == [False, True]
