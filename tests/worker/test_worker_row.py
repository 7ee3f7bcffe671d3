"""The row of a worker in the registry, as its heartbeat writes it."""

import os
from collections.abc import Callable
from typing import Any

from jsworker import JobClient
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker
from tests.worker.tied import tied

ROW = "SELECT supervisor_pid, memory_bytes, loop_lag_seconds FROM jsworker.workers"


async def test_a_worker_tells_its_memory_and_its_lag_with_each_heartbeat(
    rows: Rows, start: StartWorker
) -> None:
    await start(scripted(echo))
    await rows.query("UPDATE jsworker.workers SET memory_bytes = NULL, loop_lag_seconds = NULL")

    async def told() -> dict[str, Any]:
        [row] = await rows.query(ROW)
        assert row["memory_bytes"] is not None
        return row

    row = await eventually(told)
    assert row["supervisor_pid"] is None
    assert 2**20 < row["memory_bytes"] < 2**40
    assert 0 <= row["loop_lag_seconds"] < 600


async def test_a_child_names_its_supervisor(rows: Rows, settings: Settings) -> None:
    async with tied(scripted(echo), settings=settings):
        [row] = await rows.query(ROW)
        assert row["supervisor_pid"] == os.getppid()


async def test_that_it_drains_is_written_at_once_even_if_a_search_is_due(
    rows: Rows, client: JobClient, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    """The search for orphaned claims replaces the write of the row in every twelfth heartbeat."""
    slow = {
        "heartbeat_interval": 100.0,
        "crash_threshold": 300.0,
        "stale_threshold": 1000.0,
        "ack_wait": 5000.0,
    }
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=make_settings(**slow))
    await client.enqueue(KIND, {})
    await gate.met()
    running.worker._components.heartbeat._look_at = 0.0
    running.worker.stop()

    async def drains() -> None:
        assert await rows.value("SELECT state FROM jsworker.workers") == "draining"

    await eventually(drains)
    gate.open()
