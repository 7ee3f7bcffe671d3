"""The memory behind rules 1 and 3: what a look proves, what the brake holds, what two witnesses must be."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from jsworker.ownership.transitions.reset import Lateness, Suspect
from jsworker.stream.liveness import Answer
from jsworker.worker.recovery.sweeper import BELIEVED_SECONDS, LateRows, Proof

SCAN = 1.0
STALE_AFTER = 9.0
THIRD = STALE_AFTER / 3
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)

ALIVE, GONE, UNKNOWN = Answer.ALIVE, Answer.NO_RESPONDERS, Answer.UNKNOWN


def late_row(owner: str = "a", number: int = 1) -> Suspect:
    """Return a row beyond both of its thresholds."""
    return Suspect(
        id=UUID(int=number),
        kind="late",
        worker_id=owner,
        fencing_token=1,
        last_activity_at=BEGAN,
        stale_after=STALE_AFTER,
        stale=True,
        crash_after=3.0,
        crashed=True,
        answers=True,
    )


def rows_of(owners: str) -> list[Suspect]:
    """Return a late row of each owner."""
    return [late_row(owner, number) for number, owner in enumerate(owners)]


class Watch:
    """Late rows as a sweeper would look at them."""

    def __init__(self) -> None:
        self.late = LateRows(scan_interval=SCAN)

    def look(self, *rows: Suspect, at: float, owners: int = 1) -> Proof:
        late_owners = len({row.worker_id for row in rows})
        return self.late.look(Lateness(list(rows), owners, late_owners, database_up_for=1e6), now=at)

    def stale(self, *rows: Suspect, at: float, owners: int = 1) -> set[str]:
        return {row.worker_id for row in self.look(*rows, at=at, owners=owners).stale}

    def asks(self, answer: Answer | None, *, at: float, row: Suspect | None = None) -> bool:
        """Look and ask as one scan does; tell whether the row is proven to be of a crashed owner."""
        row = row or late_row()
        self.look(row, at=at)
        self.late.witnessed([row], {} if answer is None else {row.worker_id: answer}, now=at)
        return self.late.crashed([row]) == [row]


@pytest.fixture
def watch() -> Watch:
    return Watch()


# --- rule 1 ---


def test_the_first_sighting_proves_nothing(watch: Watch) -> None:
    row = replace(late_row(), last_activity_at=BEGAN - timedelta(days=1))
    assert watch.look(row, at=1e6) == Proof([], held=0, braked=False)
    assert watch.late.proven == {}


@pytest.mark.parametrize(("seconds", "proven"), [(0.0, False), (THIRD - 0.01, False), (THIRD, True)])
def test_a_row_is_watched_for_a_third_of_its_threshold(
    watch: Watch,
    seconds: float,
    proven: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    watch.look(late_row(), at=100.0)
    assert watch.look(late_row(), at=100.0 + seconds).stale == ([late_row()] if proven else [])
    assert set(watch.late.proven) == ({late_row().id} if proven else set())


def test_the_watch_may_begin_before_the_threshold_but_must_end_behind_it(watch: Watch) -> None:
    not_yet = replace(late_row(), stale=False)
    for at in (0.0, THIRD, 2 * THIRD):
        assert watch.look(not_yet, at=at).stale == []
    assert watch.look(late_row(), at=2 * THIRD + 0.1).stale == [late_row()]


@pytest.mark.parametrize(
    "moved",
    [{"last_activity_at": BEGAN + timedelta(microseconds=1)}, {"fencing_token": 2}],
    ids=["renewed", "claimed anew"],
)
def test_a_row_that_moved_is_watched_anew(watch: Watch, moved: dict[str, object]) -> None:
    row = replace(late_row(), **moved)  # type: ignore[arg-type] # whichever field it is
    watch.look(late_row(), at=0.0)
    assert watch.look(row, at=THIRD).stale == []
    assert watch.look(row, at=2 * THIRD - 0.01).stale == []
    assert watch.look(row, at=2 * THIRD).stale == [row]


def test_a_row_that_was_missing_once_is_watched_anew(watch: Watch) -> None:
    watch.look(late_row(), at=0.0)
    watch.look(at=1.0)
    assert watch.look(late_row(), at=THIRD).stale == []


def test_a_deaf_worker_forgets_what_it_saw(watch: Watch) -> None:
    watch.look(late_row(), at=0.0)
    assert watch.look(late_row(), at=THIRD).stale
    watch.late.forget()
    assert watch.late.proven == {}
    assert watch.look(late_row(), at=2 * THIRD).stale == []


def test_what_was_decided_is_claimed_by_nobody(watch: Watch) -> None:
    one, other = late_row(number=1), late_row(number=2)
    watch.look(one, other, at=0.0)
    watch.look(one, other, at=THIRD)
    watch.late.taken_back([one.id, UUID(int=77)])
    assert watch.late.proven == {other.id: other}


def test_a_row_without_a_stale_threshold_is_never_stale(watch: Watch) -> None:
    never = replace(late_row(), stale_after=None)
    for at in (0.0, 1e3, 1e6):
        assert watch.look(never, at=at) == Proof([], held=0, braked=False)


# --- the brake ---


@pytest.mark.parametrize(
    ("late", "owners", "held"),
    [
        ("ab", 3, 2),
        ("abc", 3, 3),
        ("abc", 5, 3),
        ("a", 3, 0),  # a death
        ("ab", 4, 0),  # half is not more than half
        ("ab", 2, 0),  # of two, nobody can tell
        ("a", 1, 0),
        ("aaab", 4, 0),  # owners count, not their rows
    ],
)
def test_the_brake_holds_when_more_than_half_of_three_owners_turn_stale(
    watch: Watch, late: str, owners: int, held: int
) -> None:
    rows = rows_of(late)
    watch.look(*rows, at=0.0, owners=owners)
    proof = watch.look(*rows, at=THIRD, owners=owners)
    assert proof.held == held
    assert {row.worker_id for row in proof.stale} == (set() if held else set(late))
    assert not proof.braked


def test_what_is_held_is_released_after_one_more_threshold_as_a_mass_event(watch: Watch) -> None:
    rows = rows_of("abc")
    watch.look(*rows, at=0.0, owners=3)
    assert watch.look(*rows, at=THIRD, owners=3).held == 3
    assert watch.late.proven == {}
    still_held = watch.look(*rows, at=THIRD + STALE_AFTER - 0.01, owners=3)
    assert still_held == Proof([], held=0, braked=False)  # told once
    released = watch.look(*rows, at=THIRD + STALE_AFTER, owners=3)
    assert (released.stale, released.held, released.braked) == (rows, 0, True)
    assert set(watch.late.proven) == {row.id for row in rows}


def test_an_owner_that_comes_back_while_it_is_held_keeps_its_jobs(watch: Watch) -> None:
    one, *others = rows_of("abc")
    watch.look(one, *others, at=0.0, owners=3)
    watch.look(one, *others, at=THIRD, owners=3)
    back = replace(one, last_activity_at=BEGAN + timedelta(seconds=8), stale=False)
    assert watch.stale(back, *others, at=THIRD + STALE_AFTER, owners=3) == {"b", "c"}


def test_whoever_turns_stale_a_scan_later_belongs_to_the_same_event(watch: Watch) -> None:
    held, later = rows_of("abcd"), late_row("z", 99)
    watch.look(*held, at=0.0, owners=6)
    assert watch.look(*held, later, at=THIRD, owners=6).held == 4
    proof = watch.look(*held, later, at=2 * THIRD, owners=6)
    assert (proof.stale, proof.held) == ([], 1)


def test_a_death_beside_few_that_are_late_is_not_held(watch: Watch) -> None:
    late, alone = rows_of("ab"), late_row("z", 99)
    watch.look(*late, alone, at=0.0, owners=6)
    proof = watch.look(*late, alone, at=THIRD, owners=6)
    assert ({row.worker_id for row in proof.stale}, proof.held) == ({"a", "b", "z"}, 0)


# --- rule 3 ---


@pytest.mark.parametrize(
    ("answers", "crashed"),
    [
        ([(0.0, GONE)], False),
        ([(0.0, GONE), (SCAN, GONE)], True),
        ([(0.0, GONE), (SCAN - 0.01, GONE)], False),
        ([(0.0, GONE), (SCAN / 2, GONE), (SCAN, GONE)], True),
        ([(0.0, GONE), (SCAN, ALIVE)], False),
        ([(0.0, GONE), (SCAN, ALIVE), (2 * SCAN, GONE)], False),
        ([(0.0, GONE), (SCAN, ALIVE), (2 * SCAN, GONE), (3 * SCAN, GONE)], True),
        ([(0.0, GONE), (SCAN, GONE), (2 * SCAN, ALIVE)], False),
        ([(0.0, GONE), (SCAN, UNKNOWN), (2 * SCAN, GONE)], True),
        ([(0.0, GONE), (SCAN, None), (2 * SCAN, GONE)], True),
        ([(0.0, UNKNOWN), (SCAN, UNKNOWN), (2 * SCAN, UNKNOWN)], False),
        ([(0.0, UNKNOWN), (SCAN, GONE)], False),
        ([(0.0, None), (SCAN, None)], False),
    ],
    ids=lambda value: str([each[1] and each[1].name for each in value]) if isinstance(value, list) else "",
)
def test_two_witnesses_a_scan_apart_prove_a_crash(
    watch: Watch,
    answers: list[tuple[float, Answer | None]],
    crashed: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    *_, proven = [watch.asks(answer, at=at) for at, answer in answers]
    assert proven is crashed


def test_asking_may_begin_before_the_crash_threshold(watch: Watch) -> None:
    early = replace(late_row(), crashed=False)
    assert not watch.asks(GONE, at=0.0, row=early)
    assert not watch.asks(GONE, at=SCAN, row=early)
    watch.look(late_row(), at=SCAN + 0.1)
    assert watch.late.crashed([late_row()]) == [late_row()]


def test_a_row_that_moved_between_two_witnesses_needs_two_others(watch: Watch) -> None:
    moved = replace(late_row(), last_activity_at=BEGAN + timedelta(seconds=1))
    assert not watch.asks(GONE, at=0.0)
    assert not watch.asks(GONE, at=SCAN, row=moved)
    assert watch.asks(GONE, at=2 * SCAN, row=moved)


def test_a_deaf_worker_forgets_what_it_heard(watch: Watch) -> None:
    watch.asks(GONE, at=0.0)
    watch.late.forget()
    assert not watch.asks(GONE, at=SCAN)
    assert watch.asks(GONE, at=2 * SCAN)


@pytest.mark.parametrize("answer", [ALIVE, UNKNOWN])
def test_an_answer_stands_for_heartbeats_for_a_day_beyond_the_crash_threshold(
    watch: Watch, answer: Answer
) -> None:
    early = replace(late_row(), crashed=False)

    def is_too_long(row: Suspect, *, at: float) -> bool:
        assert not watch.asks(answer, at=at, row=row)
        return watch.late.silent_for_too_long([row], now=at) == [row]

    assert not is_too_long(early, at=0.0)
    assert not is_too_long(early, at=BELIEVED_SECONDS)  # in a quiet phase, say
    for at in (BELIEVED_SECONDS + 1, 2 * BELIEVED_SECONDS + 0.9):
        assert not is_too_long(late_row(), at=at)
    assert is_too_long(late_row(), at=2 * BELIEVED_SECONDS + 1)
    assert not is_too_long(replace(late_row(), fencing_token=2), at=2 * BELIEVED_SECONDS + 2)
