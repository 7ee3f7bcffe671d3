"""The owner's last word: COMPLETE, FAIL, RELEASE. Each is fenced; zero rows means the job is lost.

Batches skip locked rows and then read without a lock what they skipped: a row that is still mine is returned as
locked, or settled alone, where waiting for its lock holds up no other job.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import (
    completed_under,
    held_by_me,
    last_attempt,
    last_stall,
    locked_of_mine,
    mine,
    worker_id,
)
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.schema import job_events
from jsworker.ownership.statements import (
    NO_OWNER,
    NOW,
    compiled,
    entry,
    given_array,
    given_runs,
    j,
    json_object,
    seconds,
    stall_back_off,
    waiting,
)
from jsworker.ownership.transitions.timeline import REJECTED


def _complete() -> sa.TextClause:
    run = given_runs("run", result=given_array("results", sa.Text))
    row = locked_of_mine(run, sa.cast(run.c.result, JSONB).label("result"))
    return compiled(
        sa.update(j)
        .values(
            status="completed",
            result=row.c.result,
            finished_at=NOW,
            completed_by=j.c.worker_id,
            **NO_OWNER,
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(j.c.id, j.c.status, j.c.fencing_token)
    )


def _fail() -> sa.TextClause:
    """Return FAIL. A run of a job that is cancelled on request counts neither as an error nor as an attempt."""
    run = given_runs(
        "run",
        error=given_array("errors", sa.Text),
        reason=given_array("reasons", sa.Text),
        delay=given_array("delays", sa.Double),
        stalled=given_array("stalled", sa.Boolean),
    )
    next_status = sa.case(
        (j.c.cancel_requested, "cancelled"),
        (run.c.reason.is_not(None), "failed"),
        (sa.and_(run.c.stalled, last_stall), "failed"),
        (sa.and_(~run.c.stalled, last_attempt), "failed"),
        else_="scheduled",
    )
    reason = sa.func.coalesce(run.c.reason, sa.case((run.c.stalled, "stalled"), else_="attempts"))
    row = locked_of_mine(
        run, next_status.label("next"), reason.label("reason"), run.c.error, run.c.delay, run.c.stalled
    )
    cancelled, again = row.c.next == "cancelled", row.c.next == "scheduled"
    back_off = sa.case((row.c.stalled, stall_back_off(j.c.stalls)), else_=seconds(row.c.delay))
    failed = (
        sa.update(j)
        .values(
            status=row.c.next,
            errors=j.c.errors + sa.case((sa.or_(row.c.stalled, cancelled), 0), else_=1),
            stalls=j.c.stalls + sa.case((row.c.stalled, 1), else_=0),
            attempts=j.c.attempts - sa.case((sa.and_(cancelled, ~row.c.stalled), 1), else_=0),
            last_error=row.c.error,
            failure_reason=sa.case((row.c.next == "failed", row.c.reason)),
            cleared=False,
            clear_reason=sa.null(),
            run_at=sa.case((again, NOW + back_off), else_=j.c.run_at),
            finished_at=sa.case((~again, NOW)),
            **NO_OWNER,
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(
            j.c.id,
            j.c.status,
            j.c.fencing_token,
            j.c.errors,
            j.c.failure_reason,
            j.c.run_at,
            row.c.error,
            sa.case((row.c.stalled, j.c.stalls)).label("stalls"),
        )
        .cte("failed")
    )
    again = failed.c.status == "scheduled"
    logged = entry(
        failed,
        sa.case((again, "error"), else_=failed.c.status),
        worker_id=worker_id,
        error=failed.c.error,
        detail=sa.func.jsonb_strip_nulls(
            json_object(
                errors=failed.c.errors,
                stalls=failed.c.stalls,
                reason=failed.c.failure_reason,
                run_at=sa.case((again, failed.c.run_at)),
            )
        ),
    )
    return compiled(sa.select(failed.c.id, failed.c.status, failed.c.fencing_token).add_cte(logged))


def _release() -> sa.TextClause:
    run = given_runs("run", reason=given_array("reasons", sa.Text), delay=given_array("delays", sa.Double))
    row = locked_of_mine(run, j.c.cancel_requested.label("cancel"), run.c.reason, run.c.delay)
    cancelled, now = row.c.cancel, row.c.delay.is_(None)
    queued, scheduled = sa.and_(~cancelled, now), sa.and_(~cancelled, ~now)
    released = (
        sa.update(j)
        .values(
            status=sa.case((cancelled, "cancelled"), (now, "queued"), else_="scheduled"),
            attempts=j.c.attempts - 1,
            dispatch=j.c.dispatch + sa.case((queued, 1), else_=0),
            needs_publish=queued,
            publish_after=NOW,
            queued_at=sa.case((queued, NOW), else_=j.c.queued_at),
            run_at=sa.case((scheduled, NOW + seconds(row.c.delay)), else_=j.c.run_at),
            cleared=~cancelled,
            clear_reason=sa.case((~cancelled, row.c.reason)),
            finished_at=sa.case((cancelled, NOW)),
            **NO_OWNER,
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(j.c.id, j.c.status, j.c.fencing_token, j.c.dispatch, j.c.run_at, row.c.reason)
        .cte("released")
    )
    server_fault = json_object(server_fault=sa.true(), run_at=released.c.run_at)
    logged = entry(
        released,
        sa.case((released.c.status == "cancelled", "cancelled"), else_="released"),
        worker_id=worker_id,
        detail=json_object(reason=released.c.reason, dispatch=released.c.dispatch).concat(
            sa.case((released.c.status == "scheduled", server_fault), else_=json_object())
        ),
    )
    return compiled(sa.select(released.c.id, released.c.status, released.c.fencing_token).add_cte(logged))


COMPLETE = _complete()
FAIL = _fail()
RELEASE = _release()

_e = job_events.alias("e")
_other = job_events.alias("other")

# Releases for a server's fault since the last error that counted.
_last_error = (
    sa.select(sa.func.max(_other.c.id))
    .where(_other.c.job_id == sa.bindparam("id"), _other.c.event.in_(("error", "retried")))
    .scalar_subquery()
)
SERVER_FAULTS = compiled(
    sa.select(sa.func.count().label("releases"))
    .select_from(_e)
    .where(
        _e.c.job_id == sa.bindparam("id"),
        _e.c.event == "released",
        _e.c.detail.op("->")("server_fault").is_not(None),
        _e.c.id > sa.func.coalesce(_last_error, 0),
    )
)

# Waits for the lock that a COMMIT without an answer may still hold: what it reads is final.
COMMITTED = compiled(
    sa.select(j.c.status)
    .where(j.c.id == sa.bindparam("id"), j.c.fencing_token == sa.bindparam("token"))
    .with_for_update(read=True)
)

# What a zero-row write means: still mine behind a lock, already written by me (the commit's answer was
# lost, or the job's own transaction completed it), or lost.
_run = given_runs("run")
_last_entry = (
    sa.select(_e.c.event)
    .where(
        _e.c.job_id == j.c.id,
        _e.c.worker_id == worker_id,
        _e.c.fencing_token == _run.c.token,
        _e.c.event.in_(("error", "failed", "cancelled", "released")),
    )
    .order_by(_e.c.id.desc())
    .limit(1)
    .correlate(j, _run)
    .scalar_subquery()
)
VERDICT = compiled(
    sa.select(
        j.c.id,
        _run.c.token.label("fencing_token"),
        mine(_run.c.token).label("mine"),
        completed_under(_run.c.token).label("completed"),
        _last_entry.label("ended"),
    ).join(_run, _run.c.id == j.c.id)
)


class Settled(Enum):
    """What became of a job when its run wanted to settle it."""

    COMPLETED = "completed"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    REFUSED = "refused"
    """PostgreSQL refused the content of this row; the job is still owned."""
    LOCKED = "locked"
    """Another transaction holds a lock on the row: nothing was written, the job is still owned."""


class Completion(NamedTuple):
    """A run that returned. ``result`` is JSON text."""

    id: UUID
    token: int
    result: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended in an error.

    Attributes:
        permanent: why no further attempt may follow (``permanent``, ``payload``), or None.
        delay: seconds until the next attempt, if there is one; after a stall that is RESET's back-off instead.
        stalled: the run's process died in quarantine: a stall, not an error of the job.
    """

    id: UUID
    token: int
    error: str
    permanent: str | None
    delay: float
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """A run that has ended without an outcome: the job goes back to the queue.

    ``delay``: seconds until it may run again, because a server's fault ended the run; None: at once.
    """

    id: UUID
    token: int
    reason: str
    delay: float | None = None


