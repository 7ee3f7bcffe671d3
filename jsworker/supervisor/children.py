"""The places of the children: when a dead one is started again, and how all of them look from outside."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.processor import Backoff
from jsworker.supervisor.child_process import Child, Death
from jsworker.telemetry.logs import show_line
from jsworker.telemetry.worker_status import Readiness

_BACKOFF: Final = Backoff(first=0.5, longest=30.0)
_LONG_LIFE_SECONDS: Final = 60.0
_DEFAULT_HEARTBEAT: Final = 5.0
_LINE_SECONDS: Final = 1.0
_COLUMNS: Final = 80


class RestartBackoff:
    """When a dead child is started again: at once the first time, ever later after further deaths in a row.

    A fleet with quicker heartbeats than usual restarts quicker too.
    """

    def __init__(self, heartbeat_interval: float) -> None:
        self._scale = min(1.0, heartbeat_interval / _DEFAULT_HEARTBEAT)
        self._in_a_row = 0

    def delay_after(self, lived: float, *, worked: bool) -> float:
        """Return the seconds to wait after a child that lived for so many, and has worked or has not."""
        if lived >= _LONG_LIFE_SECONDS * self._scale:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row == 1 and worked:
            return 0.0
        return _BACKOFF.delay(self._in_a_row - 1) * self._scale


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One place for a child.

    Attributes:
        was_ready: whether any child at this place has worked; ``ready``: whether the present one does.
        quiet: whether it has announced that its event loop is silent now.
        silent_seconds: since its last tick; 0 before the first, and while it is quiet.
        limit: seconds of silence after which the supervisor kills it; more while it starts.
        report_seconds: since its last report; None: there is none.
        readiness, figures: of its last report, the figures packed.
        figures_seconds: since it reported them, or since its start.
    """

    number: int
    was_ready: bool
    ready: bool = False
    quiet: bool = False
    silent_seconds: float = 0.0
    limit: float = 0.0
    report_seconds: float | None = None
    readiness: Readiness | None = None
    figures: str = ""
    figures_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """The supervisor at one moment of boot time.

    Attributes:
        deaths: how many children ended without a request to stop, by how they did.
        stalls: runs that the supervisor itself has taken back, by their kind's label and whether it counted.
    """

    places: Sequence[PlaceView]
    stopping: bool
    deaths: Mapping[Death, int]
    now: float
    stalls: Mapping[tuple[str, bool], int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Place:
    """One of ``PROCESSES`` places, numbered from 1, with its present child and the timer of the next one."""

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


async def show_work(look: Callable[[], tuple[int, int | None]]) -> None:
    """Show in one line on the terminal, once a second until cancelled, what the children do.

    ``look`` returns how many runs have ended, and how many jobs are begun; None: that is not known.
    """
    then, ended_then = boottime(), 0
    try:
        while True:
            now, (ended, running) = boottime(), look()
            rate = (ended - ended_then) / max(now - then, _LINE_SECONDS)
            then, ended_then = now, ended
            doing = "" if running is None else f", {running:,} running"
            if not running and not rate:
                doing = ", waiting for jobs"
            show_line(f"{ended:,} done, {rate:,.0f}/s{doing}"[: _columns() - 1])
            await asyncio.sleep(_LINE_SECONDS)
    finally:
        show_line("")


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except OSError:  # it was closed
        return _COLUMNS
