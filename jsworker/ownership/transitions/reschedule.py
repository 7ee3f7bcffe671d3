"""RESCHEDULE: a job that waits for a time gets another time."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.ownership import statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import waits_for_a_time
from jsworker.ownership.refusals import write_unlocked
from jsworker.ownership.statements import compiled, given, given_array, j, json_object
from jsworker.ownership.transitions.audit import AuditEntry, run_noted
from jsworker.ownership.transitions.priorities import Changed

_AT_ONCE: Final = 500


def _reschedule() -> sa.TextClause:
    """Return RESCHEDULE, for a job that waits for a delay or a back-off; PROMOTE compares the new time.

    A job that was deferred behind another job of its key no longer waits for the end of that job.
    """
    chosen = sa.select(j.c.id, j.c.run_at.label("was")).where(
        j.c.id == sa.any_(given_array("ids", sa.Uuid)), waits_for_a_time
    )
    locked = statements.locked(chosen, "chosen")
    moved = (
        sa.update(j)
        .values(run_at=given("run_at", sa.DateTime(timezone=True)), behind=sa.null())
        .where(j.c.id == locked.c.id, waits_for_a_time)
        .returning(*j.c["id", "fencing_token", "run_at"], locked.c.was)
        .cte("moved")
    )
    detail = json_object(run_at=moved.c.run_at, was=moved.c.was)
    return compiled(sa.select(moved.c.id).add_cte(statements.entry(moved, "rescheduled", detail=detail)))


RESCHEDULE = _reschedule()
WAITS = sa.text("SELECT id, status, held_by FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))")


async def reschedule_all(
    database: Database, ids: Sequence[UUID], run_at: datetime, *, entry: AuditEntry | None = None
) -> Changed:
    """Let jobs that wait for a time wait for ``run_at``, which may have passed; other jobs are refused."""

    async def write(some: Sequence[UUID]) -> Sequence[Row]:
        values = {"ids": uuid_array(some), "run_at": run_at}
        return await run_noted(database, RESCHEDULE, values, entry)

    async def look(some: Sequence[UUID]) -> Sequence[Row]:
        return await database.run(WAITS, {"ids": uuid_array(some)})

    def is_meant(row: Row) -> bool:
        return row.status == "scheduled" and row.held_by is None

    wanted = list(dict.fromkeys(ids))
    rows, bad, left = await write_unlocked(wanted, write, look, is_meant, size=_AT_ONCE)
    done = {row.id for row in rows}
    refused = {each: f"job {each} cannot be rescheduled: {error}" for each, error in bad}
    known = done.union(refused)
    refused |= {each: _why_not(each, left.get(each)) for each in wanted if each not in known}
    return Changed([each for each in wanted if each in done], refused)


def _why_not(job_id: UUID, row: Row | None) -> str:
    if row is None:
        return f"job {job_id} does not exist"
    rule = "only a job that waits for a time can be rescheduled"
    if row.held_by is not None:
        return f"job {job_id} waits for {row.held_by}, not for a time; {rule}"
    return f"job {job_id} is {row.status}; {rule}"
