"""The components of a worker and how they are wired: the one place that knows all of them."""

from collections.abc import Awaitable, Callable, Collection
from typing import Final

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.worker.context import WorkerContext
from jsworker.worker.heartbeat import Heartbeat
from jsworker.worker.lifecycle import Loop
from jsworker.worker.maintenance.database_watch import DatabaseWatch
from jsworker.worker.maintenance.fleet_survey import INTERVAL_SECONDS as SURVEY_SECONDS
from jsworker.worker.maintenance.fleet_survey import FleetSurvey
from jsworker.worker.maintenance.relay import Relay
from jsworker.worker.maintenance.retention import TICK_SECONDS, Retention
from jsworker.worker.maintenance.shape_watch import LONGEST_INTERVAL_SECONDS as SHAPE_SECONDS
from jsworker.worker.maintenance.shape_watch import ShapeWatch
from jsworker.worker.maintenance.throttled_scan import (
    LONGEST_REST_SECONDS,
    MOST_TIMEOUTS,
    REST,
    ScanPace,
    ThrottledScan,
)
from jsworker.worker.pipeline.pipeline import Pipeline
from jsworker.worker.presence import Presence
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.dead_owners import DeadOwners
from jsworker.worker.recovery.earlier_lives import Reconciler
from jsworker.worker.recovery.late_rows import LateRows
from jsworker.worker.recovery.lost_messages import LostMessages
from jsworker.worker.recovery.reports import report_operators
from jsworker.worker.recovery.sweeper import Sweeper
from jsworker.worker.recovery.table_poll import IdlePoll
from jsworker.worker.recovery.unconsumed import LOOK_SECONDS, Unconsumed
from jsworker.worker.stacks import Stacks
from jsworker.worker.watchdog import LoopLag, Watchdog

HEARTBEAT: Final = "heartbeat"
"""Name of the loop without which a worker must not go on, not even to drain."""

_PROBE_SECONDS: Final = 0.5
_SCAN_JITTER: Final = 0.2
_SWEEPER_REST: Final = 20
"""Shorter than that of other searches: jobs of the dead wait for this one."""
_FENCE_LOOKS: Final = 4
"""Looks at the fence in a heartbeat interval."""
_FAILOVER_HEARTBEATS: Final = 6
"""Heartbeat intervals between two looks at the database's history and the schema's level; also looked at when
the database falls silent or answers again."""
_SHAPE_SCANS: Final = 6
"""Scans between two looks at the shape of stream and consumers."""
_RECONCILE_ROUNDS: Final = 4
"""Rounds of the startup reconciliation in a statement time-out."""


