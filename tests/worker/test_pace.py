"""Searches that have become slow rest in between, and the relay goes on with what has become due lately."""

from uuid import UUID

import pytest

from jsworker import JobClient
from jsworker.worker.maintenance import throttled_scan as pace_module
from jsworker.worker.maintenance.relay import Relay
from jsworker.worker.maintenance.throttled_scan import ScanPace
from tests.support.clock import Clock
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.worker.rows import Rows


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace_module, "boottime", made)
    return made


def search(pace: ScanPace, clock: Clock, seconds: float) -> None:
    with pace.timed():
        clock.now += seconds


def failing_search(pace: ScanPace, clock: Clock, seconds: float) -> None:
    with pace.timed():
        clock.now += seconds
        raise OSError("gone")


def test_a_quick_search_is_due_at_once(clock: Clock) -> None:
    pace = ScanPace()
    assert pace.is_due
    search(pace, clock, 0.02)
    assert pace.is_due


def test_a_slow_search_rests_fifty_times_its_own_duration(clock: Clock) -> None:
    pace = ScanPace()
    search(pace, clock, 0.3)
    search(pace, clock, 0.2)
    clock.now += 9.9
    assert not pace.is_due
    clock.now += 0.2
    assert pace.is_due


def test_a_single_slow_search_is_no_reason_to_rest(clock: Clock) -> None:
    pace = ScanPace()
    for seconds in (0.01, 3.0, 0.01, 3.0):
        search(pace, clock, seconds)
        assert pace.is_due


def test_a_search_that_fails_rests_at_once(clock: Clock) -> None:
    pace = ScanPace()
    with pytest.raises(OSError, match="gone"):
        failing_search(pace, clock, 0.2)
    clock.now += 9.9
    assert not pace.is_due
    clock.now += 0.2
    assert pace.is_due


def test_a_search_that_found_all_it_could_take_is_due_at_once(clock: Clock) -> None:
    pace = ScanPace()
    search(pace, clock, 0.2)
    search(pace, clock, 0.2)
    pace.hurry()
    assert pace.is_due


@pytest.fixture
def relay(client: JobClient) -> Relay:
    assert client.publisher.stream is not None
    return Relay(make_context(client.database, stream=client.publisher.stream))


async def is_published(rows: Rows, job: UUID) -> None:
    async def marked() -> None:
        assert not (await rows.job(job))["needs_publish"]

    await eventually(marked)


async def test_a_resting_relay_takes_what_has_become_due_lately_and_the_rest_afterwards(
    client: JobClient, relay: Relay, rows: Rows, clock: Clock
) -> None:
    for pace in (relay._publishing, relay._promoting):
        search(pace, clock, 10.0)
        search(pace, clock, 10.0)
    old, new = [(await client.enqueue("elsewhere", {}, delay=3600.0)).id for _ in range(2)]
    await rows.query("UPDATE jsworker.jobs SET run_at = now() - interval '1 minute' WHERE id = %s", old)
    await rows.query("UPDATE jsworker.jobs SET run_at = now() - interval '1 second' WHERE id = %s", new)
    await relay.step()
    assert [(await rows.job(job))["status"] for job in (old, new)] == ["scheduled", "queued"]
    await is_published(rows, new)
    clock.now += 51.0
    await relay.step()
    assert (await rows.job(old))["status"] == "queued"
    await is_published(rows, old)
