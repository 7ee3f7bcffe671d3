"""Recovery that is switched off, by rule or wholly: what no rule gives free stays where it is."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.telemetry.metrics import Metrics
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.lives import Lives, ended_pid
from tests.worker.processors import echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import new_worker

HOST = "recovery-off"
VICTIMS = {"start": "gone", "crashed": "vanished", "stale": "silent"}
"""Whose job each rule gives free, and no other one does."""


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("recovery", ["off", "start", "crashed", "stale", "crashed, start"])
async def test_jobs_are_taken_back_by_the_rules_that_are_on(
    recovery: str, database: Database, rows: Rows, make_settings: Callable[..., Settings]
) -> None:
    settings = make_settings(hostname=HOST, recovery=recovery)
    lives = Lives(database, rows, settings)
    await lives.add("gone", pid=ended_pid())
    await lives.add("vanished", answers=True, job=False, hostname="another")
    lives.jobs["vanished"] = await lives.hold("vanished", silent_for=60, crash_after=0.9)
    lives.jobs["silent"] = await lives.hold("silent", silent_for=60, stale_after=1.0)
    taken = {victim for rule, victim in VICTIMS.items() if rule in recovery}

    running = new_worker(scripted(echo), settings=settings)
    registry = CollectorRegistry()
    Metrics(registry).watch(running.worker)
    await running.worker.start()
    try:

        async def taken_back() -> None:
            assert await lives.kept() == lives.jobs.keys() - taken

        await eventually(taken_back)
        await rounds_pass(count_rounds(running.worker._components.repairs), 5)
        await taken_back()
        [told] = running.events.of("recovery.off")
        assert set(told["rules"]) == {"supervisor", *VICTIMS} - {rule.strip() for rule in recovery.split(",")}
        assert f"JSWORKER_RECOVERY={recovery}" in told["reason"]
        for rule in ("supervisor", *VICTIMS):
            shown = registry.get_sample_value("jsworker_recovery_enabled", {"rule": rule})
            assert shown == (rule not in told["rules"])
    finally:
        await running.end()


async def test_nothing_is_told_where_recovery_is_on(settings: Settings) -> None:
    running = new_worker(scripted(echo), settings=settings)
    async with running.worker:
        assert running.events.of("recovery.off") == []
