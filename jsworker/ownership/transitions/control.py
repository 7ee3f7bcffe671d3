"""CANCEL and RETRY: what operators and clients do to jobs."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
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
from jsworker.ownership.refusals import in_halves, write_unlocked
from jsworker.ownership.schema import FINAL, STATUSES
from jsworker.ownership.statements import (
    NOT_HELD,
    NOW,
    WAITS_BRIEFLY,
    compiled,
    entry,
    given_array,
    j,
    json_object,
    locked,
)
from jsworker.ownership.transitions import reopen, workflows
from jsworker.ownership.transitions.audit import AuditEntry, run_noted
from jsworker.ownership.transitions.expire import write_beside_expired
from jsworker.ownership.transitions.priorities import Changed
from jsworker.ownership.transitions.publish import QUEUED_AGAIN

_RETRIED_AT_ONCE: Final = 500

LIVE = frozenset(STATUSES) - frozenset(FINAL)

_ids = given_array("ids", sa.Uuid)
_is_meant = sa.and_(j.c.status == sa.any_(given_array("statuses", sa.Text)), as_old_as_chosen)


def _cancel() -> sa.TextClause:
    """Return CANCEL, one UPDATE with a CASE on the status: two could both miss a job that fails in between."""
    taken = locked(sa.select(j.c.id).where(j.c.id == sa.any_(_ids), live, _is_meant), "live")
    asked = (
        sa.update(j)
        .values(
            status=sa.case((processing, "processing"), else_="cancelled"),
            cancel_requested=processing,
            needs_publish=False,
            finished_at=sa.case((~processing, NOW)),
            **NOT_HELD,
        )
        .where(j.c.id == taken.c.id, live)
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
    """Return RETRY. It keeps the fencing token, which never decreases; members of a batch have their own RETRY.

    The job is queued at once, even if it waited for a time, an event or its key when it was cancelled.
    """
    found = sa.select(*j.c["id", "status", "failure_reason"])
    found = found.where(j.c.id == sa.any_(_ids), may_be_retried, without_batch, WAITS_BRIEFLY)
    dead = locked(found, "dead")
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
        .where(j.c.id == dead.c.id, may_be_retried)
        .returning(*j.c["id", "fencing_token", "dispatch"], dead.c.status, dead.c.failure_reason)
        .cte("retried")
    )
    detail = json_object(
        dispatch=retried.c.dispatch, was=retried.c.status, failed_for=retried.c.failure_reason
    )
    return compiled(sa.select(retried.c.id).add_cte(entry(retried, "retried", detail=detail)))


CANCEL = _cancel()
RETRY = _retry()
STATUS = compiled(
    sa.select(*j.c["id", "status", "batch_id"], may_be_retried.label("may_be_retried")).where(
        j.c.id == sa.any_(_ids)
    )
)
MISSED = compiled(sa.select(j.c.id, j.c.status, _is_meant.label("meant")).where(j.c.id == sa.any_(_ids)))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result of a cancel.

    Attributes:
        cancelled: jobs that are cancelled now.
        requested: running jobs, whose owners learn of it with their next heartbeat.
        final: jobs that had already ended, with their status.
        unknown: ids without a job.
        refused: jobs that another transaction keeps locked, or whose row PostgreSQL refused to update, each with
            the reason.
        other: live jobs that do not, or no longer, meet the conditions, with their status.
    """

    cancelled: list[UUID]
    requested: list[UUID]
    final: dict[UUID, str]
    unknown: list[UUID]
    refused: dict[UUID, str] = field(default_factory=dict)
    other: dict[UUID, str] = field(default_factory=dict)


