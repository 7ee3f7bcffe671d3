"""The components of a worker and how they are wired: the one place that knows all of them."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.telemetry.worker_status import PoolUse, Readiness, WorkerStatus
from jsworker.worker.context import WorkerContext
from jsworker.worker.heartbeat import Heartbeat
from jsworker.worker.lifecycle import Loop
from jsworker.worker.maintenance.fleet_survey import INTERVAL_SECONDS as SURVEY_SECONDS
from jsworker.worker.maintenance.fleet_survey import FleetSurvey
from jsworker.worker.maintenance.relay import Relay
from jsworker.worker.maintenance.retention import TICK_SECONDS, Retention
from jsworker.worker.maintenance.scheduler import Scheduler
from jsworker.worker.maintenance.watches import (
    LOOK_SECONDS,
    SHAPE_SECONDS,
    DatabaseWatch,
    Unconsumed,
    keep_in_shape,
)
from jsworker.worker.pipeline.pipeline import Pipeline
from jsworker.worker.presence import Presence
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.earlier_lives import Reconciler
from jsworker.worker.recovery.late_rows import LateRows
from jsworker.worker.recovery.lost_messages import LostMessages
from jsworker.worker.recovery.resets import DeadOwners, report_operators
from jsworker.worker.recovery.sweeper import Sweeper
from jsworker.worker.recovery.table_poll import IdlePoll
from jsworker.worker.stacks import Stacks
from jsworker.worker.watchdog import LoopLag, Watchdog

HEARTBEAT: Final = "heartbeat"
"""Name of the loop without which a worker must not go on, not even to drain."""

_PROBE_SECONDS: Final = 0.5
_SCAN_JITTER: Final = 0.2
_FENCE_LOOKS: Final = 4
"""Looks at the fence in a heartbeat interval."""
_FAILOVER_HEARTBEATS: Final = 6
"""Heartbeat intervals between two looks at the database's history and the schema's level; also looked at when
the database falls silent or answers again."""
_SHAPE_SCANS: Final = 6
"""Scans between two looks at the shape of stream and consumers."""
_NAMED: Final = 5
"""Kinds or jobs that a status names; there may be hundreds."""
_RECONCILE_ROUNDS: Final = 4
"""Rounds of the startup reconciliation in a statement time-out."""


class Components:
    """Everything that works in a worker, wired and not started yet; ``siblings`` as ``Worker`` says."""

    def __init__(
        self, context: WorkerContext, *, migration: str, siblings: Collection[str], surveys: bool
    ) -> None:
        self._context = context
        self._surveys = surveys
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
            on_ignored=self.pipeline.note_ignored,
        )
        self.beats = self._loop(HEARTBEAT, self._beat, interval)
        self.fences = self._loop("fence", self.heartbeat.fence.step, interval / _FENCE_LOOKS)
        self.presences = self._loop("presence", self.presence.step, interval)
        probe = partial(context.health.probe, self.heartbeat.seen)
        self.probes = self._loop("probe", probe, _PROBE_SECONDS)

    async def _beat(self) -> None:
        await self.heartbeat.step()
        # What was prefetched and got no slot after all: others may run it.
        overdue = max(1.0, self._context.settings.heartbeat_interval)
        self.pipeline.hand_back_waiting("claimed ahead, but no job slot fell free", older_than=overdue)

    def _wire_maintenance(self, migration: str) -> None:
        context, settings = self._context, self._context.settings
        self.publisher = Relay(context)
        self.relay = self._loop("relay", self.publisher.step, settings.relay_interval)
        self.retention = self._scan("retention", Retention(context).step, TICK_SECONDS)
        shape_interval = min(SHAPE_SECONDS, _SHAPE_SCANS * settings.scan_interval)
        self.shape = self._scan("shape", partial(keep_in_shape, context), shape_interval)
        self.schedules = self._scan("schedules", self._fire_schedules, settings.scan_interval)
        self.scheduler = Scheduler(context, wake=self.schedules.wake)
        self.survey = FleetSurvey(context)
        self.surveys = self._scan("survey", self.survey.step, SURVEY_SECONDS)
        self.database_watch = DatabaseWatch(
            context, revision=migration, on_failover=self.heartbeat.look_for_orphaned_claims
        )
        interval = _FAILOVER_HEARTBEATS * settings.heartbeat_interval
        self.failover_watch = self._scan("failover watch", self.database_watch.step, interval)

    def _wire_recovery(self, siblings: Collection[str]) -> None:
        context, settings = self._context, self._context.settings
        self.dead_owners = DeadOwners(context)
        sweeper = Sweeper(context, heartbeat=self.heartbeat, presence=self.presence, late=self.late)
        self.scans = self._scan("scan", sweeper.step, settings.scan_interval)
        self._repair = LostMessages(context)
        # By itself: the jobs of the dead wait for no search that has become slow.
        self.repairs = self._scan("repair", self._look_after_the_queue, settings.scan_interval)
        self.table = self._loop("table", self._take_from_the_table, settings.relay_interval)
        self.poll = IdlePoll(context, self.pipeline.consumers, on_more=self.table.wake)
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

    async def _fire_schedules(self) -> None:
        await self._by_itself("schedules", self.scheduler.step())

    async def _by_itself(self, what: str, asking: Awaitable[None]) -> None:
        """Ask something of a table of its own: where a right is missing, say, all else may go on."""
        try:
            await asking
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if not isinstance(error, DatabaseRefused) or error.sqlstate is None:
                self._context.health.failed(error)
            else:
                self._context.complaints.report(what, str(error))

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
        loops += [self.table, self.failover_watch, self.unconsumed, self.shape, self.schedules]
        loops += [self.retention] if self._context.settings.retention is not None else []
        loops += [self.surveys] if self._surveys else []
        return [*loops, self.reconciliation] if recovers_by["start"] else loops

    def status(self, *, draining: bool) -> WorkerStatus:
        """Return how the worker is, from what is known at this moment; nothing is asked."""
        not_pulled = [puller.kind for puller in self.pipeline.pullers if not puller.is_pulling]
        # A list at once: figures may be collected in another thread.
        running = Counter(run.kind.name for run in list(self._context.in_flight.runs.values()))
        readiness = Readiness(
            postgresql=self._context.health.up,
            nats=self._context.stream.connected,
            migration=self.database_watch.revision,
            pulling=not not_pulled and not draining,
            draining=draining,
            ailing=self._ailing(not_pulled),
            misfit=self.database_watch.misfit,
            publishing=not self._context.publishing.refused,
        )
        return WorkerStatus(
            readiness=readiness,
            in_flight={kind: running[kind] for kind in self._context.kinds},
            heartbeat_lag=boottime() - self.heartbeat.heard_at,
            event_loop_lag=self.lag.seconds,
            pools={
                name: PoolUse(pool.in_use, pool.limit)
                for name, pool in self._context.database.pools_by_name().items()
            },
            recovers_by=self._context.settings.recovers_by(),
        )

    def _ailing(self, not_pulled: Sequence[str]) -> list[str]:
        runs = [*self._context.in_flight.runs.values(), *self._context.in_flight.given_up]
        ignoring = [f"job {run.id}" for run in runs if run.ignores_stop]
        ailing = [*_named("not pulled", not_pulled), *_named("told to stop and still running", ignoring)]
        if seconds := self.watchdog.blocked_seconds:
            ailing.append(f"its event loop has not come round for {seconds:.0f} s")
        return ailing

    def _loop(self, name: str, step: Callable[[], Awaitable[None]], interval: float) -> Loop:
        return Loop(name, step, interval=interval, died=self._context.died)

    def _scan(self, name: str, step: Callable[[], Awaitable[None]], interval: float) -> Loop:
        return Loop(name, step, interval=interval, died=self._context.died, jitter=_SCAN_JITTER)


def _named(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what}: {', '.join(names[:_NAMED])}{more}"] if names else []
