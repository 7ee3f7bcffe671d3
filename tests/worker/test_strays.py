"""Orphaned claims are looked for when an answer may have been lost, and now and then anyway."""

import math
import time
from typing import Any

import pytest
from sqlalchemy import text

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import heartbeat, workers
from jsworker.worker.maintenance import throttled_scan
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

EVERY = 12
SLEEP = text("SELECT pg_sleep(60)")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A mark for each look."""
    taken: list[float] = []
    strays = heartbeat.orphaned_claims

    async def noted(*arguments: Any, **rest: Any) -> Any:
        taken.append(rest["older_than"])
        return await strays(*arguments, **rest)

    monkeypatch.setattr(heartbeat, "orphaned_claims", noted)
    return taken


async def test_heartbeats_look_for_them_rarely_while_every_answer_comes(
    start: StartWorker, looks: list[float], settings: Settings
) -> None:
    running = await start(scripted(echo))
    beats = count_rounds(running.worker._components.beats)
    looks.clear()
    began = time.monotonic()
    await rounds_pass(beats, EVERY)
    times = (beats[-1] - began) / (EVERY * settings.heartbeat_interval)  # one, unless the machine is busy
    assert len(looks) <= 1 + times

    async def looked() -> None:
        assert looks

    await eventually(looked)  # without a reason, sooner or later


async def test_a_doubt_outlives_the_rest_of_a_slow_search(start: StartWorker, looks: list[float]) -> None:
    running = await start(scripted(echo))
    heartbeat, beats = running.worker._components.heartbeat, count_rounds(running.worker._components.beats)
    heartbeat._look_at = math.inf
    await rounds_pass(beats, 1)  # one that had begun
    heartbeat._search._grow(DatabaseUnavailable("it took too long"))
    heartbeat._search._rested_at = math.inf
    looks.clear()
    heartbeat.look_for_orphaned_claims()
    heartbeat._doubted_at += 3600.0  # until the test ends the doubt
    await rounds_pass(beats, 2)
    assert looks == []
    heartbeat._doubted_at = -math.inf
    heartbeat._search.hurry()
    await rounds_pass(beats, 2)
    assert looks


@pytest.mark.parametrize("whose", ["everybody's", "the kind's own"])
async def test_a_look_that_took_too_long_is_made_again_before_the_jobs_are_stale(
    start: StartWorker,
    settings: Settings,
    looks: list[float],
    whose: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(throttled_scan, "_QUICK_SECONDS", 0.02)
    threshold = 20.0
    attributes: dict[str, Any] = {"stale_threshold": threshold} if whose == "the kind's own" else {}
    own = scripted(echo, **attributes)
    everybodys = {"stale_threshold": threshold if whose == "everybody's" else 600.0, "ack_wait": 900.0}
    times = everybodys | {"watchdog_timeout": 15.0}
    running = await start(own, with_settings=settings.model_copy(update=times))
    heartbeat, database = running.worker._components.heartbeat, running.worker._database
    heartbeat._look_at = math.inf
    heartbeat._search._seconds = heartbeat._search._least = 0.25
    assert await heartbeat._search.make(lambda seconds: database.run(SLEEP, seconds=seconds)) is None
    assert heartbeat._search.must_rest
    assert heartbeat._search._rested_at <= boottime() + threshold / 4
    looks.clear()
    heartbeat.look_for_orphaned_claims()
    heartbeat._doubted_at += 3600.0  # the doubt lasts as long as the test
    heartbeat._search._rested_at = -math.inf  # it has rested

    async def looked() -> None:
        assert looks

    await eventually(looked)


async def test_a_heartbeat_sends_two_statements_also_when_it_looks(
    start: StartWorker, looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(scripted(echo))
    beats, heartbeat, seen = (
        running.worker._components.beats,
        running.worker._components.heartbeat,
        workers.seen,
    )
    step = beats._step
    notes: list[str] = []
    sent: list[tuple[int, int]] = []

    async def noted(*arguments: Any, **rest: Any) -> None:
        notes.append(rest["state"])
        await seen(*arguments, **rest)

    async def counted() -> None:
        notes.clear()
        looks.clear()
        await step()
        if not heartbeat._is_doubtful():
            sent.append((len(notes), len(looks)))

    async def both_sent() -> None:
        assert set(sent) == {(1, 0), (0, 1)}

    monkeypatch.setattr(workers, "seen", noted)
    monkeypatch.setattr(beats, "_step", counted)
    await eventually(both_sent)
    await rounds_pass(count_rounds(beats), EVERY)
    await both_sent()


async def test_and_each_time_after_an_answer_was_lost(start: StartWorker, looks: list[float]) -> None:
    running = await start(scripted(echo))
    health = running.worker._context.health
    health.failed(DatabaseUnavailable("lost"))
    health.answered()
    assert running.worker._components.heartbeat._is_doubtful()
    health._failed_at += 3600.0  # the doubt lasts as long as the test
    beats = count_rounds(running.worker._components.beats)
    looks.clear()
    await rounds_pass(beats, 4)
    assert len(looks) >= 3


async def test_and_again_at_once_while_somebody_locks_the_row(
    client: JobClient, rows: Rows, start: StartWorker, looks: list[float]
) -> None:
    running = await start(scripted(echo))
    heartbeat, beats = running.worker._components.heartbeat, count_rounds(running.worker._components.beats)

    async def no_longer_doubts() -> None:
        assert not heartbeat._is_doubtful()

    await eventually(no_longer_doubts)
    await rounds_pass(beats, 1)
    heartbeat._look_at = math.inf  # a look would take the row back before it is locked
    job = await client.enqueue(KIND, {}, delay=3600.0)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'processing', worker_id = %s, fencing_token = 1, attempts = 1, "
        "max_attempts = 5, max_stalls = 3, claimed_at = clock_timestamp() - interval '1 minute', "
        "last_activity_at = clock_timestamp() WHERE id = %s",
        running.worker.id,
        job.id,
    )
    async with rows.connection.transaction():
        await rows.query("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", job.id)
        heartbeat._look_at = -math.inf  # the routine look, and no other comes
        await rounds_pass(beats, 2)
        heartbeat._look_at = math.inf
        looks.clear()

        async def looked() -> None:
            assert looks

        await eventually(looked)
    await rows.becomes(job.id, "completed")
