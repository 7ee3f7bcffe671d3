"""One run from its job slot to the answer of its message: process, settle, answer, report."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from jsworker.core import fault_points
from jsworker.core.clock import boottime
from jsworker.core.job import Job
from jsworker.ownership.transitions.settle import Settled
from jsworker.worker.context import WorkerContext
from jsworker.worker.isolation.isolated_runner import IsolatedRunner
from jsworker.worker.pipeline import outcomes
from jsworker.worker.pipeline.attempt import judged, open_job
from jsworker.worker.pipeline.invocation import forget_cancellation, process
from jsworker.worker.pipeline.large_values import Values
from jsworker.worker.pipeline.outcomes import (
    Completed,
    Failed,
    HandedBack,
    Interrupted,
    InvalidResult,
    Outcome,
)
from jsworker.worker.pipeline.run import Phase, Run
from jsworker.worker.pipeline.run_ownership import LeaseServices
from jsworker.worker.pipeline.settling import Settler
from jsworker.worker.pipeline.slots import Slots
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.run_tracing import RunTracing

_LEAVE_SECONDS = 1.0
"""How long the worker's end waits for a run that swallows its last cancellation too."""


class Executor:
    """Runs the jobs that were claimed."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        slots: Slots,
        quiet: QuietPhases,
        isolated_runner: IsolatedRunner,
        settler: Settler,
        tracing: RunTracing,
        loop_ends: Callable[[], bool],
    ) -> None:
        """Prepare the executor.

        Args:
            context: the worker's.
            slots: the job slots; they launch runs through ``launch``.
            quiet: notes quiet phases that jobs announce.
            isolated_runner: runs jobs in quarantine.
            settler: writes outcomes.
            tracing: makes spans, where the application wants them.
            loop_ends: whether all tasks of the event loop have been cancelled.
        """
        self._context = context
        self._events = context.events
        self._in_flight = context.in_flight
        self._supervision = context.supervision
        self._slots = slots
        self._quiet = quiet
        self._values = Values(context)
        self._isolated_runner = isolated_runner
        self._settler = settler
        self._tracing = tracing
        self._loop_ends = loop_ends
        self._loop = asyncio.get_running_loop()
        self._services = LeaseServices(
            worker_id=context.worker_id,
            max_result_bytes=context.settings.max_result_bytes,
            max_checkpoint_bytes=context.settings.max_checkpoint_bytes,
            database=context.database,
            sessions=context.sessions,
            events=context.events,
            loop=self._loop,
            on_quiet=quiet.announce,
            cover_others=quiet.cover_others,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def launch(self, run: Run) -> None:
        """Run a job that got a slot."""
        self._start(run, partial(self._execute, run))

    def hand_back(self, run: Run, reason: str) -> None:
        """Release a run that never got a slot."""
        run.phase = Phase.SETTLING
        self._slots.settling()
        self._start(run, partial(self._settle, run, HandedBack(reason), None))

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until every run has ended and is settled; False when ``seconds`` were not enough."""
        try:
            async with asyncio.timeout(seconds):
                while self._tasks or self._settler.is_completing:
                    if self._tasks:
                        await asyncio.wait(self._tasks)
                    await self._settler.flush_completions()
        except TimeoutError:
            return False
        return True

    def note_ignored(self, run: Run) -> None:
        """Report that a run ignores its stop.

        Without supervision, which would end the process, the attempt of a coroutine fails here and now,
        although it goes on: what it still wants to write is refused by its fencing token. It keeps its job
        slot, for it takes what a job takes. A thread keeps its job.
        """
        self._report_ignored(run)
        if self._supervision is None and run.kind.is_async:
            self._give_up(run)

    def _report_ignored(self, run: Run) -> None:
        run.ignores_stop = True
        self._events.emit(
            "job.stop_ignored",
            **run.facts(),
            stop=run.stop_in_words,
            cancellations=run.cancellations if run.kind.is_async else 0,
            seconds=round(boottime() - (run.told_at or run.claimed_at), 3),
        )

    async def abandon(self) -> int:
        """Leave runs that do not end to the stale rule, and return how many there are."""
        left = len(self._in_flight.runs)
        for run in self._in_flight.runs.values():
            run.abandoned = True
            if run.phase is Phase.RUNNING and not run.ignores_stop:
                self._report_ignored(run)
        for run in self._in_flight.given_up:
            run.abandoned = True
            run.cancel_again()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LEAVE_SECONDS)
        self._tasks = {task for task in self._tasks if not task.done()}  # those that never began, too
        return left

    def _give_up(self, run: Run) -> None:
        run.left_task = run.task
        self._in_flight.given_up.add(run)
        if run.task is not None:
            self._tasks.discard(run.task)
        run.phase = Phase.SETTLING
        self._slots.settling()
        outcome = outcomes.ignored_its_stop(run)
        error = TimeoutError(outcome.error) if isinstance(outcome, Failed) else None
        self._tracing.processed(run, outcome, error)
        self._start(run, partial(self._settle, run, outcome, error))

    def _note_late_end(self, run: Run, seconds: float) -> None:
        """Give back the job slot of a run that was given up and has ended after all."""
        self._in_flight.given_up.discard(run)
        self._slots.leave(run, seconds)
        self._slots.settled()
        self._events.emit("worker.restored", what=f"job {run.id}")
        self._context.room.notify()

    def _start(self, run: Run, steps: Callable[[], Awaitable[None]]) -> None:
        run.task = self._loop.create_task(self._watched(run, steps))
        self._tasks.add(run.task)

    async def _watched(self, run: Run, steps: Callable[[], Awaitable[None]]) -> None:
        task = run.task
        try:
            await steps()
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- told to the worker, which stops
            self._context.died("executor", error)
        finally:
            if task is not None:
                self._tasks.discard(task)

    async def _execute(self, run: Run) -> None:
        if self._supervision is not None:
            self._supervision.began(run.id)
        # Only from here on may a signal cancel the task: one that never began would settle nothing.
        run.phase = Phase.RUNNING
        if fault_points.armed():
            await fault_points.reach("after_claim_before_run")
        started = run.began_at = boottime()
        self._tracing.begin(run)
        if run.spans is None:
            outcome, error = await judged(run, self._process(run), loop_ends=self._loop_ends)
        else:
            with run.spans.active():
                outcome, error = await judged(run, self._process(run), loop_ends=self._loop_ends)
            if run.left_task is None:
                self._tracing.processed(run, outcome, error)
        forget_cancellation(run.left_task or run.task)
        if run.abandoned:  # the worker has gone; the stale rule has the job
            return
        if run.left_task is not None:
            self._note_late_end(run, boottime() - started)
            return
        run.phase = Phase.SETTLING
        if run.quiet_until:  # a phase ends with its run
            self._quiet.announce()
        self._slots.leave(run, boottime() - started)
        self._context.room.notify()
        if type(outcome) is Completed and not run.completed and not fault_points.armed():
            # Without a task that waits: most runs end like this, and most of the time.
            self._settler.complete(run, outcome.result, partial(self._completed, run, outcome))
        elif self._loop_ends():
            await self._settle(run, outcome, error)  # nobody waits for new tasks any more
        else:
            # In a task of its own: whatever the processor has left behind may still cancel this one.
            self._start(run, partial(self._settle, run, outcome, error))

    def _completed(self, run: Run, outcome: Completed, settled: Settled | None) -> None:
        if settled is Settled.COMPLETED:
            self._end(run, outcome, settled)
        elif not run.abandoned:  # else the worker has gone, and nobody would wait for the task
            self._start(run, partial(self._settle, run, outcome, None, settled))

    async def _process(self, run: Run) -> Outcome:
        if run.claimed.payload is None and not (run.stop is None and await self._values.fetch(run)):
            return outcomes.stopped(run)
        run.job = open_job(run, self._services)
        if run.stop is not None:
            return outcomes.stopped(run)
        run.quarantined = self._isolated_runner.takes(run.claimed, run.kind)
        if self._events.wants("job.started"):
            self._events.emit(
                "job.started", **run.facts(), cleared=run.claimed.cleared, quarantined=run.quarantined
            )
        if run.quarantined:
            return await self._isolated_runner.run(run)
        return outcomes.returned(run, await process(run, run.job), self._services.max_result_bytes)

    async def _settle(
        self, run: Run, outcome: Outcome, error: BaseException | None, settled: Settled | None = None
    ) -> None:
        """Write the outcome, unless the job is known to be lost, and tell what became of it."""
        if fault_points.armed():
            await fault_points.reach("after_process_before_settle")
        try:
            if run.completed:
                settled = Settled.COMPLETED
            elif settled is not Settled.LOST:
                if not isinstance(outcome, Completed | outcomes.Lost):  # another run may follow
                    await self._tracing.noted(run)
                settled = await self._settler.settle(run, outcome)
        except BaseException:
            self._let_go(run)
            raise
        if fault_points.armed():
            await fault_points.reach("after_settle_before_ack")
        self._end(run, outcome, settled, error)
        if run.job is not None:
            if isinstance(outcome, Failed):
                error = error or InvalidResult(outcome.error)
            await self._call_hooks(run, run.job, error)

    def _end(self, run: Run, outcome: Outcome, settled: Settled, raised: BaseException | None = None) -> None:
        run.settled = settled
        self._let_go(run)
        if self._supervision is not None:  # not before: a job whose settling ends the process has begun
            self._supervision.ended(run.id)
        if run.delivery is not None:
            run.delivery.ack()
        self._tracing.settled(run, settled)
        self._report(run, outcome, settled, raised)

    def _let_go(self, run: Run) -> None:
        self._in_flight.runs.pop(run.id, None)
        if self._slots.settled():
            self._context.room.notify()

    def _report(self, run: Run, outcome: Outcome, settled: Settled, raised: BaseException | None) -> None:
        error = outcomes.first_line(outcome.error) if isinstance(outcome, Failed | Interrupted) else None
        if settled is Settled.COMPLETED and error is None and not self._events.wants("job.completed"):
            return
        facts = run.facts() | {"seconds": boottime() - run.claimed_at}
        if isinstance(outcome, Failed) and outcome.stalled and settled in {Settled.SCHEDULED, Settled.FAILED}:
            self._events.emit("job.stalled", **run.facts(), cause="crashed in quarantine", counted=True)
        match settled:
            case Settled.COMPLETED:
                if error is not None:
                    told = f"after its completion: {error}"
                    self._events.emit("job.error", raised, **run.facts(), error=told)
                self._events.emit("job.completed", **facts)
            case Settled.SCHEDULED:
                self._events.emit("job.error", raised, **facts, error=error)
            case Settled.FAILED:
                self._events.emit("job.failed", raised, **facts, error=error or run.refusal)
            case Settled.CANCELLED:
                self._events.emit("job.cancelled", **facts)
            case Settled.QUEUED:
                reason = outcome.reason if isinstance(outcome, HandedBack | Interrupted) else None
                self._events.emit("job.released", **facts, reason=reason)
                self._context.requeued.notify()
            case Settled.LOST:
                late_write = not isinstance(outcome, outcomes.Lost)
                self._events.emit("job.lost", **facts, late_write=late_write)
            case Settled.REFUSED:
                self._events.emit("job.lost", **facts, reason="PostgreSQL refused to write its outcome")

    async def _call_hooks(self, run: Run, job: Job[Any], error: BaseException | None) -> None:
        processor = run.kind.processor
        try:
            if run.settled is Settled.FAILED:
                await processor.on_failed(
                    job, error or RuntimeError(run.refusal or "the result could not be stored")
                )
            elif run.settled is Settled.LOST:
                await processor.on_lost(job)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as raised:  # noqa: BLE001 -- a hook's error is reported and changes nothing
            told = f"in a hook: {outcomes.headline(raised)}"
            self._events.emit("job.error", raised, **run.facts(), error=told)
