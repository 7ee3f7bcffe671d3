"""Retention: deletes ended jobs after the retention time, in small batches between other work."""

from datetime import datetime
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseTimeout, DatabaseUnavailable
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.prune import FIRST_LIMIT, Ended, OldWorkflows, cutoff, next_limit, prune
from jsworker.worker.context import WorkerContext
from jsworker.worker.recovery.earlier_lives import FORGOTTEN_AFTER_SECONDS

TICK_SECONDS: Final = 0.25

_SHARE: Final = 0.1
"""The share of the time in which all workers together run a batch in the database."""
_PASS_SECONDS: Final = 60.0
"""The time from the end of a pass to the beginning of the next."""
_REPORT_SECONDS: Final = 60.0
_AFTER_A_TIMEOUT_SECONDS: Final = 1.0


class Retention:
    """Deletes the jobs that ended before the cutoff, the oldest first; then rests for a minute.

    Every worker does so; the more workers there are, the smaller the share of time that each uses. Nothing
    depends on it: the next round finds the jobs that one leaves.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._limit = FIRST_LIMIT
        self._rests_until = 0.0
        self._ended: Ended | None = None
        self._workflows = OldWorkflows(context.database)
        self._in_workflows = False
        self._since: datetime | None = None
        self._fellows = 1
        self._jobs = self._entries = 0
        self._reported_at = 0.0

    async def step(self) -> None:
        """Delete for this worker's share of a tick, unless it rests or the database does not answer."""
        retention = self._context.settings.retention
        if retention is None or not self._context.health.up or boottime() < self._rests_until:
            return
        try:
            await self._work(retention)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            # A batch that was too large is no sign that the database is unhealthy.
            is_large = self._limit > 1 and self._ended is not None and not self._in_workflows
            self._limit = max(self._limit // 4, 1)
            if is_large and isinstance(error, DatabaseTimeout):
                # Not a new pass, which might come here again with a batch as large.
                self._rests_until = boottime() + _AFTER_A_TIMEOUT_SECONDS
                return
            self._end_pass()
            self._context.events.emit("prune.failed", reason=str(error))

    async def _work(self, retention: float) -> None:
        began = boottime()
        if self._ended is None:
            self._ended = Ended(await cutoff(self._context.database, older_than=retention))
            self._workflows.begin(self._ended.before)
            self._in_workflows = True
            self._since = None
            self._reported_at = boottime()
        while self._ended is not None and self._context.health.up:
            if self._in_workflows:
                await self._prune_workflows()
            else:
                await self._prune(self._ended)
            if boottime() - began >= _SHARE * TICK_SECONDS:
                break
        if self._ended is not None:  # the pass is not over
            self._rests_until = began + (boottime() - began) * self._fellows / _SHARE

    async def _prune_workflows(self) -> None:
        batch = await self._workflows.delete_some()
        self._in_workflows = not batch.is_last
        if batch.refused:
            [(workflow, error), *others] = batch.refused
            more = f" and {len(others)} others" if others else ""
            reason = f"workflow {workflow}{more} kept, with the jobs: {error}"
            self._context.events.emit("prune.failed", reason=reason)

    async def _prune(self, ended: Ended) -> None:
        database, began = self._context.database, boottime()
        try:
            batch = await prune(
                database, ended, since=self._since, limit=self._limit, refused_rows=self._context.refused_rows
            )
        except DatabaseTimeout:
            await database.end_given_up()  # the next batch would pass over what it still locks
            raise
        self._limit = next_limit(self._limit, seconds=boottime() - began)
        self._fellows = max(batch.workers, 1)
        self._since = batch.last or self._since
        self._jobs += batch.jobs
        self._entries += batch.events
        if batch.is_last:
            self._end_pass()
            await workers.forget_workers(database, silent_for=FORGOTTEN_AFTER_SECONDS)
        elif boottime() - self._reported_at >= _REPORT_SECONDS:
            self._report()

    def _end_pass(self) -> None:
        self._ended = None
        self._rests_until = boottime() + _PASS_SECONDS
        self._report()

    def _report(self) -> None:
        if self._jobs:
            self._context.events.emit("jobs.pruned", jobs=self._jobs, entries=self._entries)
        self._jobs = self._entries = 0
        self._reported_at = boottime()
