"""RESET (clear_and_reenqueue): processing goes back, by the stale rule or by an operator.

Each statement repeats its reason and the fencing token it was decided on, so an owner that was faster
keeps its job. The CASE ladder is the protocol's order: cancelled, failed, queued, scheduled.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.ownership.database import Database

# Late by two missed heartbeats already: watching begins before the threshold, so that the last of two
# sightings can fall right behind it. The longest overdue first: rows that are never stale stand behind.
SUSPECTS = text("""
SELECT id, kind, worker_id, fencing_token, last_activity_at, extract(epoch FROM stale_after) AS stale_after,
  last_activity_at + stale_after < clock_timestamp() AS stale
FROM jsworker.jobs
WHERE status || '' = 'processing'
  AND last_activity_at + least(stale_after, 2 * make_interval(secs => :heartbeat_interval))
      < clock_timestamp()
ORDER BY last_activity_at + stale_after LIMIT :limit
""")

RESET_STALE = text("""
WITH seen AS (
  SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:activities AS timestamptz[]))
    AS s(id, token, activity)
), decided AS (
  SELECT j.id, j.worker_id AS owner, CAST(:counted AS boolean) AS counted, CASE
      WHEN j.cancel_requested THEN 'cancelled'
      WHEN CAST(:counted AS boolean) AND j.stalls + 1 >= j.max_stalls THEN 'failed'
      WHEN NOT CAST(:counted AS boolean) OR j.stalls = 0 THEN 'queued'
      ELSE 'scheduled' END AS next
  FROM jsworker.jobs AS j JOIN seen ON seen.id = j.id
  WHERE j.status = 'processing' AND j.fencing_token = seen.token AND j.last_activity_at = seen.activity
    AND j.last_activity_at + j.stale_after < clock_timestamp()
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), reset AS (
  UPDATE jsworker.jobs AS j SET
    status = decided.next,
    stalls = j.stalls + CASE WHEN decided.counted THEN 1 ELSE 0 END,
    attempts = j.attempts - CASE WHEN decided.counted THEN 0 ELSE 1 END,
    dispatch = j.dispatch + CASE WHEN decided.next = 'queued' THEN 1 ELSE 0 END,
    needs_publish = decided.next = 'queued',
    publish_after = CASE WHEN decided.next = 'queued' THEN clock_timestamp() ELSE j.publish_after END,
    queued_at = CASE WHEN decided.next = 'queued' THEN clock_timestamp() ELSE j.queued_at END,
    run_at = CASE WHEN decided.next = 'scheduled'
      THEN clock_timestamp() + make_interval(secs => least(600, 5 * 2 ^ least(j.stalls - 1, 20)) * (0.8 + 0.4 * random()))
      ELSE j.run_at END,
    finished_at = CASE WHEN decided.next IN ('cancelled', 'failed') THEN clock_timestamp() END,
    failure_reason = CASE WHEN decided.next = 'failed' THEN 'stalled' END,
    cleared = decided.next IN ('queued', 'scheduled'),
    clear_reason = :reason,
    worker_id = NULL, last_activity_at = NULL
  FROM decided
  WHERE j.id = decided.id AND j.status = 'processing' AND j.last_activity_at + j.stale_after < clock_timestamp()
  RETURNING j.id, j.kind, j.status, j.fencing_token, j.dispatch, j.stalls, decided.owner, decided.counted
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'reset', :worker_id, fencing_token, jsonb_build_object(
    'cause', 'stale', 'reason', CAST(:reason AS text), 'owner', owner, 'to', status, 'counted', counted,
    'stalls', stalls, 'dispatch', dispatch)
  FROM reset
)
SELECT id, kind, status, fencing_token, dispatch, owner FROM reset
""")

# An operator's clear is uncounted: the job did nothing wrong.
RESET_BY_OPERATOR = text("""
WITH seen AS (
  SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS s(id, token)
), mine AS (
  SELECT j.id, j.worker_id AS owner, j.cancel_requested AS cancel
  FROM jsworker.jobs AS j JOIN seen ON seen.id = j.id
  WHERE j.status = 'processing' AND j.fencing_token = seen.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), reset AS (
  UPDATE jsworker.jobs AS j SET
    status = CASE WHEN mine.cancel THEN 'cancelled' ELSE 'queued' END,
    attempts = j.attempts - 1,
    dispatch = j.dispatch + CASE WHEN mine.cancel THEN 0 ELSE 1 END,
    needs_publish = NOT mine.cancel,
    publish_after = CASE WHEN mine.cancel THEN j.publish_after ELSE clock_timestamp() END,
    queued_at = CASE WHEN mine.cancel THEN j.queued_at ELSE clock_timestamp() END,
    finished_at = CASE WHEN mine.cancel THEN clock_timestamp() END,
    cleared = NOT mine.cancel,
    clear_reason = :reason,
    worker_id = NULL, last_activity_at = NULL
  FROM mine WHERE j.id = mine.id AND j.status = 'processing'
  RETURNING j.id, j.kind, j.status, j.fencing_token, j.dispatch, mine.owner
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'reset', CAST(:worker_id AS text), fencing_token, jsonb_build_object(
    'cause', 'operator', 'reason', CAST(:reason AS text), 'owner', owner, 'to', status, 'counted', false,
    'dispatch', dispatch)
  FROM reset
)
SELECT id, kind, status, fencing_token, dispatch, owner FROM reset
""")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A row whose owner is late.

    Attributes:
        stale_after: seconds of silence that its owner allowed itself; None: never stale.
        stale: whether that is over, by the database's clock.
    """

    id: UUID
    kind: str
    worker_id: str
    fencing_token: int
    last_activity_at: datetime
    stale_after: float | None
    stale: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """A job that was taken back.

    Attributes:
        status: where it went: queued, scheduled, failed or cancelled.
        owner: the worker that had it.
    """

    id: UUID
    kind: str
    status: str
    fencing_token: int
    dispatch: int
    owner: str


