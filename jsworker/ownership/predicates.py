"""The guards of the ownership protocol, each written once, over the row ``j`` that a statement is about.

A guard whose name ends in ``_indexed`` means the same as the one without, in the words of a partial index:
only a search may use it, because a statement that names its rows must reach them by their ids.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import sqlalchemy as sa

from jsworker.core.priorities import NORMAL
from jsworker.ownership.schema import batches, jobs, limits, refused_rows, workflows
from jsworker.ownership.statements import AT_START, NOW, given, given_seconds, j, locked, seconds

Predicate = sa.ColumnElement[bool]

worker_id: Final[sa.ColumnElement[Any]] = sa.bindparam("worker_id")

# The states.
scheduled: Final = j.c.status == "scheduled"
queued: Final = j.c.status == "queued"
processing: Final = j.c.status == "processing"
completed: Final = j.c.status == "completed"
failed: Final = j.c.status == "failed"
cancelled: Final = j.c.status == "cancelled"
live: Final = j.c.status.in_(("scheduled", "queued", "processing"))
ended: Final = j.c.status.in_(("completed", "failed", "cancelled"))

waiting: Final = j.c.status.in_(("scheduled", "queued"))

scheduled_indexed: Final = j.c.status + "" == "scheduled"
queued_indexed: Final = j.c.status + "" == "queued"
processing_indexed: Final = j.c.status + "" == "processing"
ended_indexed: Final = (j.c.status + "").not_in(("scheduled", "queued", "processing"))
waiting_indexed: Final = (j.c.status + "").in_(("scheduled", "queued"))
needs_publish_indexed: Final = sa.cast(j.c.needs_publish, sa.Integer) == 1

# Scheduled for an event, not for a time: no message is expected, and no clock makes it due.
held: Final = sa.and_(scheduled, j.c.held_by.is_not(None))


waits_for_a_time: Final = sa.and_(scheduled, j.c.held_by.is_(None))


def held_by(*why: str) -> Predicate:
    """Return that a job waits for one of these events: ``limit``, ``rate``, ``paused``, ``needs``."""
    return sa.and_(scheduled, j.c.held_by == why[0] if len(why) == 1 else j.c.held_by.in_(why))


# A job with a key is claimed only through admission, even by workers that know no limit for it.
has_no_limit_key: Final = j.c.limit_key.is_(None)

pause_holds: Final = sa.and_(
    limits.c.paused_at.is_not(None), sa.or_(limits.c.paused_until.is_(None), limits.c.paused_until > NOW)
)
_of_its_kind_and_key: Final = sa.and_(
    limits.c.kind == j.c.kind, limits.c.key.in_(("", sa.func.coalesce(j.c.limit_key, "")))
)
not_paused: Final = ~sa.select(limits.c.key).where(_of_its_kind_and_key, pause_holds).exists()
"""Neither its key nor its kind is paused. Takes no locks: a pause that is being committed may be missed."""

# The owner's fence.
held_by_me: Final = sa.and_(processing, j.c.worker_id == worker_id)
held_by_me_indexed: Final = sa.and_(processing_indexed, j.c.worker_id == worker_id)


def mine(token: sa.ColumnElement[Any]) -> Predicate:
    """Return that this worker owns the job under a fencing token: the whole guard of every write of an owner."""
    return sa.and_(held_by_me, j.c.fencing_token == token)


def locked_of_mine(run: sa.FromClause, *columns: sa.ColumnElement[Any]) -> sa.CTE:
    """Return the jobs of given runs that this worker owns, locked, with the given columns of each."""
    return locked(sa.select(j.c.id, *columns).join(run, run.c.id == j.c.id).where(mine(run.c.token)))


def completed_under(token: sa.ColumnElement[Any]) -> Predicate:
    """Return that this worker's run with this token has completed the job.

    A failover that loses a claim lets another worker get the same token.
    """
    return sa.and_(completed, j.c.fencing_token == token, j.c.completed_by == worker_id)


of_kind: Final = j.c.kind == sa.bindparam("kind")

# The lanes.
normal: Final = j.c.priority == NORMAL
in_lane_indexed: Final = j.c.priority != NORMAL
has_other_priority: Final = j.c.priority != given("priority", sa.SmallInteger)
of_lane_indexed: Final = sa.and_(in_lane_indexed, j.c.priority == given("priority", sa.SmallInteger))


def published_at_dispatch(dispatch: sa.ColumnElement[Any]) -> Predicate:
    """Return that the message of this dispatch, not of a newer one, is not yet marked as published."""
    return sa.and_(queued, j.c.needs_publish, j.c.dispatch == dispatch)


def lost_at_dispatch(dispatch: sa.ColumnElement[Any]) -> Predicate:
    """Return that a job still waits for this dispatch's message, which was published and is proven lost."""
    return sa.and_(queued, ~j.c.needs_publish, j.c.dispatch == dispatch)


