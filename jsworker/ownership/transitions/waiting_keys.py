"""DEFER and WAKE: one job of a key runs and one waits; the waiting one is due when the running one has ended.

A worker whose claim is refused defers the job: it leaves the queue for a while, so that nothing looks for it
there. The end of the running job wakes the waiting one, at its old place in the queue; if it does not,
PROMOTE queues the job.
"""

from collections.abc import Collection
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import o
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.statements import NOW, compiled, entry, given_array, j, json_object
from jsworker.ownership.transitions.publish import AT_ITS_PLACE, QUEUED_AGAIN

LOOKS_AGAIN_SECONDS: Final = 10.0

_ids: Final = given_array("ids", sa.Uuid)


def _defer() -> sa.TextClause:
    behind = (o.c.id.label("runs"), j.c.behind.label("before"))
    found = sa.select(j.c.id, *behind).select_from(j.join(o, predicates.same_waiting_key))
    row = statements.locked(
        found.where(j.c.id == sa.any_(_ids), predicates.queued, o.c.status == "processing"), "waits"
    )
    deferred = (
        sa.update(j)
        .values(
            status="scheduled",
            run_at=NOW + statements.seconds(sa.literal(LOOKS_AGAIN_SECONDS)),
            needs_publish=False,
            behind=row.c.runs,
        )
        .where(j.c.id == row.c.id, predicates.queued)
        .returning(*j.c["id", "fencing_token", "behind"], row.c.before)
        .cte("deferred")
    )
    is_new = deferred.c.before.is_distinct_from(deferred.c.behind)
    logged = entry(deferred, "deferred", when=is_new, detail=json_object(behind=deferred.c.behind))
    return compiled(sa.select(deferred.c.id).add_cte(logged))


def _wake() -> sa.TextClause:
    found = sa.select(j.c.id).select_from(j.join(o, predicates.same_waiting_key))
    row = statements.locked(
        found.where(o.c.id == sa.any_(_ids), predicates.waits_for_a_time, j.c.behind == o.c.id), "waits"
    )
    return compiled(
        sa.update(j)
        .values(**QUEUED_AGAIN | AT_ITS_PLACE, behind=sa.null())
        .where(j.c.id == row.c.id, predicates.waits_for_a_time)
        .returning(j.c.id)
    )


DEFER: Final = _defer()
WAKE: Final = _wake()


async def defer(database: Database, ids: Collection[UUID]) -> set[UUID]:
    """Take queued jobs out of the queue while others of their keys run, and return the deferred jobs.

    For a job that is not returned, the running job has ended meanwhile, or the row is locked or refused.
    """
    return await _written(database, DEFER, ids)


async def wake(database: Database, ended: Collection[UUID]) -> int:
    """Queue the jobs that wait behind jobs that have ended, and return how many there were."""
    return len(await _written(database, WAKE, ended))


async def _written(database: Database, statement: sa.TextClause, ids: Collection[UUID]) -> set[UUID]:
    rows, _ = await in_halves(list(ids), lambda some: database.run(statement, {"ids": uuid_array(some)}))
    return {row.id for row in rows}
