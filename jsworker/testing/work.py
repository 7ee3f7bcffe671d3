"""Runs all waiting jobs in the test's own process, and moves the times for which jobs wait."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import JobFailed
from jsworker.core.events import Event
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership import for_tests
from jsworker.ownership.pool import Row
from jsworker.testing.shared_servers import database_at, settings_in_use
from jsworker.worker.worker import Worker

_LOOK_SECONDS: Final = 0.02
_SHOWN: Final = 10
_OUTCOMES: Final = {
    "job.completed": "completed",
    "job.failed": "failed",
    "job.error": "retrying",
    "job.snoozed": "snoozed",
}


class RunError(NamedTuple):
    """An attempt that ended in an error, or a run that was interrupted and after which the job still waits.

    Attributes:
        attempt: its number; None: the job has failed because its runs were taken back too often, or its run
            was interrupted by a fault that is not the job's, which counts no attempt: a decryption key is
            missing, or PostgreSQL failed in the job's transaction.
        is_final: whether the job has failed for good; else another run follows.
        error: the first line of the error that it raised, or why it failed.
        exception: what the processor raised, TimeoutError if it was cancelled for a time limit; None: nothing
            was raised in this process.
    """

    job_id: UUID
    kind: str
    attempt: int | None
    is_final: bool
    error: str
    exception: BaseException | None


@dataclass(eq=False)
class WorkDone:
    """The outcomes that ``work_until_empty`` has seen, by kind; a job that ran twice may count in two.

    Attributes:
        completed, failed: jobs that have ended in this way.
        cancelled: jobs of any kind that were cancelled meanwhile, also because they expired or because a job
            that they need has failed.
        retrying: attempts that ended in an error and after which the job waits for its next attempt.
        snoozed: runs that ended in ``Snooze`` or in a sleep.
        errors: each attempt that ended in an error, then each interrupted run whose job still waits.
    """

    completed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    retrying: Counter[str] = field(default_factory=Counter)
    snoozed: Counter[str] = field(default_factory=Counter)
    errors: list[RunError] = field(default_factory=list)

    def note(self, event: Event) -> None:
        """Count the outcome that an event of a worker reports."""
        if (outcome := _OUTCOMES.get(event.name)) is None:
            return
        facts = event.fields
        if event.name != "job.error" or "seconds" in facts:  # else it is about a hook, or a completed job
            getattr(self, outcome)[facts["kind"]] += 1
        if outcome in ("failed", "retrying"):
            self.errors.append(
                RunError(
                    UUID(facts["job_id"]),
                    facts["kind"],
                    facts.get("attempt"),  # another worker's run is taken back: its attempt is not known here
                    outcome == "failed",
                    str(facts.get("error") or ""),
                    event.exception,
                )
            )

    def raise_first(self) -> None:
        """Raise the error of the first attempt that ended in one, with notes that name the jobs."""
        if not self.errors:
            return
        first, *others = self.errors
        error = first.exception
        if not isinstance(error, Exception):
            failed = JobFailed(first.error)
            failed.job_id, failed.error = first.job_id, first.error
            error = failed
        error.add_note(f"raised in {_place_in_words(first)}")
        for other in others[:_SHOWN]:
            error.add_note(f"and in {_place_in_words(other)}: {other.error}")
        raise error


async def work_until_empty(
    processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]],
    *,
    timeout: float = 30.0,  # noqa: ASYNC109 -- its error names the jobs that are left
    raise_failures: bool = True,
    settings: Settings | None = None,
) -> WorkDone:
    """Run a worker of these processors in this process until none of their jobs waits; return the outcomes.

    Jobs that they enqueue for each other meanwhile are run, too. Jobs that wait for a later time are not run:
    those with a delay, a back-off, a sleep, a schedule, a rate or a pause; ``advance`` makes them due.

    Args:
        processors: as for ``Worker``.
        timeout: seconds after the worker's start until it gives up; the start itself may take as long.
        raise_failures: whether the first of ``errors`` is raised once all is done: any error of the
            processor, ``Retry`` and ``Fail`` included, but not ``Snooze``. For tests of retries give False.
        settings: where the jobs are; None: in the database of the test that runs.

    Raises:
        TimeoutError: jobs are left; the message names them. Or an attempt was cancelled for its time limit.
        Exception: the error of a processor; notes name the job and other errors.
        JobFailed: an attempt ended in an error that was not raised in this process, or a run was interrupted.
        JsworkerError: the worker could not start, or died.
    """
    own = settings_in_use(settings, "work_until_empty")
    done = WorkDone()
    interrupted: dict[str, Event] = {}

    def note_interruption(event: Event) -> None:
        """Keep the end of a run until its job is claimed again, if a fault that is not the job's ended it."""
        interrupted.pop(event.fields["job_id"], None)
        if "server_fault" in event.fields:
            interrupted[event.fields["job_id"]] = event

    async with database_at(own) as database:
        worker = Worker(processors, own, connect_seconds=timeout)
        worker.on("*", done.note)
        worker.on("job.claimed", note_interruption)
        worker.on("job.released", note_interruption)
        kinds = [each.kind for each in processors]
        cancelled_before = Counter(await for_tests.cancelled(database))
        async with worker:
            give_up_at = boottime() + timeout
            while left := [
                *(f"schedule {row.name} is due" for row in await for_tests.due_schedules(database, kinds)),
                *map(_job_in_words, await for_tests.undone(database, kinds)),
            ]:
                if boottime() > give_up_at:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            if left:
                worker.stop(force=True)
        done.cancelled = Counter(await for_tests.cancelled(database)) - cancelled_before
        waiting = await for_tests.waiting_of(database, [UUID(job_id) for job_id in interrupted])
    if left:
        more = [f"and {len(left) - _SHOWN} more"] if len(left) > _SHOWN else []
        lines = "\n  ".join([*left[:_SHOWN], *more])
        raise TimeoutError(
            f"after {timeout:g} s {len(left)} of kind {', '.join(kinds)} were not done:\n  {lines}"
        )
    done.errors += [
        RunError(UUID(job_id), event.fields["kind"], None, False, event.fields["reason"], None)
        for job_id, event in interrupted.items()
        if UUID(job_id) in waiting
    ]
    if raise_failures:
        done.raise_first()
    return done


