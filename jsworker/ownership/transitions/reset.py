"""RESET (clear_and_reenqueue): takes processing jobs back, by one of the four rules of the protocol.

Each statement checks again what its caller has seen, so that an owner that was faster keeps its job.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import LockTimeout
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.predicates import ANY_AGE, RunAge
from jsworker.ownership.refusals import RowLocked, RowRefused, in_halves, write_unlocked
from jsworker.ownership.schema import untold_resets
from jsworker.ownership.statements import NOW, compiled, given, given_array, j
from jsworker.ownership.transitions.audit import AuditEntry, run_noted
from jsworker.ownership.transitions.expire import write_beside_expired
from jsworker.ownership.transitions.workers import DRAINING

NotBegun = dict[tuple[UUID, int], bool]
"""Whether a job of a dead owner had not begun, by id and fencing token, when it was first seen."""

SHARED_STALLS: Final = 2
"""After so many stalls, and before its last, a job runs alone, and its row tells that it has begun."""
_BATCH: Final = 500


def _reset(
    cause: str, rows: sa.Select[Any], *, counted: sa.ColumnElement[bool], is_reported: bool = True
) -> sa.TextClause:
    """Return the statement that takes back the rows of one rule, each ``counted`` as a stall or not.

    Without ``is_reported`` a worker reports the resets later: the caller is an operator's process, which has
    no subscribers of events.
    """
    found = (j.c.id, j.c.worker_id.label("owner"), *j.c["cancel_requested", "stalls", "max_stalls"])
    found += (predicates.is_superseded.label("superseded"),)
    rows = rows.where(statements.WAITS_BRIEFLY)
    taken = statements.locked(rows.add_columns(*found, counted.label("counted")), "taken")
    next_status = sa.case(
        (taken.c.cancel_requested, "cancelled"),
        (sa.and_(taken.c.counted, taken.c.stalls + 1 >= taken.c.max_stalls), "failed"),
        (taken.c.superseded, "cancelled"),
        (sa.or_(~taken.c.counted, taken.c.stalls == 0), "queued"),
        else_="scheduled",
    )
    decided = sa.select(*taken.c["id", "owner", "counted"], next_status.label("next")).cte("decided")
    queued, again = decided.c.next == "queued", decided.c.next == "scheduled"
    reported = ("kind", "status", "fencing_token", "dispatch", "owner", "stalls")
    reset = (
        sa.update(j)
        .values(
            status=decided.c.next,
            stalls=j.c.stalls + sa.case((decided.c.counted, 1), else_=0),
            attempts=j.c.attempts - sa.case((decided.c.counted, 0), else_=1),
            dispatch=j.c.dispatch + sa.case((queued, 1), else_=0),
            needs_publish=queued,
            publish_after=sa.case((queued, NOW), else_=j.c.publish_after),
            queued_at=sa.case((queued, NOW), else_=j.c.queued_at),
            run_at=sa.case((again, NOW + statements.stall_back_off(j.c.stalls)), else_=j.c.run_at),
            finished_at=sa.case((decided.c.next.in_(("cancelled", "failed")), NOW)),
            failure_reason=sa.case(
                (decided.c.next == "failed", "stalled"),
                (sa.and_(decided.c.next == "cancelled", ~j.c.cancel_requested), "superseded"),
            ),
            cleared=sa.or_(queued, again),
            clear_reason=sa.bindparam("reason"),
            **statements.NO_OWNER,
        )
        .where(j.c.id == decided.c.id, predicates.processing)
        .returning(*j.c["id", *reported[:4]], *decided.c["owner", "counted"], j.c.stalls)
        .cte("reset")
    )
    what = reset.c
    detail = {"cause": cause, "reason": given("reason", sa.Text), "owner": what.owner, "to": what.status}
    detail |= {"counted": what.counted, "stalls": what.stalls, "dispatch": what.dispatch}
    worker_id = given("worker_id", sa.Text)
    logged = statements.entry(reset, "reset", worker_id=worker_id, detail=statements.json_object(**detail))
    answer = sa.select(*reset.c).add_cte(logged)
    if not is_reported:
        values = sa.select(reset.c.id, *reset.c[reported])
        untold = sa.insert(untold_resets).from_select(["job_id", *reported], values)
        answer = answer.add_cte(untold.cte("unreported"))
    return compiled(answer)


_counted: Final = given("counted", sa.Boolean)
_suspect = statements.given_runs(
    "seen",
    activity=given_array("activities", sa.DateTime(timezone=True)),
    uncounted=given_array("uncounted", sa.Boolean),
)
_suspects = sa.select().select_from(j.join(_suspect, _suspect.c.id == j.c.id))
_is_counted = sa.and_(_counted, ~_suspect.c.uncounted)

# Rule 1. The row is as it was seen, and is still stale.
RESET_STALE = _reset("stale", _suspects.where(predicates.stale_and_seen(_suspect)), counted=_is_counted)

# Rule 2. No worker gets the owner's id again, so all its jobs are without an owner, at any token.
_owned, _culprits = given_array("ids", sa.Uuid), given_array("culprits", sa.Uuid)
RESET_DEAD = _reset(
    "dead",
    sa.select().where(predicates.of_dead_owner, j.c.id == sa.any_(_owned)),
    counted=sa.case(
        (
            sa.func.cardinality(_culprits) > 0,
            sa.and_(j.c.id == sa.any_(_culprits), sa.or_(_counted, j.c.cleared)),
        ),
        else_=sa.and_(_counted, j.c.id != sa.all_(given_array("in_line", sa.Uuid))),
    ),
)

# Rule 3. The row is as it was seen, and is still silent beyond the crash threshold. Innocence is assumed only once, or a
# job that takes PostgreSQL down with its worker would run without end.
RESET_CRASHED = _reset(
    "crashed",
    _suspects.where(predicates.crashed_and_seen(_suspect)),
    counted=sa.and_(sa.or_(_counted, j.c.cleared), ~_suspect.c.uncounted),
)

# Rule 4. The row is as it was seen, and still meets the chosen age. No stall: the job did nothing wrong.
_chosen = statements.given_runs("seen")
_as_chosen = (predicates.processing, j.c.fencing_token == _chosen.c.token, predicates.as_old_as_chosen)
RESET_BY_OPERATOR = _reset(
    "operator",
    sa.select().select_from(j.join(_chosen, _chosen.c.id == j.c.id)).where(*_as_chosen),
    counted=sa.false(),
    is_reported=False,
)
STILL_CHOSEN = compiled(
    sa.select(j.c.id).select_from(j.join(_chosen, _chosen.c.id == j.c.id)).where(*_as_chosen)
)

# One worker deletes each row and then reports it: if that worker dies in between, the reset stays unreported,
# but none is reported twice.
TAKE_UNREPORTED = sa.text("""
DELETE FROM jsworker.untold_resets WHERE id = ANY(ARRAY(
  SELECT u.id FROM jsworker.untold_resets AS u ORDER BY u.id LIMIT :limit FOR UPDATE SKIP LOCKED))
