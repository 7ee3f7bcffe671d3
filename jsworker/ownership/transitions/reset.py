"""RESET (clear_and_reenqueue): processing goes back, by one of the four rules of the protocol.

The caller has seen the row before; the statement decides anew, on the row as it is by then.
"""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.predicates import ANY_AGE, RunAge
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.transitions.reset_rules import (
    OWNED,
    RESET_BY_OPERATOR,
    RESET_CRASHED,
    RESET_DEAD,
    RESET_STALE,
    TAKE_UNREPORTED,
)

InLine = dict[tuple[UUID, int], bool]
"""Whether a job of a dead owner had not begun, by id and fencing token, as it was first seen."""

_BATCH = 500
"""Rows that one statement takes back at most."""

_LINE_SECONDS = 1.0
"""Jobs are claimed ahead for a tenth of a second of work: for so long, as a rule, none waits for its slot."""

# Claimed, but not begun when its owner died, as far as a row can tell: the owner held more jobs than it has job
# slots, and this one was claimed right before its last sign of life. A job that kills its process at once may
# look the same, so a job is believed once: one that was taken or handed back before (cleared) is counted,
# until an error of its own, which counts too, lets it begin anew.
_IN_LINE = """hands.jobs > w.concurrency AND NOT {job}.cleared
    AND {job}.claimed_at > hands.heard_at - interval '{seconds} s'""".replace("{seconds}", str(_LINE_SECONDS))

# Late by two missed heartbeats already: watching begins before the threshold, so that the last of two
# sightings can fall right behind it. The longest overdue first: rows that are never stale stand behind.
# statement_timestamp(): the rows are of that moment, and by the end of a long search all would look late.
_LATE = """
WITH owned AS MATERIALIZED (
  SELECT id, kind, worker_id, fencing_token, claimed_at, cleared, last_activity_at, stale_after, crash_after
  FROM jsworker.jobs WHERE status || '' = 'processing'
), hands AS (
  SELECT worker_id, count(*) AS jobs, max(greatest(claimed_at, last_activity_at)) AS heard_at
  FROM owned GROUP BY worker_id
), fleet AS (
  SELECT count(DISTINCT worker_id) AS owners,
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()) AS database_up_for
  FROM owned
), late AS (
  SELECT id, kind, worker_id, fencing_token, claimed_at, cleared, last_activity_at, stale_after, crash_after
  FROM owned
  WHERE coalesce(stale_after, crash_after) IS NOT NULL
    AND last_activity_at
        + least(stale_after, crash_after, 2 * make_interval(secs => CAST(:heartbeat_interval AS double precision)))
        < statement_timestamp(){besides}
  ORDER BY last_activity_at + stale_after, last_activity_at + crash_after LIMIT :limit
)
SELECT fleet.owners, fleet.database_up_for, late.id, late.kind, late.worker_id, late.fencing_token,
  late.last_activity_at,
  extract(epoch FROM late.stale_after) AS stale_after,
  coalesce(late.last_activity_at + late.stale_after < statement_timestamp(), false) AS stale,
  extract(epoch FROM late.crash_after) AS crash_after,
  coalesce(late.last_activity_at + late.crash_after < statement_timestamp(), false) AS crashed,
  coalesce(w.answers, false) AS answers,
  coalesce({in_line}, false) AS in_line
FROM fleet LEFT JOIN late ON true LEFT JOIN hands ON hands.worker_id = late.worker_id
LEFT JOIN jsworker.workers AS w ON w.id = late.worker_id
ORDER BY late.last_activity_at + late.stale_after, late.last_activity_at + late.crash_after
""".replace("{in_line}", _IN_LINE.replace("{job}", "late"))
LATE = text(_LATE.replace("{besides}", ""))

# Past rows whose RESET is refused: they are late for ever, and stand first.
LATE_BESIDES = text(
    _LATE.replace(
        "{besides}",
        """
    AND NOT EXISTS (
      SELECT FROM jsworker.refused_rows AS r
      WHERE r.job_id = owned.id AND r.attempted = 'reset' AND r.status = 'processing'
        AND r.fencing_token = owned.fencing_token AND r.retry_at > statement_timestamp())""",
    )
)

