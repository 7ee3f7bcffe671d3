"""The supervisor and its children as seen from outside: by probes, metrics and on a terminal."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from jsworker.core.clock import boottime
from jsworker.telemetry.logs import show_line

HUNG: Final = "hung"
ASKED_FOR_KILL: Final = "condemned"
KILLED: Final = "killed"
EXITED: Final = "exited"
DEATHS: Final = (HUNG, ASKED_FOR_KILL, KILLED, EXITED)
"""How a child may end without a request to stop: its event loop hung; a run ignored its stop, so that
the child asked to be killed; a signal of another process; by itself."""

_LINE_SECONDS: Final = 1.0
_COLUMNS: Final = 80


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One place for a child.

    Attributes:
        number: from 1.
        was_ready: whether any child at this place has worked.
        ready: whether the present one works; False: there is none, or it starts.
        quiet: whether it has announced that its event loop is silent now.
        silent_seconds: since its last tick; 0 before the first, and while it is quiet.
        limit: seconds of silence after which the supervisor kills it; more while it starts.
        report_seconds: since its last report; None: there is none.
        readiness: of its last report, as ``telemetry.figures`` writes it; None: there is none.
        figures: its packed figures; empty: it has not reported any.
        figures_seconds: since it reported them, or since its start.
    """

    number: int
    was_ready: bool
    ready: bool = False
    quiet: bool = False
    silent_seconds: float = 0.0
    limit: float = 0.0
    report_seconds: float | None = None
    readiness: str | None = None
    figures: str = ""
    figures_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """The supervisor at one moment.

    Attributes:
        places: of all children that there should be.
        stopping: whether it was asked to stop.
        deaths: how many children ended without a request to stop, by ``DEATHS``.
        now: boot time.
        stalls: runs that the supervisor itself has taken back, by their kind's label and whether it counted.
    """

    places: Sequence[PlaceView]
    stopping: bool
    deaths: Mapping[str, int]
    now: float
    stalls: Mapping[tuple[str, bool], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetWork:
    """What the children have done and do.

    Attributes:
        ended: runs that have ended since the supervisor's start.
        running: jobs that are begun; None: that is not known.
    """

    ended: int
    running: int | None


class StatusLine:
    """What the children do, in one line on the supervisor's terminal, once a second."""

    def __init__(self, look: Callable[[], FleetWork]) -> None:
        """Show what ``look`` returns, from ``start`` on."""
        self._look = look
        self._before = (boottime(), 0)
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Show it now, and then once a second."""
        self._next = asyncio.get_running_loop().call_later(_LINE_SECONDS, self.start)
        (then, ended), work, now = self._before, self._look(), boottime()
        self._before = (now, work.ended)
        show_line(in_words(work, (work.ended - ended) / max(now - then, _LINE_SECONDS))[: _columns() - 1])

    def stop(self) -> None:
        """Clear it."""
        if self._next is not None:
            self._next.cancel()
            show_line("")


def in_words(work: FleetWork, rate: float) -> str:
    """Return the line; ``rate`` is in runs a second."""
    running = "" if work.running is None else f", {work.running:,} running"
    if not work.running and not rate:
        running = ", waiting for jobs"
    return f"{work.ended:,} done, {rate:,.0f}/s{running}"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except OSError:  # it was closed
        return _COLUMNS
