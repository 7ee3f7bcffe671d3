"""A job's way through a worker, top to bottom: pull, claim, wait for a slot, execute, settle, answer."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from jsworker.core import fault_points
from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.job import kinds_of_slot
from jsworker.core.open_files import NO_FILES
from jsworker.core.priorities import NORMAL
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions import waiting_keys
from jsworker.ownership.transitions.settle import ENDED, Settled
from jsworker.stream.puller import Puller
from jsworker.stream.result_hints import HintSender
from jsworker.worker.context import WorkerContext
from jsworker.worker.isolation.isolated_runner import IsolatedRunner
from jsworker.worker.maintenance.dead_letters import DeadLetters
from jsworker.worker.pipeline import outcomes, run_reports
from jsworker.worker.pipeline.attempt import forget_cancellation, judge, open_job, process_job
from jsworker.worker.pipeline.in_flight import Phase, Run
from jsworker.worker.pipeline.intake import Consumer
from jsworker.worker.pipeline.kinds import AdmissionState, Kind
from jsworker.worker.pipeline.outcomes import Completed, Failed, HandedBack, Lost, Outcome
from jsworker.worker.pipeline.run_ownership import fetch_content
from jsworker.worker.pipeline.run_writes import LeaseServices, note_beginning, until_answered
from jsworker.worker.pipeline.settling import Settler
from jsworker.worker.pipeline.slots import Slots
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.sweeper import LateRows

if TYPE_CHECKING:
    from jsworker.core.spans import RunSpans

_ABANDON_SECONDS: Final = 1.0  # then a run that ignores its last cancellation, too, is given up
_WAKES: Final = 500


class Pipeline:
    """Runs the jobs that come by messages and from the table, with one puller and one consumer for each kind.

    Once its lane is opened, each priority other than normal has a puller and a consumer of its own.
    ``loop_ends`` returns whether all tasks of the event loop have been cancelled.
    """

    def __init__(
        self, context: WorkerContext, *, quiet: QuietPhases, late: LateRows, loop_ends: Callable[[], bool]
    ) -> None:
        self._context = context
        self._events = context.events
        self._in_flight = context.in_flight
        self._files = context.files
        self._supervision = context.supervision
        self._quiet = quiet
        self._services = LeaseServices(
            worker_id=context.worker_id,
            settings=context.settings,
            contents=context.contents,
            database=context.database,
            sessions=context.sessions,
            events=context.events,
            loop=asyncio.get_running_loop(),
            on_quiet=quiet.announce,
            cover_others=quiet.cover_others,
            kinds=frozenset(context.kinds),
            on_added=context.requeued.notify,
            loop_ends=loop_ends,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        # Tasks start with a copy of one of these contexts, not with the context in which another run ended.
        self._application = copy_context()
        self._in_a_slot = copy_context()
        self._in_a_slot.run(kinds_of_slot.set, self._services.kinds)
        self.ended: Counter[Settled] = Counter()
        """The number of ended runs, by what became of their jobs."""
        self.slots = Slots(
            context.settings.concurrency,
            len(context.kinds),
            context.in_flight,
            isolated_processes=context.settings.isolated_processes,
        )
        self.isolated_runner = IsolatedRunner(
            context,
            self._services,
            next_waits=lambda: self.slots.has_quarantined,
            on_started=self._let_next_start,
        )
        self._wakes: Batcher[UUID, None] = Batcher("wakes", self._wake, limit=_WAKES, died=context.died)
        self.tracing = run_reports.RunTracing(context)
        self.settler = Settler(context)
        self.dead_letters = DeadLetters(context)
        complain = partial(context.complaints.note, "result hints")
        self.hints = HintSender(context.stream.connection, report=complain)
        self._consumer = partial(
            Consumer,
            context,
            slots=self.slots,
            dead_letters=self.dead_letters,
            late=late,
            quiet=quiet,
            claim=self._claim,
            admit=self._admit,
        )
        self.consumers: list[Consumer] = []
        self.pullers: list[Puller] = []
        self.states = {kind.name: AdmissionState(kind) for kind in context.kinds.values()}
        self.of_kind = {kind.name: self.add_lane(kind, NORMAL) for kind in context.kinds.values()}

    # --- Pull: messages of a kind arrive at its consumer, which gathers them into batches. ---

    def add_lane(self, kind: Kind, priority: int) -> Consumer:
        """Create the consumer and the puller of a kind and priority; the caller starts the puller."""
        consumer = self._consumer(kind, priority=priority, state=self.states[kind.name])
        consumer.puller = Puller(
            self._context.stream,
            kind.name,
            deliver=consumer.deliver,
            undecodable=lambda message: consumer.keep_unusable(message, message.reason),
            room=consumer.wanted,
            waiting=consumer.waiting,
            priority=priority,
            gives_way=consumer.gives_way,
            awaits_turn=partial(self.slots.awaits_turn, consumer),
            died=partial(self._context.died, "pull loop"),
        )
        self.slots.open_lane(consumer)
        self.consumers.append(consumer)
        self.pullers.append(consumer.puller)
        return consumer

    # --- Claim: a batch of messages becomes runs. ---

    async def _claim(self, consumer: Consumer, ids: Sequence[UUID]) -> None:
        runs = await consumer.claim(ids)
        self._wait_for_slots(runs)
        # Also after a full batch: admission may have claimed jobs in their place that were held before them.
        if refused := consumer.undecided(ids):
            self._wait_for_slots(await consumer.claim_from_stale_owners(refused))
            await consumer.answer_refused(refused)
        self._context.room.notify()  # refused messages make room, without the end of a run

    async def _admit(self, consumer: Consumer, keys: Collection[str]) -> None:
        runs, is_full = await consumer.claim_freed(keys)
        self._wait_for_slots(runs)  # before another admission counts the room
        if is_full:
            await consumer.wake(keys)

    # --- Slots: as many runs as there are slots execute, the others wait. ---

    def _wait_for_slots(self, runs: Iterable[Run]) -> None:
        for run in runs:
            run.quarantined = self.isolated_runner.takes(run.claimed, run.kind)
            run.isolated = run.quarantined or run.kind.is_isolated
            self.slots.add(run)
        self._fill_slots()

    def _let_next_start(self, run: Run) -> None:
        self.slots.note_started(run)
        self._fill_slots()

    def _fill_slots(self) -> None:
        if self._files.are_exhausted:  # they would fail, too
            self.hand_back_waiting(NO_FILES)
        while (run := self.slots.next_run()) is not None:
            self._launch(run)

    def _launch(self, run: Run) -> None:
        self._start(run, self._execute(run), self._in_a_slot.copy())

    def _leave_slot(self, run: Run, seconds: float) -> None:
        self.slots.leave(run, seconds)
        self._fill_slots()
        self._context.room.notify()

    # --- Execute: the processor does the job, which gives an outcome. ---

    async def _execute(self, run: Run) -> None:
        if self._supervision is not None:
            self._supervision.began(run.id)
        # Only now may a signal cancel the task: a task that is cancelled before its start settles nothing.
        run.phase = Phase.RUNNING
        if fault_points.armed():
            await fault_points.reach("after_claim_before_run")
        started = run.began_at = boottime()
        self.tracing.begin(run)
        processing = self._process(run) if run.spans is None else self._process_in_span(run, run.spans)
        try:
            outcome, error = await processing
        except GeneratorExit as raised:  # raised by the job, or by Python because it closes this coroutine
            if _is_closed(run):
                raise
            outcome, error = outcomes.raised(run, raised), raised
        if run.left_task is None:
            run_reports.end_process_span(run, outcome, error)
        task = run.left_task or run.task
        if task is not None and task.cancelling():
            forget_cancellation(task)
        if run.abandoned:  # the worker has stopped; the stale rule takes the job back
            return
        if run.left_task is not None:  # it was given up and has now ended
            self._in_flight.given_up.discard(run)
            self._events.emit("worker.restored", what=f"job {run.id}")
            self._leave_slot(run, boottime() - started)
            return
        run.phase = Phase.SETTLING
        if run.quiet_until:  # a quiet phase ends with its run
            self._quiet.announce()
        self._leave_slot(run, boottime() - started)
        if type(outcome) is Completed and not run.completed and not fault_points.armed():
            # Most runs end here: no task waits for the write, which would cost time.
            # Its task may yet end as cancelled, if the processor has cancelled it right before its return.
            run.task = None
            self.settler.complete(run, outcome.result, partial(self._completed, run, outcome))
        elif self._services.loop_ends():
            await self._settle(run, outcome, error)  # nothing would wait for a new task
        else:
            # In a task of its own, because what the processor has left, such as a timer, may cancel this one.
            # In the same context, so that hooks see the context variables that the job has set.
            self._start(run, self._settle(run, outcome, error), copy_context())

    async def _process_in_span(self, run: Run, spans: "RunSpans") -> tuple[Outcome, BaseException | None]:
        with spans.active():
            return await self._process(run)

    async def _process(self, run: Run) -> tuple[Outcome, BaseException | None]:
        """Return the outcome of a run and its error; raises CancelledError if it must not be settled."""
        try:
            if run.claimed.payload is None and run.stop is None:
                await self._fetch_content(run)
            if run.claimed.payload is not None:
                run.job = open_job(run, self._services)
            if run.job is None or run.stop is not None:
                return outcomes.stopped(run), None
            if self._events.wants("job.started"):
                facts = run.facts() | {"cleared": run.claimed.cleared, "quarantined": run.quarantined}
                self._events.emit("job.started", **facts)
            if run.claimed.notes_beginning and not run.quarantined:  # that notes it when its turn comes
                await until_answered(run, lambda _: note_beginning(run, self._services))
            if run.isolated:
                return await self.isolated_runner.run(run), None
            return await process_job(run, run.job, self._services), None
        except GeneratorExit:
            raise
        except BaseException as raised:  # even sys.exit() in a job must not end the worker
            loop_ends, supervised = self._services.loop_ends, self._supervision is not None
            if (outcome := judge(run, raised, loop_ends=loop_ends, supervised=supervised)) is None:
                raise
            self._files.try_one()
            if (missing := outcomes.missing_thread(raised)) is not None:
                run.has_thread = False
                self._context.complaints.report("threads", str(missing))
            return outcome, outcomes.timed_out(run, raised)
        finally:
            if run.has_thread:
                self._context.complaints.end("threads")

    async def _fetch_content(self, run: Run) -> None:
        try:
            await fetch_content(run, self._services)
        except (DatabaseUnavailable, DatabaseRefused):
            if run.stop is None:
                raise

    # --- Settle: the outcome is written, unless the job is known to be lost. ---

    def _completed(self, run: Run, outcome: Completed, settled: Settled | None) -> None:
        if settled is Settled.COMPLETED:
            self._answer(run, outcome, settled)
            run.job = None  # breaks a cycle, whose collection would take a third of the worker's time
        elif not run.abandoned:  # if the worker has stopped, nothing would wait for the task
            self._start(run, self._settle(run, outcome, None, settled), self._application.copy())

    async def _settle(
        self, run: Run, outcome: Outcome, error: BaseException | None, settled: Settled | None = None
    ) -> None:
        kinds_of_slot.set(frozenset())  # the run has left its slot, so hooks may wait for other jobs
        await fault_points.reach("after_process_before_settle")
        if isinstance(outcome, Completed):
            await fault_points.reach(fault_points.after_process(run.id))
        try:
            if run.completed:
                settled = Settled.COMPLETED
            elif settled is not Settled.LOST:
                # Another run may follow: the row must name this run's span before this run is settled.
                if run.noting is not None and not isinstance(outcome, Completed | Lost):
                    await asyncio.wait({run.noting})
                settled = await self.settler.settle(run, outcome)
        except BaseException:
            self._let_go(run, owned=True)
            raise
        await fault_points.reach("after_settle_before_ack")
        self._answer(run, outcome, settled, error)
        await run_reports.note_error(self._context, run, outcome, settled)
        try:
            await run_reports.call_hooks(self._events, run, outcome, settled, error)
        except GeneratorExit as raised:
            if _is_closed(run):
                raise
            run_reports.emit_hook_error(self._events, run, raised)
        run.job = None

    # --- Answer: the message is acknowledged, and events report what became of the job. ---

    def _answer(
        self, run: Run, outcome: Outcome, settled: Settled, error: BaseException | None = None
    ) -> None:
        self._let_go(run, owned=settled is Settled.REFUSED)
        self.ended[settled] += 1
        self._context.counts.ended(run.kind.name, settled, boottime() - run.claimed_at)
        if self._supervision is not None:  # only now: a job whose settling kills the process counts as begun
            self._supervision.ended(run.id)
        if run.delivery is not None:
            run.delivery.ack()
        if self.hints.somebody_waits and settled in ENDED:
            self.hints.tell(run.id)
        batch = run.claimed.batch_id
        # If other members run here, the batch is checked when the last of them ends.
        if batch is not None and settled in ENDED and not self._in_flight.has_member_of(batch):
            self._context.batches.touch(batch)
        run_reports.emit_end(self._events, run, outcome, settled, error)
        if settled is Settled.COMPLETED and run.child_jobs is not None:
            self._context.requeued.notify()
        if settled is Settled.QUEUED:
            self._context.requeued.notify()
        elif run.claimed.waiting_key is not None and settled in ENDED:
            self._wakes.post(run.id)
        if run.claimed.limit_key is not None:  # the outcome is committed, so its slot is free for held jobs
            self.of_kind[run.kind.name].free(run.claimed.limit_key)

    async def _wake(self, ended: Sequence[UUID]) -> None:
        """Queue now the jobs that wait behind ended ones; if this fails, PROMOTE does it seconds later."""
        with self._context.noting("waiting keys"):
            if self._context.health.up and await waiting_keys.wake(self._context.database, ended):
                self._context.requeued.notify()

    def _let_go(self, run: Run, *, owned: bool) -> None:
        self._in_flight.remove(run)
        if owned:
            self._in_flight.unsettled.add(run.held)
        if self.slots.has_room_again:
            self._context.room.notify()

    async def forget_unsettled(self) -> None:
        """Forget unsettled runs whose jobs this worker no longer owns under their tokens."""
        if unsettled := set(self._in_flight.unsettled):
            ids = [job_id for job_id, _ in unsettled]
            rows = await claims.read_back(self._context.database, worker_id=self._context.worker_id, ids=ids)
            self._in_flight.unsettled -= unsettled - {(row.id, row.fencing_token) for row in rows}

    # --- Other ends: runs without a slot, runs that ignore their stop, the worker's own end. ---

    def hand_back_waiting(self, reason: str, *, older_than: float = 0.0) -> None:
        """Release the runs that waited for a slot for at least ``older_than`` seconds, or were stopped."""
        for run in self.slots.take_waiting(older_than=older_than):
            run.phase = Phase.SETTLING
            outcome = HandedBack(reason) if run.stop is None else outcomes.stopped(run)
            self._start(run, self._settle(run, outcome, None), self._application.copy())

    def note_ignored(self, run: Run) -> None:
        """Report that a run ignores its stop.

        With supervision, the supervisor kills the process. Without it, the attempt of a coroutine fails now,
        although the coroutine goes on: its fencing token makes PostgreSQL refuse its later writes, and it
        keeps its job slot. A job in a thread stays owned, and so does a coroutine while a step runs in a
        thread.
        """
        if not run.ignores_stop:
            run.ignores_stop = True
            run_reports.emit_ignored_stop(self._events, run)
        is_threads = not run.kind.is_async or run.steps_in_threads > 0
        if self._supervision is not None or is_threads or run.task is None:
            return
        run.left_task = run.task
        self._in_flight.given_up.add(run)
        self._tasks.discard(run.task)
        run.phase = Phase.SETTLING
        outcome = outcomes.ignored_its_stop(run)
        error: TimeoutError | None = None
        if isinstance(outcome, Failed) and outcomes.passed_limit(run):
            error = TimeoutError(outcome.error)
        run_reports.end_process_span(run, outcome, error)
        self._start(run, self._settle(run, outcome, error), self._application.copy())

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until every run has ended and is settled; return False if ``seconds`` were not enough."""
        try:
            async with asyncio.timeout(seconds):
                while self._tasks or self.settler.completions.is_busy:
                    if self._tasks:
                        await asyncio.wait(self._tasks)
                    await self.settler.completions.flush()
                await self._wakes.flush()
        except TimeoutError:
            return False
        return True

    async def abandon(self) -> int:
        """Leave runs that do not end to the stale rule, and return their number."""
        await self._wakes.close()
        left = len(self._in_flight.runs)
        for run in self._in_flight.runs.values():
            run.abandoned = True
            if run.phase is Phase.RUNNING and not run.ignores_stop:
                run.ignores_stop = True
                run_reports.emit_ignored_stop(self._events, run)
        for run in self._in_flight.given_up:
            run.abandoned = True
            run.cancel_again()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ABANDON_SECONDS)
        return left

    def _start(self, run: Run, steps: Coroutine[Any, Any, None], context: Context) -> None:
        # Not by the loop's task factory: an eager one would execute the steps within those of another run.
        run.task = asyncio.Task(steps, loop=self._services.loop, context=context)
        self._tasks.add(run.task)
        run.task.add_done_callback(partial(self._on_end, run))

    def _on_end(self, run: Run, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error: BaseException | None = None
        if not task.cancelled():
            error = task.exception()
        elif run.task is task and not run.abandoned and self._in_flight.runs.get(run.id) is run:
            # Nothing would settle the run, whose heartbeats would go on: something cancelled the task before
            # its start, or the event loop ends.
            error = asyncio.CancelledError(f"the run of job {run.id} was cancelled")
        if error is not None:
            self._context.died("executor", error)


def _is_closed(run: Run) -> bool:
    """Return whether a run's coroutine is being closed, not executed by its task: the event loop is gone."""
    try:
        return asyncio.current_task() not in {run.task, run.left_task}
    except RuntimeError:  # no event loop
        return True
