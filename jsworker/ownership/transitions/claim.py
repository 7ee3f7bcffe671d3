"""CLAIM: queued becomes processing, with a new fencing token. The worker that gets the row owns the job."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import (
    held_by_me,
    may_stall_once,
    mine,
    of_kind,
    processing,
    queued,
    stale_and_seen,
    worker_id,
)
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.schema import job_events
from jsworker.ownership.statements import (
    NOW,
    compiled,
    entry,
    given,
    given_array,
    given_runs,
    given_seconds,
    j,
    json_object,
)
from jsworker.ownership.transitions.reset import Suspect, as_seen

INLINE_BYTES: Final = 16 * 1024
"""Payload and checkpoint come with the claim up to so many bytes together. Larger ones are fetched, each with
a deadline of its own: beside them an answer for many jobs might never arrive in time."""


class ClaimedJob(NamedTuple):
    """A row that this worker owns from now on, until it settles it or loses it.

    Attributes:
        payload: JSON text; None: it and the checkpoint did not come with the claim and are to be fetched.
        checkpoint: JSON text or None.
        dispatch: the dispatch at which it was claimed: copies of messages up to it are spent.
        stalls: runs of this job that were taken back from silent owners.
        max_stalls: at which of them it fails.
        waited: seconds from the moment at which it was last put into the queue to this claim.
        stored_bytes: of payload and checkpoint as PostgreSQL stores them; their text may be longer.
        scheduled_for: the instant for which a schedule has enqueued it.
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


_stored_bytes = sa.func.pg_column_size(j.c.payload) + sa.func.coalesce(
    sa.func.pg_column_size(j.c.checkpoint), 0
)
"""Found without reading the values themselves."""


def _columns(
    payload: sa.ColumnElement[Any], checkpoint: sa.ColumnElement[Any], stored_bytes: sa.ColumnElement[Any]
) -> tuple[sa.ColumnElement[Any], ...]:
    """Return the columns of ``ClaimedJob``, in its order."""
    waited = sa.cast(sa.extract("epoch", j.c.claimed_at - j.c.queued_at), sa.Double)
    return (
        *(j.c.id, j.c.kind, payload.label("payload"), j.c.fencing_token, j.c.dispatch),
        *(j.c.attempts.label("attempt"), j.c.max_attempts, j.c.cleared, j.c.clear_reason),
        *(j.c.deadline_at.label("deadline"), checkpoint.label("checkpoint")),
        *(j.c.traceparent, j.c.tracestate, j.c.cancel_requested, j.c.stalls, j.c.max_stalls),
        *(waited.label("waited"), stored_bytes.label("stored_bytes"), j.c.scheduled_for),
    )


def _claim(
    rows: sa.Select[Any], guard: sa.ColumnElement[bool], *, from_stale_owner: bool = False
) -> sa.TextClause:
    """Return the statement that claims rows which it locks, as long as the guard holds.

    It skips locked rows: the holder of one row's lock must not keep the rest of a batch waiting. So a job that
    is not in the answer is not refused before a look without a lock has found that it is not queued: the message
    may be its only one, and the lock a MARK's.
    """
    picked = (
        rows.add_columns(j.c.id, j.c.worker_id.label("owner"), _stored_bytes.label("stored_bytes"))
        .order_by(j.c.id)
        .with_for_update(key_share=True, of=j, skip_locked=True)
        .cte("picked")
    )

    def inline(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.case((picked.c.stored_bytes <= INLINE_BYTES, sa.cast(column, sa.Text)))

    stall: dict[str, Any] = {
        "stalls": j.c.stalls + 1,
        "cleared": True,
        "clear_reason": sa.literal("worker ").concat(picked.c.owner).concat(" stopped responding"),
    }
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
            **(stall if from_stale_owner else {}),
        )
        .where(j.c.id == picked.c.id, guard, of_kind)
        .returning(
            *_columns(inline(j.c.payload), inline(j.c.checkpoint), picked.c.stored_bytes), picked.c.owner
        )
        .cte("claimed")
    )
    claim_of = claimed.c
    detail = {"attempt": claim_of.attempt, "cleared": claim_of.cleared, "clear_reason": claim_of.clear_reason}
    taken = {"cause": "stale", "owner": claim_of.owner, "counted": sa.true(), "stalls": claim_of.stalls}
    logged = entry(
        claimed,
        "claimed",
        when=claim_of.fencing_token > 1,
        worker_id=worker_id,
        detail=json_object(**detail | (taken if from_stale_owner else {})),
    )
    # What is stored compressed is measured again as text.
    length = sa.func.octet_length(claim_of.payload) + sa.func.coalesce(
        sa.func.octet_length(claim_of.checkpoint), 0
    )
    text_of = {
        "payload": sa.case((length <= INLINE_BYTES, claim_of.payload)),
        "checkpoint": sa.case(
            (sa.func.octet_length(claim_of.checkpoint) <= INLINE_BYTES, claim_of.checkpoint)
        ),
    }
    answer = [text_of.get(name, claim_of[name]).label(name) for name in ClaimedJob._fields]
    return compiled(sa.select(*answer).add_cte(logged))


