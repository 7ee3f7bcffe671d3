"""What takes too long is told from another thread: a start that goes on, an event loop that stands still."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.worker import watchdog
from jsworker.worker.quiet_phases import QuietPhases
from tests.support.contexts import make_context
from tests.worker.processors import KIND, Scripted, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker, new_worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")

HERE = str(Path(__file__))
PATIENCE_SECONDS = 60.0


def block_until_told(heard: Recorder, name: str) -> None:
    """Keep the event loop until another thread has told of it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not heard.of(name) and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_a_loop_that_stands_still_in_an_application_is_told_with_its_stack(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    async def block(_: Job[Any]) -> list[str]:
        block_until_told(running.events, "worker.degraded")
        status = running.worker.status()
        assert status is not None
        return list(status.readiness.problems)

    running = await start(scripted(block), with_settings=make_settings(watchdog_timeout=3.0))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    [problem] = row["result"]
    assert problem.startswith("its event loop has not come round for ")
    [told] = running.events.of("worker.degraded")
    assert told["what"] == "event loop"
    assert f", at {HERE}, line " in told["reason"]
    assert any(frame.startswith(HERE) and frame.endswith("in block_until_told") for frame in told["stack"])
    assert await running.events.told("worker.restored") == [{"what": "event loop"}]
    status = running.worker.status()
    assert status is not None
    assert status.readiness.problems == []


@pytest.mark.parametrize("supervised", [True, False])
async def test_what_blocks_a_loop_is_told_long_before_the_time_out(
    database: Database, monkeypatch: pytest.MonkeyPatch, *, supervised: bool
) -> None:
    monkeypatch.setattr(watchdog, "_BLOCKED_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "_LONGEST_ROUND_SECONDS", 0.1)
    context = make_context(database)
    heard = Recorder()
    context.events.on("*", heard)
    watches = watchdog.Watchdog(context, QuietPhases(context))
    watches.start(supervised=supervised)
    try:
        await watches.step()
        block_until_told(heard, "loop.blocked")
    finally:
        await watches.stop()
    [told, *_] = heard.of("loop.blocked")
    assert told["place"].startswith(f"{HERE}, line ")
    assert heard.of("worker.degraded") == []


async def test_a_loop_that_stands_still_as_announced_is_not_told(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    async def block(job: Job[Any]) -> None:
        await job.quiet(60.0)
        time.sleep(2.0)  # noqa: ASYNC251 -- the fault itself

    running = await start(scripted(block), with_settings=make_settings(watchdog_timeout=0.2))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    # On a busy machine the loop stands still elsewhere, too.
    assert [told["reason"] for told in running.events.of("worker.degraded") if HERE in told["reason"]] == []


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_setup_that_goes_on_is_named_with_the_place_that_it_has_reached(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, *, blocks: bool
) -> None:
    monkeypatch.setattr(watchdog, "_SLOW_SECONDS", 0.3)

    async def load_model() -> None:
        if blocks:
            block_until_told(running.events, "setup.slow")
        else:
            await running.events.told("setup.slow", times=2)

    class Slow(Scripted):
        kind = "slow"

        async def setup(self) -> None:
            await load_model()

        async def process(self, job: Job[Any]) -> None: ...

    running = new_worker(scripted(echo), Slow(), settings=settings)
    async with running.worker:
        told = running.events.of("setup.slow")
    assert {fields["what"].split(" (")[0] for fields in told} == {"setup of kind slow"}
    assert "Slow" in told[0]["what"]
    assert told[0]["place"].startswith(HERE if blocks else str(Path(HERE).parents[1]))
    if not blocks:
        assert told[1]["seconds"] >= told[0]["seconds"]


async def test_a_step_that_is_soon_over_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_SLOW_SECONDS", 0.5)
    told: list[dict[str, object]] = []
    with watchdog.reported_while_slow(lambda **facts: told.append(facts), what="a step"):
        pass
    await asyncio.sleep(1.0)
    assert told == []
