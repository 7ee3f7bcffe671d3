"""How much is prefetched: what should start within a tenth of a second, by what has really ended."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jsworker.worker.pipeline import slots as module
from jsworker.worker.pipeline.in_flight import InFlight
from jsworker.worker.pipeline.slots import Slots

NORMAL = SimpleNamespace(priority=1)
KIND = cast("Any", SimpleNamespace(name="any", concurrency=10))


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "boottime", made)
    return made


@pytest.fixture
def slots(clock: Clock) -> Slots:
    return Slots(10, 1, InFlight())


def run_jobs(slots: Slots, clock: Clock, *, jobs: int, seconds: float) -> None:
    """Let jobs that take no time run one after the other, within so many seconds in all."""
    for number in range(jobs):
        slots.add(cast("Any", SimpleNamespace(id=number, kind=KIND, claimed_at=clock.now, claimed=NORMAL)))
        run = slots.next_run()
        assert run is not None
        slots.leave(run, 1e-4)
    clock.now += seconds


def test_nothing_is_prefetched_before_it_is_known_how_long_runs_take(slots: Slots) -> None:
    assert slots.room(KIND, claiming=0) == 10


def test_short_runs_alone_let_200_be_prefetched(slots: Slots, clock: Clock) -> None:
    run_jobs(slots, clock, jobs=100, seconds=0.1)
    assert slots.room(KIND, claiming=0) == 10 + 200


def test_a_tenth_of_what_has_ended_in_a_second_may_be_prefetched(slots: Slots, clock: Clock) -> None:
    run_jobs(slots, clock, jobs=10_000, seconds=0.5)
    assert slots.room(KIND, claiming=0) == 10 + 2_000
    run_jobs(slots, clock, jobs=100_000, seconds=0.5)
    assert slots.room(KIND, claiming=0) == 10 + 4_000


def test_a_process_that_is_starved_prefetches_no_more_than_others(slots: Slots, clock: Clock) -> None:
    """However short its runs are: what it claimed ahead would be handed back, again and again."""
    run_jobs(slots, clock, jobs=10_000, seconds=0.5)
    assert slots.room(KIND, claiming=0) == 10 + 2_000
    run_jobs(slots, clock, jobs=100, seconds=2.0)
    assert slots.room(KIND, claiming=0) == 10 + 200