_SETTLED = {each.value: each for each in Settled}
_Held = tuple[UUID, int]
Refusals = dict[_Held, RowRefused]
"""Why the rows of runs were refused, by job id and fencing token."""
EndedT = TypeVar("EndedT", Completion, Failure, Return)


@dataclass(frozen=True, slots=True)
class _Write(Generic[EndedT]):
    """COMPLETE, FAIL or RELEASE: a statement for many runs, and for one alone, with the parameters of both.

    ``always`` is what becomes of every job that it writes; None: that depends on the job.
    """

    name: str
    batch: sa.TextClause
    alone: sa.TextClause
    parameters: Callable[[Sequence[EndedT]], dict[str, Any]]
    size: Callable[[EndedT], int]
    always: Settled | None = None

    async def __call__(
        self,
        database: Database,
        *,
        worker_id: str,
        runs: Sequence[EndedT],
        refusals: Refusals | None = None,
        tries: int = 0,
        wait: bool = True,
    ) -> list[Settled]:
        """Settle jobs and return what became of each, in order.

        Args:
            refusals: takes why rows were refused.
            tries: that went unanswered; after each of them it may take longer.
            wait: for the locks that others hold on their rows, one by one; else such a row is returned as ``LOCKED``.

        Raises:
            DatabaseUnavailable: unclear; ask again: what was written under the same token counts as success.
        """
        refusals = {} if refusals is None else refusals
        seconds = database.seconds_for(sum([self.size(run) for run in runs]), tries=tries)
        rows, refused = await in_halves(
            runs,
            lambda half: database.run_by_key(self.batch, self._values(worker_id, half), seconds=seconds),
        )
        if len(rows) == len(runs) and self.always is not None:
            return [self.always] * len(runs)
        settled = {(job_id, token): _SETTLED[status] for job_id, status, token in rows}
        for run, error in refused:
            settled[run.id, run.token], refusals[run.id, run.token] = Settled.REFUSED, error
        missing = [run for run in runs if (run.id, run.token) not in settled]
        if missing:
            verdicts = await _verdicts(database, worker_id, missing)
            for run in missing:
                held = run.id, run.token
                settled[held] = verdict = verdicts.get(held, Settled.LOST)
                if verdict is Settled.LOCKED and wait:
                    settled[held] = await self._alone(database, worker_id, run, refusals, tries)
            await self._note_lost(
                database, worker_id, [run for run in missing if settled[run.id, run.token] is Settled.LOST]
            )
        return [settled[run.id, run.token] for run in runs]

    async def _alone(
        self, database: Database, worker_id: str, run: EndedT, refusals: Refusals, tries: int
    ) -> Settled:
        seconds = database.seconds_for(self.size(run), tries=tries)
        try:
            rows = await database.run(self.alone, self._values(worker_id, [run]), seconds=seconds)
        except RowRefused as error:
            refusals[run.id, run.token] = error
            return Settled.REFUSED
        if rows:
            return Settled(rows[0].status)
        # The lock may have been held by an earlier try of this very write.
        verdict = (await _verdicts(database, worker_id, [run])).get((run.id, run.token), Settled.LOST)
        return Settled.LOST if verdict is Settled.LOCKED else verdict

    async def _note_lost(self, database: Database, worker_id: str, lost: Sequence[EndedT]) -> None:
        if lost:
            with suppress(RowRefused):  # the entry in the timeline; the answer is the same without it
                await database.run(REJECTED, {"worker_id": worker_id, "write": self.name} | _held(lost))

    def _values(self, worker_id: str, runs: Sequence[EndedT]) -> dict[str, Any]:
        return {"worker_id": worker_id} | self.parameters(runs)