# Expiry. A job that was ever claimed does not expire, even if it comes back to the queue.
never_claimed: Final = j.c.fencing_token == 0
is_over: Final = j.c.expires_at <= NOW
may_begin: Final = sa.or_(j.c.expires_at.is_(None), j.c.fencing_token > 0, j.c.expires_at > NOW)

# A waiting key allows one job to wait while another one runs: a job that would come back to the queue while
# another one waits is superseded. This is decided by the snapshot; if another job was committed since, or an
# expired job still holds the key, the index jobs_unique_waiting refuses the row.
o: Final = jobs.alias("o")
same_waiting_key: Final = sa.and_(o.c.kind == j.c.kind, o.c.waiting_key == j.c.waiting_key)
_another_runs: Final = sa.select(o.c.id).where(same_waiting_key, o.c.status == "processing").exists()
_other_may_begin: Final = sa.or_(o.c.expires_at.is_(None), o.c.fencing_token > 0, o.c.expires_at > NOW)
_another_waits: Final = (
    sa.select(o.c.id)
    .where(same_waiting_key, o.c.status.in_(("scheduled", "queued")), _other_may_begin)
    .exists()
)
none_of_its_key_runs: Final = sa.or_(j.c.waiting_key.is_(None), ~_another_runs)
may_be_claimed: Final = sa.and_(queued, may_begin, none_of_its_key_runs)
is_superseded: Final = sa.and_(j.c.waiting_key.is_not(None), _another_waits)

# Guards of a reset: the row is as the sweeper has seen it, and is still late.
may_stall_once: Final = sa.and_(j.c.stalls == 0, j.c.max_stalls >= 2, ~j.c.cancel_requested)


def _in_seconds(value: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.func.date_part("epoch", value, type_=sa.Double)


# Sums are made of seconds: of a short table PostgreSQL may compute them for rows that were not given, too, and one
# whose sum no time can hold would refuse all of them.
_active: Final = _in_seconds(j.c.last_activity_at)
is_stale: Final = _active + _in_seconds(j.c.stale_after) < _in_seconds(NOW)
is_crashed: Final = _active + _in_seconds(j.c.crash_after) < _in_seconds(NOW)


def as_seen(seen: sa.FromClause) -> Predicate:
    """Return that a running job has the fencing token and the last activity with which it was seen."""
    return sa.and_(processing, j.c.fencing_token == seen.c.token, j.c.last_activity_at == seen.c.activity)


def stale_and_seen(seen: sa.FromClause) -> Predicate:
    """Return the guard of rule 1."""
    return sa.and_(as_seen(seen), is_stale)


def crashed_and_seen(seen: sa.FromClause) -> Predicate:
    """Return the guard of rule 3."""
    return sa.and_(as_seen(seen), is_crashed)


# Rule 2: every job that a dead owner holds.
of_dead_owner: Final = sa.and_(processing, j.c.worker_id == sa.bindparam("owner"))

progressed_at: Final = sa.func.greatest(j.c.claimed_at, j.c.progress_at)
"""When a running job last progressed. Progress of an earlier run is older than this run's claim."""


# Later than before even if the clock was set back, because a time that returned would let a late write pass.
next_progress: Final = sa.func.greatest(NOW, j.c.progress_at + sa.literal_column("interval '1 microsecond'"))
progress_as_seen: Final = j.c.progress_at.is_not_distinct_from(given("seen", sa.DateTime(timezone=True)))


def _is_older(instant: sa.ColumnElement[Any], parameter: str) -> Predicate:
    age = given(parameter, sa.Double)
    return sa.or_(age.is_(None), instant < NOW - seconds(age))


is_silent: Final = _is_older(j.c.last_activity_at, "stale_for")
has_run: Final = _is_older(j.c.claimed_at, "running_for")
stands_still: Final = _is_older(progressed_at, "no_progress_for")

# Rule 4, and listings: running jobs as an operator has chosen them, with the parameters of ``RunAge.values``.
as_old_as_chosen: Final = sa.and_(is_silent, has_run, stands_still)

_LONGEST_SECONDS: Final = 1e9
"""Longer than any run, and PostgreSQL can still subtract it from the present time."""


@dataclass(frozen=True, slots=True)
class RunAge:
    """Selects running jobs: those that meet every condition that is not None, by the database's clock.

    Attributes:
        stale_for: seconds, at least, without a heartbeat of its owner.
        running_for: seconds, at least, since its claim.
        no_progress_for: seconds, at least, since claim, ``update_progress``, ``save_checkpoint``, ``quiet``.

    Raises:
        ValueError: a value is not a finite number of seconds, 0 or more.
    """

    stale_for: float | None = None
    running_for: float | None = None
    no_progress_for: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r} must be a number of seconds, 0 or more")

    def __bool__(self) -> bool:
        return self != ANY_AGE

    def values(self) -> dict[str, float | None]:
        """Return the parameters of ``as_old_as_chosen``."""
        return {
            name: None if seconds is None else min(seconds, _LONGEST_SECONDS)
            for name, seconds in asdict(self).items()
        }


