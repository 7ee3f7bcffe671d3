"""CLAIM: queued becomes processing, with a new fencing token; the worker that gets the row owns the job."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import LockTimeout
from jsworker.core.priorities import NORMAL
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import of_kind, worker_id
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.statements import NOW, compiled, entry, given_array, given_seconds, j
from jsworker.ownership.transitions.heartbeat import by_owner, run_owned
from jsworker.ownership.transitions.reset import SHARED_STALLS, Suspect, as_seen
from jsworker.ownership.transitions.timeline import logged

INLINE_BYTES: Final = 16 * 1024
"""A claim returns payload and checkpoint up to so many bytes together. Larger ones are fetched later, each with
a deadline of its own: with them, the answer for many jobs might never arrive in time."""


class ClaimedJob(NamedTuple):
    """A row that this worker owns until it settles the job or loses it.

    Attributes:
        payload, checkpoint: JSON text. Payload None: neither came with the answer (together too large, or read
            back after a lost answer), and both must be fetched.
        dispatch: the dispatch at which it was claimed; messages up to it are used up.
        waited: seconds between its last entry into the queue and the claim.
        stored_bytes: size of payload and checkpoint as PostgreSQL stores them; their text may be longer.
        scheduled_for: the instant for which a schedule has enqueued it.
        limit_key: the key under which limits count it; None if no limit does.
        waiting_key: the unique key of which one other job may wait.
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

    @property
    def notes_beginning(self) -> bool:
        """Whether its row must tell that it has begun: one more stall would be its last or its third."""
        return self.stalls >= min(SHARED_STALLS, self.max_stalls - 1)


