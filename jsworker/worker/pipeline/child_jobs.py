"""Jobs that a run enqueues: kept until its own job is completed, and written in that transaction."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import UUID

from jsworker.core.errors import UsageError
from jsworker.core.names import shown
from jsworker.ownership.transitions.enqueue import ChildJob
from jsworker.worker.pipeline.in_flight import Phase, Run

MOST: Final = 5000
"""The most child jobs of one run, because the row of its own job is locked while they are inserted."""
MOST_PAYLOADS: Final = 8
"""The payloads of a run's child jobs may together be as large as this number of largest payloads."""

_changing = threading.Lock()
"""Several threads of a job may enqueue at once. One lock for all runs: it is held only for moments."""


class _Block:
    """A block of ``job.transaction()``: jobs enqueued in it, its steps, and whether it locks the batch."""

    __slots__ = ("enqueued", "locks_batch", "steps")

    def __init__(self) -> None:
        self.enqueued: set[UUID] = set()
        self.steps: set[str] = set()
        self.locks_batch = False


_block: ContextVar[_Block | None] = ContextVar("block", default=None)
"""The present block, also of tasks that it has started."""
_step: ContextVar[tuple[Run, str] | None] = ContextVar("step", default=None)
"""Run and name of the present step, also of tasks that it has started; None in a block that it opens."""


class ChildJobs:
    """The child jobs of one run, and the bytes of their payloads."""

    __slots__ = ("bytes", "jobs")

    def __init__(self, jobs: Iterable[ChildJob] = ()) -> None:
        self.jobs = list(jobs)
        self.bytes = _bytes(self.jobs)


def add(run: Run, child_jobs: list[ChildJob], *, max_payload_bytes: int) -> None:
    """Keep child jobs for the completion of their run.

    Raises:
        UsageError: a step enqueues, the run has ended, or the completion of its job was already made.
        ValueError: there would be too many jobs, or their payloads together would be too large.
    """
    if (step := _step.get()) is not None and step[0] is run:
        raise UsageError(
            f"job {run.id}: job.enqueue() in step {shown(step[1])}: a later run, which does not call the step"
            " again, would enqueue nothing; call job.enqueue() outside of the step"
        )
    most = MOST_PAYLOADS * max_payload_bytes
    with _changing:
        if run.phase is not Phase.RUNNING or not run.takes_child_jobs:
            raise UsageError(f"job {run.id}: its completion is made, so nothing more can be enqueued with it")
        kept = run.child_jobs or ChildJobs()
        number = len(kept.jobs) + len(child_jobs)
        if number > MOST:
            raise ValueError(f"job {run.id}: a run may enqueue {MOST:,} jobs, not {number:,}")
        size = kept.bytes + _bytes(child_jobs)
        if size > most:
            raise ValueError(
                f"job {run.id}: the payloads that a run enqueues may take {most:,} bytes together"
                f" ({MOST_PAYLOADS} × JSWORKER_MAX_PAYLOAD_BYTES), not {size:,}"
            )
        kept.jobs += child_jobs
        kept.bytes = size
        run.child_jobs = kept
        if (block := _block.get()) is not None:
            block.enqueued.update(child.job.id for child in child_jobs)


def take(run: Run) -> tuple[ChildJob, ...]:
    """Return the child jobs that a run's completion must write; from here on no more can be added."""
    with _changing:
        run.takes_child_jobs = False
        return () if run.child_jobs is None else tuple(run.child_jobs.jobs)


@contextmanager
def within_block(run: Run) -> Iterator[None]:
    """Note that the block has completed the job; if it raises, forget the jobs enqueued in it.

    Its transaction is then rolled back, and the names of the steps that have ended in it may be used again in
    another try of the block. Raises UsageError if another block of the run is open or has completed the job.
    """
    with _changing:
        if run.completed or run.in_block:
            raise UsageError(
                f"job {run.id}: a run has one job.transaction(), whose end completes the job: another one is"
                f" {'open' if run.in_block else 'committed'} already; do all of its work inside one block"
            )
        run.in_block = True
    outer, step, took = _block.get(), _step.get(), run.takes_child_jobs
    # Not a cut at the list's length: other tasks and threads of the job enqueue meanwhile, outside the block.
    inside = _Block()
    _block.set(inside)
    _step.set(None)
    try:
        yield
        run.completed = True
    except BaseException:
        if run.steps is not None:
            run.steps.free_names(inside.steps)
        with _changing:
            run.takes_child_jobs = took
            if run.child_jobs is not None:
                left = [child for child in run.child_jobs.jobs if child.job.id not in inside.enqueued]
                run.child_jobs = ChildJobs(left) if left else None
        raise
    finally:
        inside.locks_batch = run.in_block = False
        _block.set(outer)
        _step.set(step)


@contextmanager
def within_step(run: Run, name: str) -> Iterator[None]:
    """Refuse to enqueue meanwhile: a later run, which does not call the step, would enqueue nothing."""
    outer = _step.get()
    _step.set((run, name))
    try:
        yield
    finally:
        _step.set(outer)
    if (block := _block.get()) is not None:
        block.steps.add(name)


def note_lock_of_batch() -> None:
    """Note that the present block, if any, has a statement that adds members to the job's batch."""
    if (block := _block.get()) is not None:
        block.locks_batch = True


def refuse_to_wait_for_batch(run: Run) -> None:
    """Raise UsageError if the present block locks the batch: others wait for its end."""
    if (block := _block.get()) is not None and block.locks_batch:
        raise UsageError(
            f"job {run.id}: job.add_to_batch() would wait for the end of the job.transaction() in which"
            " job.add_to_batch_statement() locks the batch: execute another such statement there instead"
        )


def _bytes(child_jobs: Iterable[ChildJob]) -> int:
    payloads = [child.job.payload for child in child_jobs]
    return sum(len(payload) if payload.isascii() else len(payload.encode()) for payload in payloads)