RETURNING job_id AS id, kind, status, fencing_token, dispatch, owner, false AS counted, stalls
""")

# The owned rows, and for each owner its number of jobs and its last sign of life.
_OWNED = """owned AS MATERIALIZED (
  SELECT id, kind, worker_id, fencing_token, claimed_at, cleared, last_activity_at, stale_after, crash_after,
    stalls, max_stalls, progress_at
  FROM jsworker.jobs WHERE status || '' = 'processing'{of}
), owners AS (
  SELECT worker_id, count(*) AS jobs, max(greatest(claimed_at, last_activity_at)) AS heard_at
  FROM owned GROUP BY worker_id
)"""

# True for a job that was claimed but had not begun when its owner died, as far as a row can show: the owner held
# more jobs than it has job slots, and this job was claimed right before the owner's last sign of life. (Jobs are
# claimed ahead for a fifth of a second of work, besides the ways to the servers: they rarely wait for a second.)
# A job that kills its process at once may look the same, so this is assumed only once: for a job that was taken or
# handed back before (cleared), a stall is counted, until an error of its own, which counts as well, ends that state.
# Of a job that runs alone the row is sure: its owner notes the beginning before anything of the job runs. What
# kills a whole container, supervisor included, leaves no other witness.
_NOT_BEGUN = f"""(coalesce(
    owners.jobs > w.concurrency AND NOT job.cleared
    AND date_part('epoch', job.claimed_at) > date_part('epoch', owners.heard_at) - 1, false
  ) OR job.stalls >= least({SHARED_STALLS}, job.max_stalls - 1)
    AND (job.progress_at IS NULL OR job.progress_at < job.claimed_at))"""

# Rows are late from two missed heartbeats on: watching begins before the threshold, so that the second of two
# sightings can come right after it. The longest overdue come first; rows that never turn stale are last.
# statement_timestamp(): the rows are of that moment; with a later time, a long search would find all of them late.
# Sums are made of seconds: one row whose sum no time can hold would fail the search for all of them. Not of extract(),
# whose numbers take twice as long where there are very many rows.
_LATE = f"""
WITH {_OWNED.format(of="")}, late AS MATERIALIZED (
  SELECT owned.*, date_part('epoch', last_activity_at) + date_part('epoch', stale_after) AS stale_at,
    date_part('epoch', last_activity_at) + date_part('epoch', crash_after) AS crashed_at
  FROM owned
  WHERE coalesce(stale_after, crash_after) IS NOT NULL AND last_activity_at < statement_timestamp() - greatest(
    least(stale_after, crash_after, 2 * make_interval(secs => CAST(:heartbeat_interval AS double precision))),
    interval '0'){{besides}}
), fleet AS (
  SELECT count(DISTINCT worker_id) AS owners, (SELECT count(DISTINCT worker_id) FROM late) AS late_owners,
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()) AS database_up_for
  FROM owned
), first AS (
  SELECT late.* FROM late
  ORDER BY stale_at, crashed_at LIMIT :limit
)
SELECT fleet.owners, fleet.late_owners, fleet.database_up_for, job.id, job.kind, job.worker_id, job.fencing_token,
  job.last_activity_at,
  extract(epoch FROM job.stale_after) AS stale_after,
  coalesce(job.stale_at < date_part('epoch', statement_timestamp()), false) AS stale,
  extract(epoch FROM job.crash_after) AS crash_after,
  coalesce(job.crashed_at < date_part('epoch', statement_timestamp()), false) AS crashed,
  coalesce(w.answers, false) AS answers, coalesce(w.state = '{DRAINING}', false) OR {_NOT_BEGUN} AS uncounted,
  date_part('epoch', statement_timestamp()) - date_part('epoch', job.last_activity_at) AS silent_for
