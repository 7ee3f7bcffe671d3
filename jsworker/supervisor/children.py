"""The places of the children: the present one of each, and when a dead one is started again."""

import asyncio
import random
from dataclasses import dataclass
from typing import Final

from jsworker.supervisor.child_process import Child
from jsworker.supervisor.fleet_view import PlaceView

_FIRST_SECONDS: Final = 0.5
_LONGEST_SECONDS: Final = 30.0
_LONG_LIFE_SECONDS: Final = 60.0
_DEFAULT_HEARTBEAT: Final = 5.0
_JITTER: Final = 0.2


class RestartBackoff:
    """When a dead child is started again: at once the first time, ever later after further deaths in a row.

    A fleet with quicker heartbeats than usual restarts quicker too.
    """

    def __init__(self, heartbeat_interval: float) -> None:
        """Begin without a death.

        Args:
            heartbeat_interval: seconds.
        """
        self._scale = min(1.0, heartbeat_interval / _DEFAULT_HEARTBEAT)
        self._in_a_row = 0

    def delay_after(self, lived: float, *, worked: bool) -> float:
        """Return the seconds to wait after a child that lived for so many, and has worked or has not."""
        if lived >= _LONG_LIFE_SECONDS * self._scale:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row == 1 and worked:
            return 0.0
        delay: float = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(max(0, self._in_a_row - 2), 10))
        return delay * self._scale * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 -- spreads load, hides nothing


@dataclass(slots=True, eq=False)
class Place:
    """One of ``PROCESSES`` places.

    Attributes:
        number: from 1.
        backoff: when the next child may start here.
        generation: how many have been started here.
        child: the present one; None: it has ended, or was never started.
        restart: the timer of its successor.
        was_ready: whether any child at this place has worked.
    """

    number: int
    backoff: RestartBackoff
    generation: int = 0
    child: Child | None = None
    restart: asyncio.TimerHandle | None = None
    was_ready: bool = False

    def view(self, now: float) -> PlaceView:
        """Return how it is at this moment of boot time."""
        child = self.child
        if child is None:
            return PlaceView(self.number, was_ready=self.was_ready)
        return PlaceView(
            number=self.number,
            was_ready=self.was_ready,
            ready=child.ready and not child.stopped,
            quiet=child.silence.is_quiet(now),
            silent_seconds=child.silence.seconds,
            limit=child.silence.timeout,
            report_seconds=None if child.reported_at is None else now - child.reported_at,
            readiness=child.readiness,
            figures=child.figures,
            figures_seconds=now - child.figures_at,
        )
