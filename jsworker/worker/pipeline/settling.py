"""The way out: outcomes are written in natural batches and kept until the database has answered."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias
from uuid import UUID

from jsworker.core.batching import Batcher
from jsworker.core.clock import boottime, jittered
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, LockTimeout
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import limits, settle, snooze, timeline
from jsworker.ownership.transitions.child_jobs import complete_with_child_jobs
from jsworker.ownership.transitions.heartbeat import Held, Orphan
from jsworker.ownership.transitions.settle import Completion, Failure, Refusals, Return, Settled, Snoozing
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline import child_jobs
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.pipeline.outcomes import (
    Completed,
    Failed,
    HandedBack,
    Interrupted,
    Lost,
    Outcome,
    Snoozed,
    first_line,
)

_BATCH = 500
_LARGE_CHARACTERS = 64 * 1024  # a longer result is written alone, so that others need not wait for it
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_JITTER = 0.2  # the share by which pauses vary
_LONGEST_WITHOUT_KEY_SECONDS = 600.0
_MOST_SERVER_FAULTS = 16  # in a row; the pauses between them add up to eleven minutes
_ALONE_AT_ONCE = 3  # outcomes that wait for locks, and large ones; claims need their connections, too
_LATE_SECONDS = 60.0  # an outcome that could not be written for so long is reported
_REFUSED_KEPT = 200  # the most refused failures kept here; for others a mark shows that the job has run
_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0  # between single tries: some errors come at once while others are answered
_LOCKED_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3)  # after these pauses the write waits for the lock

Ended: TypeAlias = Completion | Failure | Return | Snoozing
Statement: TypeAlias = Callable[..., Awaitable[Sequence[Settled]]]

_STATEMENTS: dict[Statement, str] = {
    settle.complete: "completions",
    settle.fail: "failures",
    settle.release: "releases",
    snooze.snooze: "snoozes",
}


class Settler:
    """Writes outcomes; finished outcomes are kept through an outage of the database."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._refusals: Refusals = {}
        self._refused: dict[Held, Failure] = {}
        self._late: set[UUID] = set()  # jobs whose outcomes are reported as not written
        self._waiting = asyncio.Semaphore(_ALONE_AT_ONCE)
        self._large = asyncio.Semaphore(_ALONE_AT_ONCE)
        self._letting_go: set[asyncio.Task[Settled | None]] = set()
        self._batchers: dict[Statement, Batcher[Any, Settled | None]] = {
            statement: Batcher(name, partial(self._write, statement), limit=_BATCH, died=context.died)
            for statement, name in _STATEMENTS.items()
        }
        self.completions = self._batchers[settle.complete]

    async def settle(self, run: Run, outcome: Outcome) -> Settled:
        """Write a run's outcome and return what became of the job; this may take as long as an outage."""
        match outcome:
            case Completed(result):
                return await self._completed(run, result)
            case Failed(error, permanent, delay, stalled):
                if outcome.pauses_key:
                    await self._pause_key(run, outcome)
                failure = Failure(*run.held, error, permanent, delay, stalled=stalled)
                return await self._failed(failure, alone=_has_key(run))
            case HandedBack(reason):
                if run.stop is StopReason.FENCED:
                    await self._note_fence(run)
                return await self._written(settle.release, Return(*run.held, reason), alone=_has_key(run))
            case Snoozed():
                return await self._snoozed(run, outcome)
            case Interrupted():
                return await self._interrupted(run, outcome)
            case Lost():
                return Settled.LOST

    def complete(self, run: Run, result: str | None, then: Callable[[Settled | None], None]) -> None:
        """Complete a job in the next batch; ``then`` is called with the result, None if it is unclear."""
        if child_jobs.take(run) or _is_large(result):  # not in a batch: settled like other outcomes
            then(None)
        else:
            self.completions.post(Completion(*run.held, result), then)

    def let_go(self, held: Held, reason: str, orphan: Orphan) -> asyncio.Future[Settled | None]:
        """End an orphaned claim; the future's result is None if the database does not answer.

        If the job has run but the write of its failure was refused, this tries to write the failure again.
        Otherwise the job is released, with ``reason`` in its timeline.
        """
        failure = self._refused.get(held)
        if failure is None and orphan.ended:
            error = "its run has ended, but PostgreSQL refused to write how"
            failure = Failure(*held, error, None, _LONGEST_PAUSE_SECONDS)
        what = Return(*held, reason) if failure is None else failure
        statement = settle.release if failure is None else settle.fail
        if not orphan.has_key:
            return self._batchers[statement].submit(what)
        task = asyncio.create_task(self._once(statement, what))
        self._letting_go.add(task)
        task.add_done_callback(self._letting_go.discard)
        return task

    async def close(self) -> None:
        """Give up unwritten outcomes; the stale rule takes their jobs back."""
        for task in self._letting_go:
            task.cancel()
        for batcher in self._batchers.values():
            await batcher.close()

    async def _completed(self, run: Run, result: str | None) -> Settled:
        completion = Completion(*run.held, result, child_jobs.take(run))
        if completion.child_jobs:
            has_key = any(child.job.unique_key is not None for child in completion.child_jobs)
            settled = await self._written(complete_with_child_jobs, completion, alone=has_key)
        else:
            settled = await self._written(settle.complete, completion)
        error = self._refusals.pop(run.held, None)
        if settled is Settled.REFUSED:
            run.refusal = f"cannot be completed: {error or 'PostgreSQL refused the row'}"
            return await self._failed(Failure(*run.held, run.refusal, "result", 0.0))
        return settled

    async def _snoozed(self, run: Run, outcome: Snoozed) -> Settled:
        most = run.kind.processor.max_snoozes if outcome.counted else None
        used_up = f"snoozed more often than max_snoozes={most} allows: {outcome.reason}"
        snoozing = Snoozing(*run.held, outcome.reason, outcome.after, most, used_up)
        settled = await self._written(snooze.snooze, snoozing, alone=_has_key(run))
        error = self._refusals.pop(run.held, None)
        if settled is Settled.REFUSED:
            run.refusal = f"cannot be snoozed: {error or 'PostgreSQL refused the row'}"
            failure = Failure(*run.held, run.refusal, None, outcome.after)
            return await self._failed(failure, alone=_has_key(run))
        if settled is Settled.FAILED:
            run.refusal = used_up
        return settled

    async def _failed(self, failure: Failure, *, alone: bool = False) -> Settled:
        settled = await self._written(settle.fail, failure, alone=alone)
        if settled is Settled.REFUSED:
            self._refused[failure.id, failure.token] = failure
            if len(self._refused) > _REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
        return settled

    async def _written(self, statement: Statement, ended: Ended, *, alone: bool = False) -> Settled:
        """Write an outcome without waiting for locks: in a batch, or by itself if large or with child jobs.

        If there is no answer, or the row stays locked, it is written alone, which waits. With ``alone`` it is
        so from the start: a producer's open transaction may be taking the job's key.
        """
        if alone:
            return await self._persist(statement, ended)
        by_itself = partial(self._persist, statement, wait=False)
        write = by_itself if _is_large_completion(ended) else self._batchers[statement].submit
        for pause in _LOCKED_PAUSES:
            settled = await write(ended)
            if settled is None:
                break
            if settled is not Settled.LOCKED:
                return settled
            await asyncio.sleep(pause)
        return await self._persist(statement, ended)

    async def _interrupted(self, run: Run, outcome: Interrupted) -> Settled:
        """Release a job with a growing pause; after ten minutes of faults in a row, fail the attempt.

        A job whose decryption key is missing is released without that limit: another worker may have it.
        """
        longest = _LONGEST_PAUSE_SECONDS
        if outcome.missing_key is not None:
            self._context.complaints.report("decryption", f"{outcome.missing_key} is not here")
            longest = _LONGEST_WITHOUT_KEY_SECONDS
        faults = partial(settle.server_faults, self._context.database, job_id=run.id)
        times = await self._context.health.until_answered(faults)
        if times >= _MOST_SERVER_FAULTS and outcome.missing_key is None:
            failure = Failure(*run.held, outcome.error, None, outcome.delay)
            return await self._failed(failure, alone=_has_key(run))
        pause = min(longest, _FIRST_PAUSE_SECONDS * 2 ** min(times, _MOST_SERVER_FAULTS))
        returned = Return(*run.held, outcome.reason, jittered(pause, _JITTER))
        settled = await self._written(settle.release, returned, alone=_has_key(run))
        return Settled.QUEUED if settled is Settled.SCHEDULED else settled  # a release, not a retry

    async def _pause_key(self, run: Run, outcome: Failed) -> None:
        """Pause the job's limit key before its slot becomes free; a refusal of the database is reported.

        Like the write of the failure itself, this is repeated until the database answers.
        """
        key = run.claimed.limit_key or ""
        pause = partial(
            limits.pause_for,
            self._context.database,
            run.kind.name,
            key,
            seconds=outcome.delay,
            worker_id=self._context.worker_id,
            held=run.held,
            reason=f"job {run.id}: {first_line(outcome.error)}",
        )
        up_since: float | None = None
        try:
            while True:
                await self._context.health.wait_until_up()
                up_since = up_since or boottime()
                try:
                    if not await pause():
                        return
                    break
                except (DatabaseUnavailable, LockTimeout) as error:
                    up_since = await self._note_unanswered(run.id, error, up_since)
                except DatabaseRefused as error:
                    if error.sqlstate is not None:
                        self._context.complaints.report("pauses", str(error))
                        return
                    self._context.health.failed(error)
                await asyncio.sleep(jittered(_FIRST_WAIT_SECONDS, _JITTER))
        finally:
            self._end_late(run.id)
        facts = {"kind": run.kind.name, "key": key, "seconds": round(outcome.delay, 3)}
        self._context.events.emit("limit.paused", **facts, job_id=str(run.id))

    async def _note_fence(self, run: Run) -> None:
        """Write to the timeline, as soon as the database answers, that the fence stopped the run."""
        silent = round(boottime() - run.beaten_at, 3)

        async def note() -> None:
            try:
                await timeline.note_fence(
                    self._context.database,
                    worker_id=self._context.worker_id,
                    held=run.held,
                    seconds_without_heartbeat=silent,
                )
            except RowRefused as error:  # only reported: the run ends anyway
                self._context.health.failed(error)

        await self._context.health.until_answered(note)

    async def _persist(self, statement: Statement, ended: Ended, *, wait: bool = True) -> Settled:
        """Write one outcome alone, repeatedly until it is answered: a locked row must not delay others."""
        up_since: float | None = None
        try:
            for tries in count():
                # Outcomes that wait for a lock may hold their places for long.
                async with self._waiting if wait else self._large:
                    await self._context.health.wait_until_up()
                    up_since = up_since or boottime()
                    try:
                        if tries and _is_large_completion(ended) and await self._is_completed(ended):
                            return Settled.COMPLETED  # sending it again would take long
                        [settled] = await self._ask(statement, [ended], tries=tries, wait=wait)
                    except (DatabaseUnavailable, DatabaseRefused) as error:
                        up_since = await self._note_unanswered(ended.id, error, up_since)
                    else:
                        return settled
                seconds = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(tries, 10))
                await asyncio.sleep(jittered(seconds, _JITTER))
        finally:
            self._end_late(ended.id)
        raise AssertionError

    async def _note_unanswered(
        self, job_id: UUID, error: DatabaseUnavailable | DatabaseRefused, up_since: float
    ) -> float | None:
        """Report an outcome that is late; return since when the database is up, None if it is not."""
        # Find out whether the database is silent: a row that stays locked looks the same.
        await self._context.unanswered(error)
        if not self._context.health.up:
            return None
        if boottime() - up_since >= _LATE_SECONDS and job_id not in self._late:
            self._late.add(job_id)
            reason = f"the outcome of job {job_id} could not be written for {_LATE_SECONDS:g} s: {error}"
            self._context.complaints.report("outcomes", reason)
        return up_since

    def _end_late(self, job_id: UUID) -> None:
        self._late.discard(job_id)
        if not self._late:
            self._context.complaints.end("outcomes")

    async def _is_completed(self, ended: Ended) -> bool:
        completed = await settle.is_completed(
            self._context.database, worker_id=self._context.worker_id, run=ended
        )
        self._context.health.answered()
        return completed

    async def _once(self, statement: Statement, ended: Ended) -> Settled | None:
        async with self._waiting:
            [settled] = await self._write(statement, [ended])
        return settled

    async def _write(self, statement: Statement, runs: Sequence[Ended]) -> Sequence[Settled | None]:
        """Write outcomes once, as soon as the database is up; None for each if it does not answer."""
        await self._context.health.wait_until_up()
        try:
            return await self._ask(statement, runs, wait=False)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            return [None] * len(runs)

    async def _ask(self, statement: Statement, runs: Sequence[Ended], **how: int) -> Sequence[Settled]:
        """Write outcomes and set refused rows aside; refused completions and snoozes become failures."""
        refusals: Refusals = {}
        settled = await statement(
            self._context.database, worker_id=self._context.worker_id, runs=runs, refusals=refusals, **how
        )
        self._context.health.answered()
        if statement in {settle.complete, complete_with_child_jobs, snooze.snooze}:
            self._refusals |= refusals
        elif refusals:
            attempted = "fail" if statement is settle.fail else "release"
            refused = [(job_id, error) for (job_id, _), error in refusals.items()]
            with self._context.health.noting():  # else the rows are found again as orphaned claims
                await self._context.refused_rows.note(attempted, refused)
        return settled


def _has_key(run: Run) -> bool:
    """Return whether the job may have to wait for its key when it comes back to the queue."""
    return run.claimed.waiting_key is not None


def _is_large_completion(ended: Ended) -> bool:
    return isinstance(ended, Completion) and (_is_large(ended.result) or bool(ended.child_jobs))


def _is_large(result: str | None) -> bool:
    return result is not None and len(result) > _LARGE_CHARACTERS
