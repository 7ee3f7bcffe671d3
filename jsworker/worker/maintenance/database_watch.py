"""What may change below a running worker: the database's history, by a failover, and its schema."""

from collections.abc import Callable
from dataclasses import replace

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, MigrationMissing
from jsworker.ownership.failover import DatabaseHistory, read_history
from jsworker.ownership.revision import check_level
from jsworker.worker.context import WorkerContext


class DatabaseWatch:
    """Compares the database with what this process saw last.

    It looks again and again, not only after an outage: a standby may take over between two statements, and
    a pooler may hide it altogether. A failover may have lost commits. Nothing is repaired from here: rows
    that went back to an earlier state are jobs like any other, and claims, heartbeats and sweeps find them as
    they do after a crash.

    Attributes:
        revision: of the schema; None: there is none.
    """

    def __init__(
        self, context: WorkerContext, *, revision: str | None, on_failover: Callable[[], None]
    ) -> None:
        """Prepare the watch; the first look only remembers the history.

        Args:
            context: the worker's.
            revision: found when the worker started.
            on_failover: called after ``database.changed`` was emitted.
        """
        self.revision = revision
        self._context = context
        self._on_failover = on_failover
        self._last: DatabaseHistory | None = None
        self._refusal: str | None = None

    @property
    def misfit(self) -> str | None:
        """Why this version cannot work with the schema, and what to do; None: it can."""
        try:
            check_level(self.revision)
        except MigrationMissing as missing:
            return str(missing)
        return None

    async def step(self) -> None:
        """Look once; what the database does not answer leaves what is known."""
        if self._context.health.up:
            await self._look_at_history()
        # Also while the database counts as silent: so does one that refuses statements for want of tables.
        try:
            self.revision = await self._context.database.migrated_to()
        except (DatabaseUnavailable, DatabaseRefused):  # a heartbeat meets the same, and reports it
            return

    async def _look_at_history(self) -> None:
        try:
            found = await read_history(self._context.database)
        except DatabaseUnavailable as error:
            self._context.health.failed(error)
        except DatabaseRefused as error:
            self._report_refusal(str(error))
        else:
            self._compare(found)

    def _compare(self, found: DatabaseHistory) -> None:
        last, self._last = self._last, found
        if last is None:
            return
        if found.system_identifier != last.system_identifier:
            self._report_failover("system identifier", last.system_identifier, found.system_identifier)
        elif found.timeline is None:  # a standby, which takes no writes
            self._last = replace(found, timeline=last.timeline)
        elif last.timeline not in (None, found.timeline):
            self._report_failover("timeline", last.timeline, found.timeline)

    def _report_failover(self, what: str, was: object, now: object) -> None:
        fields = {"what": what, "was": was, "is": now}
        self._context.events.emit("database.changed", **fields)
        self._on_failover()

    def _report_refusal(self, refusal: str) -> None:
        if refusal != self._refusal:
            self._refusal = refusal
            self._context.events.emit(
                "worker.degraded", what="watch over the database's history", reason=refusal
            )
