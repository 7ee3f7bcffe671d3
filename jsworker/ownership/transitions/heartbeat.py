"""The owner's signs of life: HEARTBEAT, PROGRESS, CHECKPOINT, a quiet phase; and rows in nobody's hand.

``mine`` is the whole guard of every write: processing, my worker id, my fencing token.
"""

from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.halving import in_halves
from jsworker.ownership.pool import Row
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.timeline import REJECTED_ONE

# One statement for all runs in flight. Locked rows are skipped: some are just being settled, and one row
# that user code has locked must not silence the others.
HEARTBEAT = text("""
WITH hand AS (
  SELECT id, token FROM unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS h(id, token)
), mine AS (
  SELECT j.id FROM jsworker.jobs AS j JOIN hand ON hand.id = j.id
  WHERE j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = hand.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET last_activity_at = clock_timestamp()
FROM mine WHERE j.id = mine.id AND j.status = 'processing' AND j.worker_id = :worker_id
RETURNING j.id, j.fencing_token, j.cancel_requested
""")

# What the heartbeat skipped, read without a lock: still mine means alive; completed under my token means
# that the job's own transaction has completed it.
STILL_MINE = text("""
SELECT j.id, j.fencing_token, j.cancel_requested, j.status
FROM jsworker.jobs AS j
JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS h(id, token) ON h.id = j.id
WHERE (j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = h.token)
   OR (j.status = 'completed' AND j.fencing_token = h.token)
""")

# A skipped row's heartbeat alone: waits for the lock, so that only this row pays for it.
HEARTBEAT_ALONE = text("""
UPDATE jsworker.jobs SET last_activity_at = clock_timestamp()
WHERE id = :id AND status = 'processing' AND worker_id = :worker_id AND fencing_token = :token
RETURNING id
""")

# A write that comes too late is told once for each run and kind of write.
_WRITE = """
WITH written AS (
  UPDATE jsworker.jobs SET
    {values},
    last_activity_at = clock_timestamp()
  WHERE id = :id AND status = 'processing' AND worker_id = :worker_id AND fencing_token = :token
  RETURNING id
), told AS (
  {rejected}
  AND NOT EXISTS (SELECT FROM written)
)
SELECT id FROM written
"""


def _write(values: str) -> TextClause:
    """Return the statement by which an owner changes one of its rows, a sign of life like any other."""
    return text(_WRITE.replace("{values}", values.strip()).replace("{rejected}", REJECTED_ONE))


PROGRESS = _write("""
    progress_at = clock_timestamp(),
    stage = coalesce(CAST(:stage AS text), stage),
    progress = coalesce(CAST(:progress AS double precision), progress),
    message = coalesce(CAST(:message AS text), message)
""")

CHECKPOINT = _write("""
    progress_at = clock_timestamp(),
    checkpoint = CAST(:checkpoint AS jsonb)
""")

# Absolute values, so that a second try after a lost answer does no harm. A phase that the job itself announces tells
# that it has come so far.
QUIET = _write("""
    progress_at = CASE WHEN CAST(:announced AS boolean) THEN clock_timestamp() ELSE progress_at END,
    stale_after = make_interval(secs => CAST(:stale_after AS double precision)),
    crash_after = make_interval(secs => CAST(:crash_after AS double precision))
""")

# The same for many runs: those beside a quiet one, whose owner keeps silent for them too. No write of theirs.
QUIET_BESIDE = text("""
WITH hand AS (
  SELECT id, token, stale_after, crash_after FROM unnest(
    CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:stale_after AS double precision[]),
    CAST(:crash_after AS double precision[])) AS h(id, token, stale_after, crash_after)
), mine AS (
  SELECT j.id, hand.stale_after, hand.crash_after FROM jsworker.jobs AS j JOIN hand ON hand.id = j.id
  WHERE j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = hand.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET
  stale_after = make_interval(secs => mine.stale_after),
  crash_after = make_interval(secs => mine.crash_after),
  last_activity_at = clock_timestamp()
FROM mine WHERE j.id = mine.id AND j.status = 'processing' AND j.worker_id = :worker_id
RETURNING j.id, j.fencing_token
""")

