"""SET_PRIORITY: a waiting job goes to another lane; and which lanes have jobs."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import TransitionRefused
from jsworker.core.priorities import PRIORITIES
from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import has_other_priority, queued, waits_for_a_run
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.statements import NOW, compiled, condition, entry, filled, given, j, json_object

_TRIES: Final = 3


def _set_priority() -> sa.TextClause:
    """Return SET_PRIORITY: one UPDATE with CASE on the status, as CANCEL is.

    A queued job gets a new dispatch, and so a message in its new lane; the one in the old lane is spent, but
    a worker that gets it first may still claim the job. Its place in the order, ``queued_at``, is kept.
    """
    chosen = sa.select(j.c.id, j.c.priority.label("was")).where(
        j.c.id == sa.bindparam("id"), waits_for_a_run, has_other_priority
    )
    locked = chosen.with_for_update(key_share=True).cte("chosen")
    moved = (
        sa.update(j)
        .values(
            priority=given("priority", sa.SmallInteger),
            dispatch=sa.case((queued, j.c.dispatch + 1), else_=j.c.dispatch),
            needs_publish=queued,
            publish_after=sa.case((queued, NOW), else_=j.c.publish_after),
        )
        .where(j.c.id == locked.c.id, waits_for_a_run, has_other_priority)
        .returning(*j.c["id", "status", "fencing_token", "dispatch", "priority"], locked.c.was)
        .cte("moved")
    )
    detail = json_object(
        priority=_name_of(moved.c.priority), was=_name_of(moved.c.was), dispatch=moved.c.dispatch
    )
    return compiled(
        sa.select(moved.c.id, moved.c.status).add_cte(entry(moved, "priority_set", detail=detail))
    )


def _name_of(number: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.case(*((number == place, name) for place, name in enumerate(PRIORITIES)))


SET_PRIORITY = _set_priority()
STANDING = sa.text("SELECT status, priority FROM jsworker.jobs WHERE id = :id")

# Along an index in which no normal job stands: one look for each kind and priority, whatever waits.
LANES = filled(
    """
SELECT lane.kind, lane.priority
FROM unnest(CAST(:kinds AS text[]), CAST(:priorities AS smallint[])) AS lane(kind, priority) CROSS JOIN LATERAL (
  SELECT j.id FROM jsworker.jobs AS j
  WHERE {queued} AND {in_lane} AND j.kind = lane.kind AND j.priority = lane.priority LIMIT 1
) AS first
""",
    queued=condition(predicates.queued_indexed),
    in_lane=condition(predicates.in_lane_indexed),
)


async def set_priority(database: Database, job_id: UUID, priority: int) -> str:
    """Give a waiting job another priority and return its status; TransitionRefused says why it cannot be."""
    values = {"id": job_id, "priority": priority}
    for _ in range(_TRIES):  # it may be released, say, between the two statements
        try:
            if moved := await database.run(SET_PRIORITY, values):
                return str(moved[0].status)
        except RowRefused as error:
            raise TransitionRefused(f"the priority of job {job_id} cannot be set: {error}") from None
        found = await database.run(STANDING, {"id": job_id})
        if not found:
            raise TransitionRefused(f"job {job_id} does not exist")
        status = str(found[0].status)
        if status not in {"queued", "scheduled"}:
            raise TransitionRefused(f"job {job_id} is {status}; only a waiting job's priority can be set")
        if found[0].priority == priority:
            return status
    raise TransitionRefused(f"job {job_id} goes in and out of the queue too fast; try again")


async def lanes_with_jobs(database: Database, lanes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return those kinds and priorities, other than normal, of which a job is queued."""
    kinds, priorities = [kind for kind, _ in lanes], [priority for _, priority in lanes]
    rows = await database.run_along_index(LANES, {"kinds": kinds, "priorities": priorities})
    return [(row.kind, row.priority) for row in rows]
