"""The owner's heartbeats, and the fence, which stops its runs before another worker may start them.

Heartbeats run on the event loop, so they prove that it runs. They start first and stop last: a drain must not
look like a death.
"""

import asyncio
import math
import random
from contextlib import suppress
from functools import partial
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseTimeout, DatabaseUnavailable, LockTimeout
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import heartbeat, workers
from jsworker.ownership.transitions.heartbeat import Beat, Held
from jsworker.ownership.transitions.settle import Settled
from jsworker.worker.context import WorkerContext
from jsworker.worker.isolation.resident_memory import own_resident_bytes
from jsworker.worker.maintenance.throttled_scan import ThrottledScan
from jsworker.worker.pipeline.in_flight import Phase, Run, StopReason
from jsworker.worker.pipeline.pipeline import Pipeline
from jsworker.worker.presence import Presence
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.sweeper import BELIEVED_SECONDS
from jsworker.worker.watchdog import Watchdog

_UNANSWERED: Final = (DatabaseUnavailable, DatabaseRefused)
_REGISTRY: Final = "this worker's row of jsworker.workers"
_LOOK_EVERY_HEARTBEATS: Final = 12
_ALONE_AT_ONCE: Final = 3
"""The most heartbeats that wait for a lock; each uses a connection that claims and outcomes need, too."""

_CANCELLATIONS: Final = 2
"""A coroutine that was cancelled so often and goes on counts as ignoring its stop."""


