"""The ownership of a job that ``run_job`` runs: everything that the job writes is kept in memory."""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from jsworker.client.enqueueing import Kind, kind_name
from jsworker.core import strict_json
from jsworker.core.clock import boottime
from jsworker.core.errors import OwnershipLost
from jsworker.core.job import MemberResult
from jsworker.core.names import shown
from jsworker.ownership.given_session import (
    GivenSession,
    added_rows,
    completed_row,
    savepoint,
    sync_savepoint,
)
from jsworker.ownership.transitions.steps import FoundStep
from jsworker.worker.pipeline import child_jobs
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.pipeline.outcomes import check_size
from jsworker.worker.pipeline.run_ownership import (
    Progress,
    RunLease,
    check_quiet,
    checked_progress,
    written_checkpoint,
)
from jsworker.worker.pipeline.run_writes import LeaseServices
from jsworker.worker.pipeline.steps import NamedStep, Steps
from jsworker.worker.pipeline.threads import refuse_on_a_loop

if TYPE_CHECKING:
    from sqlalchemy import Executable
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


class AddedJob(NamedTuple):
    """A job that the run's job has enqueued or added to its batch; ``payload`` is a JSON value."""

    id: UUID
    kind: str
    payload: Any


@dataclass(eq=False)
class JobRun:
    """The outcome of one run of a job, and what it has reported and stored, as the database would hold it.

    Attributes:
        job_id: the job's id.
        result: the job's result, a JSON value; None until it has completed.
        completed: whether ``process`` has returned, or completed the job in a transaction of its own.
        stage, progress, message: the last reported values; None: none was reported.
        reports: each call of ``job.update_progress``.
        checkpoint: the last saved checkpoint, else the given one.
        steps: the results of its steps by name, None for sleeps; the given ones come first.
        added: jobs that it has added to its batch.
        enqueued: jobs that it has enqueued; empty if the run does not complete the job.
    """

    job_id: UUID
    result: Any = None
    completed: bool = False
    stage: str | None = None
    progress: float | None = None
    message: str | None = None
    reports: list[Progress] = field(default_factory=list)
    checkpoint: Any = None
    steps: dict[str, Any] = field(default_factory=dict)
    added: list[AddedJob] = field(default_factory=list)
    enqueued: list[AddedJob] = field(default_factory=list)


