"""The guards of docs/protocol.md, each written once, over the row ``j`` that a statement is about.

Those that end in ``_indexed`` mean the same as their namesakes without, in the words of a partial index: only a
search may use them, for a statement that names its rows must reach them by their ids.
"""

from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Integer,
    and_,
    bindparam,
    cast,
    select,
)

from jsworker.ownership.schema import refused_rows
from jsworker.ownership.statements import AT_START, NOW, given_seconds, j

Predicate = ColumnElement[bool]

worker_id: Final[ColumnElement[Any]] = bindparam("worker_id")

# The states.
scheduled: Final = j.c.status == "scheduled"
queued: Final = j.c.status == "queued"
processing: Final = j.c.status == "processing"
completed: Final = j.c.status == "completed"
failed: Final = j.c.status == "failed"
live: Final = j.c.status.in_(("scheduled", "queued", "processing"))
ended: Final = j.c.status.in_(("completed", "failed", "cancelled"))

scheduled_indexed: Final = j.c.status + "" == "scheduled"
queued_indexed: Final = j.c.status + "" == "queued"
processing_indexed: Final = j.c.status + "" == "processing"
needs_publish_indexed: Final = cast(j.c.needs_publish, Integer) == 1

# The owner's fence.
held_by_me: Final = and_(processing, j.c.worker_id == worker_id)
held_by_me_indexed: Final = and_(processing_indexed, j.c.worker_id == worker_id)


def mine(token: ColumnElement[Any]) -> Predicate:
    """Return that this worker owns the job under a fencing token: the whole guard of every write of an owner."""
    return and_(held_by_me, j.c.fencing_token == token)


def completed_under(token: ColumnElement[Any]) -> Predicate:
    """Return that the run with this token has completed the job."""
    return and_(completed, j.c.fencing_token == token)


last_attempt: Final = j.c.errors + 1 >= j.c.max_attempts
last_stall: Final = j.c.stalls + 1 >= j.c.max_stalls


def claimed_before(seconds: str) -> Predicate:
    """Return that the job was claimed so many seconds ago, as a parameter gives them."""
    return j.c.claimed_at < NOW - given_seconds(seconds)


# Rows that PostgreSQL refused to write. A mark belongs to the row as it was refused: another claim, dispatch or
# status is another try.
r: Final = refused_rows.alias("r")
as_refused: Final = and_(
    r.c.status == j.c.status, r.c.fencing_token == j.c.fencing_token, r.c.dispatch == j.c.dispatch
)


def refused(*attempted: str) -> Predicate:
    """Return that PostgreSQL has refused one of these transitions to the row as it is."""
    return _marked(r.c.attempted.in_(attempted))


def set_aside(*attempted: str) -> Predicate:
    """Return that the row is left alone for now, because one of these transitions was refused."""
    return _marked(r.c.attempted.in_(attempted), r.c.retry_at > AT_START)


def _marked(*which: Predicate) -> Predicate:
    return select(r.c.job_id).where(r.c.job_id == j.c.id, *which, as_refused).correlate(j).exists()
