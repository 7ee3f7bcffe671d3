"""CLAIM: queued becomes processing, with a new fencing token. Whoever gets the row owns the job."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.halving import in_halves
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.reset import Suspect, as_seen

INLINE_BYTES: Final = 16 * 1024
"""Payload and checkpoint come with the claim up to so many bytes together. Larger ones are fetched, each with
a deadline of its own: beside them an answer for many jobs might never arrive in time."""

_COLUMNS = """
    j.id, j.kind, {payload} AS payload, j.fencing_token, j.dispatch, j.attempts AS attempt,
    j.max_attempts, j.cleared, j.clear_reason, j.deadline_at AS deadline, {checkpoint} AS checkpoint,
    j.traceparent, j.tracestate, j.cancel_requested, j.stalls, j.max_stalls,
    CAST(extract(epoch FROM j.claimed_at - j.queued_at) AS double precision) AS waited, {stored_bytes} AS stored_bytes
"""
_STORED_BYTES = "pg_column_size(j.payload) + coalesce(pg_column_size(j.checkpoint), 0)"
"""Found without reading the values themselves."""

# Skips locked rows: whoever holds the lock of one row must not keep the rest of a batch waiting. So a job that
# is not in the answer is not refused before a look without a lock has found that it is not queued: the message
# may be its only one, and the lock a MARK's. What is stored compressed is measured again as text.
_CLAIM = """
WITH picked AS (
  SELECT j.id, j.worker_id AS owner, {stored_bytes} AS stored_bytes FROM jsworker.jobs AS j {rows}
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
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
    needs_publish = false{stall}
  FROM picked WHERE j.id = picked.id AND j.status = '{status}' AND j.kind = :kind
  RETURNING {columns}, picked.owner
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'claimed', :worker_id, fencing_token,
    jsonb_build_object('attempt', attempt, 'cleared', cleared, 'clear_reason', clear_reason){detail}
  FROM claimed WHERE fencing_token > 1
)
SELECT id, kind,
  CASE WHEN octet_length(payload) + coalesce(octet_length(checkpoint), 0) <= {inline} THEN payload END AS payload,
  fencing_token, dispatch, attempt, max_attempts, cleared, clear_reason, deadline,
  CASE WHEN octet_length(checkpoint) <= {inline} THEN checkpoint END AS checkpoint,
  traceparent, tracestate, cancel_requested, stalls, max_stalls, waited, stored_bytes
FROM claimed
"""


def _claim(status: str, *, rows: str, stall: str = "", detail: str = "") -> TextClause:
    """Return the statement that claims rows of one status."""
    parts = {
        "status": status,
        "rows": rows.strip(),
        "stall": stall,
        "detail": detail,
        "columns": _columns(_inline("payload"), _inline("checkpoint"), "picked.stored_bytes"),
        "stored_bytes": _STORED_BYTES,
        "inline": str(INLINE_BYTES),
    }
    statement = _CLAIM
    for name, part in parts.items():
        statement = statement.replace(f"{{{name}}}", part)
    return text(statement)


def _columns(payload: str, checkpoint: str, stored_bytes: str) -> str:
    columns = _COLUMNS.strip().replace("{payload}", payload).replace("{checkpoint}", checkpoint)
    return columns.replace("{stored_bytes}", stored_bytes)


def _inline(column: str) -> str:
    return f"CASE WHEN picked.stored_bytes <= {INLINE_BYTES} THEN CAST(j.{column} AS text) END"


CLAIM = _claim(
    "queued", rows="WHERE j.id = ANY(CAST(:ids AS uuid[])) AND j.status = 'queued' AND j.kind = :kind"
)

# The stale owner's job, from a list of rows that rule 1 has proven stale: reset and claim in one. Only a
# first stall, for a later one waits out its back-off; only when a further run is due at all.
CLAIM_STALE = _claim(
    "processing",
    rows="""
  JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:activities AS timestamptz[]))
    AS seen(id, token, activity) ON seen.id = j.id
  WHERE j.status = 'processing' AND j.kind = :kind
    AND j.fencing_token = seen.token AND j.last_activity_at = seen.activity
    AND j.last_activity_at + j.stale_after < clock_timestamp()
    AND j.stalls = 0 AND j.max_stalls >= 2 AND NOT j.cancel_requested