async def _verdicts(
    database: Database, worker_id: str, runs: Sequence[Completion | Failure | Return]
) -> dict[_Held, Settled]:
    rows = await database.run(VERDICT, {"worker_id": worker_id} | _held(runs))
    return {(row.id, row.fencing_token): _verdict(row) for row in rows}


def _verdict(row: Row) -> Settled:
    if row.mine:
        return Settled.LOCKED
    if row.completed:
        return Settled.COMPLETED
    return _WRITTEN_BEFORE.get(row.ended, Settled.LOST)


_WRITTEN_BEFORE = {
    "error": Settled.SCHEDULED,
    "failed": Settled.FAILED,
    "cancelled": Settled.CANCELLED,
    "released": Settled.QUEUED,
}


def _held(runs: Sequence[Completion | Failure | Return]) -> dict[str, Any]:
    return {"ids": uuid_array(run.id for run in runs), "tokens": [run.token for run in runs]}


def _completions(runs: Sequence[Completion]) -> dict[str, Any]:
    return _held(runs) | {"results": [run.result for run in runs]}


def _failures(runs: Sequence[Failure]) -> dict[str, Any]:
    return _held(runs) | {
        "errors": [run.error for run in runs],
        "reasons": [run.permanent for run in runs],
        "delays": [run.delay for run in runs],
        "stalled": [run.stalled for run in runs],
    }


def _returns(runs: Sequence[Return]) -> dict[str, Any]:
    return _held(runs) | {"reasons": [run.reason for run in runs], "delays": [run.delay for run in runs]}


complete = _Write(
    *("complete", COMPLETE, waiting(COMPLETE), _completions, lambda run: len(run.result or "")),
    always=Settled.COMPLETED,
)
fail = _Write("fail", FAIL, waiting(FAIL), _failures, lambda run: len(run.error))
release = _Write("release", RELEASE, waiting(RELEASE), _returns, lambda run: len(run.reason))


async def server_faults(database: Database, *, job_id: UUID) -> int:
    """Return how often in a row a job was released because of a server's fault."""
    [row] = await database.run(SERVER_FAULTS, {"id": job_id})
    releases: int = row.releases
    return releases


async def was_committed(database: Database, *, job_id: UUID, token: int) -> bool:
    """Return, after a COMMIT without an answer, whether it completed the job under this token.

    Raises:
        DatabaseUnavailable: no answer, or the commit is still on its way; ask again.
    """
    rows = await database.run(COMMITTED, {"id": job_id, "token": token})
    return bool(rows) and rows[0].status == "completed"


def complete_statement(worker_id: str, run: Completion) -> sa.TextClause:
    """Return COMPLETE for one job with its values bound; no row means that the job is lost."""
    return complete.alone.bindparams(worker_id=worker_id, **_completions([run]))
