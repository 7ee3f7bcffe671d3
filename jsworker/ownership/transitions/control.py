"""What operators and clients may do to a job: CANCEL and RETRY."""

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import text

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.halving import in_halves
from jsworker.ownership.pool import Row
from jsworker.ownership.queries.run_age import ANY_AGE, IS_SO_OLD, RunAge
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.schema import FINAL, STATUSES

LIVE = frozenset(STATUSES) - frozenset(FINAL)

# One UPDATE with CASE on the status: as two statements it can miss both sides of a FAIL.
_CANCEL = """
WITH live AS (
  SELECT id FROM jsworker.jobs
  WHERE id = ANY(CAST(:ids AS uuid[])) AND status IN ('scheduled', 'queued', 'processing')
    AND status = ANY(CAST(:statuses AS text[])) AND {is_so_old}
  ORDER BY id FOR NO KEY UPDATE
), asked AS (
  UPDATE jsworker.jobs AS j SET
    status = CASE WHEN j.status = 'processing' THEN 'processing' ELSE 'cancelled' END,
    cancel_requested = j.status = 'processing',
    needs_publish = false,
    finished_at = CASE WHEN j.status = 'processing' THEN NULL ELSE clock_timestamp() END
  FROM live WHERE j.id = live.id AND j.status IN ('scheduled', 'queued', 'processing')
  RETURNING j.id, j.status, j.worker_id, j.fencing_token
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, fencing_token, detail)
  SELECT id, CASE status WHEN 'processing' THEN 'cancel_requested' ELSE 'cancelled' END, fencing_token,
    jsonb_strip_nulls(jsonb_build_object('owner', worker_id))
  FROM asked
)
SELECT id, status FROM asked
"""
CANCEL = text(_CANCEL.replace("{is_so_old}", IS_SO_OLD))

# The fencing token is kept: it never goes back.
RETRY = text("""
WITH dead AS (
  SELECT id, failure_reason, last_error FROM jsworker.jobs
  WHERE id = :id AND status = 'failed' FOR NO KEY UPDATE
), retried AS (
  UPDATE jsworker.jobs AS j SET
    status = 'queued', attempts = 0, errors = 0, stalls = 0,
    finished_at = NULL, failure_reason = NULL, cancel_requested = false,
    cleared = false, clear_reason = NULL,
    dispatch = j.dispatch + 1, needs_publish = true,
    publish_after = clock_timestamp(), queued_at = clock_timestamp()
  FROM dead WHERE j.id = dead.id AND j.status = 'failed'
  RETURNING j.id, j.fencing_token, j.dispatch, dead.failure_reason
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, fencing_token, detail)
  SELECT id, 'retried', fencing_token, jsonb_build_object('dispatch', dispatch, 'failed_for', failure_reason)
  FROM retried
)
SELECT id FROM retried
""")

STATUS = text("SELECT id, status FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))")

_MISSED = """
SELECT id, status, status = ANY(CAST(:statuses AS text[])) AND {is_so_old} AS meant
FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
"""
MISSED = text(_MISSED.replace("{is_so_old}", IS_SO_OLD))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel did.

    Attributes:
        cancelled: jobs that are cancelled now.
        requested: running jobs whose owners learn of it with their next heartbeat.
        final: jobs that had ended before, with their status.
        unknown: ids without a job.
        refused: jobs whose row PostgreSQL refused to update, and why.
        other: live jobs that are not, or no longer, among those that were meant, with their status.
    """

    cancelled: list[UUID]
    requested: list[UUID]
    final: dict[UUID, str]
    unknown: list[UUID]
    refused: dict[UUID, str] = field(default_factory=dict)
    other: dict[UUID, str] = field(default_factory=dict)


async def cancel(
    database: Database,
    ids: Sequence[UUID],
    *,
    statuses: Collection[str] | None = None,
    age: RunAge = ANY_AGE,
) -> Cancelled:
    """Cancel waiting jobs at once and ask the owners of running ones to stop.

    Args:
        database: where they are.
        ids: the jobs.
        statuses: only those that are of one of these statuses when they are cancelled; None: whatever is live.
        age: only those that are so old when they are cancelled; for running jobs.
    """
    meant = LIVE if statuses is None else LIVE.intersection(statuses)
    wanted = {"statuses": list(meant), **age.values()}
    asked: dict[UUID, str] = {}
    seen: dict[UUID, str] = {}
    refused: dict[UUID, str] = {}

    def write(some: Sequence[UUID]) -> Awaitable[Sequence[Row]]:
        return database.run(CANCEL, {"ids": list(some), **wanted})

    missed = list(ids)
    while missed:  # once more for a job that was retried between the two statements
        rows, bad = await in_halves(missed, write)
        asked |= {row.id: row.status for row in rows}
        refused |= {job_id: str(error) for job_id, error in bad}
        missed = [job_id for job_id in missed if job_id not in asked and job_id not in refused]
        if missed:
            found = await database.run(MISSED, {"ids": missed, **wanted})
            seen |= {row.id: row.status for row in found}
            missed = [row.id for row in found if row.meant]
    missed_as = {job_id: status for job_id, status in seen.items() if job_id not in asked | refused}
    return Cancelled(
        cancelled=[job_id for job_id, status in asked.items() if status == "cancelled"],
        requested=[job_id for job_id, status in asked.items() if status == "processing"],
        final={job_id: status for job_id, status in missed_as.items() if status not in LIVE},
        unknown=[job_id for job_id in ids if job_id not in asked | refused | seen],
        refused=refused,
        other={job_id: status for job_id, status in missed_as.items() if status in LIVE},
    )


async def retry(database: Database, job_id: UUID) -> None:
    """Put a failed job back into the queue, its counters at zero.

    Raises:
        TransitionRefused: there is no such job, it is not failed, a live job holds its unique key, or
            PostgreSQL refuses to update its row.
    """
    try:
        if await database.run(RETRY, {"id": job_id}):
            return
    except RowRefused as error:
        if error.constraint != "jobs_unique_live":
            raise TransitionRefused(f"job {job_id} cannot be retried: {error}") from None
        raise TransitionRefused(f"job {job_id} cannot be retried: a live job holds its unique key") from None
    rows = await database.run(STATUS, {"ids": [job_id]})
    if not rows:
        raise TransitionRefused(f"job {job_id} does not exist")
    raise TransitionRefused(f"job {job_id} is {rows[0].status}; only a failed job can be retried")
