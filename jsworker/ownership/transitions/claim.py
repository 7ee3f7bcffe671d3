"""CLAIM: queued becomes processing, with a new fencing token. The worker that gets the row owns the job."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import OwnershipLost
from jsworker.core.priorities import NORMAL
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import of_kind, worker_id
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.statements import NOW, compiled, entry, given_array, given_seconds, j
from jsworker.ownership.transitions.reset import Suspect, as_seen
from jsworker.ownership.transitions.timeline import logged

INLINE_BYTES: Final = 16 * 1024
"""Payload and checkpoint come with the claim up to so many bytes together. Larger ones are fetched, each with
a deadline of its own: beside them an answer for many jobs might never arrive in time."""


class ClaimedJob(NamedTuple):
    """A row that this worker owns from now on, until it settles it or loses it.

    Attributes:
        payload, checkpoint: JSON text. Payload None: both did not come with the claim and are to be fetched.
        dispatch: at which it was claimed: copies of messages up to it are spent.
        waited: seconds since it was last put into the queue.
        stored_bytes: of payload and checkpoint as PostgreSQL stores them; their text may be longer.
        scheduled_for: the instant for which a schedule has enqueued it.
        limit_key: under which limits count it; None: no limit does.
        waiting_key: of which one other job may wait.
        batch_id: the batch of a workflow to which it belongs.
    """

    id: UUID
    kind: str
    payload: str | None
    fencing_token: int
    dispatch: int
    attempt: int
    max_attempts: int
    cleared: bool
    clear_reason: str | None
    deadline: datetime | None
    checkpoint: str | None
    traceparent: str | None
    tracestate: str | None
    cancel_requested: bool
    stalls: int
    max_stalls: int
    waited: float | None
    stored_bytes: int
    scheduled_for: datetime | None = None
    limit_key: str | None = None
    priority: int = NORMAL
    waiting_key: str | None = None
    batch_id: UUID | None = None


def _inline(value: sa.ColumnElement[Any], size: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((size <= INLINE_BYTES, value))


# Found without reading the values themselves.
_stored_size = sa.func.pg_column_size
_stored_bytes = _stored_size(j.c.payload) + sa.func.coalesce(_stored_size(j.c.checkpoint), 0)


def _columns(**computed: sa.ColumnElement[Any]) -> list[sa.ColumnElement[Any]]:
    """Return the columns of ``ClaimedJob``, in its order."""
    waited = sa.cast(sa.extract("epoch", j.c.claimed_at - j.c.queued_at), sa.Double)
    computed |= {"attempt": j.c.attempts, "deadline": j.c.deadline_at, "waited": waited}
    return [computed[name].label(name) if name in computed else j.c[name] for name in ClaimedJob._fields]


PICKED: Final = (j.c.id, j.c.worker_id.label("owner"), _stored_bytes.label("stored_bytes"))
"""What a claim needs of the rows that it has locked."""


def _claim(
    rows: sa.Select[Any], guard: sa.ColumnElement[bool], *, from_stale_owner: bool = False
) -> sa.TextClause:
    """Return the statement that claims rows which it locks, as long as the guard holds.

    It skips locked rows: the holder of one row's lock must not keep the rest of a batch waiting. So a job that
    is not in the answer is not refused before a look without a lock has found that it is not queued: the message
    may be its only one, and the lock a MARK's.
    """
    picked = statements.locked(rows.add_columns(*PICKED), "picked")
    return compiled(claimed_of(picked, guard, from_stale_owner=from_stale_owner))


def claimed_of(
    picked: sa.FromClause,
    guard: sa.ColumnElement[bool],
    *,
    from_stale_owner: bool = False,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> sa.Select[Any]:
    """Return what claims rows that are locked, ``PICKED`` of each, and writes ``also`` besides."""
    size = picked.c.stored_bytes
    texts = {name: _inline(sa.cast(j.c[name], sa.Text), size) for name in ("payload", "checkpoint")}
    reason = sa.literal("worker ").concat(picked.c.owner).concat(" stopped responding")
    stall: dict[str, Any] = {"stalls": j.c.stalls + 1, "cleared": True, "clear_reason": reason}
    claimed = (
        sa.update(j)
        .values(
            status="processing",
            worker_id=worker_id,
            fencing_token=j.c.fencing_token + 1,
            attempts=j.c.attempts + 1,
            claimed_at=NOW,
            last_activity_at=NOW,
            started_at=sa.func.coalesce(j.c.started_at, NOW),
            stale_after=given_seconds("stale_after"),
            crash_after=given_seconds("crash_after"),
            deadline_at=NOW + given_seconds("timeout"),
            max_attempts=sa.func.coalesce(j.c.max_attempts, sa.bindparam("max_attempts")),
            max_stalls=sa.func.coalesce(j.c.max_stalls, sa.bindparam("max_stalls")),
            needs_publish=False,
            behind=sa.null(),
            **(stall if from_stale_owner else {}),
            **also,
        )
        .where(j.c.id == picked.c.id, guard, of_kind)
        .returning(*_columns(**texts, stored_bytes=size), picked.c.owner)
        .cte("claimed")
    )
    job = claimed.c
    detail: dict[str, Any] = {name: job[name] for name in ("attempt", "cleared", "clear_reason")}
    if from_stale_owner:
        detail |= {"cause": "stale", "owner": job.owner, "counted": sa.true(), "stalls": job.stalls}
    again, what = job.fencing_token > 1, statements.json_object(**detail)
    entered = entry(claimed, "claimed", when=again, worker_id=worker_id, detail=what)
    # What is stored compressed is measured again as text.
    length = sa.func.octet_length
    together = length(job.payload) + sa.func.coalesce(length(job.checkpoint), 0)
    text_of = {
        "payload": _inline(job.payload, together),
        "checkpoint": _inline(job.checkpoint, length(job.checkpoint)),
    }
    answer = [text_of.get(name, job[name]).label(name) for name in ClaimedJob._fields]
    return sa.select(*answer).add_cte(entered)


_ids = given_array("ids", sa.Uuid)

_free = sa.and_(predicates.may_be_claimed, predicates.has_no_limit_key)
CLAIM = _claim(sa.select().where(j.c.id == sa.any_(_ids), _free, of_kind), _free)

# The stale owner's job, from a list of rows that rule 1 has proven stale: reset and claim in one. Only a
# first stall, for a later one waits out its back-off; only when a further run is due at all; and only when it may
# begin at once, for what is paused is held once it was reset.
_seen = statements.given_runs("seen", activity=given_array("activities", sa.DateTime(timezone=True)))
CLAIM_STALE = _claim(
    sa.select()
    .select_from(j.join(_seen, _seen.c.id == j.c.id))
    .where(predicates.stale_and_seen(_seen), of_kind, predicates.may_stall_once, predicates.not_paused),
    predicates.processing,
    from_stale_owner=True,
)

# A CLAIM may commit and its answer be lost: what is mine now was claimed by it. Without payloads, for they may
# be the reason why the answer did not come.
_no_text = sa.cast(sa.null(), sa.Text)
_without_texts = _columns(payload=_no_text, checkpoint=_no_text, stored_bytes=_stored_bytes)
READ_BACK = compiled(sa.select(*_without_texts).where(predicates.held_by_me, j.c.id == sa.any_(_ids)))

# The same where admission may have claimed jobs that were not asked for: rows that no run of this worker has.
_besides = j.c.id != sa.all_(given_array("besides", sa.Uuid))
_admitted = sa.and_(predicates.held_by_me_indexed, of_kind, ~predicates.has_no_limit_key, _besides)
READ_BACK_ADMITTED = compiled(sa.select(*_without_texts).where(_admitted))

_texts = [sa.cast(j.c[name], sa.Text).label(name) for name in ("payload", "checkpoint")]
_mine = predicates.mine(sa.bindparam("token"))
CONTENT = compiled(sa.select(*_texts).where(j.c.id == sa.bindparam("id"), _mine))


# Why jobs were not in a claim's answer, read without a lock. What is queued was skipped because its row is
# locked, or was queued again since, and is claimed again; what is not was refused. A skip of a job that another
# worker runs is logged once for each worker that skipped it, however often its message comes back.
_me = statements.given("worker_id", sa.Text)
_status = sa.case(
    (~predicates.queued, j.c.status),
    (~predicates.may_begin, "expired"),
    (~predicates.none_of_its_key_runs, "behind"),
    else_=j.c.status,
)
_row = (
    sa.select(
        j.c.id,
        _status.label("status"),
        *j.c["dispatch", "worker_id", "fencing_token", "held_by", "limit_key"],
    )
    .where(j.c.id == sa.any_(_ids), of_kind)
    .cte("refused")
)
_of_another = sa.and_(_row.c.status == "processing", _row.c.worker_id != _me)
_skipped = entry(
    _row,
    "skipped",
    when=sa.and_(_of_another, ~logged("skipped", _row.c.id, _row.c.fencing_token)),
    worker_id=_me,
    detail=statements.json_object(owner=_row.c.worker_id, token=_row.c.fencing_token),
)
_looked_at = ("id", "status", "dispatch", "worker_id", "held_by", "limit_key")
REFUSED = compiled(sa.select(*_row.c[_looked_at]).add_cte(_skipped))


class RunLimits(NamedTuple):
    """What a claim writes into the row, so that sweepers of any settings agree on who is late.

    Attributes:
        stale_after: seconds of silence until anybody may take the job back; None: only by evidence.
        crash_after: seconds of silence until two witnesses may; None: never.
        timeout: seconds that the run may take; None: no limit.
        max_attempts, max_stalls: where the producer left them open.
    """

    stale_after: float | None
    crash_after: float | None
    timeout: float | None
    max_attempts: int
    max_stalls: int


class Taken(NamedTuple):
    """The answer to a CLAIM: what this worker owns now, and the jobs whose row was refused."""

    claimed: list[ClaimedJob]
    refused_rows: Mapping[UUID, RowRefused]


class RefusedJob(NamedTuple):
    """A job that was not claimed, as it was right after; ``queued``: its row was locked, claim it again.

    Or it has a ``limit_key``: then only admission claims it. ``held_by`` tells what a held job waits for.
    Queued are also jobs that are ``expired``, which a sweep ends, and ``behind`` another of their key that runs.
    """

    status: str
    dispatch: int
    worker_id: str | None
    held_by: str | None = None
    limit_key: str | None = None


async def claim(
    database: Database, *, worker_id: str, kind: str, ids: Sequence[UUID], limits: RunLimits
) -> Taken:
    """Take what may be taken of ``ids``; a job that is not in the answer was refused, or its row is locked.

    After DatabaseUnavailable some may be claimed: read back before anything else.
    """
    values = {"worker_id": worker_id, "kind": kind, **limits._asdict()}
    rows, refused = await in_halves(
        ids, lambda batch: database.run_by_key(CLAIM, values | {"ids": uuid_array(batch)})
    )
    return Taken([ClaimedJob._make(row) for row in rows], dict(refused))


async def claim_stale(
    database: Database, *, worker_id: str, kind: str, seen: Sequence[Suspect], limits: RunLimits
) -> Taken:
    """Take jobs of ``kind`` from their stale owners, each as rule 1 has last seen it; else as ``claim``."""
    values = {"worker_id": worker_id, "kind": kind, **limits._asdict()}
    rows, refused = await in_halves(seen, lambda batch: database.run(CLAIM_STALE, values | as_seen(batch)))
    return Taken([ClaimedJob._make(row) for row in rows], {row.id: error for row, error in refused})


async def read_back(database: Database, *, worker_id: str, ids: Iterable[UUID]) -> list[ClaimedJob]:
    """Return which of ``ids`` this worker owns, without payloads, after a claim whose answer was lost."""
    rows = await database.run(READ_BACK, {"worker_id": worker_id, "ids": list(ids)})
    return [ClaimedJob._make(row) for row in rows]


async def read_back_admitted(
    database: Database, *, worker_id: str, kind: str, besides: Iterable[UUID]
) -> list[ClaimedJob]:
    """Return what this worker owns of a kind by admission, but for ``besides``, as ``read_back``."""
    values = {"worker_id": worker_id, "kind": kind, "besides": list(besides)}
    return [ClaimedJob._make(row) for row in await database.run(READ_BACK_ADMITTED, values)]


async def fetch_content(
    database: Database, *, worker_id: str, claimed: ClaimedJob, tries: int = 0
) -> ClaimedJob:
    """Return a claimed job with payload and checkpoint, unless OwnershipLost; slower after ``tries``."""
    values = {"worker_id": worker_id, "id": claimed.id, "token": claimed.fencing_token}
    seconds = database.seconds_for(claimed.stored_bytes, tries=tries)
    rows = await database.run(CONTENT, values, seconds=seconds)
    if not rows:
        raise OwnershipLost(f"job {claimed.id}: token {claimed.fencing_token} no longer owns it")
    return claimed._replace(payload=rows[0].payload, checkpoint=rows[0].checkpoint)


async def look_at_refused(
    database: Database, *, kind: str, ids: Iterable[UUID], worker_id: str | None = None
) -> dict[UUID, RefusedJob]:
    """Return why jobs were not claimed, and note what ``worker_id`` skipped; others have no row of this kind."""
    values = {"kind": kind, "ids": list(ids), "worker_id": worker_id}
    try:
        rows = await database.run(REFUSED, values)
    except RowRefused:  # the entry in the timeline: without it, then
        rows = await database.run(REFUSED, values | {"worker_id": None})
    return {job_id: RefusedJob(*row) for job_id, *row in rows}
