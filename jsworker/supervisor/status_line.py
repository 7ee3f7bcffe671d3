"""What the children do, in one line on the supervisor's terminal, once a second."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from jsworker.core.clock import boottime
from jsworker.telemetry.logs import show_line

_SECONDS: Final = 1.0
_COLUMNS: Final = 80


@dataclass(frozen=True, slots=True)
class Work:
    """What the children have done and do.

    Attributes:
        ended: runs that have ended since the supervisor's start.
        running: jobs that are begun; None: that is not known.
    """

    ended: int
    running: int | None


class StatusLine:
    """Shown again every second, until another line is written."""

    def __init__(self, look: Callable[[], Work]) -> None:
        """Show what ``look`` returns, from ``start`` on."""
        self._look = look
        self._before = (boottime(), 0)
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Show it now, and then once a second."""
        self._next = asyncio.get_running_loop().call_later(_SECONDS, self.start)
        (then, ended), work, now = self._before, self._look(), boottime()
        self._before = (now, work.ended)
        show_line(in_words(work, (work.ended - ended) / max(now - then, _SECONDS))[: _columns() - 1])

    def stop(self) -> None:
        """Clear it."""
        if self._next is not None:
            self._next.cancel()
            show_line("")


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except OSError:  # it was closed
        return _COLUMNS


def in_words(work: Work, rate: float) -> str:
    """Return the line; ``rate`` is in runs a second."""
    running = "" if work.running is None else f", {work.running:,} running"
    if not work.running and not rate:
        running = ", waiting for jobs"
    return f"{work.ended:,} done, {rate:,.0f}/s{running}"
