"""Brings back instants that lie ahead, because the database's clock was ahead and has been corrected.

Until the clock is there again, the jobs of a dead owner would never be late, a message would not be published,
the idle poll would not find its job, a rate would give no token, a pause of seconds would not end, a refused row
would not be tried again, and a worker that is gone would be listed as alive. ``run_at`` may lie ahead, and stays.
"""

from collections.abc import Awaitable, Collection, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.statements import AT_START, compiled, given, given_array, j
from jsworker.ownership.transitions.limits import BOUND_RATES

_BATCH: Final = 500
_FURTHEST: Final = timedelta(minutes=1)
"""A client may ask relays to leave a message to it for some seconds; apart from this, nothing lies ahead."""


def _is_ahead(instant: sa.ColumnElement[Any]) -> predicates.Predicate:
    return instant > AT_START + _FURTHEST


def _first(instant: sa.ColumnElement[Any], *where: predicates.Predicate) -> sa.Select[Any]:
    rows = sa.select(j.c.id).where(*where, _is_ahead(instant)).order_by(instant).limit(_BATCH)
    return sa.select(rows.subquery().c.id)


_of_kinds = j.c.kind == sa.any_(given("kinds", sa.ARRAY(sa.Text)))
AHEAD = compiled(
    sa.union(
        _first(j.c.last_activity_at, predicates.processing_indexed),
        _first(j.c.publish_after, predicates.needs_publish_indexed),
        _first(j.c.queued_at, predicates.queued_indexed, _of_kinds),
    )
)

# For a run this is a heartbeat in its owner's name, after the last one that the owner sent. Rules 1 and 3 count
# from here, so a live owner has its whole threshold to send the next one.
_named = sa.select(j.c.id).where(j.c.id == sa.any_(given_array("ids", sa.Uuid)), predicates.live)
_found = statements.locked(_named)
BRING_BACK = compiled(
    sa.update(j)
    .values(
        {
            instant: sa.case((_is_ahead(instant), AT_START), else_=instant)
            for instant in j.c["last_activity_at", "publish_after", "queued_at"]
        }
    )
    .where(j.c.id == _found.c.id, predicates.live)
    .returning(j.c.id)
)

# By the length that was asked for, from now on.
BRING_BACK_PAUSES = sa.text(f"""
UPDATE jsworker.limits AS l
SET paused_at = statement_timestamp(), paused_until = statement_timestamp() + (l.paused_until - l.paused_at)
FROM (
  SELECT kind, key FROM jsworker.limits
  WHERE isfinite(paused_at) AND coalesce(isfinite(paused_until) AND paused_until > paused_at, true)
    AND paused_at > statement_timestamp() + interval '{_FURTHEST.total_seconds():g} s'
  ORDER BY kind, key FOR NO KEY UPDATE SKIP LOCKED) AS ahead
WHERE l.kind = ahead.kind AND l.key = ahead.key
""")  # noqa: S608 -- a constant of this file
BRING_BACK_WORKERS = sa.text(f"""
UPDATE jsworker.workers AS w
SET last_seen_at = least(w.last_seen_at, statement_timestamp()), started_at = least(w.started_at, statement_timestamp())
FROM (
  SELECT id FROM jsworker.workers
  WHERE greatest(last_seen_at, started_at) > statement_timestamp() + interval '{_FURTHEST.total_seconds():g} s'
  ORDER BY id FOR NO KEY UPDATE SKIP LOCKED) AS ahead
WHERE w.id = ahead.id
""")  # noqa: S608 -- a constant of this file
# The pause until the next try, too, is as long as it was, from now on.
BRING_BACK_REFUSED = sa.text(f"""
UPDATE jsworker.refused_rows AS r
SET first_at = least(r.first_at, statement_timestamp()), last_at = statement_timestamp(),
  retry_at = statement_timestamp() + (r.retry_at - r.last_at)
FROM (
  SELECT job_id, attempted FROM jsworker.refused_rows
  WHERE isfinite(last_at) AND isfinite(retry_at) AND retry_at > last_at
    AND last_at > statement_timestamp() + interval '{_FURTHEST.total_seconds():g} s'
  ORDER BY job_id, attempted FOR NO KEY UPDATE SKIP LOCKED) AS ahead
WHERE r.job_id = ahead.job_id AND r.attempted = ahead.attempted
""")  # noqa: S608 -- a constant of this file


async def bring_back(database: Database, *, kinds: Collection[str]) -> int:
    """Set instants of jobs that lie more than a minute ahead to the present, and return the number of jobs.

    Of ``queued_at`` only those of these kinds. Rows that are locked or refused are left for the next call.
    """

    def write(batch: Sequence[UUID]) -> Awaitable[Sequence[Row]]:
        return database.run(BRING_BACK, {"ids": list(batch)})

    jobs = 0
    while True:
        found = [row.id for row in await database.run(AHEAD, {"kinds": list(kinds)})]
        rows, _ = await in_halves(found, write, size=_BATCH)
        jobs += len(rows)
        if len(rows) < _BATCH:
            return jobs


OTHERS: Final = {
    "workers": (BRING_BACK_WORKERS,),
    "limits": (BOUND_RATES, BRING_BACK_PAUSES),
    "refused rows": (BRING_BACK_REFUSED,),
}
"""What brings back instants of other rows than jobs, by what these are."""


async def bring_back_others(database: Database, what: str) -> None:
    """Bring back instants that lie ahead, in a statement each."""
    for statement in OTHERS[what]:
        await database.run(statement)
