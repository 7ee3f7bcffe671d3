"""What no other statement notes: a fence after an outage, a write that came too late, the span of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from jsworker.core import strict_json
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import completed_under, locked_of_mine, mine
from jsworker.ownership.schema import job_events
from jsworker.ownership.statements import compiled, given, given_array, given_rows, given_runs, j

_e = job_events.alias("e")
_note = given_rows(
    "note",
    job_id=given_array("ids", sa.Uuid),
    event=given_array("events", sa.Text),
    worker_id=given_array("workers", sa.Text),
    token=given_array("tokens", sa.BigInteger),
    detail=given_array("details", sa.Text),
)
_detail = sa.cast(_note.c.detail, JSONB)
_logged = sa.select(_e.c.id).where(
    _e.c.job_id == _note.c.job_id,
    _e.c.event == _note.c.event,
    _e.c.worker_id.is_not_distinct_from(_note.c.worker_id),
    _e.c.fencing_token.is_not_distinct_from(_note.c.token),
    _e.c.detail.is_not_distinct_from(_detail),
)

# Once only: the answer to an insert may be lost, and then it is tried again.
NOTE = compiled(
    sa.insert(job_events).from_select(
        ["job_id", "event", "worker_id", "fencing_token", "detail"],
        sa.select(_note.c.job_id, _note.c.event, _note.c.worker_id, _note.c.token, _detail)
        .where(~_logged.exists())
        .distinct(),
    )
)


def rejected(late: sa.FromClause, *unless: sa.ColumnElement[bool]) -> sa.Insert:
    """Return the statement that logs writes that came too late, once for each run and kind of write.

    What this run has completed itself, in the job's own transaction, is no late write.
    """
    worker, write = given("worker_id", sa.Text), given("write", sa.Text)
    completed_itself = sa.select(j.c.id).where(j.c.id == late.c.id, completed_under(late.c.token)).exists()
    logged = (
        sa.select(_e.c.id)
        .where(
            _e.c.job_id == late.c.id,
            _e.c.event == "rejected",
            _e.c.worker_id == worker,
            _e.c.fencing_token == late.c.token,
            _e.c.detail["write"].astext == write,
        )
        .exists()
    )
    detail = sa.func.jsonb_build_object("write", write)
    columns = ["job_id", "event", "worker_id", "fencing_token", "detail"]
    values = sa.select(late.c.id, sa.literal("rejected"), worker, late.c.token, detail)
    return sa.insert(job_events).from_select(columns, values.where(~completed_itself, ~logged, *unless))


REJECTED = compiled(rejected(given_runs("late")))

# A run's span, in the row, so that a run after it can link to it. Skips what is locked, for nothing depends on it;
# the guard is the one of every write of an owner.
_run = given_runs("run", state=given_array("states", sa.Text))
_mine = locked_of_mine(_run, _run.c.token, _run.c.state)
NOTE_RUN = compiled(
    sa.update(j)
    .values(tracestate=_mine.c.state)
    .where(j.c.id == _mine.c.id, mine(_mine.c.token))
    .returning(j.c.id)
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that happened to a job.

    Attributes:
        event: its name, for example ``fenced``.
        detail: what else is known, as JSON can hold it; the same entry with the same detail is written once.
    """

    job_id: UUID
    event: str
    worker_id: str | None
    fencing_token: int | None
    detail: dict[str, Any] | None


async def note(database: Database, *, entries: Sequence[Entry]) -> None:
    """Write entries to the timelines of their jobs; what is there already is not written again.

    Raises:
        InvalidJson: a detail is no JSON.
    """
    if not entries:
        return
    details = [
        None if one.detail is None else strict_json.dumps(one.detail, what="detail") for one in entries
    ]
    values = {
        "ids": [one.job_id for one in entries],
        "events": [one.event for one in entries],
        "workers": [one.worker_id for one in entries],
        "tokens": [one.fencing_token for one in entries],
        "details": details,
    }
    await database.run(NOTE, values)


class RunContext(NamedTuple):
    """A run and what the row's ``tracestate`` is from now on."""

    id: UUID
    fencing_token: int
    tracestate: str


async def note_runs(database: Database, *, worker_id: str, runs: Sequence[RunContext]) -> None:
    """Write the contexts of runs that this worker still owns.

    Raises:
        DatabaseUnavailable: unclear; a later run may lack its link.
    """
    parameters = {
        "worker_id": worker_id,
        "ids": uuid_array(run.id for run in runs),
        "tokens": [run.fencing_token for run in runs],
        "states": [run.tracestate for run in runs],
    }
    await database.run_by_key(NOTE_RUN, parameters)
