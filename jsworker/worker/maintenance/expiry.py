"""Expiry: jobs that were not begun in time are cancelled. Any worker does it; CLAIM refuses them before."""

from collections import Counter
from typing import Final

from jsworker.ownership.transitions.expire import expire
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ScanPace

_BATCH: Final = 500


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
