"""Expiry: cancels jobs that did not begin in time, and deletes windows of unique keys that have ended.

Any worker does it. Nothing depends on it: CLAIM refuses such jobs, and an enqueue replaces such windows.
"""

from collections import Counter
from typing import Final

from jsworker.ownership.transitions.enqueue_terms import FIRST_WINDOW, forget_windows
from jsworker.ownership.transitions.expire import expire
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ScanPace

_BATCH: Final = 500
_WINDOWS: Final = 2000
"""The number of ended windows to look at together: those of jobs that still wait stay."""
WINDOWS_SECONDS: Final = 60.0
"""The longest time between two steps: no event announces windows that have ended."""


class Expiry:
    """Cancels expired jobs until a batch is not full; the next round finds the jobs that one leaves."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._pace = ScanPace()
        self._behind = FIRST_WINDOW

    async def step(self) -> None:
        """Look once, unless the database does not answer or the rest after a slow look lasts."""
        if not self._context.health.up or not self._pace.is_due:
            return
        with self._context.noting("expiry"), self._pace.timed():
            expired = None
            while expired is None or len(expired) == _BATCH:
                expired = await expire(
                    self._context.database, limit=_BATCH, refused_rows=self._context.refused_rows
                )
                for kind, jobs in Counter(row.kind for row in expired).items():
                    self._context.events.emit("jobs.expired", kind=kind, jobs=jobs)
            await self._forget_windows()

    async def _forget_windows(self) -> None:
        """Look at a page, and at the next one if some of it was deleted; the next round goes on behind it."""
        forgotten = None
        while forgotten is None or (forgotten and self._behind != FIRST_WINDOW):
            forgotten, behind = await forget_windows(
                self._context.database, behind=self._behind, limit=_WINDOWS
            )
            self._behind = behind or FIRST_WINDOW
