"""What tests of the runtime share: rows, workers that end with the test."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from jsworker.processor import JobProcessor
from jsworker.settings import Settings
from tests.runtime.rows import Rows, open_rows
from tests.runtime.running import Running, StartWorker, new_worker


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Rows]:
    opened = await open_rows(settings)
    yield opened
    await opened.connection.close()


@pytest.fixture
async def start(settings: Settings) -> AsyncIterator[StartWorker]:
    """Starts workers; those that still run at the end of the test are closed."""
    started: list[Running] = []

    async def start_worker(*processors: JobProcessor[Any], with_settings: Settings | None = None) -> Running:
        running = new_worker(*processors, settings=with_settings or settings)
        started.append(running)
        await running.worker.start()
        return running

    yield start_worker
    for running in reversed(started):
        await running.end()
