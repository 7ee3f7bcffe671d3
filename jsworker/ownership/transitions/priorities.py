"""SET_PRIORITY: a waiting job moves to another lane; and the search for lanes that have jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import TransitionRefused
from jsworker.core.priorities import PRIORITIES
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import has_other_priority, queued, waiting
from jsworker.ownership.refusals import write_unlocked
from jsworker.ownership.statements import NOW, compiled, condition, filled, given, given_array, j, json_object
from jsworker.ownership.transitions.audit import AuditEntry, run_noted

_WAITING: Final = ("queued", "scheduled")
_AT_ONCE: Final = 500


def _set_priority() -> sa.TextClause:
    """Return SET_PRIORITY: one UPDATE with CASE on the status, like CANCEL.

    A queued job gets a new dispatch, and so a message in its new lane; the message in the old lane is
    outdated, but a worker that gets it first may still claim the job. The job's place in the order,
    ``queued_at``, is kept.
    """
    chosen = sa.select(j.c.id, j.c.priority.label("was")).where(
        j.c.id == sa.any_(given_array("ids", sa.Uuid)), waiting, has_other_priority
    )
    locked = statements.locked(chosen, "chosen")
    moved = (
        sa.update(j)
        .values(
            priority=given("priority", sa.SmallInteger),
            dispatch=sa.case((queued, j.c.dispatch + 1), else_=j.c.dispatch),
            needs_publish=queued,
            publish_after=sa.case((queued, NOW), else_=j.c.publish_after),
        )
        .where(j.c.id == locked.c.id, waiting, has_other_priority)
        .returning(*j.c["id", "status", "fencing_token", "dispatch", "priority"], locked.c.was)
        .cte("moved")
    )
    detail = json_object(
        priority=_name_of(moved.c.priority), was=_name_of(moved.c.was), dispatch=moved.c.dispatch
    )
    return compiled(
        sa.select(moved.c.id, moved.c.status).add_cte(statements.entry(moved, "priority_set", detail=detail))
    )


def _name_of(number: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.case(*((number == place, name) for place, name in enumerate(PRIORITIES)))


SET_PRIORITY = _set_priority()
STANDING = sa.text("SELECT id, status, priority FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))")

# Along an index without jobs of normal priority: one look for each kind and priority, however many jobs wait.
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


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of a change of jobs; those that already were as asked for are in neither.

    Attributes:
        changed: jobs that were changed.
        refused: jobs that could not be changed, each with the reason.
        requested: how many of the changed ones run on: their owners were only asked to stop.
    """

    changed: list[UUID]
    refused: dict[UUID, str]
    requested: int = 0

    def check(self) -> None:
        """Raise TransitionRefused with the reason if a job was refused."""
        for why in self.refused.values():
            raise TransitionRefused(why)


async def set_priorities(
    database: Database, ids: Sequence[UUID], priority: int, *, entry: AuditEntry | None = None
) -> Changed:
    """Give waiting jobs another priority; others are refused."""

    async def write(some: Sequence[UUID]) -> Sequence[Row]:
        values = {"ids": uuid_array(some), "priority": priority}
        return await run_noted(database, SET_PRIORITY, values, entry)

    async def look(some: Sequence[UUID]) -> Sequence[Row]:
        return await database.run(STANDING, {"ids": uuid_array(some)})

    def is_meant(row: Row) -> bool:
        return row.status in _WAITING and row.priority != priority

    rows, bad, left = await write_unlocked(ids, write, look, is_meant, size=_AT_ONCE)
    changed = [row.id for row in rows]
    refused = {each: f"the priority of job {each} cannot be set: {error}" for each, error in bad}
    known = {*changed, *refused, *left}
    refused |= {each: f"job {each} does not exist" for each in ids if each not in known}
    rule = "only a waiting job's priority can be set"
    refused |= {
        each: f"job {each} is {row.status}; {rule}"
        for each, row in left.items()
        if row.status not in _WAITING
    }
    return Changed(changed, refused)


async def lanes_with_jobs(database: Database, lanes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return those of the given kinds and priorities, none of them normal, of which a job is queued."""
    kinds, priorities = [kind for kind, _ in lanes], [priority for _, priority in lanes]
    rows = await database.run_along_index(LANES, {"kinds": kinds, "priorities": priorities})
    return [(row.kind, row.priority) for row in rows]
