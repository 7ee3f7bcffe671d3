"""Expiry: cancels jobs that did not begin in time, and deletes windows of unique keys that have ended.

Any worker does it. Nothing depends on it: CLAIM refuses such jobs, and an enqueue replaces such windows.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from jsworker.core.errors import DatabaseTimeout
from jsworker.ownership.database import MostRows
from jsworker.ownership.pool import Row
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
        looks = {"expiry": self._expire, "windows of unique keys": self._forget_windows}
        with self._pace.timed():
            for what, look in looks.items():
                if not self._context.health.up:
                    break
                with self._context.noting(what):
                    try:
                        await look()
                    except DatabaseTimeout as error:  # for example: a trigger is slow
                        await self._context.unanswered(error)

    async def _expire(self) -> None:
        rows = MostRows(self._context.database, _BATCH)
        while len(await rows.write(self._expire_some)) == rows.most:
            continue

    async def _expire_some(self, limit: int) -> Sequence[Row]:
        context = self._context
        expired = await expire(context.database, limit=limit, refused_rows=context.refused_rows)
        for kind, jobs in Counter(row.kind for row in expired).items():
            context.events.emit("jobs.expired", kind=kind, jobs=jobs)
        return expired

    async def _forget_windows(self) -> None:
        """Look at a page, and at the next one if some of it was deleted; the next round goes on behind it."""
        windows = MostRows(self._context.database, _WINDOWS)
        while await windows.write(self._forget_some) and self._behind != FIRST_WINDOW:
            continue

    async def _forget_some(self, limit: int) -> int:
        forgotten, behind = await forget_windows(self._context.database, behind=self._behind, limit=limit)
        self._behind = behind or FIRST_WINDOW
        return forgotten
