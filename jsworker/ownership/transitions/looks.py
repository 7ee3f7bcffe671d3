"""What there is to do: one statement in each relay tick and one in each scan tell which sweeps find anything.

A sweep that finds nothing costs PostgreSQL as much as this look; with it, the sweeps of features that are not
used do not run. Each search reads one entry of the sweep's own index, in the order of the index: without that
order the planner would read the table, because it expects the first match soon.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.schema import batches, limits, workflows
from jsworker.ownership.statements import AT_START, compiled, given, given_seconds, j
from jsworker.ownership.transitions.admission import waits_for_admission_indexed

_EVER: Final = 100 * 366 * 86400.0


def _any(what: str, *where: sa.ColumnElement[bool], along: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    first = sa.select(sa.literal(1)).where(*where).order_by(along).limit(1).scalar_subquery()
    return first.is_not(None).label(what)


def _due(since: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    return sa.and_(since <= AT_START, since > AT_START - given_seconds("within"))


_due_now: Final = sa.select(
    _any("to_promote", predicates.scheduled_indexed, _due(j.c.run_at), along=j.c.run_at),
    _any("to_publish", predicates.needs_publish_indexed, _due(j.c.publish_after), along=j.c.publish_after),
).subquery("due")
_of_my_kinds: Final = sa.and_(limits.c.kind == sa.any_(given("kinds", sa.ARRAY(sa.Text))), limits.c.key == "")
# For the relay; the same statement reads what a worker must know about the limits of its kinds.
DUE = compiled(
    sa.select(
        _due_now.c.to_promote,
        _due_now.c.to_publish,
        limits.c.kind,
        sa.or_(limits.c.max_running.is_not(None), limits.c.rate.is_not(None)),
        predicates.pause_holds,
    ).select_from(_due_now.outerjoin(limits, _of_my_kinds))
)

# For the sweeps of a scan. Of workflows any open one counts: finding those left unfinished takes longer.
LEFT_TO_DO = compiled(
    sa.select(
        _any("held", waits_for_admission_indexed, along=j.c.kind),
        _any(
            "expired",
            predicates.waiting_indexed,
            predicates.never_claimed,
            j.c.expires_at <= AT_START,
            along=j.c.expires_at,
        ),
        _any("in_lanes", predicates.queued_indexed, predicates.in_lane_indexed, along=j.c.kind),
        sa.or_(
            _any("", workflows.c.finished_at.is_(None), along=workflows.c.id).element,
            _any("", batches.c.finished_at.is_(None), along=batches.c.id).element,
            _any("", batches.c.finished_at.is_not(None), ~batches.c.propagated, along=batches.c.id).element,
        ).label("in_workflows"),
    )
)


class KindLimits(NamedTuple):
    """What a worker must know about the limits of one of its kinds."""

    is_limited: bool
    is_paused: bool


class TickFindings(NamedTuple):
    """Whether any job is due to be promoted or published; and the limits, only of kinds that have a row."""

    to_promote: bool
    to_publish: bool
    limits: Mapping[str, KindLimits]


class LeftToDo(NamedTuple):
    """Which sweeps have work: jobs held for admission, expired, or queued in lanes.

    ``in_workflows``: a workflow or a batch is open, or a finished batch is not propagated.
    """

    held: bool
    expired: bool
    in_lanes: bool
    in_workflows: bool


async def due(database: Database, kinds: Collection[str], *, within: float | None = None) -> TickFindings:
    """Look for jobs that became due in the last ``within`` seconds (None: ever); read the limits of kinds."""
    values = {"kinds": list(kinds), "within": _EVER if within is None else within}
    rows = await database.run_by_key(DUE, values)
    to_promote, to_publish = rows[0][:2]
    return TickFindings(
        to_promote, to_publish, {kind: KindLimits(*known) for _, _, kind, *known in rows if kind}
    )


async def left_to_do(database: Database) -> LeftToDo:
    """Return which of the sweeps of a scan have anything to do."""
    [row] = await database.run_by_key(LEFT_TO_DO, {})
    return LeftToDo(*row)
