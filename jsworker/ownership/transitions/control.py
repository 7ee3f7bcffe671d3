"""What operators and clients may do to a job: CANCEL and RETRY."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import (
    ANY_AGE,
    RunAge,
    as_old_as_chosen,
    is_over,
    live,
    may_be_retried,
    processing,
    without_batch,
)
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.schema import FINAL, STATUSES
from jsworker.ownership.statements import NOT_HELD, NOW, compiled, entry, given_array, j, json_object
from jsworker.ownership.transitions import reopen, workflows
from jsworker.ownership.transitions.publish import QUEUED_AGAIN

LIVE = frozenset(STATUSES) - frozenset(FINAL)

_ids = given_array("ids", sa.Uuid)
_is_meant = sa.and_(j.c.status == sa.any_(given_array("statuses", sa.Text)), as_old_as_chosen)


def _cancel() -> sa.TextClause:
    """Return CANCEL: one UPDATE with CASE on the status, for as two statements it can miss both sides of a FAIL."""
    meant = sa.select(j.c.id).where(j.c.id == sa.any_(_ids), live, _is_meant)
    locked = meant.order_by(j.c.id).with_for_update(key_share=True).cte("live")
    asked = (
        sa.update(j)
        .values(
            status=sa.case((processing, "processing"), else_="cancelled"),
            cancel_requested=processing,
            needs_publish=False,
            finished_at=sa.case((~processing, NOW)),
            **NOT_HELD,
        )
        .where(j.c.id == locked.c.id, live)
        .returning(*j.c["id", "status", "worker_id", "fencing_token", "batch_id"])
        .cte("asked")
    )
    logged = entry(
        asked,
        sa.case((asked.c.status == "processing", "cancel_requested"), else_="cancelled"),
        detail=sa.func.jsonb_strip_nulls(json_object(owner=asked.c.worker_id)),
    )
    return compiled(sa.select(*asked.c["id", "status", "batch_id"]).add_cte(logged))


def _retry() -> sa.TextClause:
    """Return RETRY. The fencing token is kept: it never goes back. Members of a batch are retried with it.

    It is wanted now, whatever it waited for when it was cancelled: a time, an event, or others of its key.
    """
    found = sa.select(*j.c["id", "status", "failure_reason"])
    dead = found.where(j.c.id == sa.bindparam("id"), may_be_retried, without_batch)
    locked = dead.with_for_update(key_share=True).cte("dead")
    retried = (
        sa.update(j)
        .values(
            **QUEUED_AGAIN,
            **dict.fromkeys(("attempts", "errors", "stalls", "snoozes"), 0),
            **dict.fromkeys(("finished_at", "failure_reason", "clear_reason", "behind"), sa.null()),
            **dict.fromkeys(("cancel_requested", "cleared"), False),
            **NOT_HELD,
            expires_at=sa.case((~is_over, j.c.expires_at)),
        )
        .where(j.c.id == locked.c.id, may_be_retried)
        .returning(*j.c["id", "fencing_token", "dispatch"], locked.c.status, locked.c.failure_reason)
        .cte("retried")
    )
    detail = json_object(
        dispatch=retried.c.dispatch, was=retried.c.status, failed_for=retried.c.failure_reason
    )
    return compiled(sa.select(retried.c.id).add_cte(entry(retried, "retried", detail=detail)))


CANCEL = _cancel()
RETRY = _retry()
STATUS = compiled(
    sa.select(*j.c["status", "batch_id"], may_be_retried.label("may_be_retried")).where(
        j.c.id == sa.bindparam("id")
    )
)
MISSED = compiled(sa.select(j.c.id, j.c.status, _is_meant.label("meant")).where(j.c.id == sa.any_(_ids)))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel did.

    Attributes:
        cancelled: jobs that are cancelled now.
        requested: running jobs whose owners learn of it with their next heartbeat.
        final: jobs that had ended before, with their status.
        unknown: ids without a job.
        refused: jobs whose row PostgreSQL refused to update, and why.
        other: live jobs that are not, or no longer, among those that were meant, with their status.
    """

    cancelled: list[UUID]
    requested: list[UUID]
    final: dict[UUID, str]
    unknown: list[UUID]
    refused: dict[UUID, str] = field(default_factory=dict)
    other: dict[UUID, str] = field(default_factory=dict)


async def cancel(
    database: Database, ids: Sequence[UUID], *, statuses: Collection[str] | None = None, age: RunAge = ANY_AGE
) -> Cancelled:
    """Cancel waiting jobs at once, ask the owners of running ones to stop, and look after the batches of both.

    Only those that are of one of these statuses (None: any live one) and, if they run, so old at that moment.
    """
    meant = LIVE if statuses is None else LIVE.intersection(statuses)
    wanted = {"statuses": list(meant), **age.values()}
    asked: dict[UUID, str] = {}
    batches: set[UUID] = set()
    seen: dict[UUID, str] = {}
    refused: dict[UUID, str] = {}
    missed = list(ids)
    while missed:  # once more for a job that was retried between the two statements
        rows, bad = await in_halves(missed, lambda some: database.run(CANCEL, {"ids": list(some), **wanted}))
        asked |= {row.id: row.status for row in rows}
        batches |= {row.batch_id for row in rows if row.batch_id is not None and row.status == "cancelled"}
        refused |= {job_id: str(error) for job_id, error in bad}
        missed = [job_id for job_id in missed if job_id not in asked and job_id not in refused]
        if missed:
            found = await database.run(MISSED, {"ids": missed, **wanted})
            seen |= {row.id: row.status for row in found}
            missed = [row.id for row in found if row.meant]
    with suppress(DatabaseUnavailable, DatabaseRefused):  # the workers' scans do it then
        await workflows.advance(database, batches)
    left = {job_id: status for job_id, status in seen.items() if job_id not in asked | refused}
    return Cancelled(
        cancelled=[job_id for job_id, status in asked.items() if status == "cancelled"],
        requested=[job_id for job_id, status in asked.items() if status == "processing"],
        final={job_id: status for job_id, status in left.items() if status not in LIVE},
        unknown=[job_id for job_id in ids if job_id not in asked | refused | seen],
        refused=refused,
        other={job_id: status for job_id, status in left.items() if status in LIVE},
    )


async def retry(database: Database, job_id: UUID) -> None:
    """Put a failed or cancelled job back into the queue, its counters at zero.

    A member of a batch opens that again, and waits if what the batch needs is not finished or has failed.

    Raises:
        TransitionRefused: it is of another status, it was cancelled because of what it needs, its workflow was
            cancelled, or a live job holds its unique key.
    """
    try:
        if await database.run(RETRY, {"id": job_id}):
            return
    except RowRefused as error:
        taken = error.constraint in ("jobs_unique_live", "jobs_unique_waiting")
        why = "a live job holds its unique key" if taken else error
        raise TransitionRefused(f"job {job_id} cannot be retried: {why}") from None
    rows = await database.run(STATUS, {"id": job_id})
    if not rows:
        raise TransitionRefused(f"job {job_id} does not exist")
    if rows[0].may_be_retried and rows[0].batch_id is not None:
        if await reopen.retry_members(database, rows[0].batch_id, [job_id]):
            return
        rows = await database.run(STATUS, {"id": job_id})
    rule = "only a failed or cancelled job can be retried"
    if rows[0].status == "cancelled":
        rule = "it was cancelled because of what it needs: retry that"
    raise TransitionRefused(f"job {job_id} is {rows[0].status}; {rule}")
