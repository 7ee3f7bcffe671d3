"""CLAIM: queued becomes processing, with a new fencing token. Whoever gets the row owns the job."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text

from jsworker.ownership.database import Database, RowRefused

# Waits for row locks and never skips: beside a MARK it would see no row, and the message would be acked.
CLAIM = text("""
WITH picked AS (
  SELECT id FROM jsworker.jobs
  WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'queued' AND kind = :kind
  ORDER BY id FOR NO KEY UPDATE
), claimed AS (
  UPDATE jsworker.jobs AS j SET
    status = 'processing',
    worker_id = :worker_id,
    fencing_token = j.fencing_token + 1,
    attempts = j.attempts + 1,
    claimed_at = clock_timestamp(),
    last_activity_at = clock_timestamp(),
    started_at = coalesce(j.started_at, clock_timestamp()),
    stale_after = make_interval(secs => CAST(:stale_after AS double precision)),
    crash_after = make_interval(secs => CAST(:crash_after AS double precision)),
    deadline_at = clock_timestamp() + make_interval(secs => CAST(:timeout AS double precision)),
    max_attempts = coalesce(j.max_attempts, :max_attempts),
    max_stalls = coalesce(j.max_stalls, :max_stalls),
    needs_publish = false
  FROM picked WHERE j.id = picked.id AND j.status = 'queued' AND j.kind = :kind
  RETURNING j.id, j.kind, CAST(j.payload AS text) AS payload, j.fencing_token, j.dispatch, j.attempts,
    j.max_attempts, j.cleared, j.clear_reason, j.deadline_at, CAST(j.checkpoint AS text) AS checkpoint,
    j.queued_at, j.claimed_at, j.traceparent, j.tracestate, j.cancel_requested
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'claimed', :worker_id, fencing_token,
    jsonb_build_object('attempt', attempts, 'cleared', cleared, 'clear_reason', clear_reason)
  FROM claimed WHERE fencing_token > 1
)
SELECT * FROM claimed
""")

# A CLAIM may commit and its answer be lost: what is mine now was claimed by it.
READ_BACK = text("""
SELECT id, kind, CAST(payload AS text) AS payload, fencing_token, dispatch, attempts, max_attempts, cleared,
  clear_reason, deadline_at, CAST(checkpoint AS text) AS checkpoint, queued_at, claimed_at, traceparent,
  tracestate, cancel_requested
FROM jsworker.jobs
WHERE worker_id = :worker_id AND status = 'processing' AND id = ANY(CAST(:ids AS uuid[]))
""")

# Why a claim was refused, for the event that tells it; decides nothing.
REFUSED = text("""
SELECT id, status, dispatch, worker_id FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[])) AND kind = :kind
""")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a claim writes into the row, so that sweepers of any settings agree on who is late.

    Attributes:
        stale_after: seconds of silence until anybody may take the job back; None: only by evidence.
        crash_after: seconds of silence until two witnesses may; None: never.
        timeout: seconds that the run may take; None: no limit.
        max_attempts: used where the producer left it open.
        max_stalls: used where the producer left it open.
    """

    stale_after: float | None
    crash_after: float | None
    timeout: float | None
    max_attempts: int
    max_stalls: int


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A row that this worker owns from now on, until it settles it or loses it.

    Attributes:
        payload: JSON text.
        checkpoint: JSON text or None.
        dispatch: the dispatch at which it was claimed: copies of messages up to it are spent.
    """

    id: UUID
    kind: str
    payload: str
    fencing_token: int
    dispatch: int
    attempt: int
    max_attempts: int
    cleared: bool
    clear_reason: str | None
    deadline: datetime | None
    checkpoint: str | None
    queued_at: datetime | None
    claimed_at: datetime
    traceparent: str | None
    tracestate: str | None
    cancel_requested: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a CLAIM.

    Attributes:
        claimed: what this worker owns now.
        refused_rows: jobs whose own content PostgreSQL refused to update; nothing is known against them.
    """

    claimed: list[ClaimedJob]
    refused_rows: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that could not be claimed, as it was right after."""

    status: str
    dispatch: int
    worker_id: str | None


async def claim(
    database: Database, *, worker_id: str, kind: str, ids: Sequence[UUID], limits: Limits
) -> Taken:
    """Take what may be taken of ``ids``; a job that is not in the answer was refused.

    Raises:
        DatabaseUnavailable: unclear: some may be claimed. Read back before anything else.
    """
    values = {
        "worker_id": worker_id,
        "kind": kind,
        "ids": list(ids),
        "stale_after": limits.stale_after,
        "crash_after": limits.crash_after,
        "timeout": limits.timeout,
        "max_attempts": limits.max_attempts,
        "max_stalls": limits.max_stalls,
    }
    try:
        rows = await database.run(CLAIM, values)
    except RowRefused:
        return await _claim_halves(database, worker_id=worker_id, kind=kind, ids=ids, limits=limits)
    return Taken([_claimed(row) for row in rows], frozenset())


async def _claim_halves(
    database: Database, *, worker_id: str, kind: str, ids: Sequence[UUID], limits: Limits
) -> Taken:
    """Find the row that PostgreSQL refuses by halving; it keeps none of its neighbours back."""
    if len(ids) == 1:
        return Taken([], frozenset(ids))
    middle = len(ids) // 2
    halves = [
        await claim(database, worker_id=worker_id, kind=kind, ids=half, limits=limits)
        for half in (ids[:middle], ids[middle:])
    ]
    return Taken(
        [row for half in halves for row in half.claimed],
        frozenset().union(*(half.refused_rows for half in halves)),
    )


async def read_back(database: Database, *, worker_id: str, ids: Iterable[UUID]) -> list[ClaimedJob]:
    """Return which of ``ids`` this worker owns, after a claim whose answer was lost."""
    rows = await database.run(READ_BACK, {"worker_id": worker_id, "ids": list(ids)})
    return [_claimed(row) for row in rows]


async def look_at_refused(database: Database, *, kind: str, ids: Iterable[UUID]) -> dict[UUID, RefusedJob]:
    """Return why jobs were refused; an id that is missing has no row of this kind."""
    rows = await database.run(REFUSED, {"kind": kind, "ids": list(ids)})
    return {row.id: RefusedJob(row.status, row.dispatch, row.worker_id) for row in rows}


def _claimed(row: Row[Any]) -> ClaimedJob:
    return ClaimedJob(
        id=row.id,
        kind=row.kind,
        payload=row.payload,
        fencing_token=row.fencing_token,
        dispatch=row.dispatch,
        attempt=row.attempts,
        max_attempts=row.max_attempts,
        cleared=row.cleared,
        clear_reason=row.clear_reason,
        deadline=row.deadline_at,
        checkpoint=row.checkpoint,
        queued_at=row.queued_at,
        claimed_at=row.claimed_at,
        traceparent=row.traceparent,
        tracestate=row.tracestate,
        cancel_requested=row.cancel_requested,
    )
