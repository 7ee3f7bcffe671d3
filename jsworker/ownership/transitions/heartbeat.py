"""The owner's signs of life: HEARTBEAT, PROGRESS, CHECKPOINT, a quiet phase; and orphaned claims."""

from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from jsworker.core.errors import OwnershipLost
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.predicates import Predicate, held_by_me, locked_of_mine, mine
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.statements import NOW, compiled, given, given_array, given_seconds, j
from jsworker.ownership.transitions.timeline import rejected

Held = tuple[UUID, int]
"""A run in flight: job id and fencing token."""

_MOST_ORPHANS: Final = 500
_run = statements.given_runs("run")

# One statement for all runs in flight. Locked rows are skipped: some are being settled just now, and one row
# that user code has locked must not delay the heartbeats of the others.
_locked = locked_of_mine(_run)
_silence = sa.cast(sa.extract("epoch", sa.func.coalesce(j.c.stale_after, j.c.crash_after)), sa.Double)
HEARTBEAT = compiled(
    sa.update(j)
    .values(last_activity_at=NOW)
    .where(j.c.id == _locked.c.id, held_by_me)
    .returning(*j.c["id", "fencing_token", "cancel_requested", "last_activity_at"], _silence.label("silence"))
)
# The heartbeat of one skipped row, which waits for the lock without delaying others.
HEARTBEAT_ALONE = statements.waiting(HEARTBEAT)

# Reads the skipped rows without a lock. A row that this worker still owns is alive; a row that is completed
# under the same token was completed by the job's own transaction.
STILL_MINE = compiled(
    sa.select(*j.c["id", "fencing_token", "cancel_requested", "status"])
    .join(_run, _run.c.id == j.c.id)
    .where(sa.or_(mine(_run.c.token), predicates.completed_under(_run.c.token)))
)


def _write(*in_order: Predicate, **values: Any) -> sa.TextClause:
    """Return the statement by which an owner changes one of its rows, which is also a sign of life.

    A write by a former owner is logged once for each run and kind of write. A row of the owner that the guard
    ``in_order`` refuses is returned as not written.
    """
    this = sa.and_(j.c.id == sa.bindparam("id"), mine(sa.bindparam("token")))
    written = (
        sa.update(j)
        .values(last_activity_at=NOW, progress_at=predicates.next_progress, **values)
        .where(this, *in_order)
        .returning(*j.c["id", "progress_at"])
        .cte("written")
    )
    answers: list[sa.Select[Any]] = [sa.select(*written.c, sa.true().label("is_written"))]
    refused = [~sa.select(written.c.id).exists()]
    if in_order:
        present = sa.select(*j.c["id", "progress_at"]).where(this).cte("present")
        answers.append(sa.select(*present.c, sa.false()).where(*refused))
        refused.append(~sa.select(present.c.id).exists())
    run = sa.select(given("id", sa.Uuid).label("id"), given("token", sa.BigInteger).label("token"))
    entry = rejected(run.subquery("late"), *refused).cte("entry")
    return compiled(sa.union_all(*answers).add_cte(entry))


# Not in order: a late report shows an older stage only until the next one.
PROGRESS = _write(
    stage=sa.func.coalesce(given("stage", sa.Text), j.c.stage),
    progress=sa.func.coalesce(given("progress", sa.Double), j.c.progress),
    message=sa.func.coalesce(given("message", sa.Text), j.c.message),
)
# A try that got no answer may be executed after a later write. Each write changes the time of progress, so a late
# one does not find the time any more that its run had seen.
CHECKPOINT = _write(predicates.progress_as_seen, checkpoint=given("checkpoint", JSONB))
# Absolute values, so that a second try after a lost answer does no harm. The job itself announces a quiet phase,
# so this counts as progress.
QUIET = _write(
    predicates.progress_as_seen,
    stale_after=given_seconds("stale_after"),
    crash_after=given_seconds("crash_after"),
)

# The same for the other runs of an owner with a quiet run, because the owner is silent for them, too. This is
# no write of theirs, so it counts as no progress. It only lengthens: one that got no answer may be executed after
# a longer phase was announced, whose owner is too silent to repair it.
_LIMITS: Final = ("stale_after", "crash_after")
_given_limits = {name: given_array(name, sa.Double) for name in _LIMITS}
_beside = statements.given_runs("run", **_given_limits)
_locked_beside = locked_of_mine(_beside, *_beside.c[_LIMITS])
_lengthened = {
    name: sa.func.greatest(j.c[name], statements.seconds(_locked_beside.c[name])) for name in _LIMITS
}
QUIET_BESIDE = compiled(
    sa.update(j)
    .values(**_lengthened, last_activity_at=NOW)
    .where(j.c.id == _locked_beside.c.id, held_by_me)
    .returning(j.c.id, j.c.fencing_token)
)

