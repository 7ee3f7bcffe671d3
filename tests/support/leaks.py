"""What a test must not leave behind: tasks, threads, connections."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg

from tests.support.polling import eventually

_CONNECTIONS = (
    "SELECT pid, application_name, state, clock_timestamp() - backend_start, left(query, 100)"
    " FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)

_LASTING = ("asyncio_", "jsworker-child-starter")
"""The event loop's own threads (name resolution), and the one from which tests restart servers."""


@asynccontextmanager
async def nothing_left(database_url: str) -> AsyncIterator[None]:
    """Check after the block that no task, no thread and no connection to the database outlived it."""
    threads = set(threading.enumerate())
    yield

    async def gone() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, f"tasks left: {tasks}"
        left = [each for each in set(threading.enumerate()) - threads if not each.name.startswith(_LASTING)]
        assert not left, f"threads left: {left}"
        with psycopg.connect(database_url, autocommit=True) as connection:
            connections = connection.execute(_CONNECTIONS).fetchall()
        assert not connections, f"connections left: {connections}"

    await eventually(gone)
