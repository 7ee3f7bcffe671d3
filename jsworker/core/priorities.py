"""Priorities: the three lanes of each kind, and whose turn it is when several have work."""

from collections.abc import Iterable
from typing import Any, Final, Literal

from jsworker.core.names import shown

Priority = Literal["high", "normal", "low"]

PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
"""Indexed by the number in the job's row: 0, 1, 2."""
HIGH, NORMAL, LOW = range(3)

WEIGHTS: Final = (8, 3, 1)
"""How many jobs of each priority begin in a round of 12 while jobs of all three wait."""
_STEPS: Final = tuple(24 // weight for weight in WEIGHTS)


def priority_number(priority: Any) -> int:
    """Return the number of a priority; raise ValueError if no priority has this name."""
    if isinstance(priority, str) and priority in PRIORITIES:
        return PRIORITIES.index(priority)
    raise ValueError(f"priority={shown(priority)} must be one of {', '.join(PRIORITIES)}")


class Turns:
    """Gives turns to lanes by their weights; a lane without work loses its turns, it does not save them."""

    def __init__(self) -> None:
        self._next = [0] * len(PRIORITIES)
        self._now = 0

    def take(self, lane: int) -> None:
        """Note that a lane has had a turn."""
        self._now = self._turn(lane)
        self._next[lane] = self._now + _STEPS[lane]

    def in_order(self, lanes: Iterable[int]) -> list[int]:
        """Return lanes that have work, the one whose turn it is first."""
        return sorted(lanes, key=lambda lane: (self._turn(lane), lane))

    def part(self, lane: int, turns: int, *, among: Iterable[int], ahead: Iterable[int]) -> int:
        """Return how many of the next ``turns`` are those of ``lane``.

        Args:
            lane: one of the lanes.
            turns: how many there are to be given.
            among: the lanes that have work.
            ahead: how many jobs of each lane, by its number, have a turn before these.
        """
        others = [other for other in {*among, lane} if other != lane]
        if not others or turns <= 0:
            return max(turns, 0)
        waiting = list(ahead)
        due = {each: self._turn(each) + _STEPS[each] * waiting[each] for each in (*others, lane)}
        part = 0
        rounds = sum(WEIGHTS[each] for each in due)
        if turns > 4 * rounds:  # many turns: the share is nearly exact, and cheaper than counting
            return max(1, turns * WEIGHTS[lane] // rounds)
        for _ in range(turns):
            first = min(due, key=lambda each: (due[each], each))
            due[first] += _STEPS[first]
            part += first == lane
        return part

    def _turn(self, lane: int) -> int:
        return max(self._next[lane], self._now)