async def cancel(
    database: Database,
    ids: Sequence[UUID],
    *,
    statuses: Collection[str] | None = None,
    age: RunAge = ANY_AGE,
    entry: AuditEntry | None = None,
) -> Cancelled:
    """Cancel waiting jobs at once and advance their batches; ask the owners of running jobs to stop.

    This acts only on jobs of these ``statuses`` (None: every live one) that, if they run, meet ``age``.
    """

    async def write(some: Sequence[UUID]) -> Sequence[Row]:
        return await run_noted(database, CANCEL, {"ids": list(some), **wanted}, entry)

    async def look(some: Sequence[UUID]) -> Sequence[Row]:
        return await database.run(MISSED, {"ids": list(some), **wanted})

    meant = LIVE if statuses is None else LIVE.intersection(statuses)
    wanted = {"statuses": list(meant), **age.values()}
    rows, bad, found = await write_unlocked(ids, write, look, lambda row: bool(row.meant))
    await _advance(database, _ended_in(rows))
    asked: dict[UUID, str] = {row.id: row.status for row in rows}
    refused = {job_id: f"job {job_id} cannot be cancelled: {error}" for job_id, error in bad}
    left: dict[UUID, str] = {row.id: row.status for row in found.values()}
    return Cancelled(
        cancelled=[job_id for job_id, status in asked.items() if status == "cancelled"],
        requested=[job_id for job_id, status in asked.items() if status == "processing"],
        final={job_id: status for job_id, status in left.items() if status not in LIVE},
        unknown=[job_id for job_id in ids if job_id not in asked | refused | left],
        refused=refused,
        other={job_id: status for job_id, status in left.items() if status in LIVE},
    )


async def cancel_unlocked(database: Database, ids: Sequence[UUID]) -> None:
    """Cancel live jobs like ``cancel``, but try locked rows only once: for sweeps, which come again."""
    wanted = {"statuses": list(LIVE), **ANY_AGE.values()}
    rows, _ = await in_halves(ids, lambda some: database.run(CANCEL, {"ids": list(some), **wanted}))
    await _advance(database, _ended_in(rows))


def _ended_in(rows: Sequence[Row]) -> set[UUID]:
    """Return the batches of the jobs that CANCEL has ended at once."""
    return {row.batch_id for row in rows if row.batch_id is not None and row.status == "cancelled"}


async def _advance(database: Database, batches: Collection[UUID]) -> None:
    with suppress(DatabaseUnavailable, DatabaseRefused):  # the scans of workers do it later
        await workflows.advance(database, batches)


async def retry_all(database: Database, ids: Sequence[UUID], *, entry: AuditEntry | None = None) -> Changed:
    """Put failed or cancelled jobs back into the queue, with their counters at zero.

    A member of a batch opens its batch again, and waits if a need of the batch is unfinished or has failed. A job is
    refused if it has another status, was cancelled with its workflow or because a need failed or was cancelled, or if
    a live job holds its unique key.
    """

    async def write(some: Sequence[UUID]) -> Sequence[Row]:
        retry = partial(run_noted, database, RETRY, {"ids": uuid_array(some)}, entry)
        return await write_beside_expired(database, some, retry)

    async def look(some: Sequence[UUID]) -> Sequence[Row]:
        return await database.run(STATUS, {"ids": uuid_array(some)})

    wanted = list(dict.fromkeys(ids))
    rows, bad, left = await write_unlocked(
        wanted, write, look, lambda row: row.may_be_retried and row.batch_id is None, size=_RETRIED_AT_ONCE
    )
    done = {row.id for row in rows}
    refused: dict[UUID, str] = {}
    for job_id, error in bad:
        is_taken = error.constraint in ("jobs_unique_live", "jobs_unique_waiting")
        why = "a live job holds its unique key" if is_taken else str(error)
        refused[job_id] = f"job {job_id} cannot be retried: {why}"
    members: dict[UUID, list[UUID]] = {}
    for row in left.values():
        if row.may_be_retried and row.batch_id is not None:
            members.setdefault(row.batch_id, []).append(row.id)
    for batch, some in members.items():
        retry = partial(reopen.retry_members, database, batch, done=done, entry=entry)
        try:
            _, bad, found = await write_unlocked(some, retry, look, lambda row: bool(row.may_be_retried))
        except TransitionRefused as error:
            refused |= {each: f"job {each} cannot be retried: {error}" for each in some if each not in done}
            continue
        refused |= {each: f"job {each} cannot be retried: {error}" for each, error in bad}
        left |= found
    refused |= {
        each: _unretryable(each, left.get(each)) for each in wanted if each not in done | refused.keys()
    }
    return Changed([each for each in wanted if each in done], refused)


def _unretryable(job_id: UUID, row: Row | None) -> str:
    if row is None:
        return f"job {job_id} does not exist"
    rule = "only a failed or cancelled job can be retried"
    if row.status == "cancelled":
        rule = "it was cancelled because of what it needs: retry that"
    return f"job {job_id} is {row.status}; {rule}"