_ids = given_array("ids", sa.Uuid)

CLAIM = _claim(sa.select().where(j.c.id == sa.any_(_ids), queued, of_kind), queued)

# The stale owner's job, from a list of rows that rule 1 has proven stale: reset and claim in one. Only a
# first stall, for a later one waits out its back-off; only when a further run is due at all.
_seen = given_runs("seen", activity=given_array("activities", sa.DateTime(timezone=True)))
CLAIM_STALE = _claim(
    sa.select()
    .select_from(j.join(_seen, _seen.c.id == j.c.id))
    .where(stale_and_seen(_seen), of_kind, may_stall_once),
    processing,
    from_stale_owner=True,
)

# A CLAIM may commit and its answer be lost: what is mine now was claimed by it. Without payloads, for they may
# be the reason why the answer did not come.
_no_text = sa.cast(sa.null(), sa.Text)
READ_BACK = compiled(
    sa.select(*_columns(_no_text, _no_text, _stored_bytes)).where(held_by_me, j.c.id == sa.any_(_ids))
)

CONTENT = compiled(
    sa.select(
        sa.cast(j.c.payload, sa.Text).label("payload"), sa.cast(j.c.checkpoint, sa.Text).label("checkpoint")
    ).where(j.c.id == sa.bindparam("id"), mine(sa.bindparam("token")))
)


def _refused() -> sa.TextClause:
    """Return why jobs were not in a claim's answer, read without a lock.

    What is queued was skipped because its row is locked, or was queued again since, and is claimed again; what is not
    was refused. A skip of a job that another worker runs is logged once for each worker that skipped it, however
    often its message comes back.
    """
    refused = (
        sa.select(j.c.id, j.c.status, j.c.dispatch, j.c.worker_id, j.c.fencing_token)
        .where(j.c.id == sa.any_(_ids), of_kind)
        .cte("refused")
    )
    e = job_events.alias("e")
    me = given("worker_id", sa.Text)
    logged_before = (
        sa.select(e.c.id)
        .where(
            e.c.job_id == refused.c.id,
            e.c.event == "skipped",
            e.c.worker_id == me,
            e.c.fencing_token == refused.c.fencing_token,
        )
        .exists()
    )
    logged = entry(
        refused,
        "skipped",
        when=sa.and_(refused.c.status == "processing", refused.c.worker_id != me, ~logged_before),
        worker_id=me,
        detail=json_object(owner=refused.c.worker_id, token=refused.c.fencing_token),
    )
    columns = refused.c.id, refused.c.status, refused.c.dispatch, refused.c.worker_id
    return compiled(sa.select(*columns).add_cte(logged))