# Claimed under my id by a statement whose answer never came. Younger ones may still be on their way in.
_STRAYS = """
SELECT j.id, j.fencing_token, {ended} AS ended
FROM jsworker.jobs AS j
WHERE j.worker_id = :worker_id AND j.status || '' = 'processing'
  AND j.claimed_at < clock_timestamp() - make_interval(secs => CAST(:older_than AS double precision))
  AND j.id <> ALL(CAST(:claiming AS uuid[]))
  AND NOT EXISTS (
    SELECT FROM unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS h(id, token)
    WHERE h.id = j.id AND h.token = j.fencing_token){besides}
ORDER BY j.id LIMIT 500
"""
STRAYS = text(_STRAYS.replace("{ended}", "false").replace("{besides}", ""))
# A row whose FAIL was refused has run: handed back, it would run again for ever, and uncounted.
_REFUSED = """EXISTS (
    SELECT FROM jsworker.refused_rows AS r
    WHERE r.job_id = j.id AND r.status = j.status AND r.fencing_token = j.fencing_token AND {which})"""
STRAYS_BESIDES = text(
    _STRAYS.replace("{ended}", _REFUSED.replace("{which}", "r.attempted = 'fail'")).replace(
        "{besides}",
        "\n  AND NOT "
        + _REFUSED.replace(
            "{which}", "r.attempted IN ('fail', 'release')\n      AND r.retry_at > statement_timestamp()"
        ),
    )
)

Held = tuple[UUID, int]
"""A run in flight: job id and fencing token."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a heartbeat.

    Attributes:
        alive: runs that still own their job.
        cancelled: those of them that somebody asked to cancel.
        lost: runs that own their job no longer.
        locked: alive, but not renewed: somebody else holds a lock on the row.
        completed: completed under their token, by the job's own transaction.
    """

    alive: frozenset[Held]
    cancelled: frozenset[Held]
    lost: frozenset[Held]
    locked: frozenset[Held]
    completed: frozenset[Held]


async def heartbeat(
    database: Database,
    *,
    worker_id: str,
    in_flight: Collection[Held],
    besides: Collection[Held] = (),
    refusals: dict[Held, RowRefused] | None = None,
) -> Beat:
    """Renew the runs in hand and tell which are cancelled and which are lost.

    Args:
        database: where they are.
        worker_id: their owner.
        in_flight: the runs.
        besides: those of them that are only looked at: their row was refused before.
        refusals: takes why rows were refused; those runs are told as locked ones.

    Raises:
        DatabaseUnavailable: nothing is known about any of them.
    """
    if not in_flight:
        return Beat(*(frozenset[Held]() for _ in range(5)))

    def write(held: Sequence[Held]) -> Awaitable[Sequence[Row]]:
        return database.run_heartbeat(HEARTBEAT, _held_by(worker_id, held))

    renewed, refused = await in_halves([held for held in in_flight if held not in besides], write)
    if refusals is not None:
        refusals.update(refused)
    skipped = set(in_flight) - {(row.id, row.fencing_token) for row in renewed}
    seen = await database.run_heartbeat(STILL_MINE, _held_by(worker_id, skipped)) if skipped else []
    locked = [row for row in seen if row.status == "processing"]
    alive = [*renewed, *locked]
    return Beat(
        alive=_held(alive),
        cancelled=_held(row for row in alive if row.cancel_requested),
        lost=frozenset(skipped) - _held(seen),
        locked=_held(locked),
        completed=_held(row for row in seen if row.status == "completed"),
    )


async def heartbeat_alone(database: Database, *, worker_id: str, held: Held) -> bool:
    """Renew one run whose row was locked; False when it is no longer owned."""
    return bool(await database.run(HEARTBEAT_ALONE, _mine(worker_id, held)))


