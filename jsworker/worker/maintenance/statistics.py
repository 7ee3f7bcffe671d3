"""Adds the counts of this worker to the table of figures a few times a minute."""

from typing import Final

from jsworker.core.errors import DatabaseUnavailable, LockTimeout
from jsworker.ownership.transitions.statistics import add_statistics, forget_statistics
from jsworker.worker.context import WorkerContext

WRITE_SECONDS: Final = 10.0
_WRITES_A_TIDYING: Final = 180


class StatisticsWriter:
    """Writes the counts, and deletes figures older than two days; counts of a failed write are lost."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._writes = 0

    async def step(self) -> None:
        """Write the counts, unless there are none or the database does not answer."""
        context = self._context
        if not context.health.up:
            return
        with context.noting("statistics"):
            try:
                if taken := context.counts.take():
                    await add_statistics(context.database, taken)
                if self._writes % _WRITES_A_TIDYING == 0:
                    await forget_statistics(context.database)
            except (DatabaseUnavailable, LockTimeout) as error:
                await context.unanswered(error)  # for example: the table is locked by a rebuild
                return
            self._writes += 1
            context.complaints.end("statistics")
