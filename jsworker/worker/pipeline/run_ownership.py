"""What a job's methods call, bound to one run: every write names the run's fencing token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, TypeVar
from uuid import UUID

import tenacity

from jsworker.client.enqueueing import (
    JobOptions,
    Kind,
    chunks_of_new_jobs,
    for_statements,
    keys_of,
    kind_name,
    new_jobs,
    one_for_each,
)
from jsworker.core import strict_json, tracing
from jsworker.core.clock import boottime
from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    OwnershipLost,
    UsageError,
    may_answer_later,
)
from jsworker.core.job import MemberResult
from jsworker.core.names import shown, storable
from jsworker.core.settings.variables import LONGEST_SECONDS
from jsworker.core.tracing import TraceContext
from jsworker.ownership.queries import workflow_listing
from jsworker.ownership.sessions import Attempt
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions import heartbeat, workflow_control
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.enqueue import ChildJob, NewJob
from jsworker.ownership.transitions.settle import Completion, complete_statement, was_committed
from jsworker.worker.pipeline import child_jobs
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.outcomes import (
    Asleep,
    check_size,
    passed_limit,
    reading_own_content,
    result_text,
)
from jsworker.worker.pipeline.run_writes import (
    PAUSES,
    LeaseServices,
    note_sign,
    until_answered,
    write_in_order,
    write_owned,
)
from jsworker.worker.pipeline.steps import Steps
from jsworker.worker.pipeline.threads import refuse_on_a_loop, wait_for_loop

if TYPE_CHECKING:
    from sqlalchemy import Executable
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

T = TypeVar("T")

_RETRY_SECONDS = 60.0  # for so long a transaction is tried again in the same run
_STAGE_CHARACTERS = 200
_MESSAGE_CHARACTERS = 2000
_MEMBERS_AT_ONCE = 5000
_OPEN_AGAIN_SECONDS = 10.0  # until a job looks again whether a batch that it reads has finished


async def fetch_content(run: Run, services: LeaseServices) -> None:
    """Fetch a payload and checkpoint that were too large for the claim; heartbeats keep the job meanwhile."""

    # Each try gets more time: if handed back instead, the job would go from worker to worker for ever.
    async def fetch(tries: int) -> ClaimedJob:
        async with services.fetching:
            return await claims.fetch_content(
                services.database, worker_id=services.worker_id, claimed=run.claimed, tries=tries
            )

    with contextlib.suppress(OwnershipLost):  # the run is noted as lost
        run.claimed = await until_answered(run, fetch)


class Progress(NamedTuple):
    """A progress report of a run, as it is stored; None: the value is not changed."""

    stage: str | None
    progress: float | None
    message: str | None


def checked_progress(stage: str | None, progress: float | None, message: str | None) -> Progress:
    """Return a progress report as it is stored; raise ValueError if ``progress`` is no number from 0 to 1."""
    if progress is not None and not (isinstance(progress, SupportsFloat) and 0 <= progress <= 1):
        raise ValueError(f"progress={progress!r} must be a number between 0 and 1")
    return Progress(_text(stage, _STAGE_CHARACTERS), progress, _text(message, _MESSAGE_CHARACTERS))


def written_checkpoint(value: Any, run: Run, services: LeaseServices) -> tuple[str, Any]:
    """Return a checkpoint as it is stored, and as the next run reads it.

    Raises InvalidJson if it cannot be stored, or is too large.
    """
    text = strict_json.dumps(value, what="checkpoint")
    stored = services.contents.encode(text, "checkpoint", run.kind.name, run.id)
    check_size(stored, "checkpoint", services.settings.max_checkpoint_bytes)
    # jsonb changes plain content; encoded content is one string.
    read = strict_json.as_stored if services.contents.codec is None else strict_json.loads
    return stored, read(text)


def check_quiet(seconds: float) -> None:
    """Raise ValueError if ``seconds`` cannot be the length of a quiet phase."""
    if not 0 <= seconds <= LONGEST_SECONDS:
        raise ValueError(f"quiet for {seconds!r} seconds: must be from 0 to {LONGEST_SECONDS}")


class RunLease:
    """The ownership of one run; the methods of ``jsworker.core.job`` call it."""

    __slots__ = ("_ends", "_needs", "_run", "_services")

    def __init__(self, run: Run, services: LeaseServices) -> None:
        self._run = run
        self._services = services
        self._needs: dict[str, UUID] | None = None
        self._ends: dict[str, int | None] = {}  # of nodes, when the run began to read their results

    @property
    def should_stop(self) -> bool:
        """Whether the run should stop."""
        return self._run.should_stop

    @property
    def cancelled(self) -> bool:
        """Whether the job is to be cancelled."""
        return self._run.cancelled

    @property
    def conceals(self) -> bool:
        """Whether errors of the run are shown without their messages."""
        return self._run.kind.conceals

    @property
    def passed_limit(self) -> str:
        """In words the time limit for which the run was stopped; empty if it was not."""
        return passed_limit(self._run)

    async def update_progress(self, stage: str | None, progress: float | None, message: str | None) -> None:
        """Store how far the run is."""
        written = checked_progress(stage, progress, message)
        try:
            seen = await write_owned(
                self._run, self._services, heartbeat.update_progress, **written._asdict()
            )
        except (DatabaseUnavailable, DatabaseRefused) as error:
            if not may_answer_later(error):
                raise
            return  # the next report replaces this one; an outage is no fault of the job
        self._run.progress_seen = seen
        if self._services.events.wants("job.progress"):
            self._services.events.emit("job.progress", **self._run.facts(), stage=stage, progress=progress)

    async def save_checkpoint(self, value: Any) -> Any:
        """Store the checkpoint from which the next run starts, and return it as that run reads it."""
        text, read = written_checkpoint(value, self._run, self._services)
        write = partial(write_in_order, self._run, self._services, heartbeat.save_checkpoint, checkpoint=text)
        await until_answered(self._run, lambda tries: write(tries=tries))
        return read

    async def quiet(self, seconds: float) -> None:
        """Announce a phase without signs of life; the heartbeat restores the thresholds afterwards."""
        check_quiet(seconds)
        thresholds = self._run.thresholds(seconds)
        write = partial(write_in_order, self._run, self._services, heartbeat.set_thresholds, **thresholds)
        # At this moment the heartbeat may be restoring the thresholds after the previous phase.
        async with self._run.thresholds_lock:
            await until_answered(self._run, lambda _: write())
            self._run.note_written(seconds)
            self._run.quiet_until = boottime() + seconds
        self._services.on_quiet()
        cover_others = self._services.cover_others
        if seconds and cover_others is not None:
            await until_answered(self._run, lambda _: cover_others())

    @contextlib.asynccontextmanager
    async def transaction(self, result: Any) -> AsyncIterator["AsyncSession"]:
        """Open a session in whose transaction the job is completed at the end of the block."""
        attempt, completion = Attempt(), partial(self._completion, result)
        with child_jobs.within_block(self._run):
            try:
                async with self._services.sessions.transaction(completion, attempt) as session:
                    yield session
            except Exception as error:
                if attempt.fault is None or not (attempt.committing and await self._was_committed()):
                    self._interrupt(error, attempt)
                    raise

    async def transactions(
        self, result: Any
    ) -> AsyncIterator[contextlib.AbstractAsyncContextManager["AsyncSession"]]:
        """Yield transactions until one ends without a server's fault."""
        try:
            async for attempt in tenacity.AsyncRetrying(**self._retry()):
                self._forget_error()
                yield self._retried(attempt, result)
                _entered(attempt)
        except (Exception, asyncio.CancelledError):  # not when the processor leaves the loop
            self._forget_error()
            raise

    def complete_statement(self, result: Any) -> "Executable":
        """Return the guarded statement that completes the job."""
        self.check_no_child_jobs()
        completion = self._completion(result)
        self.check_no_child_jobs()  # a function as ``result`` may have enqueued some
        return complete_statement(self._services.worker_id, completion)

    def enqueue(
        self,
        kind: Kind,
        payloads: Iterable[Any],
        unique_keys: Sequence[str | None] | None,
        options: EnqueueOptions,
    ) -> list[UUID]:
        """Keep jobs to be enqueued with the completion of this one."""
        given = one_for_each("payloads", payloads)
        most, claimed = self._services.settings.max_payload_bytes, self._run.claimed
        context = tracing.current()
        if context.traceparent is None:  # no span is active: use the one that enqueued this job
            context = TraceContext(claimed.traceparent, claimed.tracestate)
        job_options = JobOptions.of(most, options, self._services.contents)
        new = new_jobs(kind, given, keys_of(given, unique_keys), job_options, context)
        of_kind = kind_name(kind)
        child_jobs.add(self._run, [ChildJob(of_kind, job) for job in new], max_payload_bytes=most)
        return [job.id for job in new]

    def check_no_child_jobs(self) -> None:
        """Raise UsageError if the run has enqueued jobs: ``complete_statement`` does not insert them."""
        if self._run.child_jobs is not None:
            raise UsageError(
                f"job {self._run.id}: complete_statement() does not insert what job.enqueue() was given:"
                " execute jsworker.enqueue_statement() in your session instead"
            )

    def add_to_batch(
        self, kind: Kind, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, list[UUID]]:
        """Add members to the batch of the job, in statements of limited length.

        The payloads are read in the thread of this call, to which a queryset's connection belongs.
        """
        return self._add_to_batch(kind, one_for_each("payloads", payloads), options)

    async def _add_to_batch(self, kind: Kind, payloads: list[Any], options: Mapping[str, Any]) -> list[UUID]:
        child_jobs.refuse_to_wait_for_batch(self._run)
        new: list[NewJob] = []
        for chunk in self._members(kind, payloads, options):
            new += chunk
            await asyncio.sleep(0)
        for some in for_statements(new):
            await self._add_members(kind_name(kind), some)
        self._services.on_added()
        return [job.id for job in new]

    async def _add_members(self, kind: str, new: Sequence[NewJob]) -> None:
        services = self._services
        add = partial(
            workflow_control.add_members,
            services.database,
            worker_id=services.worker_id,
            held=self._run.held,
            kind=kind,
            new=new,
        )
        await until_answered(self._run, lambda tries: add(tries=tries))
        note_sign(self._run, services)

    def add_to_batch_statement(
        self, kind: Kind, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> "Executable":
        """Return the statement that adds members to the batch of the job."""
        new = list(chain.from_iterable(self._members(kind, payloads, options)))
        if len(new) > _MEMBERS_AT_ONCE:
            raise ValueError(f"{len(new):,} jobs in one statement; it takes up to {_MEMBERS_AT_ONCE:,}")
        worker_id = self._services.worker_id
        child_jobs.note_lock_of_batch()
        return workflow_control.add_members_statement(worker_id, self._run.held, kind_name(kind), new)

    async def results_page(self, node: str, after: MemberResult | None) -> list[MemberResult]:
        """Return a page of outcomes, behind ``after``, of a node that the job's own node names."""
        database, contents = self._services.database, self._services.contents
        if self._needs is None:
            self._needs = await until_answered(
                self._run, lambda _: workflow_listing.needs_of(database, self._run.id)
            )
        if (batch := self._needs.get(node)) is None:
            names = ", ".join(map(shown, self._needs)) or "none"
            raise ValueError(
                f"results_of({shown(node)}): this job's node does not name it in after=; it names: {names}"
            )
        end = partial(until_answered, self._run, lambda _: workflow_listing.end_of(database, batch))
        if node not in self._ends:
            self._ends.setdefault(node, await end())
        with reading_own_content():
            page = await until_answered(
                self._run,
                lambda tries: workflow_listing.results(database, contents, batch, after, tries=tries),
            )
        if (now := await end()) is None or now != self._ends[node]:
            # As a sleep, it ends the run even if the processor swallows the error.
            why = f"a job of node {shown(node)} was retried: its results are read anew"
            self._run.unfinished = Asleep(_OPEN_AGAIN_SECONDS if now is None else 0.0, why)
            raise self._run.unfinished
        return page

    def _members(
        self, kind: Kind, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> Iterator[list[NewJob]]:
        given = one_for_each("payloads", payloads)
        most = self._services.settings.max_payload_bytes
        checked = JobOptions(most, contents=self._services.contents, **options)
        return chunks_of_new_jobs(kind, given, [None] * len(given), checked, tracing.current())

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop from a processor's thread."""
        return wait_for_loop(self._services.loop, call)

    def note_never_awaited(self, call: str) -> None:
        """Note the name of a call of the job that was dropped without being awaited."""
        self._run.never_awaited = call

    @property
    def steps(self) -> Steps:
        """The steps of the run."""
        if self._run.steps is None:
            self._run.steps = Steps(self._run, self._services)
        return self._run.steps

    def sync_transaction(self, result: Any) -> contextlib.AbstractContextManager["Session"]:
        """Open a plain session that completes the job at its end; refused at once on an event loop."""
        refuse_on_a_loop()
        return self._sync_transaction(result)

    def sync_transactions(self, result: Any) -> Iterator[contextlib.AbstractContextManager["Session"]]:
        """Yield transactions until one ends without a server's fault; refused at once on an event loop."""
        refuse_on_a_loop()
        return self._sync_transactions(result)

    @contextlib.contextmanager
    def _sync_transaction(self, result: Any) -> Iterator["Session"]:
        attempt, completion = Attempt(), partial(self._completion, result)
        with child_jobs.within_block(self._run):
            try:
                with self._services.sessions.sync_transaction(completion, attempt) as session:
                    yield session
            except Exception as error:
                if attempt.fault is None or not (attempt.committing and self.wait_for(self._was_committed())):
                    self._interrupt(error, attempt)
                    raise

    @contextlib.asynccontextmanager
    async def _retried(self, attempt: tenacity.AttemptManager, result: Any) -> AsyncIterator["AsyncSession"]:
        opened = contextlib.AsyncExitStack()
        async for connecting in tenacity.AsyncRetrying(**self._retry()):  # the block has not begun
            with connecting:
                session = await opened.enter_async_context(self.transaction(result))
        with attempt:
            async with opened:
                yield session
        self._run.unfinished = _raised(attempt)

    @contextlib.contextmanager
    def _sync_retried(self, attempt: tenacity.AttemptManager, result: Any) -> Iterator["Session"]:
        opened = contextlib.ExitStack()
        for connecting in tenacity.Retrying(**self._retry()):
            with connecting:
                session = opened.enter_context(self._sync_transaction(result))
        with attempt, opened:
            yield session
        self._run.unfinished = _raised(attempt)

    def _sync_transactions(self, result: Any) -> Iterator[contextlib.AbstractContextManager["Session"]]:
        try:
            for attempt in tenacity.Retrying(**self._retry()):
                self._forget_error()
                yield self._sync_retried(attempt, result)
                _entered(attempt)
        except (Exception, asyncio.CancelledError):  # not when the processor leaves the loop
            self._forget_error()
            raise

    def _retry(self) -> dict[str, Any]:
        run, late = self._run, tenacity.stop_after_delay(_RETRY_SECONDS)
        return {
            "retry": tenacity.retry_if_exception(
                lambda error: run.interrupted is not None and run.interrupted[0] is error
            ),
            "wait": PAUSES,
            "stop": lambda state: run.stop is not None or late(state),
            "reraise": True,
        }

    def _forget_error(self) -> None:
        """Forget the error of a try; a sleep ends the run even if the processor swallows it."""
        if not isinstance(self._run.unfinished, Asleep):
            self._run.unfinished = None

    def _interrupt(self, error: Exception, attempt: Attempt) -> None:
        if isinstance(error, OwnershipLost):
            self._run.lose()
        elif attempt.fault is not None:
            self._run.interrupted = error, attempt.fault

    async def _was_committed(self) -> bool:
        """Return whether an unanswered COMMIT took effect, once the database answers."""
        services, held = self._services, self._run.held
        asked = partial(was_committed, services.database, worker_id=services.worker_id, held=held)
        return await until_answered(self._run, lambda _: asked())

    def _completion(self, result: Any | Callable[[], Any]) -> Completion:
        text = self._result_text(result)
        return Completion(*self._run.held, text, child_jobs.take(self._run))

    def _result_text(self, result: Any | Callable[[], Any]) -> str | None:
        self._run.refuse_never_awaited()
        value = result() if callable(result) else result
        return result_text(self._run, value, self._services)


def _raised(attempt: tenacity.AttemptManager) -> BaseException | None:
    outcome = attempt.retry_state.outcome
    return None if outcome is None else outcome.exception()


def _entered(attempt: tenacity.AttemptManager) -> None:
    if attempt.retry_state.outcome is None:
        raise RuntimeError("enter what job.transaction(retry=True) yields: async with attempt as session")


def _text(value: str | None, most: int) -> str | None:
    return None if value is None else storable(str(value)[:most])
