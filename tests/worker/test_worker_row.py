"""The row of a worker in the registry, as its heartbeat writes it."""

import os
from typing import Any

from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import echo, scripted
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
