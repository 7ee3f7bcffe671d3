"""The owner's final writes: COMPLETE, FAIL, RELEASE (and SNOOZE, in ``snooze``). Each is fenced.

Zero rows mean that the job is lost. Batches skip locked rows, and then read the skipped rows without a lock: a
row that this worker still owns is returned as locked. It is settled by a call of its own, which waits for the
lock without delaying other jobs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import held_by_me, locked_of_mine, worker_id
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.statements import NO_OWNER, NOW, compiled, given_array, given_runs, j, waiting
from jsworker.ownership.transitions.enqueue import ChildJob
from jsworker.ownership.transitions.expire import write_beside_expired
from jsworker.ownership.transitions.timeline import REJECTED

_ANSWER = ("id", "status", "fencing_token")


def _complete() -> sa.TextClause:
    run = given_runs("run", result=given_array("results", sa.Text))
    row = locked_of_mine(run, sa.cast(run.c.result, JSONB).label("result"))
    return compiled(
        sa.update(j)
        .values(
            status="completed", result=row.c.result, finished_at=NOW, completed_by=j.c.worker_id, **NO_OWNER
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(*j.c[_ANSWER])
    )


def _fail() -> sa.TextClause:
    """Return FAIL. If the job is cancelled, on request or as superseded, no error and no attempt is counted."""
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
        (sa.and_(run.c.stalled, predicates.last_stall), "failed"),
        (sa.and_(~run.c.stalled, predicates.last_attempt), "failed"),
        (predicates.is_superseded, "cancelled"),
        else_="scheduled",
    )
    reason = sa.func.coalesce(run.c.reason, sa.case((run.c.stalled, "stalled"), else_="attempts"))
    given = run.c["error", "delay", "stalled"]
    row = locked_of_mine(run, next_status.label("next"), reason.label("reason"), *given)
    cancelled, again = row.c.next == "cancelled", row.c.next == "scheduled"
    back_off = sa.case(
        (row.c.stalled, statements.stall_back_off(j.c.stalls)), else_=statements.seconds(row.c.delay)
    )
    failed = (
        sa.update(j)
        .values(
            status=row.c.next,
            errors=j.c.errors + sa.case((sa.or_(row.c.stalled, cancelled), 0), else_=1),
            stalls=j.c.stalls + sa.case((row.c.stalled, 1), else_=0),
            attempts=j.c.attempts - sa.case((sa.and_(cancelled, ~row.c.stalled), 1), else_=0),
            last_error=row.c.error,
            failure_reason=sa.case(
                (row.c.next == "failed", row.c.reason),
                (sa.and_(cancelled, ~j.c.cancel_requested), "superseded"),
            ),
            cleared=False,
            clear_reason=sa.null(),
            run_at=sa.case((again, NOW + back_off), else_=j.c.run_at),
            finished_at=sa.case((~again, NOW)),
            **NO_OWNER,
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(
            *j.c["id", "status", "fencing_token", "errors", "failure_reason", "run_at"],
            row.c.error,
            sa.case((row.c.stalled, j.c.stalls)).label("stalls"),
        )
        .cte("failed")
    )
    again = failed.c.status == "scheduled"
    detail = statements.json_object(
        errors=failed.c.errors,
        stalls=failed.c.stalls,
        reason=failed.c.failure_reason,
        run_at=sa.case((again, failed.c.run_at)),
    )
    logged = statements.entry(
        failed,
        sa.case((again, "error"), else_=failed.c.status),
        worker_id=worker_id,
        error=failed.c.error,
        detail=sa.func.jsonb_strip_nulls(detail),
    )
    return compiled(sa.select(*failed.c[_ANSWER]).add_cte(logged))


def _release() -> sa.TextClause:
    run = given_runs("run", reason=given_array("reasons", sa.Text), delay=given_array("delays", sa.Double))
    ends = sa.or_(j.c.cancel_requested, predicates.is_superseded)
    row = locked_of_mine(run, ends.label("cancel"), run.c.reason, run.c.delay)
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
            run_at=sa.case((scheduled, NOW + statements.seconds(row.c.delay)), else_=j.c.run_at),
            cleared=~cancelled,
            clear_reason=sa.case((~cancelled, row.c.reason)),
            finished_at=sa.case((cancelled, NOW)),
            failure_reason=sa.case((sa.and_(cancelled, ~j.c.cancel_requested), "superseded")),
            **NO_OWNER,
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(
            *j.c["id", "status", "fencing_token", "dispatch", "run_at"],
            sa.func.coalesce(j.c.failure_reason, row.c.reason).label("reason"),
        )
        .cte("released")
    )
    server_fault = statements.json_object(server_fault=sa.true(), run_at=released.c.run_at)
    more = sa.case((released.c.status == "scheduled", server_fault), else_=statements.json_object())
    event = sa.case((released.c.status == "cancelled", "cancelled"), else_="released")
    detail = statements.json_object(reason=released.c.reason, dispatch=released.c.dispatch).concat(more)
    logged = statements.entry(released, event, worker_id=worker_id, detail=detail)
    return compiled(sa.select(*released.c[_ANSWER]).add_cte(logged))


COMPLETE = _complete()
FAIL = _fail()
RELEASE = _release()

# Counts releases for a server's fault since the last counted error, retry or snooze.
SERVER_FAULTS = sa.text("""
SELECT count(*) AS releases FROM jsworker.job_events AS e
WHERE e.job_id = :id AND e.event = 'released' AND (e.detail -> 'server_fault') IS NOT NULL
  AND e.id > coalesce((SELECT max(other.id) FROM jsworker.job_events AS other
    WHERE other.job_id = :id AND other.event IN ('error', 'retried', 'snoozed')), 0)
