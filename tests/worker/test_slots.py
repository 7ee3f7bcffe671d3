"""How much is prefetched: what should start within a fifth of a second, by what has really ended."""

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.worker.pipeline import slots as module
from jsworker.worker.pipeline.in_flight import InFlight
from jsworker.worker.pipeline.slots import Slots
from tests.support.clock import Clock
from tests.support.proxy import proxied
from tests.worker.processors import echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

KIND = cast("Any", SimpleNamespace(name="any", concurrency=10, is_isolated=False))
ALONE = cast("Any", SimpleNamespace(kind=KIND, priority=1, claiming=0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "boottime", made)
    return made


@pytest.fixture
def slots(clock: Clock) -> Slots:
    return Slots(10, 1, InFlight())


def run_of(kind: Any, clock: Clock, *, priority: int = 1, quarantined: bool = False) -> Any:
    claimed = SimpleNamespace(priority=priority)
    return SimpleNamespace(
        id=object(),
        kind=kind,
        claimed_at=clock.now,
        claimed=claimed,
        quarantined=quarantined,
        stop=None,
    )


def run_jobs(slots: Slots, clock: Clock, *, jobs: int, seconds: float) -> None:
    """Let jobs that take no time run one after the other, within so many seconds in all."""
    for _ in range(jobs):
        slots.add(run_of(KIND, clock))
        run = slots.next_run()
        assert run is not None
        slots.leave(run, 1e-4)
    clock.now += seconds


def test_nothing_is_prefetched_before_it_is_known_how_long_runs_take(slots: Slots) -> None:
    assert slots.room(ALONE) == 10


def test_short_runs_alone_let_200_be_prefetched(slots: Slots, clock: Clock) -> None:
    run_jobs(slots, clock, jobs=100, seconds=0.1)
    assert slots.room(ALONE) == 10 + 200


def test_a_fifth_of_what_has_ended_in_a_second_may_be_prefetched(slots: Slots, clock: Clock) -> None:
    run_jobs(slots, clock, jobs=5_000, seconds=0.5)
    assert slots.room(ALONE) == 10 + 2_000
    run_jobs(slots, clock, jobs=100_000, seconds=0.5)
    assert slots.room(ALONE) == 10 + 4_000


def test_a_fifth_of_a_second_shows_how_many_end(slots: Slots, clock: Clock) -> None:
    run_jobs(slots, clock, jobs=500, seconds=0.125)
    assert slots.room(ALONE) == 10 + 200
    run_jobs(slots, clock, jobs=500, seconds=0.125)
    assert slots.room(ALONE) == 10 + 800


def test_a_process_that_is_starved_prefetches_no_more_than_others(slots: Slots, clock: Clock) -> None:
    """However short its runs are: what it claimed ahead would be handed back, again and again."""
    run_jobs(slots, clock, jobs=5_000, seconds=0.5)
    assert slots.room(ALONE) == 10 + 2_000
    run_jobs(slots, clock, jobs=100, seconds=2.0)
    assert slots.room(ALONE) == 10 + 200


def leave_after(slots: Slots, clock: Clock, seconds: float) -> None:
    slots.add(run_of(KIND, clock))
    run = slots.next_run()
    assert run is not None
    slots.leave(run, seconds)


def test_where_servers_are_far_away_what_starts_later_is_prefetched_too(slots: Slots, clock: Clock) -> None:
    leave_after(slots, clock, 0.1)
    slots.note_claim(0.0)
    assert slots.room(ALONE) == 10 + 20
    far = Slots(10, 1, InFlight())
    leave_after(far, clock, 0.1)
    for seconds in (1.5, 0.3, 0.9, 0.3):  # the first one connects, another waits for locks
        far.note_claim(seconds)
    assert far.room(ALONE) == 10 + 80
    for _ in range(100):
        far.note_claim(20.0)
    assert far.room(ALONE) == 10 + 100  # a second's; what has waited for so long is handed back


def test_what_starts_in_turns_is_prefetched_half_a_second_before_at_most(clock: Clock) -> None:
    far = Slots(10, 4, InFlight())
    leave_after(far, clock, 0.1)
    far.note_claim(0.3)
    assert far.room(ALONE) == 10 + 50  # the last may wait for twice as long


class Lane:
    """A lane as the slots see it."""

    def __init__(self, slots: Slots, kind: Any, priority: int, *, has_more: bool = False) -> None:
        self.kind, self.priority = kind, priority
        self.claiming = 0
        self.has_more = has_more
        slots.open_lane(self)


def line_up(slots: Slots, clock: Clock, kind: Any, priority: int, count: int) -> None:
    for _ in range(count):
        slots.add(run_of(kind, clock, priority=priority))


def test_lanes_that_have_work_share_the_room_and_one_alone_has_all_of_it(slots: Slots) -> None:
    high, normal, low = (Lane(slots, KIND, priority, has_more=True) for priority in range(3))
    assert [slots.room(lane) for lane in (high, normal, low)] == [6, 3, 1]
    high.has_more = normal.has_more = False
    assert slots.room(low) == 10
    assert slots.room(high) >= 6  # what it would have of it: a request waits at the server


def test_one_free_slot_is_one_lanes(slots: Slots, clock: Clock) -> None:
    lanes = [Lane(slots, KIND, priority, has_more=True) for priority in range(3)]
    line_up(slots, clock, KIND, 1, 9)
    while slots.next_run() is not None:
        continue
    assert [slots.room(lane) for lane in lanes] == [1, 0, 0]
    assert [slots.awaits_turn(lane) for lane in lanes] == [False, True, True]
    assert [slots.gives_way(lane) for lane in lanes] == pytest.approx([0.0, 0.01, 0.02])
    # What has come after all, for it was asked for before, is taken while there is room.
    assert slots.takes_one(lanes[2])


def test_a_lane_has_its_place_behind_any_number_of_others(slots: Slots, clock: Clock) -> None:
    high, normal = Lane(slots, KIND, 0), Lane(slots, KIND, 1, has_more=True)
    run_jobs(slots, clock, jobs=100, seconds=0.1)
    line_up(slots, clock, KIND, 1, 400)
    assert slots.room(normal) <= 0
    assert slots.room(high) == 200 * 8 // 12
    line_up(slots, clock, KIND, 0, 1)
    begun = [slots.next_run() for _ in range(2)]
    assert 0 in [run.claimed.priority for run in begun if run is not None]


def test_a_kind_that_has_all_it_may_leaves_the_slots_to_lower_ones(slots: Slots, clock: Clock) -> None:
    one = cast("Any", SimpleNamespace(name="one", concurrency=1, is_isolated=False))
    Lane(slots, one, 0, has_more=True)
    normal = Lane(slots, KIND, 1, has_more=True)
    assert slots.room(normal) < 10
    line_up(slots, clock, one, 0, 1)
    assert slots.next_run() is not None
    assert slots.room(normal) == 9


def test_runs_that_wait_too_long_are_taken_from_every_lane(slots: Slots, clock: Clock) -> None:
    for priority in range(3):
        line_up(slots, clock, KIND, priority, 2)
    clock.now += 5.0
    line_up(slots, clock, KIND, 2, 1)
    assert len(slots.take_waiting(older_than=1.0)) == 6
    assert slots._in_line == [0, 0, 1, 0]
    assert slots.next_run() is not None
    assert slots.next_run() is None


def isolated(name: str) -> Any:
    return SimpleNamespace(name=name, concurrency=2, is_isolated=True)


def test_isolated_kinds_share_their_processes(clock: Clock) -> None:
    slots = Slots(10, 3, InFlight(), isolated_processes=2)
    one, other = isolated("one"), isolated("other")
    lanes = [Lane(slots, kind, 1) for kind in (one, other, KIND)]
    assert [slots.room(lane) for lane in lanes] == [2, 2, 10]
    lanes[0].claiming = 1
    assert slots.room(lanes[1]) == 1
    lanes[0].claiming = 0
    for kind in (one, other, one):
        slots.add(run_of(kind, clock))
    started = [slots.next_run(), slots.next_run()]
    assert None not in started
    assert slots.next_run() is None
    assert max(slots.room(lanes[1]), slots.room(lanes[0])) <= 0
    slots.add(run_of(KIND, clock))
    assert slots.next_run() is not None
    slots.leave(cast("Any", started[0]), 60.0)
    assert slots.next_run() is not None


def test_isolated_jobs_are_prefetched_by_what_the_isolated_processes_do(clock: Clock) -> None:
    slots = Slots(10, 3, InFlight(), isolated_processes=2)
    one, other = isolated("one"), isolated("other")
    lanes = [Lane(slots, kind, 1) for kind in (one, other, KIND)]
    for kind, seconds in ((one, 0.01), (other, 60.0), (KIND, 0.001)):
        slots.add(run_of(kind, clock))
        run = slots.next_run()
        assert run is not None
        slots.leave(run, seconds)
    slots.add(run_of(KIND, clock))
    assert slots.next_run() is not None  # short runs of others free no process
    assert slots.room(lanes[0]) == 2 + 40
    assert slots.room(lanes[1]) == 2


def in_quarantine(clock: Clock) -> tuple[Slots, list[Any], Lane, Lane]:
    """Return slots, the four runs of one kind that wait for quarantine there, and the lanes of two kinds."""
    in_flight = InFlight()
    slots = Slots(4, 2, in_flight)
    kind, other = (SimpleNamespace(name=name, concurrency=4, is_isolated=False) for name in ("one", "other"))
    lanes = Lane(slots, kind, 1), Lane(slots, other, 1)
    runs = [run_of(kind, clock, quarantined=True) for _ in range(4)]
    for number, run in enumerate(runs):
        in_flight.runs[UUID(int=number)] = run
        slots.add(run)
    return slots, runs, *lanes


def test_quarantined_runs_take_a_slot_one_at_a_time_and_room_from_their_kind_alone(clock: Clock) -> None:
    slots, runs, own, other = in_quarantine(clock)
    assert slots.next_run() == runs[0]
    assert slots.next_run() is None
    assert (slots.room(own), slots.room(other)) == (0, 3)
    beside = [run_of(other.kind, clock), run_of(own.kind, clock)]
    for run in beside:
        slots.add(run)
    assert [slots.next_run() for _ in range(3)] == [*beside, None]
    slots.note_started(runs[0])
    assert slots.next_run() == runs[1]
    slots.note_started(runs[0])  # its turn is long over
    slots.leave(runs[0], 60.0)
    assert slots.next_run() is None
    slots.leave(runs[1], 60.0)
    assert slots.next_run() == runs[2]


def test_quarantined_runs_and_others_take_turns_for_the_slots(clock: Clock) -> None:
    slots = Slots(1, 1, InFlight())
    for quarantined in (False,) * 3 + (True,) * 3:
        slots.add(run_of(KIND, clock, quarantined=quarantined))
    begun = []
    while (run := slots.next_run()) is not None:
        begun.append(run.quarantined)
        slots.leave(run, 60.0)
    assert begun == [True, False] * 3


def test_what_waits_for_quarantine_stays_while_a_process_starts(clock: Clock) -> None:
    slots, runs, _, other = in_quarantine(clock)
    assert slots.next_run() == runs[0]
    line_up(slots, clock, other.kind, 1, 3)
    clock.now += 5.0
    assert len(slots.take_waiting(older_than=1.0)) == 3
    assert slots.has_quarantined
    for run in runs[:2]:
        slots.add(run)
    assert slots.take_waiting(older_than=1.0) == [runs[1]]  # four may wait
    line_up(slots, clock, other.kind, 1, 3)
    while slots.next_run() is not None:
        continue
    slots.note_started(runs[0])
    assert slots.take_waiting(older_than=1.0) == [*runs[2:], *runs[:2]]  # all slots are taken
    assert not slots.has_quarantined
    slots.add(runs[1])
    slots.leave(runs[0], 60.0)
    assert slots.next_run() == runs[1]
    slots.add(runs[2])
    assert slots.take_waiting() == [runs[2]]  # the worker ends or is drained


def test_what_waits_for_quarantine_takes_no_isolated_process_from_other_kinds(clock: Clock) -> None:
    slots = Slots(10, 2, InFlight(), isolated_processes=2)
    one, other = isolated("one"), isolated("other")
    lanes = Lane(slots, one, 1), Lane(slots, other, 1)
    for _ in range(2):
        slots.add(run_of(one, clock, quarantined=True))
    assert slots.next_run() is not None
    assert [slots.room(lane) for lane in lanes] == [0, 1]


def test_nothing_is_prefetched_of_a_kind_of_which_much_waits_for_quarantine(
    slots: Slots, clock: Clock
) -> None:
    lane = Lane(slots, KIND, 1)
    run_jobs(slots, clock, jobs=10, seconds=0.01)
    for _ in range(4):
        slots.add(run_of(KIND, clock, quarantined=True))
    assert slots.room(lane) > 10
    slots.add(run_of(KIND, clock, quarantined=True))
    assert slots.room(lane) == 10 - 5


async def test_the_way_to_the_database_is_measured(
    client: JobClient, start: StartWorker, rows: Rows, settings: Settings, database_url: str
) -> None:
    async with proxied(database_url) as (proxy, url):
        slowly = {"database_url": url, "statement_timeout": 10.0, "heartbeat_interval": 15.0}
        running = await start(scripted(echo), with_settings=settings.model_copy(update=slowly))
        slots = running.worker._components.pipeline.slots
        assert slots.prefetch_seconds == 0.2
        proxy.slow_down(0.1)
        job = await client.enqueue("scripted", {})
        await rows.becomes(job.id, "completed")
        assert slots.prefetch_seconds >= 0.2 + 2 * 2 * 0.1
        proxy.restore()
        await running.end()