class Components:
    """Everything that works in a worker, wired and not started yet."""

    def __init__(
        self, context: WorkerContext, *, migration: str, siblings: Collection[str], surveys: bool
    ) -> None:
        """Wire the components; nothing runs yet.

        Args:
            context: the worker's.
            migration: revision of the database's schema when the worker started.
            siblings: workers whose jobs the common supervisor takes back itself.
            surveys: whether to ask now and then what waits in the table and in the stream.
        """
        self._context = context
        self._surveys = surveys
        self._complaints: dict[str, str] = {}
        self.lag = LoopLag()
        self.quiet = QuietPhases(context)
        self.watchdog = Watchdog(context, lag=self.lag, quiet=self.quiet)
        self.late = LateRows(scan_interval=context.settings.scan_interval)
        self.pipeline = Pipeline(
            context, quiet=self.quiet, late=self.late, loop_ends=lambda: self.beats.is_cancelled
        )
        self._wire_heartbeat()
        self._wire_maintenance(migration)
        self._wire_recovery(siblings)
        self._wire_wake_ups()

    def _wire_heartbeat(self) -> None:
        context, interval = self._context, self._context.settings.heartbeat_interval
        stacks = Stacks(context, self.pipeline.isolated_runner.ask_stacks)
        self.presence = Presence(context, stacks.answer)
        self.heartbeat = Heartbeat(
            context,
            settler=self.pipeline.settler,
            presence=self.presence,
            quiet=self.quiet,
            # No more time: heartbeats wait for it.
            search=self._search("claims in nobody's hand", most_timeouts=1),
            on_ignored=self.pipeline.note_ignored,
        )
        self.beats = self._loop(HEARTBEAT, self._beat, interval)
        self.fences = self._loop("fence", self.heartbeat.fence.step, interval / _FENCE_LOOKS)
        self.presences = self._loop("presence", self.presence.step, interval)
        self.probes = self._loop("probe", self._probe, _PROBE_SECONDS)

    async def _beat(self) -> None:
        await self.heartbeat.step()
        # What was prefetched and got no slot after all: others may run it.
        overdue = max(1.0, self._context.settings.heartbeat_interval)
        self.pipeline.hand_back_waiting("claimed ahead, but no job slot fell free", older_than=overdue)

    async def _probe(self) -> None:
        await self._context.health.probe(self.heartbeat.seen)

    def _wire_maintenance(self, migration: str) -> None:
        context, settings = self._context, self._context.settings
        self.publisher = Relay(context)
        self.relay = self._loop("relay", self.publisher.step, settings.relay_interval)
        self.retention = self._scan("retention", Retention(context).step, TICK_SECONDS)
        shape_interval = min(SHAPE_SECONDS, _SHAPE_SCANS * settings.scan_interval)
        self.shape = self._scan("shape", ShapeWatch(context).step, shape_interval)
        self.survey = FleetSurvey(context)
        self.surveys = self._scan("survey", self.survey.step, SURVEY_SECONDS)
        self.database_watch = DatabaseWatch(
            context, revision=migration, on_failover=self.heartbeat.look_for_orphaned_claims
        )
        interval = _FAILOVER_HEARTBEATS * settings.heartbeat_interval
        self.failover_watch = self._scan("lineage", self.database_watch.step, interval)

    def _wire_recovery(self, siblings: Collection[str]) -> None:
        context, settings = self._context, self._context.settings
        self.dead_owners = DeadOwners(context)
        sweeper = Sweeper(
            context,
            heartbeat=self.heartbeat,
            presence=self.presence,
            late=self.late,
            search=self._search("silent owners", rest=_SWEEPER_REST),
        )
        self.scans = self._scan("scan", sweeper.step, settings.scan_interval)
        self._repair = LostMessages(context, self._search("lost messages"))
        # By itself: the jobs of the dead wait for no search that has become slow.
        self.repairs = self._scan("repair", self._look_after_the_queue, settings.scan_interval)
        self.table = self._loop("table", self._take_from_the_table, settings.relay_interval)
        self.poll = IdlePoll(
            context,
            self.pipeline.consumers,
            on_more=self.table.wake,
            new_search=lambda kind: self._search(f"waiting jobs of {kind}"),
            pace=ScanPace(longest_rest=self._longest_rest()),
        )
        self.unconsumed = self._scan("unconsumed", Unconsumed(context).step, LOOK_SECONDS)
        reconciler = Reconciler(context, self.dead_owners, siblings=siblings, done=self._end_reconciliation)
        self.reconciliation = self._loop(
            "reconciliation", reconciler.step, settings.statement_timeout / _RECONCILE_ROUNDS
        )

    def _end_reconciliation(self) -> None:
        self.reconciliation.end()

    async def _look_after_the_queue(self) -> None:
        if self._context.health.up:
            await self._by_itself("refused rows", self._context.refused_rows.look())
            reporting = report_operators(self._context.database, events=self._context.events)
            await self._by_itself("events of what operators take back", reporting)
            await self.poll.step()
            await self._repair.step()

    async def _by_itself(self, what: str, asking: Awaitable[None]) -> None:
        """Ask something of a table of its own: where a right is missing, say, all else may go on."""
        try:
            await asking
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if not isinstance(error, DatabaseRefused) or error.sqlstate is None:
                self._context.health.failed(error)
            elif self._complaints.get(what) != str(error):
                self._complaints[what] = str(error)
                self._context.events.emit("worker.degraded", what=what, reason=str(error))

    async def _take_from_the_table(self) -> None:
        await self.publisher.try_again()
        await self.poll.go_on()

    def _wire_wake_ups(self) -> None:
        context = self._context
        # Rows that were found in the table come first: messages are asked for in as far as they leave room.
        context.room.subscribe(self.poll.on_room, *(puller.wake for puller in self.pipeline.pullers))
        context.requeued.subscribe(self.relay.wake)
        context.health.changed.subscribe(context.room.notify, self.failover_watch.wake)
        context.publishing.changed.subscribe(self.relay.wake, self.table.wake, self._answer_for_publishing)
        context.stream.on_disconnect(context.room.notify)
        context.stream.on_disconnect(self.table.wake)

    def _answer_for_publishing(self) -> None:
        self.presence.answer_for_publishing(refused=self._context.publishing.refused)

    @property
    def before_pulling(self) -> list[Loop]:
        """Loops that run before the first message is asked for, in their order.

        Heartbeat first: what is claimed from here on is renewed.
        """
        recovers_by = self._context.settings.recovers_by()
        loops = [self.beats, self.fences, self.presences, self.probes, self.relay, self.repairs]
        loops += [self.scans] if recovers_by["crashed"] or recovers_by["stale"] else []
        loops += [self.table, self.failover_watch, self.unconsumed, self.shape]
        loops += [self.retention] if self._context.settings.retention is not None else []
        loops += [self.surveys] if self._surveys else []
        return [*loops, self.reconciliation] if recovers_by["start"] else loops

    def _loop(self, name: str, step: Callable[[], Awaitable[None]], interval: float) -> Loop:
        return Loop(name, step, interval=interval, died=self._context.died)

    def _scan(self, name: str, step: Callable[[], Awaitable[None]], interval: float) -> Loop:
        """Return a loop that the workers of a fleet do not step at the same moment."""
        return Loop(name, step, interval=interval, died=self._context.died, jitter=_SCAN_JITTER)

    def _search(self, what: str, *, rest: int = REST, most_timeouts: int = MOST_TIMEOUTS) -> ThrottledScan:
        return ThrottledScan(
            self._context,
            what,
            rest=rest,
            longest_rest=self._longest_rest(),
            most_timeouts=most_timeouts,
        )

    def _longest_rest(self) -> float:
        """Return the seconds that a search may rest: what it finds later may have been taken for stale."""
        thresholds = [kind.limits.stale_after for kind in self._context.kinds.values()]
        stale_after = [self._context.settings.stale_threshold, *(each for each in thresholds if each)]
        return min(LONGEST_REST_SECONDS, min(stale_after) / 4)