""")

# FOR SHARE waits for the lock that a COMMIT without an answer may still hold, so that the answer is final.
COMMITTED = sa.text(
    "SELECT status, completed_by FROM jsworker.jobs WHERE id = :id AND fencing_token = :token FOR SHARE"
)

# What a write of zero rows means: this worker owns the row, which is locked; or the outcome is already written
# (the commit's answer was lost, or the job's own transaction completed it); or the job is lost.
_token: sa.ColumnElement[Any] = sa.literal_column("run.token")
VERDICT = statements.filled(
    """
SELECT j.id, run.token AS fencing_token, CASE
  WHEN {mine} THEN 'locked'
  WHEN {completed} THEN 'completed'
  ELSE coalesce((
    SELECT CASE e.event WHEN 'error' THEN 'scheduled' WHEN 'released' THEN 'queued' ELSE e.event END
    FROM jsworker.job_events AS e
    WHERE e.job_id = j.id AND e.worker_id = :worker_id AND e.fencing_token = run.token
      AND e.event IN ('error', 'failed', 'cancelled', 'released', 'snoozed')
    ORDER BY e.id DESC LIMIT 1), 'lost')
  END AS became
FROM jsworker.jobs AS j
JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS run(id, token) ON run.id = j.id
""",
    mine=statements.condition(predicates.mine(_token)),
    completed=statements.condition(predicates.completed_under(_token)),
)


class Settled(Enum):
    """What became of a job when its run was settled."""

    COMPLETED = "completed"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    SNOOZED = "snoozed"
    """Scheduled again; only the snooze is counted."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    REFUSED = "refused"
    """PostgreSQL refused the content of this row; the worker still owns the job."""
    LOCKED = "locked"
    """Another transaction holds a lock on the row: nothing was written; the worker still owns the job."""

    __hash__ = object.__hash__  # faster than Enum's own in Python: it is used for every job


ENDED = frozenset({Settled.COMPLETED, Settled.FAILED, Settled.CANCELLED})
"""After these the job does not change any more, unless an operator retries it."""


class Completion(NamedTuple):
    """A run that returned. ``result`` is JSON text.

    ``child_jobs`` are written by ``complete_with_child_jobs`` and by ``Sessions``, not by ``complete``.
    """

    id: UUID
    token: int
    result: str | None
    child_jobs: Sequence[ChildJob] = ()


class Failure(NamedTuple):
    """A run that ended in an error.

    Attributes:
        permanent: why no further attempt may follow, for example ``permanent`` or ``payload``; or None.
        delay: seconds until the next attempt; after a stall RESET's back-off applies instead.
        stalled: a stall is counted, not an error: the run's process died, not at a limit out of quarantine.
    """

    id: UUID
    token: int
    error: str
    permanent: str | None
    delay: float
    stalled: bool = False


class Return(NamedTuple):
    """A run without an outcome; ``delay``: seconds to wait after a server's fault; None: queued at once."""

    id: UUID
    token: int
    reason: str
    delay: float | None = None


class Snoozing(NamedTuple):
    """A run that ended because its job wants to run again later.

    Attributes:
        reason: written to the timeline.
        delay: seconds until the next run.
        most: the number of snoozes that are allowed; None: this one is not counted.
        error: the job's error if it has used all of them.
    """

    id: UUID
    token: int
    reason: str
    delay: float
    most: int | None
    error: str


_Held = tuple[UUID, int]
Refusals = dict[_Held, RowRefused]
"""The refusals of the rows of runs, by job id and fencing token."""
EndedT = TypeVar("EndedT", Completion, Failure, Return, Snoozing)
_SETTLED = {each.value: each for each in Settled}