""",
    stall=""",
    stalls = j.stalls + 1,
    cleared = true,
    clear_reason = 'worker ' || picked.owner || ' stopped responding'""",
    detail="""
    || jsonb_build_object('cause', 'stale', 'owner', owner, 'counted', true, 'stalls', stalls)""",
)

# A CLAIM may commit and its answer be lost: what is mine now was claimed by it. Without payloads, for they may
# be the reason why the answer did not come.
READ_BACK = text(
    """
SELECT {columns}
FROM jsworker.jobs AS j
WHERE j.worker_id = :worker_id AND j.status = 'processing' AND j.id = ANY(CAST(:ids AS uuid[]))
""".replace("{columns}", _columns("CAST(NULL AS text)", "CAST(NULL AS text)", _STORED_BYTES))
)

CONTENT = text("""
SELECT CAST(payload AS text) AS payload, CAST(checkpoint AS text) AS checkpoint FROM jsworker.jobs
WHERE id = :id AND status = 'processing' AND worker_id = :worker_id AND fencing_token = :token
""")

# Why a job was not in a claim's answer, read without a lock: what is queued was skipped because its row is
# locked, or was queued again since, and is claimed again; what is not was refused. A skip of somebody's running
# job is told once for each worker that skipped it, however often its message comes back.
REFUSED = text("""
WITH refused AS (
  SELECT id, status, dispatch, worker_id, fencing_token FROM jsworker.jobs
  WHERE id = ANY(CAST(:ids AS uuid[])) AND kind = :kind
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'skipped', CAST(:worker_id AS text), fencing_token,
    jsonb_build_object('owner', worker_id, 'token', fencing_token)
  FROM refused
  WHERE status = 'processing' AND worker_id <> CAST(:worker_id AS text) AND NOT EXISTS (
    SELECT FROM jsworker.job_events AS e
    WHERE e.job_id = refused.id AND e.event = 'skipped' AND e.worker_id = CAST(:worker_id AS text)
      AND e.fencing_token = refused.fencing_token)
)
SELECT id, status, dispatch, worker_id FROM refused
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


class ClaimedJob(NamedTuple):
    """A row that this worker owns from now on, until it settles it or loses it.

    Attributes:
        payload: JSON text; None: it and the checkpoint did not come with the claim and are to be fetched.
        checkpoint: JSON text or None.
        dispatch: the dispatch at which it was claimed: copies of messages up to it are spent.
        stalls: runs of this job that were taken back from silent owners.
        max_stalls: at which of them it fails.
        waited: seconds from the moment at which it was last put into the queue to this claim.
        stored_bytes: of payload and checkpoint as PostgreSQL stores them; their text may be longer.
    """

    id: UUID
    kind: str
    payload: str | None
    fencing_token: int
    dispatch: int
    attempt: int
    max_attempts: int
    cleared: bool
    clear_reason: str | None
    deadline: datetime | None
    checkpoint: str | None
    traceparent: str | None
    tracestate: str | None
    cancel_requested: bool
    stalls: int
    max_stalls: int
    waited: float | None
    stored_bytes: int


_FIELDS: Final = len(ClaimedJob._fields)
"""They stand in the order of ``_COLUMNS``, which come first in every answer."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a CLAIM.

    Attributes:
        claimed: what this worker owns now.
        refused_rows: jobs whose own row PostgreSQL refused to update, and why.
    """

    claimed: list[ClaimedJob]
    refused_rows: Mapping[UUID, RowRefused]


@dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that was not claimed, as it was right after; ``queued``: its row was locked, claim it again."""

    status: str
    dispatch: int
    worker_id: str | None


async def claim(
    database: Database, *, worker_id: str, kind: str, ids: Sequence[UUID], limits: Limits
) -> Taken:
    """Take what may be taken of ``ids``; a job that is not in the answer was refused, or its row is locked.

    Raises:
        DatabaseUnavailable: unclear: some may be claimed. Read back before anything else.
    """

    def write(batch: Sequence[UUID]) -> Awaitable[Sequence[Row]]:
        return database.run_by_key(CLAIM, _written(worker_id, kind, limits) | {"ids": uuid_array(batch)})

    rows, refused = await in_halves(ids, write)
    return Taken([_claimed(row) for row in rows], dict(refused))


async def claim_stale(
    database: Database, *, worker_id: str, kind: str, seen: Sequence[Suspect], limits: Limits
) -> Taken:
    """Take jobs of ``kind`` from their stale owners, each as rule 1 has last seen it; a first stall only.

    Raises:
        DatabaseUnavailable: unclear: some may be claimed. Read back before anything else.
    """

    def write(batch: Sequence[Suspect]) -> Awaitable[Sequence[Row]]:
        return database.run(CLAIM_STALE, _written(worker_id, kind, limits) | as_seen(batch))

    rows, refused = await in_halves(seen, write)
    return Taken([_claimed(row) for row in rows], {row.id: error for row, error in refused})


async def read_back(database: Database, *, worker_id: str, ids: Iterable[UUID]) -> list[ClaimedJob]:
    """Return which of ``ids`` this worker owns, without payloads, after a claim whose answer was lost."""
    rows = await database.run(READ_BACK, {"worker_id": worker_id, "ids": list(ids)})
    return [_claimed(row) for row in rows]


async def fetch_content(
    database: Database, *, worker_id: str, claimed: ClaimedJob, tries: int = 0
) -> ClaimedJob:
    """Return a claimed job with its payload and its checkpoint.

    Args:
        database: where it is.
        worker_id: its owner.
        claimed: the job as its claim returned it.
        tries: how often this was given up already; each time it may take twice as long.

    Raises:
        OwnershipLost: this worker does not own it any more.
        DatabaseUnavailable: no answer in time.
    """
    values = {"worker_id": worker_id, "id": claimed.id, "token": claimed.fencing_token}
    seconds = database.seconds_for(claimed.stored_bytes, tries=tries)
    rows = await database.run(CONTENT, values, seconds=seconds)
    if not rows:
        raise OwnershipLost(f"job {claimed.id}: token {claimed.fencing_token} no longer owns it")
    return claimed._replace(payload=rows[0].payload, checkpoint=rows[0].checkpoint)


async def look_at_refused(
    database: Database, *, kind: str, ids: Iterable[UUID], worker_id: str | None = None
) -> dict[UUID, RefusedJob]:
    """Return why jobs were not claimed; an id that is missing has no row of this kind.

    Args:
        database: where they are.
        kind: of the consumer that delivered them.
        ids: the jobs.
        worker_id: who skips them; jobs that run under another worker say so in their timeline. None: not told.
    """
    values = {"kind": kind, "ids": list(ids), "worker_id": worker_id}
    try:
        rows = await database.run(REFUSED, values)
    except RowRefused:  # the entry in the timeline: without it, then
        rows = await database.run(REFUSED, values | {"worker_id": None})
    return {row.id: RefusedJob(row.status, row.dispatch, row.worker_id) for row in rows}


def _written(worker_id: str, kind: str, limits: Limits) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "kind": kind,
        "stale_after": limits.stale_after,
        "crash_after": limits.crash_after,
        "timeout": limits.timeout,
        "max_attempts": limits.max_attempts,
        "max_stalls": limits.max_stalls,
    }


def _claimed(row: Row) -> ClaimedJob:
    return ClaimedJob._make(row[:_FIELDS])
