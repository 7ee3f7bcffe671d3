"""``worker.status``: what a worker does, told now and then while it does anything."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

INTERVAL_SECONDS = 0.2


async def told(running: Running, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until a status is told of which this holds, and return it."""

    async def found() -> dict[str, Any]:
        events = [event for event in running.events.of("worker.status") if holds(event)]
        assert events, running.events.of("worker.status")
        return events[0]

    return await eventually(found)


async def test_it_tells_what_runs_what_waits_and_what_was_done(
    start: StartWorker, client: JobClient, rows: Rows, make_settings: Callable[..., Settings]
) -> None:
    gate = Gate()

    async def process(job: Any) -> Any:
        await gate.process(job)
        if job.payload["fails"]:
            raise ValueError("as told")

    # For so long a job that was claimed ahead waits; handed back, it would count as done once more.
    patience = {"heartbeat_interval": 15.0}
    settings = make_settings(concurrency=1, status_interval=INTERVAL_SECONDS, **patience)
    running = await start(scripted(process, max_attempts=1), with_settings=settings)
    running.expects_short_runs(KIND)
    jobs = await client.enqueue_many(KIND, [{"fails": True}, {"fails": False}])
    first = await gate.met()
    seen = await told(running, lambda told: told["running"] == 1 and told["claimed_ahead"] == 1)
    assert (seen["done"], seen["oldest"]) == (0, str(first.id))
    assert seen["oldest_seconds"] >= 0
    gate.open()
    for job, status in zip(jobs, ("failed", "completed"), strict=True):
        await rows.becomes(job.id, status)
    await told(running, lambda told: told["running"] == 0 and told["done"] > 0)
    every = running.events.of("worker.status")
    assert sum(each["done"] for each in every) == 2
    assert sum(each.get("completed", 0) for each in every) == 1
    assert sum(each.get("failed", 0) for each in every) == 1
    assert every[-1]["oldest"] is None


@pytest.mark.parametrize("interval", [INTERVAL_SECONDS, None])
async def test_an_idle_worker_is_silent_and_so_is_one_that_was_told_to_be(
    start: StartWorker,
    client: JobClient,
    make_settings: Callable[..., Settings],
    interval: float | None,
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=make_settings(status_interval=interval))
    if interval is None:
        await client.enqueue(KIND, {})
        await gate.met()
    await asyncio.sleep(4 * INTERVAL_SECONDS)
    assert running.events.of("worker.status") == []
    gate.open()
