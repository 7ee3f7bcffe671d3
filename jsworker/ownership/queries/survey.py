"""The progress of jobs, their owners, and who took them over. Read-only; decides nothing.

Every query names the rows it is about, so each reads them through an index, however large the tables are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.transitions.heartbeat import Held

STANDINGS = text("""
SELECT id, status, worker_id, fencing_token, stage, progress,
  CASE WHEN status = 'completed' THEN result END AS result,
  CASE WHEN status = 'failed' THEN last_error END AS error,
  created_at, finished_at
FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")

COUNTS = text("""
SELECT status, count(*) AS jobs FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[])) GROUP BY status
""")

# The predicate of the index jobs_owned, word for word: a plain one would not be answered by it.
HOLDINGS = text("""
SELECT worker_id, id, fencing_token, clock_timestamp() AS now
FROM jsworker.jobs
WHERE worker_id = ANY(CAST(:worker_ids AS text[])) AND status || '' = 'processing'
""")

# A run that the timeline shows by its claim: first claims of a job are not in it, claims after a reset are.
TAKEOVERS = text("""
SELECT DISTINCT ON (e.job_id) e.job_id, e.worker_id, e.fencing_token, e.at
FROM jsworker.job_events AS e
JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS h(id, token) ON h.id = e.job_id
WHERE e.job_id = ANY(CAST(:ids AS uuid[])) AND e.event = 'claimed' AND e.fencing_token > h.token
ORDER BY e.job_id, e.id
""")

RESETS = text("""
SELECT job_id, fencing_token FROM jsworker.job_events
WHERE job_id = ANY(CAST(:ids AS uuid[])) AND event = 'reset'
""")


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a job is.

    Attributes:
        result: what its processor returned; None until it is completed.
        error: why it failed for good, else None.
    """

    id: UUID
    status: str
    worker_id: str | None
    fencing_token: int
    stage: str | None
    progress: float | None
    result: Any
    error: str | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Holdings:
    """What workers own at one moment.

    Attributes:
        at: that moment, by the database's clock; None when they own nothing.
        by_worker: job ids and fencing tokens by worker id; who owns nothing is missing.
    """

    at: datetime | None
    by_worker: dict[str, frozenset[Held]]


@dataclass(frozen=True, slots=True)
class Takeover:
    """The first claim of a job after a given fencing token.

    Attributes:
        worker_id: who claimed it.
        at: when, by the database's clock.
    """

    job_id: UUID
    worker_id: str
    fencing_token: int
    at: datetime


async def standings(database: Database, ids: Iterable[UUID]) -> list[Standing]:
    """Return how far jobs are; an id without a job is missing."""
    rows = await database.run(STANDINGS, {"ids": list(ids)})
    return [Standing(**row._asdict()) for row in rows]


async def count_by_status(database: Database, ids: Iterable[UUID]) -> dict[str, int]:
    """Return how many of these jobs there are in each status; a status without any is missing."""
    return {row.status: int(row.jobs) for row in await database.run(COUNTS, {"ids": list(ids)})}


async def holdings(database: Database, worker_ids: Iterable[str]) -> Holdings:
    """Return what these workers own right now."""
    by_worker: dict[str, set[Held]] = {}
    rows = await database.run(HOLDINGS, {"worker_ids": list(worker_ids)})
    for row in rows:
        by_worker.setdefault(row.worker_id, set()).add((row.id, row.fencing_token))
    return Holdings(
        at=max((row.now for row in rows), default=None),
        by_worker={worker_id: frozenset(held) for worker_id, held in by_worker.items()},
    )


async def takeovers(database: Database, held: Iterable[Held]) -> list[Takeover]:
    """Return, for each run given as job id and fencing token, the next claim of its job, if there is one."""
    runs = list(held)
    parameters = {"ids": [job_id for job_id, _ in runs], "tokens": [token for _, token in runs]}
    rows = await database.run(TAKEOVERS, parameters)
    return [Takeover(**row._asdict()) for row in rows]


async def resets(database: Database, ids: Iterable[UUID]) -> set[Held]:
    """Return which runs of these jobs were taken back from their owners, as job id and fencing token."""
    return {(row.job_id, row.fencing_token) for row in await database.run(RESETS, {"ids": list(ids)})}