REFUSED = _refused()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a claim writes into the row, so that sweepers of any settings agree on who is late.

    Attributes:
        stale_after: seconds of silence until anybody may take the job back; None: only by evidence.
        crash_after: seconds of silence until two witnesses may; None: never.
        timeout: seconds that the run may take; None: no limit.
        max_attempts: used where the producer left it open.
        max_stalls: used where the producer left it open.
    """

    stale_after: float | None
    crash_after: float | None
    timeout: float | None
    max_attempts: int
    max_stalls: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a CLAIM: what this worker owns now, and the jobs whose row PostgreSQL refused to update."""

    claimed: list[ClaimedJob]
    refused_rows: Mapping[UUID, RowRefused]


@dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that was not claimed, as it was right after; ``queued``: its row was locked, claim it again."""

    status: str
    dispatch: int
    worker_id: str | None


async def claim(
    database: Database, *, worker_id: str, kind: str, ids: Sequence[UUID], limits: Limits
) -> Taken:
    """Take what may be taken of ``ids``; a job that is not in the answer was refused, or its row is locked.

    Raises:
        DatabaseUnavailable: unclear: some may be claimed. Read back before anything else.
    """
    values = {"worker_id": worker_id, "kind": kind, **asdict(limits)}
    rows, refused = await in_halves(
        ids, lambda batch: database.run_by_key(CLAIM, values | {"ids": uuid_array(batch)})
    )
    return Taken([ClaimedJob._make(row) for row in rows], dict(refused))


async def claim_stale(
    database: Database, *, worker_id: str, kind: str, seen: Sequence[Suspect], limits: Limits
) -> Taken:
    """Take jobs of ``kind`` from their stale owners, each as rule 1 has last seen it; a first stall only.

    Raises:
        DatabaseUnavailable: unclear: some may be claimed. Read back before anything else.
    """
    values = {"worker_id": worker_id, "kind": kind, **asdict(limits)}
    rows, refused = await in_halves(seen, lambda batch: database.run(CLAIM_STALE, values | as_seen(batch)))
    return Taken([ClaimedJob._make(row) for row in rows], {row.id: error for row, error in refused})


async def read_back(database: Database, *, worker_id: str, ids: Iterable[UUID]) -> list[ClaimedJob]:
    """Return which of ``ids`` this worker owns, without payloads, after a claim whose answer was lost."""
    rows = await database.run(READ_BACK, {"worker_id": worker_id, "ids": list(ids)})
    return [ClaimedJob._make(row) for row in rows]


async def fetch_content(
    database: Database, *, worker_id: str, claimed: ClaimedJob, tries: int = 0
) -> ClaimedJob:
    """Return a claimed job with its payload and its checkpoint; after ``tries`` given up it may take longer.

    Raises:
        OwnershipLost: this worker does not own it any more.
    """
    values = {"worker_id": worker_id, "id": claimed.id, "token": claimed.fencing_token}
    seconds = database.seconds_for(claimed.stored_bytes, tries=tries)
    rows = await database.run(CONTENT, values, seconds=seconds)
    if not rows:
        raise OwnershipLost(f"job {claimed.id}: token {claimed.fencing_token} no longer owns it")
    return claimed._replace(payload=rows[0].payload, checkpoint=rows[0].checkpoint)


async def look_at_refused(
    database: Database, *, kind: str, ids: Iterable[UUID], worker_id: str | None = None
) -> dict[UUID, RefusedJob]:
    """Return why jobs were not claimed; an id that is missing has no row of this kind.

    Jobs that run under another worker get an entry in the timeline that this one skipped them, unless it is None.
    """
    values = {"kind": kind, "ids": list(ids), "worker_id": worker_id}
    try:
        rows = await database.run(REFUSED, values)
    except RowRefused:  # the entry in the timeline: without it, then
        rows = await database.run(REFUSED, values | {"worker_id": None})
    return {row.id: RefusedJob(row.status, row.dispatch, row.worker_id) for row in rows}