OWNED_IN_LINE = text(
    """
WITH owned AS (
  SELECT id, worker_id, fencing_token, claimed_at, cleared, last_activity_at
  FROM jsworker.jobs WHERE status || '' = 'processing' AND worker_id = :owner
), hands AS (
  SELECT count(*) AS jobs, max(greatest(claimed_at, last_activity_at)) AS heard_at FROM owned
)
SELECT owned.id, owned.fencing_token, {in_line} AS in_line
FROM owned CROSS JOIN hands JOIN jsworker.workers AS w ON w.id = owned.worker_id
""".replace("{in_line}", _IN_LINE.replace("{job}", "owned"))
)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A row whose owner is late.

    Attributes:
        stale_after: seconds of silence until anybody may take it back; None: never stale.
        stale: whether that is over, by the database's clock.
        crash_after: seconds of silence until two witnesses may; None: never.
        crashed: whether that is over, by the database's clock.
        answers: whether the owner's NATS subject was ever proven to answer; only then its silence there counts.
        in_line: whether it had not begun, as far as can be known: no stall of its own.
    """

    id: UUID
    kind: str
    worker_id: str
    fencing_token: int
    last_activity_at: datetime
    stale_after: float | None
    stale: bool
    crash_after: float | None
    crashed: bool
    answers: bool
    in_line: bool = False


@dataclass(frozen=True, slots=True)
class Lateness:
    """Who is late, the longest overdue first, and what a sweeper must know to judge it.

    Attributes:
        owners: how many workers hold running jobs.
        database_up_for: seconds since PostgreSQL started.
    """

    suspects: list[Suspect]
    owners: int
    database_up_for: float


@dataclass(frozen=True, slots=True)
class Reset:
    """A job that was taken back.

    Attributes:
        status: where it went: queued, scheduled, failed or cancelled.
        owner: the worker that had it.
        counted: whether it counted as a stall.
        stalls: how many the job has now.
    """

    id: UUID
    kind: str
    status: str
    fencing_token: int
    dispatch: int
    owner: str
    counted: bool
    stalls: int


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Which jobs were taken back, and whose own row PostgreSQL refused to update.

    Whatever is missing had moved, or was locked by a statement in flight.
    """

    resets: list[Reset]
    refused: Mapping[UUID, RowRefused]


def as_seen(rows: Collection[Suspect]) -> dict[str, list[Any]]:
    """Return rows as they were last seen, as statements take them: a row that moved since is left alone."""
    return {
        "ids": [row.id for row in rows],
        "tokens": [row.fencing_token for row in rows],
        "activities": [row.last_activity_at for row in rows],
        "in_line": [row.in_line for row in rows],
    }


async def look_for_late(
    database: Database,
    *,
    heartbeat_interval: float,
    limit: int,
    seconds: float | None = None,
    past_refused: bool = False,
) -> Lateness:
    """Return the running jobs that missed two heartbeats or are beyond a threshold of their own.

    With ``past_refused`` rows are left out that are set aside because their RESET was refused.
    """
    values = {"heartbeat_interval": heartbeat_interval, "limit": limit}
    rows = await database.run(LATE_BESIDES if past_refused else LATE, values, seconds=seconds)
    return Lateness(
        suspects=[Suspect(*row[2:]) for row in rows if row.id is not None],
        owners=rows[0].owners,
        database_up_for=rows[0].database_up_for,
    )


async def reset_stale(
    database: Database, *, worker_id: str, stale: Collection[Suspect], reason: str, counted: bool
) -> TakenBack:
    """Take back jobs that rule 1 has proven stale; a row that moved since it was seen is left alone.

    ``reason`` is given to the next run and in the message, ``worker_id`` is who takes them back, for the timeline.

    Raises:
        DatabaseUnavailable: unclear; some may be taken back. Look again.
    """
    values = {"worker_id": worker_id, "reason": reason, "counted": counted}
    return await _reset_seen(database, RESET_STALE, stale, values)