ANY_AGE: Final = RunAge()
"""Selects every job, running or not."""


last_attempt: Final = j.c.errors + 1 >= j.c.max_attempts
last_stall: Final = j.c.stalls + 1 >= j.c.max_stalls


claimed_before: Final = j.c.claimed_at < NOW - given_seconds("older_than")
queued_before: Final = j.c.queued_at < AT_START - given_seconds("older_than")


# Rows that PostgreSQL refused to write. A mark is valid only while status, fencing token and dispatch of the
# row are those at the refusal.
r: Final = refused_rows.alias("r")
as_refused: Final = sa.and_(
    r.c.status == j.c.status, r.c.fencing_token == j.c.fencing_token, r.c.dispatch == j.c.dispatch
)


def refused(*attempted: str) -> Predicate:
    """Return that PostgreSQL has refused one of these transitions to the row as it is."""
    return _marked(r.c.attempted.in_(attempted))


def set_aside(*attempted: str) -> Predicate:
    """Return that the row is left alone for now, because one of these transitions was refused."""
    return _marked(r.c.attempted.in_(attempted), r.c.retry_at > AT_START)


def _marked(*which: Predicate) -> Predicate:
    return sa.select(r.c.job_id).where(r.c.job_id == j.c.id, *which, as_refused).exists()


# Batches and workflows. What depends on the rows of jobs is decided before the batch is locked. Its
# generation shows whether it was changed since: adding members and opening the batch again increment it. A
# workflow's revision is incremented when batches of it are opened again, and when it is cancelled.
b: Final = batches.alias("b")
w: Final = workflows.alias("w")
sealed: Final = b.c.sealed
unfinished: Final = b.c.finished_at.is_(None)
finished: Final = b.c.finished_at.is_not(None)
not_propagated: Final = ~b.c.propagated
workflow_open: Final = w.c.finished_at.is_(None)
not_cancelled: Final = w.c.cancelled_at.is_(None)
without_batch: Final = j.c.batch_id.is_(None)
cancelled_for_needs: Final = sa.and_(cancelled, j.c.failure_reason == "needs")
# A job cancelled for its needs is not retried itself: it waits again when one of its needs runs again.
may_be_retried: Final = sa.or_(
    failed, sa.and_(cancelled, j.c.failure_reason.is_distinct_from(sa.literal("needs")))
)


def at_generation(seen: sa.ColumnElement[Any]) -> Predicate:
    """Return that no member of a batch was added or run again since the batch was read."""
    return b.c.generation == seen


def at_revision(seen: sa.ColumnElement[Any]) -> Predicate:
    """Return that a workflow was not cancelled, and no batch of it opened again, since it was read."""
    return w.c.revision == seen
