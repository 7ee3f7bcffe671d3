"""The owner's signs of life. They run on the event loop, so they attest that it ticks.

First to start, last to stop: a drain must not look like a death.
"""

import asyncio
from collections.abc import Callable, Iterable

from jsworker.errors import DatabaseRefused, DatabaseUnavailable, OwnershipLost
from jsworker.events import Events
from jsworker.ownership import lease, registry
from jsworker.ownership.database import Database
from jsworker.ownership.lease import Held
from jsworker.ownership.registry import WorkerRow
from jsworker.runtime.answers import Answers
from jsworker.runtime.clock import boottime
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.run import Hand, Phase, Run, Stop
from jsworker.runtime.settler import Settler

_UNHEARD = (DatabaseUnavailable, DatabaseRefused)


class Heartbeat:
    """Renews what this process has in hand and acts on what it learns: cancelled, lost, in nobody's hand."""

    def __init__(
        self,
        *,
        worker: WorkerRow,
        statement_timeout: float,
        ack_wait: float,
        database: Database,
        health: DatabaseHealth,
        hand: Hand,
        settler: Settler,
        answers: Answers,
        events: Events,
        on_requeued: Callable[[], None],
    ) -> None:
        """Wire the heartbeat.

        Args:
            worker: who beats; its interval is the loop's.
            statement_timeout: seconds until a heartbeat counts as unheard.
            ack_wait: seconds after which JetStream redelivers a message that nobody speaks for.
            database, health, hand, settler, answers, events: the worker's own.
            on_requeued: called when a row in nobody's hand went back to the queue.
        """
        self._worker = worker
        self._statement_timeout = statement_timeout
        self._ack_wait = ack_wait
        self._database = database
        self._health = health
        self._hand = hand
        self._settler = settler
        self._answers = answers
        self._events = events
        self._on_requeued = on_requeued
        self.state = "running"
        self._heard_since: float | None = None

    def heard_for(self) -> float:
        """Return for how many seconds heartbeats have been answered without a gap."""
        return 0.0 if self._heard_since is None else boottime() - self._heard_since

    async def step(self) -> None:
        """Send one heartbeat for all runs in hand and act on the answer."""
        started = boottime()
        runs = {run.held: run for run in self._hand.runs.values()}
        try:
            await registry.seen(self._database, self._worker, state=self.state)
            beat = await lease.heartbeat(self._database, worker_id=self._worker.id, hand=runs)
            strays = await self._strays()
        except _UNHEARD as error:
            self._unheard(error)
            return
        self._heard_since = self._heard_since or started
        self._health.answered()
        self._renew((runs[held] for held in beat.alive - beat.locked), started)
        self._cancel(runs[held] for held in beat.cancelled)
        self._lose(runs[held] for held in beat.lost)
        for held in beat.completed:
            runs[held].completed = True
        await self._retry_alone([runs[held] for held in beat.locked])
        await self._end_quiet_phases(runs.values())
        await self._release_strays(strays)

    def _unheard(self, error: DatabaseUnavailable | DatabaseRefused) -> None:
        self._heard_since = None
        self._health.failed(error)
        self._events.emit("heartbeat.failed", reason=str(error), in_hand=len(self._hand.runs))
        for run in self._hand.runs.values():
            self._fence(run)

    def _fence(self, run: Run) -> None:
        """Stop a run before anybody may take its job for stale: late enough to hope, early enough to end."""
        stale_after = run.kind.limits.stale_after
        if stale_after is None:
            return
        patience = (
            stale_after + run.quiet_seconds - 2 * self._worker.heartbeat_interval - self._statement_timeout
        )
        if boottime() - run.beaten_at > patience:
            run.signal(Stop.FENCED)

    def _renew(self, runs: Iterable[Run], started: float) -> None:
        for run in runs:
            run.beaten_at = max(run.beaten_at, started)
            if run.delivery is not None and started - run.in_progress_at > self._ack_wait / 3:
                run.in_progress_at = started
                self._answers.in_progress(run.delivery)

    def _cancel(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if not run.cancelled:
                run.signal(Stop.CANCELLED)

    def _lose(self, runs: Iterable[Run]) -> None:
        for run in runs:
            # A run that is settling may just have ended processing itself; its own statement tells it.
            if run.phase is not Phase.SETTLING:
                run.signal(Stop.LOST)

    async def _retry_alone(self, locked: list[Run]) -> None:
        await asyncio.gather(*(self._beat_alone(run) for run in locked))

    async def _beat_alone(self, run: Run) -> None:
        started = boottime()
        try:
            renewed = await lease.heartbeat_alone(self._database, worker_id=self._worker.id, held=run.held)
        except _UNHEARD:
            return  # still locked; alive as far as anybody knows, and asked again with the next heartbeat
        if renewed:
            run.beaten_at = max(run.beaten_at, started)
        else:
            self._lose([run])

    async def _end_quiet_phases(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run.quiet_seconds and boottime() > run.quiet_until and run.phase is Phase.RUNNING:
                try:
                    await lease.lengthen(
                        self._database, worker_id=self._worker.id, held=run.held, seconds=-run.quiet_seconds
                    )
                except (*_UNHEARD, OwnershipLost):
                    continue  # the next heartbeat tells
                run.quiet_seconds = 0.0

    async def _strays(self) -> list[Held]:
        return await lease.strays(
            self._database,
            worker_id=self._worker.id,
            hand=self._hand.held(),
            claiming=list(self._hand.claiming),
            older_than=2 * self._statement_timeout,
        )

    async def _release_strays(self, strays: list[Held]) -> None:
        unheld = [held for held in strays if held[0] not in self._hand]
        if unheld and await self._settler.release(unheld, "claimed, but the claim's answer was lost"):
            for job_id, token in unheld:
                self._events.emit(
                    "job.released", job_id=str(job_id), fencing_token=token, reason="in nobody's hand"
                )
            self._on_requeued()
