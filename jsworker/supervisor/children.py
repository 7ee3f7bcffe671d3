"""The places of the children: who sits there now, and what became of those before."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jsworker.core.clock import boottime
from jsworker.supervisor.child_process import Child
from jsworker.supervisor.fleet_view import PlaceView, View
from jsworker.supervisor.restarts import Restarts


@dataclass(slots=True, eq=False)
class Place:
    """One of ``PROCESSES`` places.

    Attributes:
        number: from 1.
        restarts: when the next child may start here.
        generation: how many have been started here.
        child: the present one; None: it has ended, or was never started.
        restart: the timer of its successor.
        was_ready: whether any child at this place has worked.
    """

    number: int
    restarts: Restarts
    generation: int = 0
    child: Child | None = None
    restart: asyncio.TimerHandle | None = field(default=None)
    was_ready: bool = False


class Places:
    """All places, and how many children ended that were not told to."""

    def __init__(self, processes: int, *, heartbeat_interval: float) -> None:
        """Prepare so many places, empty at first."""
        self._all = [Place(number, Restarts(heartbeat_interval)) for number in range(1, processes + 1)]
        self._deaths: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Place]:
        return iter(self._all)

    def children(self) -> list[Child]:
        """Return the children that live, or have just ended."""
        return [place.child for place in self._all if place.child is not None]

    def note_ready(self, child: Child) -> None:
        """A child works."""
        self._all[child.number - 1].was_ready = True

    def note_death(self, how: str) -> None:
        """A child has ended that was not told to; ``how`` is one of ``view.DEATHS``."""
        self._deaths[how] += 1

    def view(self, *, stopping: bool, stalls: Mapping[tuple[str, bool], int]) -> View:
        """Return how everything is at this moment, with the stalls that ``view.View`` tells."""
        now = boottime()
        places = [_view(place, now) for place in self._all]
        return View(places, stopping, self._deaths, now, stalls)


def _view(place: Place, now: float) -> PlaceView:
    child = place.child
    if child is None:
        return PlaceView(place.number, was_ready=place.was_ready)
    return PlaceView(
        number=place.number,
        was_ready=place.was_ready,
        ready=child.ready and not child.stopped,
        quiet=child.silence.is_quiet(now),
        silent_seconds=child.silence.seconds,
        patience=child.silence.timeout,
        report_seconds=None if child.reported_at is None else now - child.reported_at,
        readiness=child.readiness,
        figures=child.figures,
        figures_seconds=now - child.figures_at,
    )