class UnitLease(RunLease):
    """The ownership of a run without a database."""

    def __init__(
        self,
        run: Run,
        services: LeaseServices,
        said: JobRun,
        *,
        session: GivenSession | None,
        results: Mapping[str, Sequence[MemberResult]],
        lost_after: int | None,
    ) -> None:
        super().__init__(run, services)
        self._writes_left = lost_after
        self.said = said
        self._session = session
        self._results = results
        self._by_statement: list[UUID] = []
        run.steps = UnitSteps(run, services, self)

    async def update_progress(self, stage: str | None, progress: float | None, message: str | None) -> None:
        """Note how far the run is."""
        said = self.said
        report = checked_progress(stage, progress, message)
        self.write()
        said.reports.append(report)
        said.stage = said.stage if report.stage is None else report.stage
        said.progress = said.progress if report.progress is None else report.progress
        said.message = said.message if report.message is None else report.message

    async def save_checkpoint(self, value: Any) -> Any:
        """Keep the checkpoint from which the next run would start."""
        text, read = written_checkpoint(value, self._run, self._services)
        self.write()
        self.said.checkpoint = strict_json.as_stored(text)
        return read

    async def quiet(self, seconds: float) -> None:
        """Announce a phase without signs of life."""
        check_quiet(seconds)
        self.write()
        self._run.quiet_until = boottime() + seconds

    @contextlib.asynccontextmanager
    async def transaction(self, result: Any) -> AsyncIterator["AsyncSession"]:
        """Open a savepoint in the given session; the job is completed at the savepoint's end."""
        with self._block():
            async with savepoint(self._session) as session:
                yield session
                text = self._result_text(result)
                self.write()
            self.complete(text)

    async def transactions(
        self, result: Any
    ) -> AsyncIterator[contextlib.AbstractAsyncContextManager["AsyncSession"]]:
        """Yield one transaction: no server can fail."""
        yield self.transaction(result)

    def sync_transaction(self, result: Any) -> contextlib.AbstractContextManager["Session"]:
        """Open a savepoint in the given plain session."""
        refuse_on_a_loop()
        return self._sync_savepoint(result)

    def sync_transactions(self, result: Any) -> Iterator[contextlib.AbstractContextManager["Session"]]:
        """Yield one transaction."""
        yield self.sync_transaction(result)

    def complete_statement(self, result: Any) -> "Executable":
        """Complete the job, and return a statement whose row is that of the worker's own statement."""
        # Later writes are not refused: whether the caller commits the statement is not known here.
        self.check_no_child_jobs()
        text = self._result_text(result)
        self.write()
        self.complete(text)
        return completed_row(self._run.id)

    async def add_to_batch(
        self, kind: Kind, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> list[UUID]:
        """Note the added jobs."""
        child_jobs.refuse_to_wait_for_batch(self._run)
        new = self._new_members(kind, payloads, options)
        if new:
            self.write()
        self.said.added += new
        return [job.id for job in new]

    def add_to_batch_statement(
        self, kind: Kind, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> "Executable":
        """Note the added jobs, and return a statement that returns their ids."""
        child_jobs.note_lock_of_batch()
        new = self._new_members(kind, payloads, options)
        self.said.added += new
        self._by_statement += [job.id for job in new]
        return added_rows([job.id for job in new])

    def _new_members(self, kind: Kind, payloads: Iterable[Any], options: Mapping[str, Any]) -> list[AddedJob]:
        members = chain.from_iterable(self._members(kind, payloads, options))
        return _added_jobs(kind_name(kind), members)

    async def results_page(self, node: str, after: MemberResult | None) -> list[MemberResult]:
        """Return the given results of a node, all on one page."""
        if (found := self._results.get(node)) is None:
            names = ", ".join(map(shown, self._results)) or "none"
            raise ValueError(f"results_of({shown(node)}): run_job(…, results=…) has no such node: {names}")
        return [_as_read(each) for each in found] if after is None else []

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        """Forget the jobs that the block enqueued, or added by statements, if it raises."""
        before = len(self._by_statement)
        try:
            with child_jobs.within_block(self._run):
                yield
        except BaseException:
            undone = set(self._by_statement[before:])
            self.said.added[:] = [job for job in self.said.added if job.id not in undone]
            raise

    @contextlib.contextmanager
    def _sync_savepoint(self, result: Any) -> Iterator["Session"]:
        with self._block():
            with sync_savepoint(self._session) as session:
                yield session
                text = self._result_text(result)
                self.write()
            self.complete(text)

    def complete(self, text: str | None) -> None:
        """Note the result, which is JSON text, and the jobs that are enqueued with it."""
        self.said.completed = True
        self.said.result = None if text is None else strict_json.as_stored(text)
        for kind, job in child_jobs.take(self._run):
            self.said.enqueued += _added_jobs(kind, [job])

    def write(self) -> None:
        """Count a write that is a sign of life, too."""
        self.count_write()
        self._run.sign_at = boottime()

    def count_write(self) -> None:
        """Count a write; raise OwnershipLost if the run owns the job no longer."""
        if self._writes_left == 0:
            self._run.lose()
        self.check_owned()
        if self._writes_left is not None:
            self._writes_left -= 1

    def check_owned(self) -> None:
        """Raise OwnershipLost if a transaction has completed the job, or a write has found it lost."""
        job = f"job {self._run.id}"
        if self._run.completed:
            self._run.lose()
            raise OwnershipLost(f"{job}: its own transaction has completed it, so this run owns it no longer")
        if self._run.stop is StopReason.LOST:
            raise OwnershipLost(f"{job}: another run owns it by now, as run_job(lost_after=…) says")


class UnitSteps(Steps):
    """The steps of a run, kept in a dict by their names."""

    def __init__(self, run: Run, services: LeaseServices, lease: UnitLease) -> None:
        super().__init__(run, services)
        self._kept_steps = lease.said.steps
        self._lease = lease

    async def _looked_up(self, step: NamedStep) -> FoundStep:
        self._lease.check_owned()
        if step.name not in self._kept_steps:
            return FoundStep(False, None, None, len(self._kept_steps))
        value = self._kept_steps[step.name]
        if step.is_sleep and value is None:
            return FoundStep(True, None, 0.0, len(self._kept_steps))
        return FoundStep(True, _text(value, self._most_bytes), None, len(self._kept_steps))

    async def _keep(self, step: NamedStep, text: str | None, *, sleeps: float | None = None) -> FoundStep:
        self._lease.write()
        self._kept_steps[step.name] = None if text is None else strict_json.as_stored(text)
        return FoundStep(True, text, sleeps, 0)


def _text(value: Any, most_bytes: int) -> str | None:
    if value is None:
        return None
    text = strict_json.dumps(value, what="result")
    check_size(text, "result", most_bytes)
    return stored_text(text)


def _as_read(found: MemberResult) -> MemberResult:
    """Return a given result of a member as a worker reads it."""
    return found._replace(result=strict_json.as_stored(strict_json.dumps(found.result, what="result")))


def _added_jobs(kind: str, new: Iterable[Any]) -> list[AddedJob]:
    return [AddedJob(job.id, kind, strict_json.as_stored(job.payload)) for job in new]


def stored_text(text: str) -> str:
    """Return JSON text as a claim returns it once it was stored."""
    return strict_json.dumps(strict_json.as_stored(text))
