"""A worker without work does not pay for what nobody uses: it looks, and sweeps what a look has found."""

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import TextClause

from jsworker import JobClient
from jsworker.ownership.pool import Pool
from jsworker.ownership.transitions import admission, expire, looks, priorities, publish, workflows
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

SWEEPS = {
    "held": admission.WAITING_KEYS,
    "expired": expire.EXPIRE,
    "lanes": priorities.LANES,
    "workflows": workflows.LEFT,
    "promote": publish.PROMOTE,
    "publish": publish.PUBLISH,
}
TICKS = 20


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count statements as they are sent."""
    counted: Counter[str] = Counter()
    execute = Pool.execute

    async def counting(self: Pool, statement: TextClause, *args: Any, **kwargs: Any) -> Any:
        counted[statement.text] += 1
        return await execute(self, statement, *args, **kwargs)

    monkeypatch.setattr(Pool, "execute", counting)
    return counted


async def test_an_idle_worker_runs_no_sweep_that_has_nothing_to_do(
    client: JobClient, rows: Rows, start: StartWorker, ran: Counter[str]
) -> None:
    running = await start(scripted(echo))
    components = running.worker._components
    done = await client.enqueue(KIND, {})
    await rows.becomes(done.id, "completed")
    await rounds_pass(count_rounds(components.scan_looks), 2)  # what its start has woken is over
    ran.clear()
    ticks, scans = count_rounds(components.looks), count_rounds(components.scan_looks)
    await rounds_pass(ticks, TICKS)
    await rounds_pass(scans, 3)
    assert {name: ran[sweep.text] for name, sweep in SWEEPS.items()} == dict.fromkeys(SWEEPS, 0)
    assert ran[looks.DUE.text] >= TICKS
    assert ran[looks.LEFT_TO_DO.text] >= 3
