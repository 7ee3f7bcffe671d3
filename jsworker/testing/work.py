"""Working on all that waits, in the test's own process, and moving what waits for a later time."""

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
from jsworker.testing.servers import database_at, settings_in_use
from jsworker.worker.worker import Worker

_LOOK_SECONDS: Final = 0.02
_SHOWN: Final = 10
_OUTCOMES: Final = {
    "job.completed": "completed",
    "job.failed": "failed",
    "job.error": "retrying",
    "job.cancelled": "cancelled",
    "job.snoozed": "snoozed",
}


class RunError(NamedTuple):
    """An attempt that ended in an error.

    Attributes:
        is_final: whether the job has failed for good; else another attempt follows.
        error: the first line of what it raised, or why it failed.
        exception: what the processor raised; None: nothing was raised in this process.
    """

    job_id: UUID
    kind: str
    attempt: int
    is_final: bool
    error: str
    exception: BaseException | None


@dataclass(eq=False)
class WorkDone:
    """What ``work_until_empty`` has seen, counted by kind; a job that ran twice may be in two of them.

    Attributes:
        completed, failed, cancelled: jobs that have ended so.
        retrying: attempts that ended in an error after which the job waits for its next one.
        snoozed: runs that ended in ``Snooze`` or in a sleep.
        errors: each attempt that ended in an error.
    """

    completed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    retrying: Counter[str] = field(default_factory=Counter)
    snoozed: Counter[str] = field(default_factory=Counter)
    errors: list[RunError] = field(default_factory=list)

    def note(self, event: Event) -> None:
        """Count what an event of a worker tells."""
        if (outcome := _OUTCOMES.get(event.name)) is None:
            return
        facts = event.fields
        if event.name != "job.error" or "seconds" in facts:  # else it tells of a hook, or of a completed job
            getattr(self, outcome)[facts["kind"]] += 1
        if outcome in ("failed", "retrying"):
            self.errors.append(
                RunError(
                    UUID(facts["job_id"]),
                    facts["kind"],
                    facts["attempt"],
                    outcome == "failed",
                    str(facts.get("error") or ""),
                    event.exception,
                )
            )

    def raise_first(self) -> None:
        """Raise what the first attempt that ended in an error has raised, noting which job it was."""
        if not self.errors:
            return
        first, *others = self.errors
        error = first.exception
        if not isinstance(error, Exception):
            failed = JobFailed(first.error)
            failed.job_id, failed.error = first.job_id, first.error
            error = failed
        error.add_note(f"raised in attempt {first.attempt} of job {first.job_id} of kind {first.kind}")
        for other in others[:_SHOWN]:
            error.add_note(
                f"and in attempt {other.attempt} of job {other.job_id} of kind {other.kind}: {other.error}"
            )
        raise error


async def work_until_empty(
    processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]],
    *,
    timeout: float = 30.0,  # noqa: ASYNC109 -- with words of what is left
    raise_failures: bool = True,
    settings: Settings | None = None,
) -> WorkDone:
    """Run a worker of these processors in this process until none of their jobs waits; return what it did.

    Jobs that they enqueue for each other meanwhile are worked on, too. What waits for a later time stays: a
    delay, a back-off, a sleep, a schedule, a rate, a pause; ``advance`` makes it due.

    Args:
        processors: as for ``Worker``.
        timeout: seconds until it gives up, from the worker's start on, which may take as long.
        raise_failures: whether the first error of an attempt is raised once all is done: what the processor
            raised, ``Retry`` and ``Fail`` included, ``Snooze`` not. A test of retries says False.
        settings: where the jobs are; None: in the database of the test that runs.

    Raises:
        TimeoutError: jobs are left; it names them.
        Exception: what a processor raised; notes name the job and other errors.
        JobFailed: an attempt ended in an error that nothing in this process has raised.
        JsworkerError: the worker could not start, or died.
    """
    own = settings_in_use(settings, "work_until_empty")
    done = WorkDone()
    async with database_at(own) as database:
        worker = Worker(processors, own, connect_seconds=timeout)
        worker.on("*", done.note)
        kinds = [each.kind for each in processors]
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
    if left:
        more = [f"and {len(left) - _SHOWN} more"] if len(left) > _SHOWN else []
        lines = "\n  ".join([*left[:_SHOWN], *more])
        raise TimeoutError(
            f"after {timeout:g} s {len(left)} of kind {', '.join(kinds)} were not done:\n  {lines}"
        )
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
    """Move all that jobs wait for so much nearer, as if that time had passed. No clock is touched.

    What moves: due times of jobs (delays, back-offs, snoozes, debouncing), the ends of sleeps, when jobs
    expire, when schedules are due next, when rates have tokens again, when pauses end, windows of
    ``unique_for``. What does not: when jobs were created, began and ended, heartbeats, deadlines of running
    jobs, and retention.

    Args:
        by: how much; or in days, hours, minutes and seconds.
        settings: where the jobs are; None: in the database of the test that runs.

    Raises:
        ValueError: it is not more than nothing.
    """
    span = (by or timedelta()) + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if span <= timedelta():
        raise ValueError(f"advance by {span}: must be more than nothing, for example advance(hours=3)")
    async with database_at(settings_in_use(settings, "advance")) as database:
        await for_tests.advance(database, span)


def _job_in_words(row: Row) -> str:
    """Return what is known of a job that is left."""
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
