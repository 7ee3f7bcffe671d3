"""Looks that go unanswered keep no sweep from its work; timers of keys wait as long as they must."""

import asyncio
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import DatabaseUnavailable
from jsworker.ownership.transitions import looks
from jsworker.ownership.transitions.admission import WaitingKey
from jsworker.ownership.transitions.looks import TickFindings
from jsworker.worker.maintenance import throttled_scan
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


async def test_the_relay_runs_while_looks_for_everything_go_unanswered(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(scripted(echo))

    async def too_long(_: Any, __: Any, *, within: float | None = None) -> TickFindings:
        if within is None:
            await asyncio.sleep(0.1)  # a look that fails rests fifty times as long as it took
            raise DatabaseUnavailable("did not answer within 3 s")
        return TickFindings(to_promote=False, to_publish=False, limits={})

    monkeypatch.setattr(throttled_scan, "_QUICK_SECONDS", 0.02)
    relay = count_rounds(running.worker._components.relay)
    monkeypatch.setattr(looks, "due", too_long)
    await rounds_pass(relay, 3)


async def test_sweeps_are_woken_when_their_look_is_slow(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(scripted(echo))

    async def too_long(_: Any) -> Any:
        raise DatabaseUnavailable("did not answer within 3 s")

    monkeypatch.setattr(looks, "left_to_do", too_long)
    scans = count_rounds(running.worker._components.scan_looks)
    await rounds_pass(scans, 3)
    held = count_rounds(running.worker._components.held)
    await rounds_pass(held, 2)
    assert not running.events.of("worker.degraded")  # each sweep tells what it lacks


async def test_a_fast_rate_that_is_paused_is_not_looked_after_before_its_pause_ends(
    start: StartWorker,
) -> None:
    admissions = (await start(scripted(echo))).worker._components.admissions
    wait = admissions._wait_for(WaitingKey(KIND, "tenant-7", jobs=0, seconds=3600.0, step=0.001))
    assert wait is not None
    assert wait >= 3600.0


async def test_a_timer_that_fires_in_an_outage_keeps_no_later_one_from_being_set(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    worker = (await start(scripted(echo))).worker
    admissions = worker._components.admissions
    admissions.look_soon()
    worker._context.health.failed(DatabaseUnavailable("away"))
    await admissions.step()
    assert admissions._timer is None
    worker._context.health.answered()
