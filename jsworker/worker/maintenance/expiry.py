"""Expiry: jobs that were not begun in time are cancelled, windows of unique keys that are over forgotten.

Any worker does it, and nothing depends on it: CLAIM refuses such jobs, and who enqueues takes such windows.
"""

from collections import Counter
from typing import Final

from jsworker.ownership.transitions.enqueue_terms import forget_windows
from jsworker.ownership.transitions.expire import expire
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ScanPace

_BATCH: Final = 500
WINDOWS_SECONDS: Final = 60.0
"""Between two steps at most: nothing tells of windows that are over."""


class Expiry:
    """Cancels what has expired, until a batch is short; what one round leaves, the next one finds."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._pace = ScanPace()

    async def step(self) -> None:
        """Look once, unless the database does not answer or the last look was slow."""
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
            while await forget_windows(self._context.database, limit=_BATCH) == _BATCH:
                continue
