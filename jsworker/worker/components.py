"""The parts of a worker and how they are wired: the one place that knows all of them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions.refused_rows import RefusedRow, RefusedRows
from jsworker.ownership.transitions.workers import WorkerRow
from jsworker.stream.jetstream import Stream
from jsworker.stream.puller import Puller
from jsworker.worker.health import DatabaseHealth, PublishingHealth
from jsworker.worker.heartbeat import Heartbeat
from jsworker.worker.isolation.isolated_runner import IsolatedRunner
from jsworker.worker.lifecycle import Loop
from jsworker.worker.loop_lag import LoopLag
from jsworker.worker.maintenance.dead_letters import DeadLetters
from jsworker.worker.maintenance.failover_watch import FailoverWatch
from jsworker.worker.maintenance.fleet_survey import INTERVAL_SECONDS as SURVEY_SECONDS
from jsworker.worker.maintenance.fleet_survey import FleetSurvey
from jsworker.worker.maintenance.relay import Relay
from jsworker.worker.maintenance.retention import TICK_SECONDS, Retention
from jsworker.worker.maintenance.scan_pace import LONGEST_REST_SECONDS, REST, Pace
from jsworker.worker.maintenance.schema_level import SchemaLevel
from jsworker.worker.maintenance.shape_watch import LONGEST_INTERVAL_SECONDS as SHAPE_SECONDS
from jsworker.worker.maintenance.shape_watch import ShapeWatch
from jsworker.worker.maintenance.throttled_scan import MOST_PATIENCE, Search
from jsworker.worker.pipeline.claiming import Claimer
from jsworker.worker.pipeline.execution import Executor
from jsworker.worker.pipeline.intake import Consumer
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.large_values import Values
from jsworker.worker.pipeline.run import InFlight, Run
from jsworker.worker.pipeline.run_ownership import LeaseServices
from jsworker.worker.pipeline.settling import Settler
from jsworker.worker.pipeline.slots import Slots
from jsworker.worker.presence import Presence
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.dead_owners import DeadOwners
from jsworker.worker.recovery.late_rows import LateRows
from jsworker.worker.recovery.lost_messages import Repair
from jsworker.worker.recovery.reconciler import Reconciler
from jsworker.worker.recovery.reports import report_operators
from jsworker.worker.recovery.sweeper import Sweeper
from jsworker.worker.recovery.table_poll import IdlePoll
from jsworker.worker.recovery.unconsumed import LOOK_SECONDS, Unconsumed
from jsworker.worker.run_tracing import RunTracing
from jsworker.worker.stacks import Stacks
from jsworker.worker.supervision import Supervision
from jsworker.worker.watchdog import Watchdog

_PROBE_SECONDS: Final = 0.5
_SCAN_JITTER: Final = 0.2
_SWEEPER_REST: Final = 20
"""Shorter than that of other searches: jobs of the dead wait for this one."""
_FENCE_LOOKS: Final = 4
"""Looks at the fence in a heartbeat interval."""
_LINEAGE_HEARTBEATS: Final = 6
"""Heartbeat intervals between two looks at the database's history and the schema's level; also looked at when
the database falls silent or answers again."""
_SHAPE_SCANS: Final = 6
"""Scans between two looks at the shape of stream and consumers."""
_RECONCILE_ROUNDS: Final = 4
"""Rounds of the startup reconciliation in a statement time-out."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What the parts are wired to: opened before them, closed after them.

    Attributes:
        me: this worker's row of the registry.
        migration: revision of the database's schema when the worker started.
        supervision: whoever supervises this process, if anybody does.
        siblings: workers whose jobs that one takes back itself.
        died: told name and error of a part that ended in an error.
        heart_died: told the same of the heartbeat.
        surveys: whether it asks now and then what waits in the table and in the stream.
    """

    settings: Settings
    kinds: Mapping[str, Kind]
    me: WorkerRow
    migration: str
    database: Database
    sessions: Sessions
    stream: Stream
    events: Events
    supervision: Supervision | None
    siblings: Collection[str]
    died: Callable[[str, BaseException], None]
    heart_died: Callable[[str, BaseException], None]
    surveys: bool


class Components:
    """Everything that works in a worker, wired and not started yet.

    Attributes:
        hand: what this process has in hand.
        before_pulling: loops that run before the first message is asked for, in their order.
    """

    def __init__(self, around: WorkerContext) -> None:
        """Wire the parts; nothing runs yet."""
        self._around = around
        self.database = around.database
        self.stream = around.stream
        self.in_flight = InFlight()
        self.lag = LoopLag()
        self.health = DatabaseHealth(around.events)
        self._complaints: dict[str, str] = {}
        self.refused_rows = RefusedRows(around.database, worker_id=around.me.id, tell=self._tell_refused)
        self.publishing = PublishingHealth(around.events)
        self.late = LateRows(scan_interval=around.settings.scan_interval)
        self.schema = SchemaLevel(around.migration, database=around.database)
        self.isolated_runner = IsolatedRunner(
            worker_id=around.me.id, settings=around.settings, events=around.events
        )
        stacks = Stacks(
            worker_id=around.me.id, in_flight=self.in_flight, ask_alone=self.isolated_runner.ask_stacks
        )
        self.presence = Presence(
            around.stream,
            worker_id=around.me.id,
            heartbeat_interval=around.settings.heartbeat_interval,
            tell_stacks=stacks.answer,
        )
        self.slots = Slots(around.settings.concurrency, len(around.kinds), self._launch)
        self.settler = Settler(
            worker_id=around.me.id,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            died=around.died,
        )
        self.dead_letters = DeadLetters(
            database=around.database,
            health=self.health,
            events=around.events,
            died=around.died,
        )
        self.dead_owners = DeadOwners(
            worker_id=around.me.id,
            statement_timeout=around.settings.statement_timeout,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            events=around.events,
            on_requeued=self.wake_relay,
        )
        self.tracing = RunTracing(
            worker_id=around.me.id,
            subject_prefix=around.settings.subject_prefix,
            database=around.database,
            health=self.health,
            died=around.died,
        )
        self.quiet = QuietPhases(
            worker_id=around.me.id,
            statement_timeout=around.settings.statement_timeout,
            database=around.database,
            in_flight=self.in_flight,
            supervision=around.supervision,
        )
        self.watchdog = Watchdog(
            timeout=around.settings.watchdog_timeout, lag=self.lag, quiet=self.quiet, events=around.events
        )
        self.heartbeat = self._wire_heartbeat()
        self.executor = self._wire_executor()
        self.consumers = [self._wire_consumer(kind) for kind in around.kinds.values()]
        self.pullers = [self._wire_puller(consumer) for consumer in self.consumers]
        self._wire_loops()
        self.health.on_change(lambda _: self.wake_pullers())
        self.health.on_change(lambda _: self.lineage.wake())
        self.publishing.on_change(self.relay.wake)
        self.publishing.on_change(self.table.wake)
        self.publishing.on_change(lambda: self.presence.tell_of_publishing(refused=self.publishing.refused))
        around.stream.on_disconnect(self.wake_pullers)
        around.stream.on_disconnect(self.table.wake)

    @property
    def before_pulling(self) -> list[Loop]:
        """Heartbeat first: whatever is claimed from here on is renewed."""
        recovers_by = self._around.settings.recovers_by()
        loops = [self.beats, self.fences, self.presences, self.probes, self.relay, self.repairs]
        loops += [self.scans] if recovers_by["crashed"] or recovers_by["stale"] else []
        loops += [self.table, self.lineage, self.unconsumed, self.shape]
        loops += [self.retention] if self._around.settings.retention is not None else []
        loops += [self.surveys] if self._around.surveys else []
        return [*loops, self.reconciliation] if recovers_by["start"] else loops

    def wake_pullers(self) -> None:
        """Ask for messages now, in as far as rows that were found in the table leave room for them."""
        self.poll.on_room()
        for puller in self.pullers:
            puller.wake()

    def wake_relay(self) -> None:
        """Publish what waits now."""
        self.relay.wake()

    def _look_into_the_table(self) -> None:
        self.table.wake()

    def _wire_heartbeat(self) -> Heartbeat:
        around = self._around
        return Heartbeat(
            worker=around.me,
            statement_timeout=around.settings.statement_timeout,
            ack_wait=around.settings.ack_wait,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            in_flight=self.in_flight,
            settler=self.settler,
            presence=self.presence,
            supervision=around.supervision,
            events=around.events,
            on_requeued=self.wake_relay,
            on_ignored=self._note_ignored,
            # No more time: heartbeats wait for it.
            search=self._search("claims in nobody's hand", most_patience=1),
            quiet=self.quiet,
        )

    def _search(self, what: str, *, rest: int = REST, most_patience: int = MOST_PATIENCE) -> Search:
        around = self._around
        return Search(
            what,
            statement_timeout=around.settings.statement_timeout,
            database=around.database,
            events=around.events,
            rest=rest,
            longest_rest=self._longest_rest(),
            most_patience=most_patience,
        )

    def _longest_rest(self) -> float:
        """Return the seconds that a search may rest: what it finds later may have been taken for stale."""
        thresholds = [kind.limits.stale_after for kind in self._around.kinds.values()]
        stale_after = [self._around.settings.stale_threshold, *(each for each in thresholds if each)]
        return min(LONGEST_REST_SECONDS, min(stale_after) / 4)

    def _wire_executor(self) -> Executor:
        around = self._around
        services = LeaseServices(
            worker_id=around.me.id,
            max_result_bytes=around.settings.max_result_bytes,
            max_checkpoint_bytes=around.settings.max_checkpoint_bytes,
            database=around.database,
            sessions=around.sessions,
            events=around.events,
            loop=asyncio.get_running_loop(),
            on_quiet=self.quiet.announce,
            cover_others=self.quiet.cover_others,
        )
        return Executor(
            slots=self.slots,
            services=services,
            values=Values(worker_id=around.me.id, database=around.database),
            isolated_runner=self.isolated_runner,
            in_flight=self.in_flight,
            settler=self.settler,
            tracing=self.tracing,
            events=around.events,
            supervision=around.supervision,
            on_room=self.wake_pullers,
            on_requeued=self.wake_relay,
            died=around.died,
            loop_ends=lambda: self.beats.is_cancelled,
        )

    def _wire_consumer(self, kind: Kind) -> Consumer:
        around = self._around
        claimer = Claimer(
            kind,
            worker_id=around.me.id,
            statement_timeout=around.settings.statement_timeout,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            late=self.late,
            quiet=self.quiet,
            events=around.events,
        )
        return Consumer(
            kind,
            claimer=claimer,
            health=self.health,
            in_flight=self.in_flight,
            slots=self.slots,
            dead_letters=self.dead_letters,
            events=around.events,
            on_room=self.wake_pullers,
            died=around.died,
        )

    def _wire_puller(self, consumer: Consumer) -> Puller:
        return Puller(
            self.stream,
            consumer.kind.name,
            deliver=consumer.deliver,
            undecodable=consumer.undecodable,
            room=consumer.room,
        )

    def _wire_loops(self) -> None:
        settings, died = self._around.settings, self._around.died
        beat = settings.heartbeat_interval
        self.beats = Loop("heartbeat", self._beat, interval=beat, died=self._around.heart_died)
        self.fences = Loop("fence", self.heartbeat.fence.step, interval=beat / _FENCE_LOOKS, died=died)
        self.presences = Loop("presence", self.presence.step, interval=beat, died=died)
        self.probes = Loop("probe", self._probe, interval=_PROBE_SECONDS, died=died)
        watch = FailoverWatch(
            database=self.database,
            health=self.health,
            events=self._around.events,
            on_changed=self.heartbeat.look_for_orphaned_claims,
        )

        async def look() -> None:
            await watch.step()
            await self.schema.step()

        interval = _LINEAGE_HEARTBEATS * beat
        self.lineage = Loop("lineage", look, interval=interval, jitter=_SCAN_JITTER, died=died)
        self.publisher = Relay(
            database=self.database,
            health=self.health,
            publishing=self.publishing,
            stream=self.stream,
            refused_rows=self.refused_rows,
        )
        self.relay = Loop("relay", self.publisher.step, interval=settings.relay_interval, died=died)
        retention = Retention(
            retention=settings.retention,
            database=self.database,
            health=self.health,
            events=self._around.events,
            refused_rows=self.refused_rows,
        )
        self.retention = Loop(
            "retention", retention.step, interval=TICK_SECONDS, jitter=_SCAN_JITTER, died=died
        )
        shape = ShapeWatch(list(self._around.kinds), stream=self.stream, events=self._around.events)
        self.shape = Loop(
            "shape",
            shape.step,
            interval=min(SHAPE_SECONDS, _SHAPE_SCANS * settings.scan_interval),
            jitter=_SCAN_JITTER,
            died=died,
        )
        self.survey = FleetSurvey(
            sorted(self._around.kinds), database=self.database, health=self.health, stream=self.stream
        )
        self.surveys = Loop(
            "survey", self.survey.step, interval=SURVEY_SECONDS, jitter=_SCAN_JITTER, died=died
        )
        self._wire_recovery()

    def _wire_recovery(self) -> None:
        around, settings, died = self._around, self._around.settings, self._around.died
        sweeper = Sweeper(
            worker_id=around.me.id,
            heartbeat_interval=settings.heartbeat_interval,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            heartbeat=self.heartbeat,
            presence=self.presence,
            late=self.late,
            events=around.events,
            on_requeued=self.wake_relay,
            search=self._search("silent owners", rest=_SWEEPER_REST),
            rules=settings.recovers_by(),
        )
        repair = Repair(
            worker_id=around.me.id,
            scan_interval=settings.scan_interval,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            stream=around.stream,
            events=around.events,
            on_requeued=self.wake_relay,
            search=self._search("lost messages"),
        )
        self.poll = IdlePoll(
            self.consumers,
            scan_interval=settings.scan_interval,
            relay_interval=settings.relay_interval,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            in_flight=self.in_flight,
            nats_connected=lambda: around.stream.connected,
            publishing_refused=lambda: self.publishing.refused,
            on_more=self._look_into_the_table,
            new_search=lambda kind: self._search(f"waiting jobs of {kind}"),
            pace=Pace(longest_rest=self._longest_rest()),
        )

        unconsumed = Unconsumed(
            database=around.database, health=self.health, stream=around.stream, events=around.events
        )
        self.unconsumed = Loop(
            "unconsumed", unconsumed.step, interval=LOOK_SECONDS, jitter=_SCAN_JITTER, died=died
        )

        async def look_after_the_queue() -> None:
            if self.health.up:
                await self._look_at_refused_rows()
                await self._tell_of_operators()
                await self.poll.step()
                await repair.step()

        async def take_from_the_table() -> None:
            await self.publisher.try_again()
            await self.poll.go_on()

        interval = settings.scan_interval
        self.scans = Loop("scan", sweeper.step, interval=interval, jitter=_SCAN_JITTER, died=died)
        # By itself: the jobs of the dead wait for no search that has become slow.
        self.repairs = Loop("repair", look_after_the_queue, interval=interval, jitter=_SCAN_JITTER, died=died)
        self.table = Loop("table", take_from_the_table, interval=settings.relay_interval, died=died)
        reconciler = Reconciler(
            worker=around.me,
            siblings=around.siblings,
            statement_timeout=settings.statement_timeout,
            database=around.database,
            health=self.health,
            refused_rows=self.refused_rows,
            events=around.events,
            on_requeued=self.wake_relay,
            done=self._end_reconciliation,
        )
        self.reconciliation = Loop(
            "reconciliation",
            reconciler.step,
            interval=settings.statement_timeout / _RECONCILE_ROUNDS,
            died=died,
        )

    async def _look_at_refused_rows(self) -> None:
        await self._by_itself("refused rows", self.refused_rows.look())

    async def _tell_of_operators(self) -> None:
        telling = report_operators(self.database, events=self._around.events)
        await self._by_itself("events of what operators take back", telling)

    async def _by_itself(self, what: str, asking: Awaitable[None]) -> None:
        """Ask something of a table of its own: where a right is missing, say, all else may go on."""
        try:
            await asking
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if isinstance(error, DatabaseRefused) and error.sqlstate is not None:
                self._complain(what, str(error))
            else:
                self.health.failed(error)

    def _complain(self, what: str, reason: str) -> None:
        if self._complaints.get(what) != reason:
            self._complaints[what] = reason
            self._around.events.emit("worker.degraded", what=what, reason=reason)

    def _tell_refused(self, row: RefusedRow) -> None:
        self._around.events.emit(
            "row.refused",
            job_id=str(row.job_id),
            kind=row.kind,
            attempted=row.attempted,
            sqlstate=row.sqlstate,
            constraint=row.constraint,
            jobs=row.jobs,
        )

    def _end_reconciliation(self) -> None:
        self.reconciliation.end()

    def _launch(self, run: Run) -> None:
        self.executor.launch(run)

    async def _beat(self) -> None:
        await self.heartbeat.step()
        self._give_back_overdue()

    def _give_back_overdue(self) -> None:
        """Release what was claimed ahead and got no slot after all, so that others may run it."""
        overdue = max(1.0, self._around.settings.heartbeat_interval)
        for run in self.slots.take_waiting(older_than=overdue):
            self.executor.hand_back(run, "claimed ahead, but no job slot fell free")

    async def _probe(self) -> None:
        await self.health.probe(self.heartbeat.seen)

    def _note_ignored(self, run: Run) -> None:
        self.executor.note_ignored(run, gives_up=self._around.supervision is None)
