"""The four rules of RESET, each beside the one ladder that says where a job goes that is taken back.

Each rule repeats what it was decided on, so that an owner that was faster keeps its job.
"""

from typing import Any, Final

import sqlalchemy as sa

from jsworker.ownership.predicates import (
    as_old_as_chosen,
    crashed_and_seen,
    of_dead_owner,
    processing,
    stale_and_seen,
)
from jsworker.ownership.schema import untold_resets
from jsworker.ownership.statements import (
    NO_OWNER,
    NOW,
    compiled,
    entry,
    given,
    given_array,
    given_runs,
    j,
    json_object,
    stall_back_off,
)

_OF_A_RESET: Final = ("kind", "status", "fencing_token", "dispatch", "owner", "stalls")


def _reset(
    cause: str, rows: sa.Select[Any], *, counted: sa.ColumnElement[bool], is_reported: bool = True
) -> sa.TextClause:
    """Return the statement that takes back the rows of one rule, each ``counted`` against ``max_stalls`` or not.

    What the caller does not report is left in ``untold_resets`` to a worker, for an operator's process has no events
    and shows no figures.
    """
    taken = (
        rows.add_columns(
            j.c.id,
            j.c.worker_id.label("owner"),
            j.c.cancel_requested,
            j.c.stalls,
            j.c.max_stalls,
            counted.label("counted"),
        )
        .order_by(j.c.id)
        .with_for_update(key_share=True, of=j, skip_locked=True)
        .cte("taken")
    )
    next_status = sa.case(
        (taken.c.cancel_requested, "cancelled"),
        (sa.and_(taken.c.counted, taken.c.stalls + 1 >= taken.c.max_stalls), "failed"),
        (sa.or_(~taken.c.counted, taken.c.stalls == 0), "queued"),
        else_="scheduled",
    )
    decided = sa.select(taken.c.id, taken.c.owner, taken.c.counted, next_status.label("next")).cte("decided")
    queued, again = decided.c.next == "queued", decided.c.next == "scheduled"
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
            run_at=sa.case((again, NOW + stall_back_off(j.c.stalls)), else_=j.c.run_at),
            finished_at=sa.case((decided.c.next.in_(("cancelled", "failed")), NOW)),
            failure_reason=sa.case((decided.c.next == "failed", "stalled")),
            cleared=sa.or_(queued, again),
            clear_reason=sa.bindparam("reason"),
            **NO_OWNER,
        )
        .where(j.c.id == decided.c.id, processing)
        .returning(
            j.c.id,
            j.c.kind,
            j.c.status,
            j.c.fencing_token,
            j.c.dispatch,
            decided.c.owner,
            decided.c.counted,
            j.c.stalls,
        )
        .cte("reset")
    )
    logged = entry(
        reset,
        "reset",
        worker_id=given("worker_id", sa.Text),
        detail=json_object(
            cause=cause,
            reason=given("reason", sa.Text),
            owner=reset.c.owner,
            to=reset.c.status,
            counted=reset.c.counted,
            stalls=reset.c.stalls,
            dispatch=reset.c.dispatch,
        ),
    )
    answer = sa.select(*reset.c).add_cte(logged)
    if not is_reported:
        columns = ["job_id", *_OF_A_RESET]
        values = sa.select(reset.c.id, *(reset.c[name] for name in _OF_A_RESET))
        answer = answer.add_cte(sa.insert(untold_resets).from_select(columns, values).cte("unreported"))
    return compiled(answer)


def _rows(seen: sa.TableValuedAlias | None, *guard: sa.ColumnElement[bool]) -> sa.Select[Any]:
    joined = j if seen is None else j.join(seen, seen.c.id == j.c.id)
    return sa.select().select_from(joined).where(*guard)


_suspect = given_runs(
    "seen",
    activity=given_array("activities", sa.DateTime(timezone=True)),
    in_line=given_array("in_line", sa.Boolean),
)
_is_counted = sa.and_(given("counted", sa.Boolean), ~_suspect.c.in_line)

# Rule 1. The row as it was seen, and stale still.
RESET_STALE = _reset("stale", _rows(_suspect, stale_and_seen(_suspect)), counted=_is_counted)

# Rule 2. The owner's id never lives again, so whatever it owns has no owner left, at every token.
_ids, _culprits = given_array("ids", sa.Uuid), given_array("culprits", sa.Uuid)
_is_named = sa.or_(_ids.is_(None), j.c.id == sa.any_(_ids))
RESET_DEAD = _reset(
    "dead",
    _rows(None, of_dead_owner, _is_named).limit(sa.bindparam("limit", type_=sa.Integer)),
    counted=sa.case(
        (sa.func.cardinality(_culprits) > 0, j.c.id == sa.any_(_culprits)),
        else_=sa.and_(given("counted", sa.Boolean), j.c.id != sa.all_(given_array("in_line", sa.Uuid))),
    ),
)

# Rule 3. The row as it was seen, and silent beyond the crash threshold still.
RESET_CRASHED = _reset("crashed", _rows(_suspect, crashed_and_seen(_suspect)), counted=_is_counted)

# Rule 4. The row as it was seen, and still as old as it was chosen for. Uncounted: the job did nothing wrong.
_chosen = given_runs("seen")
RESET_BY_OPERATOR = _reset(
    "operator",
    _rows(_chosen, processing, j.c.fencing_token == _chosen.c.token, as_old_as_chosen),
    counted=sa.false(),
    is_reported=False,
)

# One worker deletes each, and reports it: one that dies right then leaves it unreported, none reports it twice.
_u = untold_resets.alias("u")
_oldest = (
    sa.select(_u.c.id)
    .order_by(_u.c.id)
    .limit(sa.bindparam("limit", type_=sa.Integer))
    .with_for_update(skip_locked=True)
)
_t = untold_resets.c
TAKE_UNREPORTED = compiled(
    sa.delete(untold_resets)
    .where(_t.id == sa.any_(sa.func.array(_oldest.scalar_subquery())))
    .returning(
        *(_t.job_id.label("id"), _t.kind, _t.status, _t.fencing_token, _t.dispatch, _t.owner),
        *(sa.false().label("counted"), _t.stalls),
    )
)

OWNED = compiled(sa.select(j.c.id).where(of_dead_owner).order_by(j.c.id))
