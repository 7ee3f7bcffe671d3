"""The reads and writes of the tables by ``jsworker.testing``; no worker and no client uses them."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.transitions.admission import waiting_keys

# Moves only instants that a job, a schedule, a limit, a unique window or a step waits for.
ADVANCE: Final = text("""
WITH jobs AS (
  UPDATE jsworker.jobs SET run_at = run_at - CAST(:by AS interval), due_at = due_at - CAST(:by AS interval),
    expires_at = expires_at - CAST(:by AS interval), debounce_until = debounce_until - CAST(:by AS interval)
  WHERE status IN ('scheduled', 'queued')
    AND (run_at IS NOT NULL OR due_at IS NOT NULL OR expires_at IS NOT NULL OR debounce_until IS NOT NULL)
), schedules AS (
  UPDATE jsworker.schedules SET next_at = next_at - CAST(:by AS interval),
    last_at = last_at - CAST(:by AS interval)
), limits AS (
  UPDATE jsworker.limits SET full_at = full_at - CAST(:by AS interval),
    paused_until = paused_until - CAST(:by AS interval)
), windows AS (
  UPDATE jsworker.unique_windows SET until = until - CAST(:by AS interval)
)
UPDATE jsworker.job_steps SET sleeps_until = sleeps_until - CAST(:by AS interval) WHERE sleeps_until IS NOT NULL
""")

# Leaves out jobs that wait for a later time, an operator, a job that is itself held, or a token of a rate.
_UNDONE: Final = """
SELECT j.id, j.kind, j.status, j.held_by, j.attempts, j.stage, j.progress, j.last_error FROM jsworker.jobs AS j
WHERE j.kind = ANY(CAST(:kinds AS text[])) AND (
  j.status = 'processing'
  OR (j.status IN ('queued', 'scheduled') AND NOT EXISTS (
      SELECT FROM jsworker.limits AS l WHERE l.kind = j.kind AND l.key IN ('', coalesce(j.limit_key, ''))
        AND l.paused_at IS NOT NULL AND coalesce(l.paused_until > clock_timestamp(), true)
    ) AND (
      j.status = 'queued' OR j.run_at <= clock_timestamp() OR j.behind IS NOT NULL
      OR j.held_by IN ('limit', 'rate', 'paused')
         AND (j.kind, coalesce(j.limit_key, '')) NOT IN (
           SELECT * FROM unnest(CAST(:later_kinds AS text[]), CAST(:later_keys AS text[])))
      OR j.held_by = 'needs' AND NOT EXISTS (
        SELECT FROM jsworker.batch_needs AS n JOIN jsworker.jobs AS m ON m.batch_id = n.needs
        WHERE n.batch = j.batch_id AND m.status IN ('scheduled', 'queued', 'processing'))
    ))
  OR (j.status IN ('scheduled', 'queued') AND j.expires_at <= clock_timestamp() AND j.fencing_token = 0)
)
ORDER BY j.id LIMIT 1000
"""
UNDONE: Final = text(_UNDONE)
DUE_SCHEDULES: Final = text("""
SELECT name, kind FROM jsworker.schedules
WHERE kind = ANY(CAST(:kinds AS text[])) AND NOT paused AND next_at <= clock_timestamp() ORDER BY name
""")

MOST_WAITING: Final = 100_000
"""The most waiting jobs of a kind that are read; with more, ``waiting_jobs`` returns one more than these."""
WAITING_JOBS: Final = text("""
SELECT j.id, j.status, j.priority, j.held_by, j.payload, coalesce(j.unique_key, j.waiting_key, w.key) AS unique_key,
  j.waiting_key, j.scheduled_for,
  CAST(extract(epoch FROM coalesce(j.run_at, j.due_at) - clock_timestamp()) AS double precision) AS seconds
FROM jsworker.jobs AS j LEFT JOIN jsworker.unique_windows AS w ON w.kind = j.kind AND w.job_id = j.id
WHERE j.kind = :kind AND j.status IN ('scheduled', 'queued') ORDER BY j.id DESC LIMIT :limit
""")
RUNNING_AND_ENDED: Final = text("""
SELECT status, count(*) AS jobs FROM jsworker.jobs
WHERE kind = :kind AND status NOT IN ('scheduled', 'queued') GROUP BY status ORDER BY status
""")
CANCELLED: Final = text("""
SELECT kind, count(*) AS jobs FROM jsworker.jobs WHERE status = 'cancelled' GROUP BY kind
""")
WAITING_OF_OTHER_KINDS: Final = text("""
SELECT kind, count(*) AS jobs FROM jsworker.jobs
WHERE status IN ('scheduled', 'queued') AND kind <> :kind GROUP BY kind ORDER BY kind LIMIT 20
""")
WAITING_OF: Final = text("""
SELECT id FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[])) AND status IN ('queued', 'scheduled')
""")
END: Final = text("""
SELECT id, kind, status, result, last_error, failure_reason, fencing_token, attempts, errors, stalls, stage, progress
FROM jsworker.jobs WHERE id = :id
""")


async def advance(database: Database, by: timedelta) -> None:
    """Move every instant that a job, a schedule, a limit or a step waits for to ``by`` earlier."""
    await database.run(ADVANCE, {"by": by})


async def undone(database: Database, kinds: Collection[str]) -> list[Row]:
    """Return jobs of these kinds that run, or that a worker would begin without waiting for a later time."""
    # Read the keys before the jobs, so that a job that begins or is held by a limit in between is undone.
    later = [key for key in await waiting_keys(database) if key.jobs == 0 and key.seconds is not None]
    values = {
        "kinds": list(kinds),
        "later_kinds": [key.kind for key in later],
        "later_keys": [key.key for key in later],
    }
    return list(await database.run(UNDONE, values))


async def due_schedules(database: Database, kinds: Collection[str]) -> Sequence[Row]:
    """Return the due schedules of these kinds; call it before ``undone`` to miss no job of theirs."""
    return await database.run(DUE_SCHEDULES, {"kinds": list(kinds)})


async def waiting_jobs(database: Database, kind: str) -> list[Row]:
    """Return the waiting jobs of a kind, the newest first, with the seconds until each is due."""
    return list(await database.run(WAITING_JOBS, {"kind": kind, "limit": MOST_WAITING + 1}))


async def count_running_and_ended(database: Database, kind: str) -> dict[str, int]:
    """Return how many jobs of a kind run or have ended, by their status."""
    return {row.status: row.jobs for row in await database.run(RUNNING_AND_ENDED, {"kind": kind})}


async def cancelled(database: Database) -> dict[str, int]:
    """Return how many jobs of each kind are cancelled."""
    return {row.kind: row.jobs for row in await database.run(CANCELLED)}


async def count_waiting_of_other_kinds(database: Database, kind: str) -> dict[str, int]:
    """Return how many jobs of other kinds wait."""
    return {row.kind: row.jobs for row in await database.run(WAITING_OF_OTHER_KINDS, {"kind": kind})}


async def waiting_of(database: Database, ids: list[UUID]) -> set[UUID]:
    """Return those of these jobs that wait."""
    return {row.id for row in await database.run(WAITING_OF, {"ids": ids})}


async def state_of(database: Database, job_id: UUID) -> dict[str, Any]:
    """Return the state of a job, by column name."""
    [row] = await database.run(END, {"id": job_id})
    return dict(row._asdict())