async def advance(
    by: timedelta | None = None,
    *,
    days: float = 0.0,
    hours: float = 0.0,
    minutes: float = 0.0,
    seconds: float = 0.0,
    settings: Settings | None = None,
) -> None:
    """Move the times for which jobs wait nearer, as if a span of time had passed. No clock is changed.

    These times move: due times of jobs (delays, back-offs, snoozes, debouncing), the ends of sleeps, when
    jobs expire, when schedules are due next, when rates have tokens again, when pauses end, windows of
    ``unique_for``. These do not: when jobs were created, began and ended, heartbeats, deadlines of running
    jobs, and retention.

    Args:
        by: the span of time; or give it in days, hours, minutes and seconds, which are added to it.
        settings: where the jobs are; None: in the database of the test that runs.

    Raises:
        ValueError: the span is not longer than 0.
    """
    span = (by or timedelta()) + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if span <= timedelta():
        raise ValueError(f"advance by {span}: must be more than nothing, for example advance(hours=3)")
    async with database_at(settings_in_use(settings, "advance")) as database:
        await for_tests.advance(database, span)


def _place_in_words(error: RunError) -> str:
    attempt = "a run" if error.attempt is None else f"attempt {error.attempt}"
    return f"{attempt} of job {error.job_id} of kind {error.kind}"


def _job_in_words(row: Row) -> str:
    words = [f"job {row.id} of kind {row.kind} is {row.status}"]
    if row.held_by is not None:
        words.append(f"held by {row.held_by}")
    if row.attempts:
        words.append(f"attempt {row.attempts}")
    if row.stage is not None:
        words.append(f"stage {row.stage}")
    if row.progress is not None:
        words.append(f"progress {row.progress:g}")
    if row.last_error is not None:
        words.append(f"last error: {row.last_error.splitlines()[0]}")
    return ", ".join(words)
