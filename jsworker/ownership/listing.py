"""Reading jobs: one with its timeline, or many by a filter. Nothing here decides who owns anything."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database

# Ids are UUIDv7, so their order is the order of creation.
JOBS = text("""
SELECT id, kind, status, worker_id, fencing_token, attempts, errors, stalls, max_attempts, max_stalls, stage,
  progress, message, unique_key, run_at, queued_at, claimed_at, last_activity_at, deadline_at, cleared, clear_reason,
  cancel_requested, last_error, failure_reason, created_at, started_at, finished_at
FROM jsworker.jobs
WHERE (CAST(:status AS text) IS NULL OR status = :status) AND (CAST(:kind AS text) IS NULL OR kind = :kind)
ORDER BY id DESC LIMIT :limit
""")

JOB = text("SELECT * FROM jsworker.jobs WHERE id = :id")

TIMELINE = text("""
SELECT at, event, worker_id, fencing_token, error, detail
FROM jsworker.job_events WHERE job_id = :id ORDER BY id LIMIT 1000
""")

MATCHING = text("""
SELECT id, fencing_token FROM jsworker.jobs
WHERE status = ANY(CAST(:statuses AS text[])) AND (CAST(:kind AS text) IS NULL OR kind = :kind)
  AND (CAST(:stale_for AS double precision) IS NULL
       OR last_activity_at < clock_timestamp() - make_interval(secs => CAST(:stale_for AS double precision)))
ORDER BY id
""")

SEEN = text("""
SELECT id, status, fencing_token FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")

COUNTS = text("""
SELECT kind, status, count(*) AS jobs FROM jsworker.jobs GROUP BY kind, status ORDER BY kind, status
""")


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A job as it was when somebody decided to act on it."""

    id: UUID
    status: str
    fencing_token: int


async def list_jobs(
    database: Database, *, status: str | None = None, kind: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """Return jobs, the newest first, each as a dict by column name, without payload and result."""
    rows = await database.run(JOBS, {"status": status, "kind": kind, "limit": limit})
    return [row._asdict() for row in rows]


async def get_job(database: Database, job_id: UUID) -> dict[str, Any] | None:
    """Return a job as a dict by column name, None when there is none."""
    rows = await database.run(JOB, {"id": job_id})
    return rows[0]._asdict() if rows else None


async def timeline(database: Database, job_id: UUID) -> list[dict[str, Any]]:
    """Return what happened to a job, oldest first, each as a dict by column name."""
    rows = await database.run(TIMELINE, {"id": job_id})
    return [row._asdict() for row in rows]


async def matching(
    database: Database, *, statuses: tuple[str, ...], kind: str | None = None, stale_for: float | None = None
) -> list[tuple[UUID, int]]:
    """Return id and fencing token of the jobs that a filter means.

    Args:
        database: where.
        statuses: any of them.
        kind: only this kind.
        stale_for: only running jobs without a sign of life for this many seconds.
    """
    rows = await database.run(MATCHING, {"statuses": list(statuses), "kind": kind, "stale_for": stale_for})
    return [(row.id, row.fencing_token) for row in rows]


async def look_up(database: Database, ids: list[UUID]) -> dict[UUID, SeenJob]:
    """Return status and token of jobs by id; an id without a job is missing."""
    rows = await database.run(SEEN, {"ids": ids})
    return {row.id: SeenJob(row.id, row.status, row.fencing_token) for row in rows}


async def count_jobs(database: Database) -> dict[tuple[str, str], int]:
    """Return how many jobs there are by kind and status. Reads the whole table."""
    return {(row.kind, row.status): int(row.jobs) for row in await database.run(COUNTS)}