# The end of these phases. It shortens thresholds, so it needs an order: every sign of life changes the time of
# activity, so a late one does not find the time any more that the heartbeat before it had written. (Only a clock that
# is set back could bring that time again, to the microsecond.)
_over = statements.given_runs(
    "run", **_given_limits, activity=given_array("activities", sa.DateTime(timezone=True))
)
_locked_over = locked_of_mine(_over, *_over.c[_LIMITS], _over.c.activity)
_restored = {name: statements.seconds(_locked_over.c[name]) for name in _LIMITS}
QUIET_OVER = compiled(
    sa.update(j)
    .values(**_restored, last_activity_at=NOW)
    .where(j.c.id == _locked_over.c.id, held_by_me, j.c.last_activity_at == _locked_over.c.activity)
    .returning(j.c.id, j.c.fencing_token)
)


def _orphaned(ended: Predicate, *besides: Predicate) -> sa.TextClause:
    """Return the search for rows that a CLAIM of this worker took although its answer never came."""
    return compiled(
        sa.select(
            j.c.id, j.c.fencing_token, ended.label("ended"), j.c.waiting_key.is_not(None).label("has_key")
        )
        .where(
            predicates.held_by_me_indexed,
            predicates.claimed_before,  # the answers of younger claims may still come
            j.c.id != sa.all_(given_array("claiming", sa.Uuid)),
            ~sa.select(_run.c.id).where(_run.c.id == j.c.id, _run.c.token == j.c.fencing_token).exists(),
            *besides,
        )
        .order_by(j.c.id)
        .limit(_MOST_ORPHANS)
    )


ORPHANED = _orphaned(sa.false())
# A job whose FAIL was refused has run: if it were released, it would run again for ever without a count.
ORPHANED_BESIDES = _orphaned(predicates.refused("fail"), ~predicates.set_aside("fail", "release"))


class Orphan(NamedTuple):
    """A claim of this worker that none of its runs has.

    Attributes:
        ended: the job has run, but its FAIL was refused and must be tried again.
        has_key: the job has a waiting key, for which its return to the queue may have to wait.
    """

    ended: bool
    has_key: bool


class Beat(NamedTuple):
    """The answer to a heartbeat.

    Attributes:
        alive: runs that this worker still owns.
        cancelled: those of them whose cancellation was requested.
        lost: runs that this worker no longer owns.
        locked: alive, but not renewed, because another transaction holds a lock on the row.
        completed: runs that the job's own transaction has completed.
        silences: for each renewed run, how many seconds of silence its row allows, by the first of its
            thresholds that is set.
        activities: for each renewed run, the time of activity that was written.
    """

    alive: frozenset[Held]
    cancelled: frozenset[Held]
    lost: frozenset[Held]
    locked: frozenset[Held]
    completed: frozenset[Held]
    silences: Mapping[Held, float | None]
    activities: Mapping[Held, datetime]


async def heartbeat(
    database: Database,
    *,
    worker_id: str,
    in_flight: Collection[Held],
    besides: Collection[Held] = (),
    refusals: dict[Held, RowRefused] | None = None,
) -> Beat:
    """Renew the runs in flight and return which are cancelled and which are lost.

    Args:
        besides: runs in flight that are only read, because their row was refused before.
        refusals: gets the refusals of rows; those runs are returned as locked.
    """
    renewed, refused = await in_halves(
        [held for held in in_flight if held not in besides],
        lambda some: database.run_heartbeat(HEARTBEAT, _held_by(worker_id, some)),
    )
    if refusals is not None:
        refusals.update(refused)
    skipped = set(in_flight) - _held(renewed)
    seen = await database.run_heartbeat(STILL_MINE, _held_by(worker_id, skipped)) if skipped else []
    locked = [row for row in seen if row.status == "processing"]
    alive = [*renewed, *locked]
    return Beat(
        alive=_held(alive),
        cancelled=_held(row for row in alive if row.cancel_requested),
        lost=frozenset(skipped) - _held(seen),
        locked=_held(locked),
        completed=_held(row for row in seen if row.status == "completed"),
        silences={(row.id, row.fencing_token): row.silence for row in renewed},
        activities={(row.id, row.fencing_token): row.last_activity_at for row in renewed},
    )


async def heartbeat_alone(database: Database, *, worker_id: str, held: Held) -> bool:
    """Renew one run whose row was locked; return False if this worker no longer owns it."""
    return bool(await database.run(HEARTBEAT_ALONE, _held_by(worker_id, [held])))


async def update_progress(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    stage: str | None,
    progress: float | None,
    message: str | None,
) -> datetime:
    """Store the progress of a run, and return the time of progress in its row; None keeps a value.

    Raises OwnershipLost if nothing was stored, as do ``save_checkpoint`` and ``set_thresholds``.
    """
    values = {"stage": stage, "progress": progress, "message": message, "write": "progress"}
    [row] = await run_owned(database, PROGRESS, by_owner(worker_id, held) | values)
    return cast("datetime", row.progress_at)


