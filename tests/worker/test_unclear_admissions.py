"""Claims beside an admission: what it finds by itself is adopted once, whatever else asks for it."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from jsworker import JobClient, Limit
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.priorities import HIGH
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import admission
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.claim import Taken
from jsworker.ownership.transitions.reset import look_for_late
from jsworker.worker.pipeline.intake import Consumer
from tests.support.polling import eventually
from tests.worker.lives import Lives
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


class Admissions:
    """Admissions that find held jobs by themselves: their answer comes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed = asyncio.Event()
        self.answered = asyncio.Event()
        self.named: list[UUID] = []
        self._admit = admission.admit
        monkeypatch.setattr(admission, "admit", self.admit)

    async def admit(self, *arguments: Any, ids: Sequence[UUID] = (), **named: Any) -> Taken:
        self.named += ids
        taken = await self._admit(*arguments, ids=ids, **named)
        if taken.claimed and not ids:
            self.committed.set()
            await self.answered.wait()
        return taken


@pytest.fixture
async def admissions(monkeypatch: pytest.MonkeyPatch) -> Admissions:
    return Admissions(monkeypatch)


async def one_runs_and_one_is_held(client: JobClient, gate: Gate, start: StartWorker) -> tuple[Running, UUID]:
    running = await start(scripted(gate.process, limit=Limit(1)))
    await client.enqueue(KIND, {})
    await gate.met()
    held = await client.enqueue(KIND, {})
    await running.events.told("job.held")
    return running, held.id


def lanes(running: Running) -> tuple[Consumer, Consumer]:
    running.worker._components._open_lane(KIND, HIGH)
    normal, high = running.worker._components.pipeline.consumers
    return normal, high


async def test_a_copy_in_another_lane_of_a_job_that_is_being_admitted(
    client: JobClient, rows: Rows, start: StartWorker, admissions: Admissions
) -> None:
    gate = Gate()
    running, held = await one_runs_and_one_is_held(client, gate, start)
    normal, high = lanes(running)
    gate.open()
    await admissions.committed.wait()
    admissions.named.clear()
    high.take(held)
    assert high.claiming == 1
    admissions.answered.set()
    await rows.becomes(held, "completed")
    await high.flush()
    assert (normal.claiming, high.claiming, high.put_off) == (0, 0, set())
    assert admissions.named == []
    assert (await rows.job(held))["fencing_token"] == 1


async def test_a_job_that_is_held_because_another_one_was_admitted_in_its_place(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    """As many begin as were asked for, and not the same ones: those are not being claimed any more."""
    running = await start(scripted(echo, limit=Limit(1)), with_settings=make_settings(scan_interval=14.0))
    first = await client.enqueue("elsewhere", {}, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = NULL, held_by = 'limit', held_at = now(), limit_key = '',"
        " queued_at = now() - interval '1 minute', kind = %s WHERE id = %s",
        KIND,
        first.id,
    )
    second = await client.enqueue(KIND, {})
    for job in (first, second):
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "unclear"])
async def test_a_job_is_admitted_while_a_claim_asks_why_it_was_refused(
    *,
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    admissions: Admissions,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    """Where the worker has not learned yet that the kind is limited: the look was under way before."""
    gate, look, looks = Gate(), claims.look_at_refused, asyncio.Event()
    running, held = await one_runs_and_one_is_held(client, gate, start)
    normal, high = lanes(running)

    async def look_slowly(*arguments: Any, **named: Any) -> Any:
        found = await look(*arguments, **named)
        looks.set()
        await rows.becomes(held, "completed")
        if fails:
            raise DatabaseUnavailable("no answer")
        return {held: found[held]._replace(status="queued")}  # as it may have been right before

    monkeypatch.setattr(claims, "look_at_refused", look_slowly)
    monkeypatch.setattr(Consumer, "_goes_by_admission", False)
    gate.open()
    await admissions.committed.wait()
    high.take(held)
    await looks.wait()
    admissions.answered.set()
    await high.flush()
    assert (normal.claiming, high.claiming, high.put_off) == (0, 0, set())
    assert (await rows.job(held))["fencing_token"] == 1


@pytest.mark.parametrize("is_limited", [False, True], ids=["not learned", "limited"])
async def test_nothing_else_of_a_kind_is_claimed_while_an_admission_is_under_way(
    *,
    database: Database,
    rows: Rows,
    make_settings: Callable[..., Settings],
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    is_limited: bool,
) -> None:
    """Its read-back would find what has just been claimed, and the claim's own answer would find it again."""
    asked: list[tuple[str, bool]] = []

    async def noted(name: str, ask: Any, *arguments: Any, **named: Any) -> Taken:
        asked.append((name, consumer.state.admitting.locked()))
        taken: Taken = await ask(*arguments, **named)
        return taken

    for name in ("claim", "claim_stale"):
        monkeypatch.setattr(claims, name, partial(noted, name, getattr(claims, name)))
    settings = make_settings(recovery="off")
    running = await start(scripted(echo, kind="elsewhere"), with_settings=settings)
    [consumer] = running.worker._components.pipeline.consumers
    consumer.state.is_limited = is_limited
    stale = await Lives(database, rows, settings).hold("gone", silent_for=60.0, stale_after=0.3)
    lateness = await look_for_late(database, heartbeat_interval=0.1, limit=10)
    running.worker._components.late.proven = {row.id: row for row in lateness.suspects}

    async def waits() -> None:
        assert consumer.state.admitting._waiters or asked

    async with consumer.state.admitting:
        consumer.take(stale)
        await eventually(waits)
        assert asked == []
    await rows.becomes(stale, "completed")
    assert asked == [("claim_stale", is_limited)]