class Heartbeat:
    """Renews the runs in flight, stops cancelled and lost ones, releases orphaned claims, fences the rest."""

    def __init__(
        self,
        context: WorkerContext,
        pipeline: Pipeline,
        *,
        presence: Presence,
        quiet: QuietPhases,
        watchdog: Watchdog,
    ) -> None:
        self._context = context
        self._in_flight = context.in_flight
        self._interval = context.settings.heartbeat_interval
        self._refused: set[Held] = set()
        """Runs whose row was refused: renewed one by one, so that one statement can renew the others."""
        self._pipeline = pipeline
        self._presence = presence
        self._quiet = quiet
        self._watchdog = watchdog
        # It gets no more than one time-out, because heartbeats wait for it.
        self._search = ThrottledScan(context, "orphaned claims", most_timeouts=1)
        self.state = "running"
        """The state of this worker: running, draining or stopped."""
        self._answered_since: float | None = None
        self.answered_at = boottime()
        """The beginning of the last heartbeat that was answered."""
        self._gap_at = -math.inf
        self._was_answered = False
        self._unanswered = 0  # heartbeats in a row
        self._is_registered = True
        self._look_at = boottime() + _LOOK_EVERY_HEARTBEATS * self._interval
        self._doubted_at = -math.inf
        self._wants_orphaned_claims = False

    def answered_for(self) -> float:
        """Return the seconds for which heartbeats have been answered without a gap, such as a freeze."""
        now = boottime()
        return 0.0 if self._answered_since is None or self._is_gap(now) else now - self._answered_since

    def had_a_gap_within(self, seconds: float) -> bool:
        """Return whether heartbeats had a gap within ``seconds``: its cause may have silenced others, too."""
        return boottime() - self._gap_at < seconds

    def look_for_orphaned_claims(self) -> None:
        """Search with the next heartbeats: after a failover, jobs that ended here may be owned again."""
        self._doubted_at = boottime()

    async def seen(self, state: str | None = None) -> None:
        """Write this worker's row of the registry, and learn whether an operator has drained it."""
        context, slots = self._context, self._pipeline.slots
        shown = "drained" if self.state == "running" and slots.is_drained else self.state
        is_to_drain = await workers.seen(
            context.database,
            context.me,
            state=state or shown,
            answers=self._presence.answers,
            memory_bytes=own_resident_bytes(),
            loop_lag_seconds=self._watchdog.lag,
        )
        if is_to_drain is not slots.is_drained:
            slots.is_drained = is_to_drain
            facts = {"worker_id": context.worker_id, "in_hand": len(self._in_flight.runs)}
            context.events.emit("worker.drained" if is_to_drain else "worker.undrained", **facts)
            self._hand_back_waiting()
            context.room.notify()

    async def register(self) -> None:
        """Call ``seen``; raises only if the database does not answer, not if the row is refused or locked."""
        context = self._context
        try:
            await self.seen()
        except RowRefused as error:
            context.health.failed(error)
        except (DatabaseTimeout, LockTimeout) as error:
            await context.database.ping()  # it answers, so the row is locked, which does not concern jobs
            context.complaints.report(_REGISTRY, str(error))
            self._is_registered = False
        else:
            context.complaints.end(_REGISTRY)
            self._is_registered = True

    async def step(self) -> None:
        """Send one heartbeat for all runs in flight and act on the answer."""
        self._hand_back_waiting()
        started = boottime()
        runs = {run.held: run for run in self._in_flight.runs.values()}
        self._refused &= runs.keys()
        refusals: dict[Held, RowRefused] = {}
        try:
            # The runs come first: a fault of the worker's own row must not stop their heartbeats.
            beat = await heartbeat.heartbeat(
                self._context.database,
                worker_id=self._context.worker_id,
                in_flight=runs,
                besides=self._refused,
                refusals=refusals,
            )
            self._apply(beat, runs, started)
            await self._register_and_search()
        except _UNANSWERED as error:
            self._answered_since = None
            self._context.health.failed(error)
            self._unanswered += 1
            facts = {"in_hand": len(self._in_flight.runs), "in_a_row": self._unanswered}
            self._context.events.emit("heartbeat.failed", reason=str(error), **facts)
            for run in self._in_flight.runs.values():
                self._check(run)
            return
        self._note_answered(started)
        if not self._is_registered:
            # A worker without a heartbeat of its own does not judge others by theirs.
            self._answered_since = None
        self._context.health.answered()
        if refusals:
            self._refused |= refusals.keys()
            refused = [(job_id, error) for (job_id, _), error in refusals.items()]
            with self._context.health.noting():
                await self._context.refused_rows.note("heartbeat", refused)
        await self._quiet.follow()
        await self._retry_alone([runs[held] for held in beat.locked if held not in refusals])

    def _hand_back_waiting(self) -> None:
        """Hand back prefetched jobs that got no slot in time, so that other workers may run them."""
        if self._pipeline.slots.is_drained:
            self._pipeline.hand_back_waiting("an operator drains this worker")
        else:
            overdue = max(1.0, self._interval)
            self._pipeline.hand_back_waiting("claimed ahead, but no job slot fell free", older_than=overdue)

    def _note_answered(self, started: float) -> None:
        if self._answered_since is None or self._is_gap(started):
            self._answered_since = started
            if self._was_answered:
                self._gap_at = started
        self._was_answered = True
        self._unanswered = 0
        self.answered_at = started

    def _is_gap(self, now: float) -> bool:
        return now - self.answered_at > 3 * self._interval

    def _apply(self, beat: Beat, runs: dict[Held, Run], started: float) -> None:
        ack_due = started - self._context.settings.ack_wait / 3
        for held, silence in beat.silences.items():
            run = runs[held]
            run.beaten_at = max(run.beaten_at, started)
            run.note_silence(silence, read_at=started)
            if run.delivery is not None and run.in_progress_at < ack_due:
                run.in_progress_at = started
                run.delivery.in_progress()
        for held in beat.cancelled:
            if not runs[held].cancelled:
                runs[held].signal(StopReason.CANCELLED)
        for held in beat.lost:
            # A settling run may just have written its outcome; its own statement finds out.
            if runs[held].phase is not Phase.SETTLING:
                runs[held].signal(StopReason.LOST)
        for held in beat.completed:
            runs[held].completed = True

    async def _retry_alone(self, locked: list[Run]) -> None:
        """Wait for the locks of a few rows, beginning with those not renewed for the longest time."""
        locked.sort(key=lambda run: run.beaten_at)
        tried = [run for run in locked if run.held not in self._refused][:_ALONE_AT_ONCE]
        if refused := [run for run in locked if run.held in self._refused]:
            # One at random, because each may be refused for ever; the answer comes at once.
            tried.append(random.choice(refused))  # noqa: S311 -- gives each its turn, hides nothing
        await asyncio.gather(*(self._beat_alone(run) for run in tried))

    async def _beat_alone(self, run: Run) -> None:
        database, worker_id, started = self._context.database, self._context.worker_id, boottime()
        with suppress(*_UNANSWERED):  # still locked; the next heartbeat tries again
            # If no row was renewed, the next heartbeat finds out whether the job is lost or completed.
            if await heartbeat.heartbeat_alone(database, worker_id=worker_id, held=run.held):
                run.beaten_at = max(run.beaten_at, started)
                self._refused.discard(run.held)

    # --- Orphaned claims: processing rows of this worker that are not in flight. ---

    async def _register_and_search(self) -> None:
        """Write this worker's row of the registry, and search for orphaned claims if a search is due.

        A periodic search without a reason replaces the write of the row, so that there are no more than two
        statements in an interval. That a drain begins is written in any case.
        """
        doubtful = self._is_doubtful()
        self._wants_orphaned_claims |= doubtful or boottime() >= self._look_at
        looks = self._wants_orphaned_claims and not self._search.must_rest
        if doubtful or not looks or self.state != "running":
            await self.register()
        if looks and await self._search.make(self._release_orphaned_claims):
            self._wants_orphaned_claims = False
            self._look_at = boottime() + _LOOK_EVERY_HEARTBEATS * self._interval

    def _is_doubtful(self) -> bool:
        doubtful = 4 * self._context.settings.statement_timeout + 4 * self._interval
        return self._context.health.failed_within(doubtful) or boottime() - self._doubted_at < doubtful

    async def _release_orphaned_claims(self, _: float) -> bool:
        """Begin to release orphaned claims; not awaited: heartbeats must go on if a row cannot be written."""
        found = await heartbeat.orphaned_claims(
            self._context.database,
            worker_id=self._context.worker_id,
            in_flight=[run.held for run in self._in_flight.runs.values()],
            claiming=list(self._in_flight.claiming),
            older_than=2 * self._context.settings.statement_timeout,
            past_refused=self._context.refused_rows.any_of("release", "fail"),
        )
        for held, orphan in found.items():
            if held[0] not in self._in_flight and held not in self._in_flight.releasing:
                self._in_flight.releasing.add(held)
                why = "claimed, but the claim's answer was lost"
                release = self._pipeline.settler.let_go(held, why, orphan)
                release.add_done_callback(partial(self._released, held))
        return True

    def _released(self, held: Held, release: "asyncio.Future[Settled | None]") -> None:
        self._in_flight.releasing.discard(held)
        if release.cancelled() or release.exception() is not None:
            return
        settled = release.result()
        if settled is None or settled is Settled.LOCKED:
            self._wants_orphaned_claims = True  # the claim is still orphaned
        elif settled is Settled.QUEUED:
            facts = {"job_id": str(held[0]), "fencing_token": held[1], "reason": "orphaned claim"}
            self._context.events.emit("job.released", **facts)
            self._context.requeued.notify()

    # --- The fence. A run whose long time-out has passed is stopped here, too. ---

    async def look_at_fence(self) -> None:
        """Check the age of each run's last heartbeat, also while a heartbeat waits for its answer."""
        now, gone = boottime(), not self._presence.reachable()
        ignoring: list[Run] = []
        for run in self._in_flight.runs.values():
            if run.is_overdue(now):
                run.signal(StopReason.TIMEOUT)
            # Heartbeats are unanswered, or the run's row is locked. A run whose own transaction has completed
            # the job has no heartbeats any more and may go on; a run that has lost its job was stopped.
            has_job = not run.completed and run.stop is not StopReason.LOST
            if has_job and now - min(run.beaten_at, self.answered_at) > 1.5 * self._interval:
                self._check(run, gone=gone)
            if self._ignores_its_stop(run, now):
                ignoring.append(run)
        if ignoring:
            self._request_kill(ignoring)
        for run in self._in_flight.given_up:
            if now - run.cancelled_at > run.grace_heartbeats * self._interval:
                run.cancel_again()

    def _check(self, run: Run, *, gone: bool = False) -> None:
        """Stop a run whose last heartbeat is so old that other workers may soon take its job.

        ``gone``: others may not find this worker on NATS, so that rule 3 may act long before rule 1.
        """
        limits, silent = run.kind.limits, boottime() - run.beaten_at - run.quiet_seconds
        margin = 2 * self._interval + self._context.settings.statement_timeout
        ends = [] if limits.stale_after is None else [limits.stale_after - margin]
        if limits.crash_after is not None:
            ends.append(limits.crash_after + BELIEVED_SECONDS - margin)
            ends += [limits.crash_after - self._interval] if gone else []
        if all(silent <= end for end in ends):
            return
        # It ends before others may take the job: there is a look every quarter of an interval, and the
        # margins above have room for three quarters and seven.
        grace = 0.4 if gone and limits.crash_after is not None else 1.4
        is_cancelled_twice = run.kind.is_async and not run.isolated
        run.grace_heartbeats = min(run.grace_heartbeats, grace / 2 if is_cancelled_twice else grace)
        if run.stop is None and run.phase is not Phase.SETTLING:
            self._context.events.emit("job.fenced", **run.facts(), seconds_without_heartbeat=round(silent, 3))
        run.signal(StopReason.FENCED)

    def _ignores_its_stop(self, run: Run, now: float) -> bool:
        """Return whether a run ignores its stop; a coroutine is cancelled a second time before it does."""
        if run.first_cancelled_at is None or run.phase is not Phase.RUNNING:
            return False
        # The process of an isolated run is killed, not this one; at shutdown this one ends anyway.
        if run.isolated or run.stop is StopReason.SHUTDOWN:
            return False
        asked_at = run.cancelled_at if run.kind.is_async else run.first_cancelled_at
        if now - asked_at <= run.grace_heartbeats * self._interval:
            return False
        is_over = not run.kind.is_async or run.cancellations >= _CANCELLATIONS
        if not is_over:
            run.cancel_again()
        return is_over

    def _request_kill(self, runs: list[Run]) -> None:
        """Ask the supervisor to kill this process: nothing else ends these runs, and no job may run twice."""
        for run in runs:
            self._pipeline.note_ignored(run)
        if self._context.supervision is not None:
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            named = f"job {runs[0].id}{more} went on although it was told to stop: {runs[0].stop_in_words}"
            reason = f"its process was ended, because {named}"
            self._context.supervision.request_kill([run.held for run in runs], reason)
