"""The watch over the database's history: a failover may have lost commits, and somebody has to say so."""

from collections.abc import Callable
from dataclasses import replace

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.failover import DatabaseHistory, read_history
from jsworker.worker.health import DatabaseHealth


class FailoverWatch:
    """Compares the database's history with the one that was last seen by this process.

    It looks again and again, not only after an outage: a standby may take over between two statements, and
    a pooler may hide it altogether. Nothing is repaired from here: rows that went back to an earlier state
    are jobs like any other, and claims, heartbeats and sweeps find them as they do after a crash.
    """

    def __init__(
        self,
        *,
        database: Database,
        health: DatabaseHealth,
        events: Events,
        on_changed: Callable[[], None],
    ) -> None:
        """Wire the watch; the first look only remembers.

        Args:
            database, health: the worker's own.
            events: told ``database.changed`` with what, was and is.
            on_changed: called then, too.
        """
        self._database = database
        self._health = health
        self._events = events
        self._on_changed = on_changed
        self._last: DatabaseHistory | None = None
        self._refusal: str | None = None

    async def step(self) -> None:
        """Look once; while the database is silent there is nothing to see."""
        if not self._health.up:
            return
        try:
            found = await read_history(self._database)
        except DatabaseUnavailable as error:
            self._health.failed(error)
        except DatabaseRefused as error:
            self._tell_refusal(str(error))
        else:
            self._compare(found)

    def _compare(self, found: DatabaseHistory) -> None:
        last, self._last = self._last, found
        if last is None:
            return
        if found.system_identifier != last.system_identifier:
            self._tell("system identifier", last.system_identifier, found.system_identifier)
        elif found.timeline is None:  # a standby, which takes no writes
            self._last = replace(found, timeline=last.timeline)
        elif last.timeline not in (None, found.timeline):
            self._tell("timeline", last.timeline, found.timeline)

    def _tell(self, what: str, was: object, now: object) -> None:
        fields = {"what": what, "was": was, "is": now}
        self._events.emit("database.changed", **fields)
        self._on_changed()

    def _tell_refusal(self, refusal: str) -> None:
        if refusal != self._refusal:
            self._refusal = refusal
            self._events.emit("worker.degraded", what="watch over the database's history", reason=refusal)
