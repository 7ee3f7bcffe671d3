"""Looks for work: one statement for all sweeps of a relay tick, and one for all sweeps of a scan.

A sweep is woken only when there is work for it, so unused features cost nothing. If PostgreSQL refuses a look
for lack of a right, or the look is slow, all sweeps are woken, and each reports what it lacks.
"""

from collections.abc import Callable, Mapping
from typing import Final

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.transitions import looks
from jsworker.ownership.transitions.looks import LeftToDo
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.admissions import Admissions
from jsworker.worker.maintenance.lanes import Lanes
from jsworker.worker.maintenance.throttled_scan import RECENT_SECONDS, ScanPace, longest_rest

_EVERYTHING: Final = LeftToDo(held=True, expired=True, in_lanes=True, in_workflows=True)


class RelayLook:
    """Reads limits and pauses, and wakes the relay when jobs are due."""

    def __init__(
        self, context: WorkerContext, admissions: Admissions, *, wake_relay: Callable[[], None]
    ) -> None:
        self._context = context
        self._admissions = admissions
        self._wake_relay = wake_relay
        self._pace = ScanPace()
        self._is_answered = True  # whether the last look without a time bound was answered

    async def step(self) -> None:
        """Look once; during the rest after a slow look, only for jobs that became due lately."""
        if self._context.health.up:
            with self._context.health.noting():
                await self.look()

    async def look(self) -> None:
        """Look as ``step`` does, but raise if the database does not answer."""
        database, kinds = self._context.database, self._context.kinds
        try:
            if self._pace.is_due:
                self._is_answered = False
                with self._pace.timed():
                    due = await looks.due(database, kinds)
                self._is_answered = True
            else:
                due = await looks.due(database, kinds, within=RECENT_SECONDS)
                if not self._is_answered:  # the relay's own searches find older jobs
                    self._wake_relay()
        except DatabaseRefused as error:  # the installation is older and has not granted the rights yet
            if error.sqlstate is None:
                raise
            self._context.complaints.report("limits", str(error))
            self._wake_relay()
            return
        if due.to_promote or due.to_publish:
            self._wake_relay()
        await self._admissions.learn(due.limits)


class ScanLook:
    """Wakes the sweeps of a scan that have work; the keys of ``wake`` are fields of ``LeftToDo``."""

    def __init__(
        self, context: WorkerContext, lanes: Lanes, *, wake: Mapping[str, Callable[[], None]]
    ) -> None:
        self._context = context
        self._lanes = lanes
        self._wake = wake
        self._pace = ScanPace(longest_rest=longest_rest(context))

    async def step(self) -> None:
        """Look once."""
        if not self._context.health.up:
            return
        found = await self._look()
        for name, wake in self._wake.items():
            if getattr(found, name):
                wake()
        await self._lanes.look(has_jobs=found.in_lanes)

    async def _look(self) -> LeftToDo:
        if not self._pace.is_due:
            return _EVERYTHING
        try:
            with self._pace.timed():
                return await looks.left_to_do(self._context.database)
        except (DatabaseUnavailable, DatabaseRefused):  # each sweep is woken and reports what it lacks
            return _EVERYTHING