async def reset_crashed(
    database: Database, *, worker_id: str, crashed: Collection[Suspect], reason: str, counted: bool = True
) -> TakenBack:
    """Take back jobs whose owners two witnesses have proven dead (rule 3); else as ``reset_stale``."""
    values = {"worker_id": worker_id, "reason": reason, "counted": counted}
    return await _reset_seen(database, RESET_CRASHED, crashed, values)


async def reset_dead(
    database: Database,
    *,
    worker_id: str,
    owner: str,
    reason: str,
    counted: bool = True,
    culprits: Collection[UUID] = (),
    in_line: InLine | None = None,
) -> TakenBack:
    """Take back everything that a worker proven dead still owns (rule 2).

    A row that a statement of the dead worker has still locked is skipped, and a CLAIM of its own may still
    commit: ask again until one statement time-out after the death.

    Args:
        owner: the dead worker; its id never lives again.
        counted: whether the stalls count against ``max_stalls``; those of jobs that had not begun, as far as
            their rows tell, never do.
        culprits: jobs that may have caused the death: when there are any, they alone are counted.
        in_line: keeps from one call to the next which jobs had not begun: with those that were taken back, the
            owner's rows no longer show that all its job slots were taken.
    """
    judged: InLine = {} if in_line is None else in_line
    held = await database.run(OWNED_IN_LINE, {"owner": owner}) if counted and not culprits else []
    not_begun = [row.id for row in held if judged.setdefault((row.id, row.fencing_token), row.in_line)]
    values = {"worker_id": worker_id, "owner": owner, "reason": reason, "counted": counted, "limit": _BATCH}
    values |= {"culprits": list(culprits), "in_line": not_begun}
    taken: list[Row] = []
    try:
        while True:
            rows = await database.run(RESET_DEAD, values | {"ids": None})
            taken += rows
            if len(rows) < _BATCH:
                return TakenBack(_resets(taken), {})
    except RowRefused:
        owned = [row.id for row in await database.run(OWNED, {"owner": owner})]
    rows, refused = await in_halves(
        owned, lambda ids: database.run(RESET_DEAD, values | {"ids": list(ids)}), size=_BATCH
    )
    return TakenBack(_resets(taken + rows), dict(refused))


async def reset_by_operator(
    database: Database,
    *,
    seen: Collection[tuple[UUID, int]],
    reason: str,
    age: RunAge = ANY_AGE,
    worker_id: str | None = None,
) -> TakenBack:
    """Take back jobs on an operator's word, each only at the fencing token at which it was seen.

    Only those that are still so old (``age``) when they are taken back.
    """
    values = {"worker_id": worker_id, "reason": reason, **age.values()}

    def write(held: Sequence[tuple[UUID, int]]) -> Awaitable[Sequence[Row]]:
        ids, tokens = [job_id for job_id, _ in held], [token for _, token in held]
        return database.run(RESET_BY_OPERATOR, values | {"ids": ids, "tokens": tokens})

    rows, refused = await in_halves(list(seen), write, size=_BATCH)
    return TakenBack(_resets(rows), {job_id: error for (job_id, _), error in refused})


async def take_unreported(database: Database) -> list[Reset]:
    """Return some of what operators have taken back and no worker has reported yet, to be reported by the caller.

    Raises:
        DatabaseUnavailable: unclear; what was taken then is never reported.
    """
    return _resets(await database.run(TAKE_UNREPORTED, {"limit": _BATCH}))


async def _reset_seen(
    database: Database, statement: TextClause, seen: Collection[Suspect], values: dict[str, Any]
) -> TakenBack:
    rows, refused = await in_halves(
        list(seen), lambda batch: database.run(statement, values | as_seen(batch)), size=_BATCH
    )
    return TakenBack(_resets(rows), {row.id: error for row, error in refused})


def _resets(rows: Sequence[Row]) -> list[Reset]:
    return [Reset(**row._asdict()) for row in rows]
