"""One run from its job slot to the answer of its message: process, settle, answer, report."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from jsworker import fault_points
from jsworker.events import Events
from jsworker.job import Job
from jsworker.ownership.settle import Settled
from jsworker.runtime import outcome as outcomes
from jsworker.runtime.answers import Answers
from jsworker.runtime.attempt import judged, open_job, process_job
from jsworker.runtime.clock import boottime
from jsworker.runtime.lease import LeaseServices
from jsworker.runtime.outcome import Failed, HandedBack, InvalidResult, Outcome
from jsworker.runtime.processing import forget_cancellation
from jsworker.runtime.quarantine.ward import Ward
from jsworker.runtime.run import Hand, Phase, Run
from jsworker.runtime.settler import Settler
from jsworker.runtime.slots import Slots

_LEAVE_SECONDS = 1.0
"""How long the worker's end waits for a run that swallows its last cancellation too."""


class Executor:
    """Runs the jobs that were claimed."""

    def __init__(
        self,
        *,
        slots: Slots,
        services: LeaseServices,
        ward: Ward,
        hand: Hand,
        settler: Settler,
        answers: Answers,
        events: Events,
        on_room: Callable[[], None],
        on_requeued: Callable[[], None],
        died: Callable[[str, BaseException], None],
    ) -> None:
        """Wire the executor.

        Args:
            slots: the job slots; they launch runs through ``launch``.
            services: what a running job may use.
            ward: runs jobs in quarantine.
            hand: what this process has in hand.
            settler: writes outcomes.
            answers: answers messages.
            events: told what became of each run.
            on_room: called when more may be claimed.
            on_requeued: called when a job went back to the queue and waits to be published.
            died: told of an error that is nobody's outcome.
        """
        self._slots = slots
        self._services = services
        self._ward = ward
        self._hand = hand
        self._settler = settler
        self._answers = answers
        self._events = events
        self._on_room = on_room
        self._on_requeued = on_requeued
        self._died = died
        self._tasks: set[asyncio.Task[None]] = set()

    def launch(self, run: Run) -> None:
        """Run a job that got a slot."""
        self._start(run, self._execute(run))

    def hand_back(self, run: Run, reason: str) -> None:
        """Release a run that never got a slot."""
        run.phase = Phase.SETTLING
        self._slots.settling()
        self._start(run, self._settle(run, HandedBack(reason)))

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until every run has ended and is settled; False when ``seconds`` were not enough."""
        deadline = None if seconds is None else boottime() + seconds
        while self._tasks:
            left = None if deadline is None else deadline - boottime()
            if left is not None and left <= 0:
                return False
            await asyncio.wait(self._tasks, timeout=left)
        return True

    async def abandon(self) -> int:
        """Leave runs that do not end to the stale rule, and return how many there are."""
        left = len(self._hand.runs)
        for run in self._hand.runs.values():
            run.abandoned = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LEAVE_SECONDS)
        return left

    def _start(self, run: Run, steps: Coroutine[Any, Any, None]) -> None:
        run.task = asyncio.create_task(steps)
        self._tasks.add(run.task)
        run.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._died("executor", error)

    async def _execute(self, run: Run) -> None:
        # Only from here on may a signal cancel the task: one that never began would settle nothing.
        run.phase = Phase.RUNNING
        if fault_points.armed():
            await fault_points.reach("after_claim_before_run")
        started = boottime()
        outcome, error = await judged(run, partial(self._process, run))
        forget_cancellation()
        if run.abandoned:  # the worker has gone; the stale rule has the job
            return
        run.phase = Phase.SETTLING
        self._slots.leave(run, boottime() - started)
        self._on_room()
        await self._settle(run, outcome)
        if run.job is not None:
            if isinstance(outcome, Failed):
                error = error or InvalidResult(outcome.error)
            await self._call_hooks(run, run.job, error)

    async def _process(self, run: Run) -> Outcome:
        run.job = open_job(run, self._services)
        if run.stop is not None:
            return outcomes.stopped(run)
        alone = self._ward.takes(run.claimed, run.kind)
        if self._events.wants("job.started"):
            self._events.emit("job.started", **run.facts(), cleared=run.claimed.cleared, quarantined=alone)
        if alone:
            return await self._ward.run(run)
        return await process_job(run, run.job, self._services.max_result_bytes)

    async def _settle(self, run: Run, outcome: Outcome) -> None:
        if fault_points.armed():
            await fault_points.reach("after_process_before_settle")
        try:
            run.settled = Settled.COMPLETED if run.completed else await self._settler.settle(run, outcome)
        finally:
            self._hand.runs.pop(run.id, None)
            self._slots.settled()
            self._on_room()
        if fault_points.armed():
            await fault_points.reach("after_settle_before_ack")
        if run.delivery is not None:
            self._answers.ack(run.delivery)
        self._report(run, outcome)

    def _report(self, run: Run, outcome: Outcome) -> None:
        facts = run.facts()
        error = outcomes.first_line(outcome.error) if isinstance(outcome, Failed) else None
        match run.settled:
            case Settled.COMPLETED:
                if error is not None:
                    self._events.emit("job.error", **facts, error=f"after its completion: {error}")
                if self._events.wants("job.completed"):
                    self._events.emit("job.completed", **facts, seconds=boottime() - run.claimed_at)
            case Settled.SCHEDULED:
                self._events.emit("job.error", **facts, error=error)
            case Settled.FAILED:
                if isinstance(outcome, Failed) and outcome.stalled:
                    self._events.emit("job.stalled", **facts, cause="crashed in quarantine", counted=True)
                self._events.emit("job.failed", **facts, error=error)
            case Settled.CANCELLED:
                self._events.emit("job.cancelled", **facts)
            case Settled.QUEUED:
                reason = outcome.reason if isinstance(outcome, HandedBack) else None
                self._events.emit("job.released", **facts, reason=reason)
                self._on_requeued()
            case Settled.LOST:
                self._events.emit("job.lost", **facts)
            case Settled.REFUSED | None:
                self._events.emit("job.lost", **facts, reason="PostgreSQL refused to write its outcome")

    async def _call_hooks(self, run: Run, job: Job[Any], error: BaseException | None) -> None:
        processor = run.kind.processor
        try:
            if run.settled is Settled.FAILED:
                await processor.on_failed(job, error or RuntimeError("the result could not be stored"))
            elif run.settled is Settled.LOST:
                await processor.on_lost(job)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as raised:  # noqa: BLE001 -- a hook's error is reported and changes nothing
            self._events.emit("job.error", **run.facts(), error=f"in a hook: {outcomes.headline(raised)}")
