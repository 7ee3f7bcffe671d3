"""The components of a worker, how they are connected, and how they end. Only this file knows all of them."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.priorities import HIGH, NORMAL
from jsworker.ownership.transitions import workers
from jsworker.stream.event_sender import EventSender
from jsworker.stream.result_hints import FORGET_SECONDS
from jsworker.telemetry.worker_status import Readiness, WorkerStatus
from jsworker.worker import stacks
from jsworker.worker.context import WorkerContext
from jsworker.worker.heartbeat import Heartbeat
from jsworker.worker.isolation.isolated_runner import MEMORY_LOOK_SECONDS
from jsworker.worker.lifecycle import Loop
from jsworker.worker.maintenance import watches
from jsworker.worker.maintenance.admissions import TIDY_SECONDS, Admissions
from jsworker.worker.maintenance.expiry import WINDOWS_SECONDS, Expiry
from jsworker.worker.maintenance.fleet_survey import SURVEY_SECONDS, FleetSurvey
from jsworker.worker.maintenance.lanes import Lanes
from jsworker.worker.maintenance.looks import RelayLook, ScanLook
from jsworker.worker.maintenance.relay import Relay
from jsworker.worker.maintenance.retention import TICK_SECONDS, Retention
from jsworker.worker.maintenance.scheduler import Scheduler
from jsworker.worker.maintenance.statistics import WRITE_SECONDS, StatisticsWriter
from jsworker.worker.maintenance.work_summary import WorkSummary
from jsworker.worker.maintenance.workflows import WorkflowSweep
from jsworker.worker.pipeline.in_flight import Phase, StopReason
from jsworker.worker.pipeline.pipeline import Pipeline
from jsworker.worker.presence import Presence
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.earlier_lives import Reconciler
from jsworker.worker.recovery.lost_messages import LostMessages
from jsworker.worker.recovery.resets import DeadOwners, report_operators
from jsworker.worker.recovery.sweeper import LateRows, Sweeper
from jsworker.worker.recovery.table_poll import IdlePoll
from jsworker.worker.watchdog import LAG_SECONDS, Watchdog

HEARTBEAT: Final = "heartbeat"
"""The name of the loop without which a worker must not go on, not even to drain."""

_PROBE_SECONDS: Final = 0.5
_SCAN_JITTER: Final = 0.2
_FENCE_LOOKS_A_HEARTBEAT: Final = 4
_HEARTBEATS_A_FAILOVER_LOOK: Final = 6
_SCANS_A_SHAPE_LOOK: Final = 6
_RECONCILE_ROUNDS_A_TIMEOUT: Final = 4
_SELDOM_SECONDS: Final = 600.0
"""The longest time between two rounds of a loop that is woken when there is work."""
_NAMED: Final = 5
"""The most kinds or jobs that a status names; there may be hundreds."""
_LEAST_FLUSH_SECONDS: Final = 0.5


class Components:
    """The components of a worker, connected but not started; ``siblings`` as in ``Worker``."""

    _pulls = False

    def __init__(self, context: WorkerContext, *, siblings: Collection[str], surveys: bool) -> None:
        settings = context.settings
        self._context = context
        self.before_pulling: list[Loop] = []
        """Loops that start before messages are pulled, the heartbeat first, to renew claimed jobs."""
        self._scan = partial(self._loop, jitter=_SCAN_JITTER)

        # The way of the jobs, and the heartbeat.
        self.quiet = QuietPhases(context)
        self.late = LateRows(scan_interval=settings.scan_interval)
        self.pipeline = Pipeline(
            context, quiet=self.quiet, late=self.late, loop_ends=lambda: self.sentinel.is_cancelled
        )
        self.presence = Presence(
            context,
            partial(
                stacks.answer, context.worker_id, context.in_flight, self.pipeline.isolated_runner.ask_stacks
            ),
        )
        self.watchdog = Watchdog(context, self.quiet)
        self.heartbeat = Heartbeat(
            context, self.pipeline, presence=self.presence, quiet=self.quiet, watchdog=self.watchdog
        )
        interval = settings.heartbeat_interval
        self.beats = self._loop(HEARTBEAT, self.heartbeat.step, interval)
        # Its only round never ends and has no time-out, so nothing cancels it but the end of the event loop.
        self.sentinel = self._loop("sentinel", asyncio.Event().wait, interval)
        self._loop("lag", self.watchdog.step, LAG_SECONDS)
        self.fences = self._loop("fence", self.heartbeat.look_at_fence, interval / _FENCE_LOOKS_A_HEARTBEAT)
        self.presences = self._loop("presence", self.presence.step, interval)
        self._loop("result hints", self.pipeline.hints.step, FORGET_SECONDS)
        self.probes = self._loop(
            "probe", partial(context.health.probe, self.heartbeat.register), _PROBE_SECONDS
        )

        self.event_sender = (
            EventSender(
                context.stream.connection,
                context.events,
                prefix=settings.subject_prefix,
                worker_id=context.worker_id,
            )
            if settings.publish_events
            else None
        )

        # Maintenance.
        self.publisher = Relay(context)
        self.relay = self._loop("relay", self.publisher.step, _SELDOM_SECONDS, at_once=False)
        prunes = settings.retention is not None
        self.retention = self._scan("retention", Retention(context).step, TICK_SECONDS, runs=prunes)
        interval = min(watches.SHAPE_SECONDS, _SCANS_A_SHAPE_LOOK * settings.scan_interval)
        self.shape = self._scan("shape", partial(watches.keep_in_shape, context, self._lane_names), interval)
        self.schedules, self.scheduler, self.held, self.admissions = self._wakers()
        self.survey = FleetSurvey(context, self._lane_names)
        self._scan("survey", self.survey.step, SURVEY_SECONDS, runs=surveys)
        self.database_watch = watches.DatabaseWatch(
            context, on_failover=self.heartbeat.look_for_orphaned_claims
        )
        self.failover_watch = self._scan(
            "failover watch",
            self.database_watch.step,
            _HEARTBEATS_A_FAILOVER_LOOK * settings.heartbeat_interval,
        )
        self.clock = self._scan(
            "clock", partial(watches.follow_the_clock, context), watches.CLOCK_SECONDS, at_once=False
        )
        self._scan("unconsumed", watches.Unconsumed(context).step, watches.LOOK_SECONDS)

        # Recovery.
        rules = settings.recovers_by()
        self.dead_owners = DeadOwners(context)
        sweeper = Sweeper(context, heartbeat=self.heartbeat, presence=self.presence, late=self.late)
        self.scans = self._scan(
            "scan", sweeper.step, settings.scan_interval, runs=rules["crashed"] or rules["stale"]
        )
        self._lost_messages = LostMessages(context)
        # A loop of its own, so that the jobs of dead owners do not wait for a slow search.
        self.repairs = self._scan("repair", self._repair_queue, settings.scan_interval)
        self.table = self._loop("table", self._take_from_the_table, settings.relay_interval)
        self.poll = IdlePoll(context, self.pipeline.consumers, on_more=self.table.wake)
        reconciler = Reconciler(
            context,
            self.dead_owners,
            presence=self.presence,
            siblings=siblings,
            done=self._end_reconciliation,
        )
        interval = settings.statement_timeout / _RECONCILE_ROUNDS_A_TIMEOUT
        self.reconciliation = self._loop("reconciliation", reconciler.step, interval, runs=rules["start"])

        # Rows found in the table come first: messages are pulled for the slots that they leave.
        context.room.extend([self.poll.on_room, *(puller.wake for puller in self.pipeline.pullers)])
        context.requeued.append(self.relay.wake)
        context.health.changed.extend([context.room.notify, self.failover_watch.wake, self.presences.wake])
        context.publishing.changed.extend([self.relay.wake, self.table.wake, self.presences.wake])
        self._follow_connection()
        self._look_for_work()

    def _follow_connection(self) -> None:
        """Take jobs from the table once the connection is lost; look whose stream it is once it is back."""
        connection = self._context.stream.connection
        connection.lost_callbacks += [self._context.room.notify, self.table.wake]
        connection.restored_callbacks.append(self.presences.wake)

    def _wakers(self) -> tuple[Loop, Scheduler, Loop, Admissions]:
        """Return the loops that are woken at an instant: of a schedule, a token, or the end of a pause."""
        context, settings = self._context, self._context.settings
        schedules = self._scan("schedules", self._fire_schedules, settings.scan_interval)
        held = self._scan("held jobs", self._find_held, TIDY_SECONDS, at_once=False)
        admissions = Admissions(context, self.pipeline.of_kind, wake=held.wake)
        context.held.append(admissions.look_soon)
        return schedules, Scheduler(context, wake=schedules.wake), held, admissions

    def _look_for_work(self) -> None:
        context, settings = self._context, self._context.settings
        self.relay_look = RelayLook(context, self.admissions, wake_relay=self.relay.wake)
        self.looks = self._loop("relay look", self.relay_look.step, settings.relay_interval)
        isolated = self.pipeline.isolated_runner
        self._loop(
            "isolated memory", isolated.look_at_memory, MEMORY_LOOK_SECONDS, runs=isolated.limits_memory
        )
        self.workflow_sweep = WorkflowSweep(context)
        self.workflows = self._loop("workflows", self.workflow_sweep.step, _SELDOM_SECONDS, at_once=False)
        context.batches.changed.append(self.workflows.wake)
        expiry = self._scan("expiry", Expiry(context).step, WINDOWS_SECONDS, at_once=False)
        wake = {"held": self.held.wake, "expired": expiry.wake, "in_workflows": self._sweep_workflows}
        look = ScanLook(context, Lanes(context, self._open_lane), wake=wake)
        self.scan_looks = self._scan("scan look", look.step, settings.scan_interval)
        self.files = self._loop("open files", partial(watches.look_at_files, context), watches.FILES_SECONDS)
        self.statistics = StatisticsWriter(context)
        self._scan("statistics", self.statistics.step, WRITE_SECONDS, at_once=False)
        if settings.status_interval is not None:
            summary = WorkSummary(context, self.pipeline.ended)
            self._loop("status", summary.step, settings.status_interval, at_once=False)

    def _sweep_workflows(self) -> None:
        self.workflow_sweep.sweep_soon()
        self.workflows.wake()

    def _end_reconciliation(self) -> None:
        self.reconciliation.end()

    def _lane_names(self) -> list[str]:
        return [each.name for each in self.pipeline.consumers if each.priority != NORMAL]

    def _open_lane(self, kind: str, priority: int) -> None:
        pipeline, room = self.pipeline, self._context.room
        if pipeline.slots.is_closed:
            return
        consumer = pipeline.add_lane(self._context.kinds[kind], priority)
        self.poll.add(consumer)
        room.insert(1 if priority == HIGH else len(room), consumer.puller.wake)  # high jobs are pulled first
        if self._pulls:
            consumer.puller.begin()

    async def _repair_queue(self) -> None:
        context = self._context
        if context.health.up:
            with context.noting("refused rows"):
                await context.refused_rows.look()
            with context.noting("unsettled runs"):
                await self.pipeline.forget_unsettled()
            with context.noting("events of what operators take back"):
                await report_operators(context.database, events=context.events)
            await self.poll.step()
            await self._lost_messages.step()

    async def _fire_schedules(self) -> None:
        with self._context.noting("schedules"):
            await self.scheduler.step()

    async def _find_held(self) -> None:
        await self.admissions.step()

    async def _take_from_the_table(self) -> None:
        await self.publisher.try_again()
        await self.poll.go_on()

    def _loop(
        self,
        name: str,
        step: Callable[[], Awaitable[object]],
        interval: float,
        *,
        jitter: float = 0.0,
        runs: bool = True,
        at_once: bool = True,
    ) -> Loop:
        died = self._context.died
        loop = Loop(name, step, interval=interval, died=died, jitter=jitter, at_once=at_once)
        if runs:
            self.before_pulling.append(loop)
        return loop

    # --- The status of the worker. ---

    def status(self, *, draining: bool) -> WorkerStatus:
        """Return the status of the worker from what is known now, without asking a server."""
        context = self._context
        not_pulled = [
            f"{puller.name} ({puller.reason})" if puller.reason else puller.name
            for puller in self.pipeline.pullers
            if not puller.is_pulling
        ]
        # Only of normal priority: jobs of others come from the table, too, and any producer may use them.
        is_pulling = all(each.is_pulling for each in self.pipeline.pullers if each.priority == NORMAL)
        # Copied at once, because figures may be collected in another thread.
        running = Counter(run.kind.name for run in list(context.in_flight.runs.values()))
        readiness = Readiness(
            postgresql=not context.health.degraded,
            nats=context.stream.connected,
            migration=context.database.revision,
            pulling=is_pulling and not draining,
            draining=draining,
            problems=self._problems(not_pulled),
            schema_mismatch=self.database_watch.schema_mismatch,
            publishing=not context.publishing.refused,
            drained=self.pipeline.slots.is_drained,
            refusal=context.health.refusal,
            silence=context.health.silence,
            answered=context.health.up,
        )
        pools = context.database.pools_by_name().items()
        return WorkerStatus(
            readiness=readiness,
            in_flight={kind: running[kind] for kind in context.kinds},
            heartbeat_lag=boottime() - self.heartbeat.answered_at,
            event_loop_lag=self.watchdog.lag,
            pools={name: (pool.in_use, pool.limit) for name, pool in pools},
            recovers_by=context.settings.recovers_by(),
            events_dropped=0 if self.event_sender is None else self.event_sender.dropped,
            isolated=self.pipeline.isolated_runner.status(),
        )

    def _problems(self, not_pulled: Sequence[str]) -> list[str]:
        runs = [*self._context.in_flight.runs.values(), *self._context.in_flight.given_up]
        ignoring = [f"job {run.id}" for run in runs if run.ignores_stop]
        problems = [*_named("not pulled", not_pulled), *_named("told to stop and still running", ignoring)]
        if seconds := self.watchdog.blocked_seconds:
            problems.append(f"its event loop has not come round for {seconds:.0f} s")
        if self._context.files.are_exhausted:
            problems.append(watches.FILES_EXHAUSTED)
        return problems

    # --- The end. If a component fails, the others end all the same. ---

    async def end(self, *, forced: asyncio.Event, stops_runs: Callable[[], None], by_error: bool) -> int:
        """Drain, hand back, publish, and only then end the heartbeat.

        ``forced`` is set when running jobs are not to be waited for any more; ``stops_runs`` is called before
        they are stopped. Returns how many runs did not end; others take their jobs back later.
        """
        if not by_error:  # an error may be the fault of a job
            self.heartbeat.state = workers.DRAINING
            self.beats.wake()  # so that no stall is counted if this process is killed before the drain ends
        await self._stop_pulling()
        left = await self._drain(forced, stops_runs)
        await self._publish_the_rest()
        await self._end_loops()
        return left

    def start_pullers(self) -> None:
        """Begin to pull messages."""
        self._pulls = True
        for puller in self.pipeline.pullers:
            puller.begin()

    async def join_pullers(self) -> None:
        """Wait until the pull loops have ended; raises the error that ended one."""
        await asyncio.gather(*(puller.join() for puller in self.pipeline.pullers))

    async def stop_pullers(self) -> None:
        """Stop all pullers at the same time, because each waits for seconds when NATS is frozen."""
        stops = (puller.stop() for puller in self.pipeline.pullers)
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(error, Exception):  # the error that ended its loop; the others are stopped
                self._context.died("pull loop", error)

    async def _stop_pulling(self) -> None:
        """Stop pulling: messages that are not claimed go back at once; claims under way are still decided."""
        self.pipeline.slots.close()
        await self.retention.stop()
        await self.stop_pullers()
        await self.table.stop()
        await self.held.stop()
        self.admissions.close()
        for consumer in self.pipeline.consumers:
            await consumer.flush()
        self.pipeline.hand_back_waiting("the worker was stopped before the job began")

    async def _drain(self, forced: asyncio.Event, stops_runs: Callable[[], None]) -> int:
        """Let runs end; then cancel the others, and leave those that do not end to the stale rule."""
        in_flight, seconds = self._context.in_flight, self._context.settings.statement_timeout
        for run in in_flight.runs.values():
            run.drain()
        is_forced = asyncio.create_task(forced.wait())
        drained = asyncio.create_task(self.pipeline.wait(self._context.settings.shutdown_timeout))
        await asyncio.wait({is_forced, drained}, return_when=asyncio.FIRST_COMPLETED)
        is_forced.cancel()
        drained.cancel()
        await asyncio.gather(is_forced, drained, return_exceptions=True)
        if any(run.phase is Phase.RUNNING for run in in_flight.runs.values()):
            stops_runs()
        for run in in_flight.runs.values():
            run.signal(StopReason.SHUTDOWN)
        # Together two statement time-outs, which the rule about GRACE_PERIOD reserves for this.
        if not await self.pipeline.wait(seconds):
            for run in in_flight.runs.values():
                run.cancel_again()
            await self.pipeline.wait(seconds)
        return await self.pipeline.abandon()

    async def _publish_the_rest(self) -> None:
        """Publish released jobs now, not only at the next relay tick of other workers.

        Other relays publish the rest of the outbox, because a process that ends too slowly is killed.
        """
        for loop in (self.reconciliation, self.scans, self.repairs, self.workflows):
            await loop.stop()
        await self.dead_owners.close()
        # A batch that is interrupted would keep its jobs from other relays for five seconds.
        self.publisher.end()
        # One time-out for all of this: after a forced end little is left of the time that the parent allows.
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self._context.settings.statement_timeout
        await self.relay.stop(within=ends_at - clock())
        try:
            async with asyncio.timeout_at(ends_at):
                for consumer in self.pipeline.consumers:  # wakes jobs of keys that the last runs have freed
                    await consumer.flush()
                await self.workflow_sweep.step()  # finishes batches whose last members ended here
                await self.publisher.publish_latest()
        except TimeoutError:
            pass  # jobs that were taken are due again in five seconds
        except Exception as error:  # noqa: BLE001 -- what killed its loop, perhaps; other workers publish too
            self._context.died("relay", error)
        await self.pipeline.dead_letters.close(ends_at - clock())
        await self._context.stream.flush(timeout=max(ends_at - clock(), _LEAST_FLUSH_SECONDS))

    async def _end_loops(self) -> None:
        """End the loops, the heartbeat last: a long drain must not look like a death."""
        for consumer in self.pipeline.consumers:
            await consumer.close()
        await self.pipeline.tracing.close()
        await self.publisher.close()
        await self.pipeline.settler.close()
        await self.statistics.step()
        for loop in (self.probes, self.presences, self.fences, self.beats):
            await loop.stop()
        if self._context.health.up:
            with self._context.health.noting():
                await self.heartbeat.seen("stopped")


def _named(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what}: {', '.join(names[:_NAMED])}{more}"] if names else []