@dataclass(frozen=True, slots=True, eq=False)
class Settlement(Generic[EndedT]):
    """COMPLETE, FAIL, RELEASE or SNOOZE, as a statement for many runs and as one for a single run.

    ``columns`` names the field of the runs for each parameter; the first one may be long.
    """

    name: str
    batch: sa.TextClause
    alone: sa.TextClause
    columns: Mapping[str, str]

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

        After DatabaseUnavailable call it again: an outcome written under the same token counts as success.

        Args:
            refusals: gets the refusals of rows.
            tries: the number of unanswered calls before; after each of them it may take longer.
            wait: whether to wait for locks on the rows, for few runs only; else such a row is ``LOCKED``.
        """
        text = attrgetter(next(iter(self.columns.values())))
        size = sum([len(text(run) or "") for run in runs])
        seconds = database.seconds_for(size, tries=tries)
        execute = partial(database.run, self.alone) if wait else partial(database.run_by_key, self.batch)
        return await self.written(
            lambda half: execute(self.values(worker_id, half), seconds=seconds, size=size),
            database,
            worker_id=worker_id,
            runs=runs,
            refusals=refusals,
            wait=wait,
        )

    async def written(
        self,
        write: Callable[[Sequence[EndedT]], Awaitable[Sequence[Row]]],
        database: Database,
        *,
        worker_id: str,
        runs: Sequence[EndedT],
        refusals: Refusals | None,
        wait: bool,
    ) -> list[Settled]:
        """Settle jobs with ``write``, which executes one of the statements, and return what became of each."""
        rows, refused = await in_halves(
            runs,
            lambda half: write_beside_expired(database, (run.id for run in half), partial(write, half)),
        )
        if self.name == "complete" and len(rows) == len(runs):  # the usual case
            return [Settled.COMPLETED] * len(runs)
        settled = {(job_id, token): _SETTLED[status] for job_id, status, token in rows}
        settled |= {run[:2]: Settled.REFUSED for run, _ in refused}
        if refusals is not None:
            refusals.update((run[:2], error) for run, error in refused)
        if missing := [run for run in runs if run[:2] not in settled]:
            settled |= {run[:2]: Settled.LOST for run in missing}
            for row in await database.run(VERDICT, {"worker_id": worker_id, **_held(missing)}):
                if not (wait and row.became == "locked"):
                    settled[row.id, row.fencing_token] = _SETTLED[row.became]
        if lost := [run for run in missing if settled[run[:2]] is Settled.LOST]:
            with suppress(RowRefused):  # only the entry of the timeline is missing then
                await database.run(REJECTED, {"worker_id": worker_id, "write": self.name, **_held(lost)})
        return [settled[run[:2]] for run in runs]

    def values(self, worker_id: str, runs: Sequence[EndedT]) -> dict[str, Any]:
        """Return the parameters of both statements."""
        columns = {name: list(map(attrgetter(field), runs)) for name, field in self.columns.items()}
        return {"worker_id": worker_id, **_held(runs), **columns}


def _held(runs: Sequence[Completion | Failure | Return | Snoozing]) -> dict[str, Any]:
    return {"ids": uuid_array(run.id for run in runs), "tokens": [run.token for run in runs]}


_FAILURE = {"errors": "error", "reasons": "permanent", "delays": "delay", "stalled": "stalled"}
_RETURN = {"reasons": "reason", "delays": "delay"}
complete: Settlement[Completion] = Settlement("complete", COMPLETE, waiting(COMPLETE), {"results": "result"})
fail: Settlement[Failure] = Settlement("fail", FAIL, waiting(FAIL), _FAILURE)
release: Settlement[Return] = Settlement("release", RELEASE, waiting(RELEASE), _RETURN)


async def is_completed(
    database: Database, *, worker_id: str, run: Completion | Failure | Return | Snoozing
) -> bool:
    """Return whether this worker has completed a run's job under its token; the answer may have been lost."""
    rows = await database.run(VERDICT, {"worker_id": worker_id, **_held([run])})
    return [row.became for row in rows] == [Settled.COMPLETED.value]


async def server_faults(database: Database, *, job_id: UUID) -> int:
    """Return how many times in a row a job was released because of a server's fault."""
    [row] = await database.run(SERVER_FAULTS, {"id": job_id})
    return int(row.releases)


async def was_committed(database: Database, *, worker_id: str, held: _Held) -> bool:
    """Return whether a COMMIT without an answer completed the job; DatabaseUnavailable: ask again."""
    rows = await database.run(COMMITTED, {"id": held[0], "token": held[1]})
    return [tuple(row) for row in rows] == [("completed", worker_id)]


def complete_statement(worker_id: str, run: Completion) -> sa.TextClause:
    """Return COMPLETE for one job with its values bound; no row means that the job is lost."""
    return complete.alone.bindparams(**complete.values(worker_id, [run]))
