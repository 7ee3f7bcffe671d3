"""What tests of the runtime share: rows, workers that end with the test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from tests.support.fleet import Fleet, fleet_of
from tests.support.leaks import nothing_left
from tests.support.servers import ON_OLDEST_SCHEMA
from tests.worker.rows import Rows, open_rows
from tests.worker.running import Running, StartWorker, new_worker


@pytest.fixture(autouse=True)
def _older_schema_is_not_reported(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests that count reports run on the oldest schema too; one file is about this report."""
    if ON_OLDEST_SCHEMA and request.path.name != "test_older_schema.py":
        monkeypatch.setattr("jsworker.worker.maintenance.watches.upgrade_advice", lambda _: None)


@pytest.fixture
async def nothing_is_left(database_url: str) -> AsyncIterator[None]:
    """Check at the end of the test that no task, no thread and no connection outlives it."""
    async with nothing_left(database_url):
        yield


@pytest.fixture
def fleet(settings: Settings, tmp_path: Path) -> Iterator[Fleet]:
    """Starts workers as processes of their own, which end with the test."""
    with fleet_of(settings, tmp_path) as running:
        yield running


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Rows]:
    opened = await open_rows(settings)
    yield opened
    await opened.connection.close()


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(settings.database_dsn().replace("postgresql://", "postgresql+psycopg://"))
    yield made
    await made.dispose()


@pytest.fixture
async def js(settings: Settings) -> AsyncIterator[JetStreamContext]:
    """JetStream over a connection of the test's own, for raw messages and the server's own figures."""
    connection = await nats.connect(settings.nats_url)
    yield connection.jetstream()
    await connection.close()


@pytest.fixture
async def start(settings: Settings) -> AsyncIterator[StartWorker]:
    """Starts workers; those that still run at the end of the test are closed."""
    started: list[Running] = []

    async def start_worker(
        *processors: JobProcessor[Any] | type[JobProcessor[Any]], with_settings: Settings | None = None
    ) -> Running:
        running = new_worker(*processors, settings=with_settings or settings)
        started.append(running)
        await running.worker.start()
        return running

    yield start_worker
    for running in reversed(started):
        await running.end()
