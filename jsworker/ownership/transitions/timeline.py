"""What no other transition notes: a fence after an outage, a write that came too late, the span of a run."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import completed_under, locked_of_mine, mine
from jsworker.ownership.schema import job_events
from jsworker.ownership.statements import compiled, given, given_array, given_runs, j

_e = job_events.alias("e")
_worker_id = given("worker_id", sa.Text)


def logged(
    event: str, job_id: sa.ColumnElement[Any], token: sa.ColumnElement[Any], *same: sa.ColumnElement[bool]
) -> sa.Exists:
    """Return that the timeline already has this event of a run, written by this worker."""
    of_run = (_e.c.job_id == job_id, _e.c.event == event, _e.c.worker_id == _worker_id)
    return sa.select(_e.c.id).where(*of_run, _e.c.fencing_token == token, *same).exists()


def _entries(
    event: str, run: sa.FromClause, key: str, value: sa.ColumnElement[Any], *when: sa.ColumnElement[bool]
) -> sa.Insert:
    detail = sa.func.jsonb_build_object(key, value)
    values = sa.select(run.c.id, sa.literal(event), _worker_id, run.c.token, detail).where(*when)
    columns = ["job_id", "event", "worker_id", "fencing_token", "detail"]
    return sa.insert(job_events).from_select(columns, values)


def rejected(late: sa.FromClause, *unless: sa.ColumnElement[bool]) -> sa.Insert:
    """Return the statement that logs writes that came too late, once for each run and kind of write.

    If the run has completed the job itself, in the job's own transaction, its write is not late.
    """
    write = given("write", sa.Text)
    completed_itself = sa.select(j.c.id).where(j.c.id == late.c.id, completed_under(late.c.token)).exists()
    is_logged = logged("rejected", late.c.id, late.c.token, _e.c.detail["write"].astext == write)
    return _entries("rejected", late, "write", write, ~completed_itself, ~is_logged, *unless)


REJECTED = compiled(rejected(given_runs("late")))

# Written only once, even if the answer to the insert is lost and the insert is tried again.
_fenced = given_runs("run")
_is_logged = logged("fenced", _fenced.c.id, _fenced.c.token)
_silent = given("silent", sa.Double)
FENCED = compiled(_entries("fenced", _fenced, "seconds_without_heartbeat", _silent, ~_is_logged))

# Stores a run's span in the row, so that a later run can link to it. Locked rows are skipped, because nothing
# depends on the span; the guard is that of every write of an owner.
_run = given_runs("run", state=given_array("states", sa.Text))
_mine = locked_of_mine(_run, _run.c.token, _run.c.state)
NOTE_RUN = compiled(
    sa.update(j)
    .values(tracestate=_mine.c.state)
    .where(j.c.id == _mine.c.id, mine(_mine.c.token))
    .returning(j.c.id)
)

ERROR_AFTER_COMPLETION = compiled(
    sa.insert(job_events).from_select(
        ["job_id", "event", "worker_id", "fencing_token", "error"],
        sa.select(
            j.c.id,
            sa.literal("error_after_completion"),
            j.c.completed_by,
            j.c.fencing_token,
            given("error", sa.Text),
        ).where(j.c.id == given("id", sa.Uuid), completed_under(given("token", sa.BigInteger))),
    )
)


class RunContext(NamedTuple):
    """A run and the new ``tracestate`` of its job's row."""

    id: UUID
    fencing_token: int
    tracestate: str


async def note_fence(
    database: Database, *, worker_id: str, held: tuple[UUID, int], seconds_without_heartbeat: float
) -> None:
    """Note once in the timeline of a job that the fence stopped this run."""
    values = {"worker_id": worker_id, "ids": [held[0]], "tokens": [held[1]]}
    await database.run(FENCED, values | {"silent": seconds_without_heartbeat})


async def note_error_after_completion(
    database: Database, *, worker_id: str, held: tuple[UUID, int], error: str
) -> None:
    """Note in the timeline of a job that its run raised after the job's own transaction had completed it."""
    values = {"worker_id": worker_id, "id": held[0], "token": held[1], "error": error}
    await database.run(ERROR_AFTER_COMPLETION, values)


async def note_runs(database: Database, *, worker_id: str, runs: Sequence[RunContext]) -> None:
    """Write the contexts of runs that this worker still owns; if that fails, later runs lack the links."""
    ids, tokens, states = map(list, zip(*runs, strict=True))
    values = {"worker_id": worker_id, "ids": uuid_array(ids), "tokens": tokens, "states": states}
    await database.run_by_key(NOTE_RUN, values)