async def suspects(database: Database, *, heartbeat_interval: float, limit: int) -> list[Suspect]:
    """Return processing rows that missed two heartbeats or are stale, the longest overdue first."""
    rows = await database.run(SUSPECTS, {"heartbeat_interval": heartbeat_interval, "limit": limit})
    return [
        Suspect(
            id=row.id,
            kind=row.kind,
            worker_id=row.worker_id,
            fencing_token=row.fencing_token,
            last_activity_at=row.last_activity_at,
            stale_after=None if row.stale_after is None else float(row.stale_after),
            stale=bool(row.stale),
        )
        for row in rows
    ]


async def reset_stale(
    database: Database, *, worker_id: str, stale: Collection[Suspect], reason: str, counted: bool
) -> list[Reset]:
    """Take back jobs that rule 1 has proven stale; a row that moved since it was seen is left alone.

    Args:
        database: where they are.
        worker_id: the worker that takes them back, for the timeline.
        stale: rows as they were last seen.
        reason: told to the next run and in the message.
        counted: whether the stall counts against ``max_stalls``.
    """
    parameters = {
        "worker_id": worker_id,
        "reason": reason,
        "counted": counted,
        "ids": [row.id for row in stale],
        "tokens": [row.fencing_token for row in stale],
        "activities": [row.last_activity_at for row in stale],
    }
    return await _reset(database, RESET_STALE, parameters)


async def reset_by_operator(
    database: Database, *, seen: Collection[tuple[UUID, int]], reason: str, worker_id: str | None = None
) -> list[Reset]:
    """Take back jobs on an operator's word, each only at the fencing token at which it was seen."""
    parameters = {
        "worker_id": worker_id,
        "reason": reason,
        "ids": [job_id for job_id, _ in seen],
        "tokens": [token for _, token in seen],
    }
    return await _reset(database, RESET_BY_OPERATOR, parameters)


async def _reset(database: Database, statement: TextClause, parameters: Mapping[str, object]) -> list[Reset]:
    rows: Sequence[object] = await database.run(statement, parameters)
    return [Reset(**row._mapping) for row in rows]  # type: ignore[attr-defined]  # noqa: SLF001 -- SQLAlchemy's public name