async def save_checkpoint(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    checkpoint: str,
    seen: datetime | None = None,
    tries: int = 0,
) -> datetime:
    """Store a checkpoint, given as JSON text; it may take longer after each of ``tries``.

    ``seen`` is the time of progress that the last write of the run has returned, as this one does. If it is not
    that of the row any more, the write is repeated with the row's.
    """
    values = by_owner(worker_id, held) | {"checkpoint": checkpoint, "write": "checkpoint"}
    seconds = database.seconds_for(len(checkpoint), tries=tries)
    return await _run_in_order(database, CHECKPOINT, values, seen, seconds)


async def set_thresholds(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    stale_after: float | None,
    crash_after: float | None,
    seen: datetime | None = None,
) -> datetime:
    """Set the thresholds of silence, in seconds, as in ``RunLimits``, when the job itself asks for it.

    ``seen`` and the value returned are those of ``save_checkpoint``.
    """
    limits = {"stale_after": stale_after, "crash_after": crash_after, "write": "quiet"}
    return await _run_in_order(database, QUIET, by_owner(worker_id, held) | limits, seen)


async def _run_in_order(
    database: Database,
    statement: sa.TextClause,
    values: dict[str, Any],
    seen: datetime | None,
    seconds: float | None = None,
) -> datetime:
    while True:
        [row] = await run_owned(database, statement, values | {"seen": seen}, seconds)
        seen = cast("datetime", row.progress_at)
        if row.is_written:
            return seen


async def set_thresholds_beside(
    database: Database, *, worker_id: str, thresholds: Mapping[Held, Mapping[str, float | None]]
) -> frozenset[Held]:
    """Lengthen shorter thresholds of many runs to these and return the runs that have them now.

    Locked and refused runs are not returned.
    """

    def write(held: Sequence[Held]) -> Awaitable[Sequence[Row]]:
        return database.run(QUIET_BESIDE, _held_by(worker_id, held) | _limits(thresholds, held))

    rows, _ = await in_halves(list(thresholds), write)
    return _held(rows)


async def restore_thresholds(
    database: Database,
    *,
    worker_id: str,
    thresholds: Mapping[Held, Mapping[str, float | None]],
    activities: Mapping[Held, datetime],
) -> frozenset[Held]:
    """Set thresholds of many runs, also to shorter ones, and return the runs that have them now.

    Locked and refused runs are not returned, nor those that have had an activity since that of ``activities``,
    as a heartbeat has returned it.
    """

    def write(held: Sequence[Held]) -> Awaitable[Sequence[Row]]:
        seen = {"activities": [activities[each] for each in held]}
        return database.run(QUIET_OVER, _held_by(worker_id, held) | _limits(thresholds, held) | seen)

    rows, _ = await in_halves(list(thresholds), write)
    return _held(rows)


def _limits(
    thresholds: Mapping[Held, Mapping[str, float | None]], held: Sequence[Held]
) -> dict[str, list[float | None]]:
    return {name: [thresholds[each][name] for each in held] for name in _LIMITS}


async def orphaned_claims(
    database: Database,
    *,
    worker_id: str,
    in_flight: Collection[Held],
    claiming: Iterable[UUID],
    older_than: float,
    past_refused: bool = False,
) -> dict[Held, Orphan]:
    """Return rows that this worker owns without a run: claimed by a statement whose answer was lost.

    Args:
        in_flight: all runs of this worker, including settling ones.
        claiming: ids of claims whose answer is still awaited.
        older_than: the least seconds since the claim: two statement time-outs.
        past_refused: leave out rows that are set aside because their FAIL or RELEASE was refused.
    """
    parameters = _held_by(worker_id, in_flight) | {"claiming": list(claiming), "older_than": older_than}
    statement = ORPHANED_BESIDES if past_refused else ORPHANED
    rows = await database.run_heartbeat(statement, parameters)
    return {(row.id, row.fencing_token): Orphan(row.ended, row.has_key) for row in rows}


def _held_by(worker_id: str, held: Collection[Held]) -> dict[str, Any]:
    return {"worker_id": worker_id, "ids": [each[0] for each in held], "tokens": [each[1] for each in held]}


def _held(rows: Iterable[Row]) -> frozenset[Held]:
    return frozenset((row.id, row.fencing_token) for row in rows)


def by_owner(worker_id: str, held: Held) -> dict[str, Any]:
    """Return the parameters that name a run and its owner."""
    return {"worker_id": worker_id, "id": held[0], "token": held[1]}


async def run_owned(
    database: Database, statement: sa.TextClause, values: dict[str, Any], seconds: float | None = None
) -> Sequence[Row]:
    """Return the rows of a statement about a run ``by_owner``; raise OwnershipLost if there are none."""
    rows = await database.run(statement, values, seconds=seconds)
    if not rows:
        raise OwnershipLost(f"job {values['id']}: token {values['token']} no longer owns it")
    return rows