FROM fleet LEFT JOIN first AS job ON true LEFT JOIN owners ON owners.worker_id = job.worker_id
LEFT JOIN jsworker.workers AS w ON w.id = job.worker_id
ORDER BY job.stale_at, job.crashed_at
"""  # noqa: S608 -- constants of this file
LATE = statements.filled(_LATE, besides="")
# Leaves out rows whose RESET is refused: they stay late for ever and would always come first.
_NOT_REFUSED = """
    AND NOT EXISTS (
      SELECT FROM jsworker.refused_rows AS r
      WHERE r.job_id = owned.id AND r.attempted = 'reset' AND r.status = 'processing'
        AND r.fencing_token = owned.fencing_token AND r.retry_at > statement_timestamp())"""
LATE_BESIDES = statements.filled(_LATE, besides=_NOT_REFUSED)

OWNED = sa.text(f"""
WITH {_OWNED.format(of=" AND worker_id = :owner")}
SELECT job.id, job.fencing_token, {_NOT_BEGUN} AS in_line
FROM owned AS job CROSS JOIN owners LEFT JOIN jsworker.workers AS w ON w.id = job.worker_id
""")  # noqa: S608 -- constants of this file


@dataclass(frozen=True, slots=True)
class Suspect:
    """A row whose owner is late.

    Attributes:
        stale_after: seconds of silence until any worker may take it back; None: never.
        stale: whether it is silent for longer than that.
        crash_after, crashed: the same for the threshold of rule 3.
        answers: whether the owner was ever proven to answer on NATS; only then its silence there counts.
        uncounted: whether no stall is counted: it had not begun, as far as is known, or its owner was being stopped.
        silent_for: the seconds since the owner's last sign of life.
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
    uncounted: bool = False
    silent_for: float = 0.0


class Lateness(NamedTuple):
    """The late rows, the longest overdue first.

    Attributes:
        suspects: at most as many rows as were asked for.
        owners: how many workers own jobs.
        late_owners: how many of them own late rows, also ones that are not among ``suspects``.
        database_up_for: the seconds PostgreSQL has been up.
    """

    suspects: list[Suspect]
    owners: int
    late_owners: int
    database_up_for: float


@dataclass(frozen=True, slots=True)
class Reset:
    """A job that was taken back.

    Attributes:
        status: its new status: queued, scheduled, failed or cancelled.
        owner: the worker that owned it.
        counted: whether a stall was counted.
        stalls: the number of its stalls now.
    """

    id: UUID
    kind: str
    status: str
    fencing_token: int
    dispatch: int
    owner: str
    counted: bool
    stalls: int


class TakenBack(NamedTuple):
    """The jobs that were taken back, and the refused rows; other rows had changed, or a sweep found them locked."""

    resets: list[Reset]
    refused: Mapping[UUID, RowRefused]


def as_seen(rows: Collection[Suspect]) -> dict[str, list[Any]]:
    """Return the parameters of a statement for rows as they were last seen."""
    fields = {
        "ids": "id",
        "tokens": "fencing_token",
        "activities": "last_activity_at",
        "uncounted": "uncounted",
    }
    return {name: [getattr(row, field) for row in rows] for name, field in fields.items()}


