"""The scan: jobs whose owners have fallen silent are taken back, by the stale rule of the protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.events import Events
from jsworker.ownership import reset
from jsworker.ownership.database import Database, RowRefused
from jsworker.ownership.reset import Reset, Suspect
from jsworker.runtime.clock import boottime
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.heartbeat import Heartbeat

_BATCH = 500


@dataclass(frozen=True, slots=True)
class _Sighting:
    """A late row as it was first seen, and when, on this worker's own clock."""

    fencing_token: int
    last_activity_at: datetime
    at: float


class Sweeper:
    """Watches late rows and takes back those that stay late.

    A row must be seen unchanged for a third of its threshold on this worker's own clock, the last time
    beyond the threshold: a jump of the database's clock, or an outage that silenced every owner, then
    resets nobody who lives.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        heartbeat_interval: float,
        database: Database,
        health: DatabaseHealth,
        heartbeat: Heartbeat,
        events: Events,
        on_requeued: Callable[[], None],
    ) -> None:
        """Wire the sweeper.

        Args:
            worker_id: who takes jobs back, for the timeline.
            heartbeat_interval: seconds; two of them missed begin the watch.
            database, health, events: the worker's own.
            heartbeat: the worker's own; while it goes unheard nobody else's silence proves anything.
            on_requeued: called when jobs went back to the queue.
        """
        self._worker_id = worker_id
        self._heartbeat_interval = heartbeat_interval
        self._database = database
        self._health = health
        self._heartbeat = heartbeat
        self._events = events
        self._on_requeued = on_requeued
        self._watched: dict[UUID, _Sighting] = {}

    async def step(self) -> None:
        """Look at every late row once, and take back what is proven stale."""
        if self._heartbeat.heard_for() < 2 * self._heartbeat_interval:
            self._watched.clear()
            return
        try:
            suspects = await reset.suspects(
                self._database, heartbeat_interval=self._heartbeat_interval, limit=10 * _BATCH
            )
            proven = self._watch(suspects)
            for start in range(0, len(proven), _BATCH):
                await self._take_back(proven[start : start + _BATCH])
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)

    def _watch(self, suspects: list[Suspect]) -> list[Suspect]:
        """Keep the sightings of rows that have not moved and return those that are proven stale."""
        now = boottime()
        watched: dict[UUID, _Sighting] = {}
        proven: list[Suspect] = []
        for row in suspects:
            before = self._watched.get(row.id)
            same = before is not None and (before.fencing_token, before.last_activity_at) == (
                row.fencing_token,
                row.last_activity_at,
            )
            sighting = before if same and before else _Sighting(row.fencing_token, row.last_activity_at, now)
            watched[row.id] = sighting
            if row.stale and row.stale_after is not None and now - sighting.at >= row.stale_after / 3:
                proven.append(row)
        self._watched = watched
        return proven

    async def _take_back(self, stale: list[Suspect]) -> None:
        owners = sorted({row.worker_id for row in stale})
        self._events.emit("stale.detected", jobs=len(stale), owners=owners)
        taken: list[Reset] = []
        for owner in owners:
            taken += await self._reset([row for row in stale if row.worker_id == owner], owner)
        for job in taken:
            self._report(job)
        if taken:
            self._events.emit("stale.recovered", jobs=len(taken), owners=owners)
            self._on_requeued()

    async def _reset(self, rows: list[Suspect], owner: str) -> list[Reset]:
        """Reset one owner's rows; one that PostgreSQL refuses keeps none of the others back."""
        try:
            return await reset.reset_stale(
                self._database,
                worker_id=self._worker_id,
                stale=rows,
                reason=f"worker {owner} stopped responding",
                counted=True,
            )
        except RowRefused as error:
            if len(rows) == 1:
                facts = {"job_id": str(rows[0].id), "kind": rows[0].kind}
                self._events.emit("job.error", **facts, error=f"cannot be taken back: {error}")
                return []
        middle = len(rows) // 2
        return await self._reset(rows[:middle], owner) + await self._reset(rows[middle:], owner)

    def _report(self, job: Reset) -> None:
        facts = {
            "job_id": str(job.id),
            "kind": job.kind,
            "fencing_token": job.fencing_token,
            "owner": job.owner,
        }
        self._events.emit("job.stalled", **facts)
        match job.status:
            case "failed":
                self._events.emit("job.failed", **facts, error="stalled too often")
            case "cancelled":
                self._events.emit("job.cancelled", **facts)
            case _:
                self._events.emit("job.cleared", **facts, to=job.status)
