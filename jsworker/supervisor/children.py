"""The places of the children: when a dead child is started again, and what probes and metrics see of them."""

import asyncio
import shutil
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


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One place for a child.

    Attributes:
        was_ready: whether any child at this place has worked.
        ready: whether the present child works.
        quiet: whether it has announced that it may be silent now.
        silent_seconds: seconds since its last tick; 0 before the first tick and while it is ``quiet``.
        limit: seconds of silence after which the supervisor kills it; more while it starts.
        report_seconds: seconds since its last report; None if there is none.
        figures, figures_seconds: its figures, packed, and the seconds since it reported them or was started.
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
        deaths: the numbers of children that ended without a request to stop, by how they ended.
        now: the moment, in seconds of boot time.
        stalls: the numbers of runs that the supervisor itself has taken back, by the kind's label and whether
            a stall was counted.
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
    heartbeat_interval: float
    deaths_in_a_row: int = 0
    generation: int = 0
    child: Child | None = None
    restart: asyncio.TimerHandle | None = None
    was_ready: bool = False

    def restart_delay(self, lived: float, *, worked: bool) -> float:
        """Return the seconds to wait after a child that lived for ``lived`` seconds and was ready or not."""
        # A shorter heartbeat interval than the default shortens the back-off, too.
        scale = min(1.0, self.heartbeat_interval / _DEFAULT_HEARTBEAT)
        self.deaths_in_a_row = 1 if lived >= _LONG_LIFE_SECONDS * scale else self.deaths_in_a_row + 1
        if self.deaths_in_a_row == 1 and worked:
            return 0.0
        return _BACKOFF.delay(self.deaths_in_a_row - 1) * scale

    def view(self, now: float) -> PlaceView:
        """Return its state at ``now``, in seconds of boot time."""
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
    """Show the progress of the children in one line on the terminal, once a second until cancelled.

    ``look`` returns the numbers of runs that have ended and of running jobs; None if that is unknown.
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
            show_line(f"{ended:,} done, {rate:,.0f}/s{doing}"[: shutil.get_terminal_size().columns - 1])
            await asyncio.sleep(_LINE_SECONDS)
    finally:
        show_line("")