async def update_progress(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    stage: str | None,
    progress: float | None,
    message: str | None,
) -> None:
    """Store how far a run is; None keeps what is there.

    Raises:
        OwnershipLost: nothing was stored.
    """
    values = {"stage": stage, "progress": progress, "message": message, "write": "progress"}
    _owned(held, await database.run(PROGRESS, _mine(worker_id, held) | values))


async def save_checkpoint(
    database: Database, *, worker_id: str, held: Held, checkpoint: str, tries: int = 0
) -> None:
    """Store a checkpoint, given as JSON text; after ``tries`` without an answer it may take longer each time.

    Raises:
        OwnershipLost: nothing was stored.
    """
    values = {"checkpoint": checkpoint, "write": "checkpoint"}
    seconds = database.seconds_for(len(checkpoint), tries=tries)
    _owned(held, await database.run(CHECKPOINT, _mine(worker_id, held) | values, seconds=seconds))


async def set_patience(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    stale_after: float | None,
    crash_after: float | None,
    announced: bool = True,
) -> None:
    """Set the seconds of silence after which a run may be taken back; the same again changes nothing else.

    Args:
        database: where it is.
        worker_id: its owner.
        held: the run.
        stale_after: until anybody may take it back; None: never.
        crash_after: until two witnesses may; None: never.
        announced: whether the job itself asks for it, which counts as progress.

    Raises:
        OwnershipLost: nothing was stored.
    """
    patience = {"stale_after": stale_after, "crash_after": crash_after}
    values = {**patience, "announced": announced, "write": "quiet"}
    _owned(held, await database.run(QUIET, _mine(worker_id, held) | values))


async def set_patience_beside(
    database: Database, *, worker_id: str, patience: Mapping[Held, Mapping[str, float | None]]
) -> frozenset[Held]:
    """Set limits of silence, named as for ``set_patience``, and return the runs whose rows have them now.

    Rows that are locked, lost or refused are left alone.

    Raises:
        DatabaseUnavailable: nothing is known about any of them.
    """

    def write(held: Sequence[Held]) -> Awaitable[Sequence[Row]]:
        limits = {name: [patience[each][name] for each in held] for name in ("stale_after", "crash_after")}
        return database.run(QUIET_BESIDE, _held_by(worker_id, held) | limits)

    return _held((await in_halves(list(patience), write))[0])


async def strays(
    database: Database,
    *,
    worker_id: str,
    in_flight: Collection[Held],
    claiming: Iterable[UUID],
    older_than: float,
    past_refused: bool = False,
    ended: set[Held] | None = None,
) -> list[Held]:
    """Return processing rows of this worker that are in nobody's hand.

    Args:
        database: where to look.
        worker_id: this worker.
        in_flight: runs in flight, settling ones included.
        claiming: ids of claims whose answer is still awaited.
        older_than: seconds since the claim; two statement time-outs.
        past_refused: leave out rows that are set aside because their FAIL or RELEASE was refused.
        ended: takes those of them that have run: their FAIL was refused, and is to be tried again.
    """
    parameters = _held_by(worker_id, in_flight) | {"claiming": list(claiming), "older_than": older_than}
    statement = STRAYS_BESIDES if past_refused else STRAYS
    rows = await database.run_heartbeat(statement, parameters)
    if ended is not None:
        ended |= _held(row for row in rows if row.ended)
    return [(row.id, row.fencing_token) for row in rows]


def _held_by(worker_id: str, in_flight: Collection[Held]) -> dict[str, object]:
    return {
        "worker_id": worker_id,
        "ids": [held[0] for held in in_flight],
        "tokens": [held[1] for held in in_flight],
    }


def _held(rows: Iterable[Row]) -> frozenset[Held]:
    return frozenset((row.id, row.fencing_token) for row in rows)


def _mine(worker_id: str, held: Held) -> dict[str, object]:
    return {"worker_id": worker_id, "id": held[0], "token": held[1]}


def _owned(held: Held, rows: object) -> None:
    if not rows:
        raise OwnershipLost(f"job {held[0]}: token {held[1]} no longer owns it")