def _inline(value: sa.ColumnElement[Any], size: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((size <= INLINE_BYTES, value))


# The sizes are found without reading the values themselves.
_stored_size = sa.func.pg_column_size
_stored_bytes = _stored_size(j.c.payload) + sa.func.coalesce(_stored_size(j.c.checkpoint), 0)


def _columns(**computed: sa.ColumnElement[Any]) -> list[sa.ColumnElement[Any]]:
    """Return the columns of ``ClaimedJob``, in its order."""
    waited = sa.cast(sa.extract("epoch", j.c.claimed_at - j.c.queued_at), sa.Double)
    computed |= {"attempt": j.c.attempts, "deadline": j.c.deadline_at, "waited": waited}
    computed |= statements.BOUNDED_TEXTS
    return [computed[name].label(name) if name in computed else j.c[name] for name in ClaimedJob._fields]


PICKED: Final = (j.c.id, j.c.worker_id.label("owner"), _stored_bytes.label("stored_bytes"))
"""The columns that a claim needs of the rows that it has locked."""


def _claim(
    rows: sa.Select[Any], guard: sa.ColumnElement[bool], *, from_stale_owner: bool = False
) -> sa.TextClause:
    """Return the statement that locks rows and claims those that meet the guard.

    It skips rows that others have locked, so that one locked row does not delay the rest of a batch. Therefore
    a job that is missing in the answer is refused only once a read without a lock finds that it is not queued:
    the lock may be that of a MARK, and the message the job's only one.
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
    """Return the statement that claims the locked rows ``picked`` (columns ``PICKED``) and also writes ``also``."""
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
    # Values may be stored compressed, so the size is checked again as text.
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
# Comes before CLAIM in one transaction, for a row that many others lock in turn: it waits for its own turn.
LOCK_ROWS = compiled(
    sa.select(j.c.id)
    .where(j.c.id == sa.any_(_ids), statements.WAITS_BRIEFLY)
    .order_by(j.c.id)
    .with_for_update(key_share=True, of=j)
)

# Takes jobs directly from stale owners, from rows that rule 1 has proven stale: a reset and a claim in one. Only
# for a first stall, because later ones wait for a back-off; only if the job may run again; and only if it may
# begin at once: a job of a paused kind or key has to be held, after a RESET.
_seen = statements.given_runs("seen", activity=given_array("activities", sa.DateTime(timezone=True)))
CLAIM_STALE = _claim(
    sa.select()
    .select_from(j.join(_seen, _seen.c.id == j.c.id))
    .where(predicates.stale_and_seen(_seen), of_kind, predicates.may_stall_once, predicates.not_paused),
    predicates.processing,
    from_stale_owner=True,
)

# A CLAIM may commit although its answer is lost: the rows that this worker owns now were claimed by it. Read
# without payloads, because those may be the reason why the answer did not come.
_no_text = sa.cast(sa.null(), sa.Text)
_without_texts = _columns(payload=_no_text, checkpoint=_no_text, stored_bytes=_stored_bytes)
READ_BACK = compiled(sa.select(*_without_texts).where(predicates.held_by_me, j.c.id == sa.any_(_ids)))

# The same after an admission, which chooses the jobs itself: rows that no run of this worker has.
_besides = j.c.id != sa.all_(given_array("besides", sa.Uuid))
_admitted = sa.and_(predicates.held_by_me_indexed, of_kind, ~predicates.has_no_limit_key, _besides)
READ_BACK_ADMITTED = compiled(sa.select(*_without_texts).where(_admitted))

_texts = [sa.cast(j.c[name], sa.Text).label(name) for name in ("payload", "checkpoint")]
_mine = predicates.mine(sa.bindparam("token"))
CONTENT = compiled(sa.select(*_texts).where(j.c.id == sa.bindparam("id"), _mine))


# Why jobs were not in a claim's answer, read without a lock. A job that is queued was skipped because its row is
# locked, or was queued again since then: it is claimed again. Any other job was refused. If another worker runs
# the job, each worker that skips it logs that once, no matter how often the message comes back.
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
    """The limits that a claim writes into the row, so that all sweepers agree on which rows are late.

    Attributes:
        stale_after: seconds of silence until any worker may take the job back; None: only with proof of death.
        crash_after: seconds of silence after which it may be taken back once NATS twice reports no listener
            for its owner (rule 3); None: never.
        timeout: seconds that the run may take; None: no limit.
        max_attempts, max_stalls: used if the producer has not set them.
    """

    stale_after: float | None
    crash_after: float | None
    timeout: float | None
    max_attempts: int
    max_stalls: int

    @property
    def silence(self) -> float | None:
        """Seconds of silence by the first threshold that is set, as ``Beat.silences`` has them."""
        return self.crash_after if self.stale_after is None else self.stale_after


class Taken(NamedTuple):
    """The answer to a CLAIM: the jobs that this worker owns now, and those whose row PostgreSQL refused."""

    claimed: list[ClaimedJob]
    refused_rows: Mapping[UUID, RowRefused]


class RefusedJob(NamedTuple):
    """The state of a job right after it was not claimed.

    Status ``queued``: its row was locked, so claim it again, or, if it has a ``limit_key``, by admission.
    ``expired``: queued, but expired; a sweep ends it. ``behind``: queued, but another job of its unique key
    runs. ``held_by`` names what a held job waits for.
    """

    status: str
    dispatch: int
    worker_id: str | None
    held_by: str | None = None
    limit_key: str | None = None


async def claim(
    database: Database,
    *,
    worker_id: str,
    kind: str,
    ids: Sequence[UUID],
    limits: RunLimits,
    waits: bool = False,
) -> Taken:
    """Claim jobs; a job that is not in the answer was refused, or its row is locked.

    After DatabaseUnavailable some may be claimed: call ``read_back`` first. ``waits``: wait for 0.2 s for
    locked rows.
    """
    values = {"worker_id": worker_id, "kind": kind, **limits._asdict()}
    first = LOCK_ROWS if waits else None
    try:
        rows, refused = await in_halves(
            ids, lambda batch: database.run_by_key(CLAIM, values | {"ids": uuid_array(batch)}, first=first)
        )
    except LockTimeout:
        if not waits:
            raise
        return Taken([], {})
    return Taken([ClaimedJob._make(row) for row in rows], dict(refused))


async def claim_stale(
    database: Database, *, worker_id: str, kind: str, seen: Sequence[Suspect], limits: RunLimits
) -> Taken:
    """Claim jobs of ``kind`` from stale owners, if rows are still as rule 1 saw them; else like ``claim``."""
    values = {"worker_id": worker_id, "kind": kind, **limits._asdict()}
    rows, refused = await in_halves(seen, lambda batch: database.run(CLAIM_STALE, values | as_seen(batch)))
    return Taken([ClaimedJob._make(row) for row in rows], {row.id: error for row, error in refused})


async def read_back(database: Database, *, worker_id: str, ids: Iterable[UUID]) -> list[ClaimedJob]:
    """Return the jobs of ``ids`` that this worker owns, without payloads, after a claim without an answer."""
    rows = await database.run(READ_BACK, {"worker_id": worker_id, "ids": list(ids)})
    return [ClaimedJob._make(row) for row in rows]


async def read_back_admitted(
    database: Database, *, worker_id: str, kind: str, besides: Iterable[UUID]
) -> list[ClaimedJob]:
    """Return the jobs of a kind that this worker owns by admission, without ``besides``, like ``read_back``."""
    values = {"worker_id": worker_id, "kind": kind, "besides": list(besides)}
    return [ClaimedJob._make(row) for row in await database.run(READ_BACK_ADMITTED, values)]


async def fetch_content(
    database: Database, *, worker_id: str, claimed: ClaimedJob, tries: int = 0
) -> ClaimedJob:
    """Return a claimed job with payload and checkpoint; it may take longer after each of ``tries``.

    Raises OwnershipLost.
    """
    values = by_owner(worker_id, (claimed.id, claimed.fencing_token))
    rows = await run_owned(database, CONTENT, values, database.seconds_for(claimed.stored_bytes, tries=tries))
    return claimed._replace(payload=rows[0].payload, checkpoint=rows[0].checkpoint)


async def look_at_refused(
    database: Database, *, kind: str, ids: Iterable[UUID], worker_id: str | None = None
) -> dict[UUID, RefusedJob]:
    """Return the states of jobs that were not claimed, and log the skips of ``worker_id``.

    Jobs that are missing in the answer have no row of this kind.
    """
    values = {"kind": kind, "ids": list(ids), "worker_id": worker_id}
    try:
        rows = await database.run(REFUSED, values)
    except RowRefused:  # the entry of the timeline was refused; read without writing it
        rows = await database.run(REFUSED, values | {"worker_id": None})
    return {job_id: RefusedJob(*row) for job_id, *row in rows}