async def look_for_late(
    database: Database,
    *,
    heartbeat_interval: float,
    limit: int,
    seconds: float | None = None,
    past_refused: bool = False,
) -> Lateness:
    """Return the running jobs that missed two heartbeats or are beyond a threshold of their own.

    ``past_refused`` leaves out rows that are set aside because their RESET was refused.
    """
    values = {"heartbeat_interval": heartbeat_interval, "limit": limit}
    rows = await database.run(LATE_BESIDES if past_refused else LATE, values, seconds=seconds)
    suspects = [Suspect(*row[3:]) for row in rows if row.id is not None]
    return Lateness(suspects, rows[0].owners, rows[0].late_owners, rows[0].database_up_for)


async def reset_stale(
    database: Database, *, worker_id: str, stale: Collection[Suspect], reason: str, counted: bool
) -> TakenBack:
    """Take back jobs that rule 1 has proven stale; after DatabaseUnavailable some may have been taken back.

    The next run and its message get ``reason``; the timeline names ``worker_id``, which takes them back.
    """
    values = {"worker_id": worker_id, "reason": reason, "counted": counted}
    return await _take_back(database, RESET_STALE, values, as_seen(stale))


async def reset_crashed(
    database: Database, *, worker_id: str, crashed: Collection[Suspect], reason: str, counted: bool = True
) -> TakenBack:
    """Take back jobs still silent beyond their crash threshold (rule 3); else like ``reset_stale``.

    Their owners have no listener on NATS, or the silence has lasted so long that answers do not count.
    """
    values = {"worker_id": worker_id, "reason": reason, "counted": counted}
    return await _take_back(database, RESET_CRASHED, values, as_seen(crashed))


async def reset_dead(
    database: Database,
    *,
    worker_id: str,
    owner: str,
    reason: str,
    counted: bool = True,
    culprits: Collection[UUID] = (),
    in_line: NotBegun | None = None,
) -> TakenBack:
    """Take back all jobs that a worker proven dead still owns (rule 2).

    A row that a statement of the dead worker still locks is skipped, and a CLAIM of its own may still commit:
    call this again until one statement time-out after the death.

    Args:
        counted: whether stalls are counted; never for jobs that had not begun, as far as their rows show.
        culprits: jobs that may have caused the death; if there are any, stalls are counted for these only,
            and without ``counted`` only for those that were taken or handed back before.
        in_line: keeps, from one call to the next, which jobs had not begun: once some are taken back, the
            owner's rows no longer show that all its job slots were taken.
    """
    judged: NotBegun = {} if in_line is None else in_line
    held = await database.run(OWNED, {"owner": owner})
    not_begun = [row.id for row in held if judged.setdefault((row.id, row.fencing_token), row.in_line)]
    values = {"worker_id": worker_id, "owner": owner, "reason": reason, "counted": counted}
    values |= {"culprits": list(culprits), "in_line": not_begun}
    return await _take_back(database, RESET_DEAD, values, {"ids": [row.id for row in held]})


async def reset_by_operator(
    database: Database,
    *,
    seen: Collection[tuple[UUID, int]],
    reason: str,
    age: RunAge = ANY_AGE,
    entry: AuditEntry | None = None,
) -> TakenBack:
    """Take back jobs for an operator, each at the token that was seen, if it still meets ``age``."""
    tokens, chosen = dict(seen), age.values()

    def of(some: Sequence[UUID]) -> dict[str, Any]:
        return {"ids": list(some), "tokens": [tokens[job_id] for job_id in some], **chosen}

    async def write(some: Sequence[UUID]) -> Sequence[Row]:
        values = {"worker_id": None, "reason": reason, **of(some)}
        return await write_beside_expired(
            database, some, partial(run_noted, database, RESET_BY_OPERATOR, values, entry)
        )

    async def look(some: Sequence[UUID]) -> Sequence[Row]:
        return await database.run(STILL_CHOSEN, of(some))

    taken, refused, _ = await write_unlocked(list(tokens), write, look, size=_BATCH)
    return TakenBack([Reset(*row) for row in taken], dict(refused))


async def take_unreported(database: Database) -> list[Reset]:
    """Return some resets by operators that no worker has reported yet; the caller must report them."""
    return [Reset(*row) for row in await database.run(TAKE_UNREPORTED, {"limit": _BATCH})]


async def _take_back(
    database: Database,
    statement: sa.TextClause,
    values: dict[str, Any],
    rows: Mapping[str, Sequence[Any]],
) -> TakenBack:
    """Take back ``rows``, given as columns; a row is refused while a transaction is taking its unique key."""

    async def write(places: Sequence[int]) -> Sequence[Row]:
        some = {name: [column[place] for place in places] for name, column in rows.items()}
        try:
            reset = partial(database.run, statement, values | some)
            return await write_beside_expired(database, some["ids"], reset)
        except LockTimeout:
            raise RowLocked("jobs_unique_waiting") from None

    taken, refused = await in_halves(range(len(rows["ids"])), write, size=_BATCH)
    return TakenBack([Reset(*row) for row in taken], {rows["ids"][place]: error for place, error in refused})
