"""What operators may do to a workflow: cancel live jobs, retry failed ones; and members that add members."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import TextClause, bindparam

from jsworker.core.errors import OwnershipLost, TransitionRefused
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database, MostRows
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.refusals import Refused, RowRefused, write_unlocked
from jsworker.ownership.statements import condition, filled, sql
from jsworker.ownership.transitions import control, reopen
from jsworker.ownership.transitions.audit import AuditEntry, run_noted
from jsworker.ownership.transitions.enqueue import NewJob, size_of
from jsworker.ownership.transitions.heartbeat import Held

T = TypeVar("T")

_PAGE: Final = 500
_FIRST: Final = UUID(int=0)
_LAST: Final = UUID(int=2**128 - 1)
_COUNT_SECONDS: Final = 30.0

_PARTS: Final = {
    "workflow_open": sql(predicates.workflow_open),
    "unfinished": sql(predicates.unfinished),
    "mine": condition(predicates.mine(bindparam("token"))),
}


def _statement(template: str, **parts: str) -> TextClause:
    return filled(template, **parts, **_PARTS)


# From its commit on, NEEDS cancels instead of waking, and the scans of all workers cancel live jobs.
CANCEL_WORKFLOW = _statement("""
UPDATE jsworker.workflows AS w
SET cancelled_at = coalesce(w.cancelled_at, clock_timestamp()), revision = w.revision + 1
WHERE w.id = CAST(:id AS uuid) AND {workflow_open}
RETURNING w.id
""")
WORKFLOW = _statement("SELECT w.name, w.outcome FROM jsworker.workflows AS w WHERE w.id = CAST(:id AS uuid)")

# A range of the index jobs_of_batch for each batch: by equations, or by ids alone, the planner may walk all jobs of
# the table once it holds many. In the alphabet no other status lies between those of live jobs. Backwards, because
# a job moves on from "scheduled" to "processing", as the pages do.
_MEMBERS_OF: Final = """
SELECT page.id, page.batch_id, page.status FROM (
  SELECT b.id FROM jsworker.batches AS b
  WHERE b.workflow = CAST(:id AS uuid) AND b.id <= CAST(:batch AS uuid) ORDER BY b.id DESC
) AS b CROSS JOIN LATERAL (
  SELECT j.id, j.batch_id, j.status FROM jsworker.jobs AS j
  WHERE j.batch_id IS NOT NULL AND (j.batch_id, j.status, j.id) >= (b.id, '{lowest}', CAST('{first}' AS uuid))
    AND (j.batch_id, j.status, j.id) < (b.id,
      CASE WHEN b.id = CAST(:batch AS uuid) THEN CAST(:status AS text) ELSE '{highest}' END,
      CASE WHEN b.id = CAST(:batch AS uuid) THEN CAST(:before AS uuid) ELSE CAST('{last}' AS uuid) END)
{unless}
  ORDER BY j.batch_id DESC, j.status DESC, j.id DESC LIMIT :limit
) AS page
ORDER BY b.id DESC, page.status DESC, page.id DESC LIMIT :limit
"""


def _members_of(*, lowest: str, highest: str, unless: str = "") -> TextClause:
    return _statement(
        _MEMBERS_OF, lowest=lowest, highest=highest, unless=unless, first=str(_FIRST), last=str(_LAST)
    )


LIVE_MEMBERS = _members_of(lowest="processing", highest="scheduled", unless=" AND NOT j.cancel_requested")
FAILED_MEMBERS = _members_of(lowest="failed", highest="failed")
CANCELLED_SINCE = _statement("""
SELECT count(*) AS jobs FROM jsworker.workflows AS w JOIN jsworker.batches AS b ON b.workflow = w.id
JOIN jsworker.jobs AS j ON j.batch_id = b.id AND j.status = 'cancelled' AND j.finished_at >= w.cancelled_at
WHERE w.id = CAST(:id AS uuid)
""")

# A running member adds members to its batch. The batch's generation moves on first, so that a FINISH that did
# not see the new members takes no effect; if a FINISH was faster, nothing is added.
_ADD_MEMBERS: Final = """
WITH owner AS MATERIALIZED (
  SELECT j.id, j.batch_id FROM jsworker.jobs AS j WHERE j.id = CAST(:job_id AS uuid) AND {mine}{lock}
), opened AS (
  UPDATE jsworker.batches AS b SET generation = b.generation + 1
  FROM owner WHERE b.id = owner.batch_id AND {unfinished}{briefly}
  RETURNING b.id
)
INSERT INTO jsworker.jobs (
  id, kind, payload, max_attempts, max_stalls, traceparent, tracestate, limit_key, priority, batch_id,
  status, run_at, dispatch, needs_publish, publish_after, queued_at)
SELECT new.id, CAST(:kind AS text), CAST(new.payload AS jsonb), new.max_attempts, new.max_stalls, new.traceparent,
  new.tracestate, new.limit_key, new.priority, opened.id, 'queued', clock_timestamp(), 1, true, clock_timestamp(), clock_timestamp()
FROM opened CROSS JOIN unnest(
  CAST(:ids AS uuid[]), CAST(:payloads AS text[]), CAST(:max_attempts AS integer[]), CAST(:max_stalls AS integer[]),
  CAST(:traceparents AS text[]), CAST(:tracestates AS text[]), CAST(:limit_keys AS text[]),
  CAST(:priorities AS smallint[])
) AS new(id, payload, max_attempts, max_stalls, traceparent, tracestate, limit_key, priority)
RETURNING id
"""
# Heartbeats skip the locked row of the job, so it must not wait long for another member that adds.
ADD_MEMBERS = _statement(
    _ADD_MEMBERS, lock=" FOR NO KEY UPDATE OF j", briefly=f" AND {sql(statements.WAITS_BRIEFLY)}"
)
# For the job's own transaction, which ends with the guard: until then heartbeats would skip a locked row.
ADD_MEMBERS_UNLOCKED = _statement(_ADD_MEMBERS, lock="", briefly="")
MAY_ADD = _statement("""
SELECT {mine} AS mine, j.batch_id FROM jsworker.jobs AS j WHERE j.id = CAST(:job_id AS uuid)
""")


class CancelledWorkflow(NamedTuple):
    """How many jobs were cancelled since the first cancel, and how many running ones this one has asked to stop.

    A job that has stopped since then is in both numbers.
    """

    cancelled: int
    requested: int


async def cancel_workflow(
    database: Database, workflow: UUID, *, entry: AuditEntry | None = None
) -> CancelledWorkflow:
    """Cancel the live jobs of a workflow; the workers' scans cancel members that are added meanwhile.

    Raises:
        TransitionRefused: there is no such workflow, or it has ended; or the rows of some jobs were refused or
            locked, and the others were cancelled; the workers' scans cancel locked ones later.
    """
    done = CancelledWorkflow(0, 0)
    async for so_far in cancelling_workflow(database, workflow, entry=entry):
        done = so_far
    return done


async def cancelling_workflow(
    database: Database, workflow: UUID, *, entry: AuditEntry | None = None
) -> AsyncGenerator[CancelledWorkflow]:
    """Cancel as ``cancel_workflow`` does, and yield what was done so far: first once the workflow is cancelled.

    From then on the workers' scans cancel what this leaves.
    """
    if not await run_noted(database, CANCEL_WORKFLOW, {"id": workflow}, entry):
        await _refuse(database, workflow, "cancelled")
    cancelled, requested, refused = 0, 0, dict[UUID, str]()
    yield CancelledWorkflow(cancelled, requested)
    async for done in _cancelled(database, workflow, partial(control.cancel, database)):
        cancelled += len(done.cancelled)
        requested += len(done.requested)
        refused |= done.refused
        yield CancelledWorkflow(cancelled, requested)
    [row] = await database.run(CANCELLED_SINCE, {"id": workflow}, seconds=_COUNT_SECONDS)  # also by NEEDS
    if refused:
        raise TransitionRefused(
            f"{row.jobs + requested} jobs were cancelled, {len(refused)} were not;"
            f" the first one: {next(iter(refused.values()))}"
        )
    yield CancelledWorkflow(row.jobs, requested)


async def cancel_left(database: Database, workflow: UUID) -> None:
    """Cancel the jobs of a cancelled workflow that are still live; locked rows are left to the next sweep."""
    async for _ in _cancelled(database, workflow, partial(control.cancel_unlocked, database)):
        continue


async def _cancelled(
    database: Database, workflow: UUID, cancel: Callable[[Sequence[UUID]], Awaitable[T]]
) -> AsyncIterator[T]:
    """Yield what ``cancel`` returns for the live members, a page or less at a time."""
    jobs, left = MostRows(database, _PAGE), list[UUID]()

    def cancel_first(most: int) -> Awaitable[T]:
        return cancel(left[:most])

    async for rows in _pages(database, LIVE_MEMBERS, workflow, "scheduled"):
        left = [row.id for row in rows]
        while left:
            yield await jobs.write(cancel_first)
            left = left[jobs.most :]


async def _pages(
    database: Database, members: TextClause, workflow: UUID, highest: str
) -> AsyncIterator[Sequence[Row]]:
    place = {"batch": _LAST, "status": highest, "before": _LAST}
    while rows := await database.run(members, {"id": workflow, "limit": _PAGE, **place}):
        yield rows
        place = {"batch": rows[-1].batch_id, "status": rows[-1].status, "before": rows[-1].id}


async def retry_workflow(database: Database, workflow: UUID, *, entry: AuditEntry | None = None) -> int:
    """Retry all failed jobs of a workflow, and return how many were retried.

    Raises:
        TransitionRefused: there is no such workflow, it was cancelled, or none of its jobs has failed; or some
            jobs cannot be retried, and the others were.
    """

    async def look(some: Sequence[UUID]) -> Sequence[Row]:
        return await database.run(control.STATUS, {"ids": uuid_array(some)})

    retried, refused = set[UUID](), Refused[UUID]()
    async for rows in _pages(database, FAILED_MEMBERS, workflow, "failed"):
        members = [row.id for row in rows]
        retry = partial(reopen.retry_members, database, rows[0].batch_id, done=retried, entry=entry)
        try:
            _, bad, _ = await write_unlocked(members, retry, look, lambda row: row.status == "failed")
        except TransitionRefused as why:
            if not retried:
                raise
            says = f"{len(retried)} jobs were retried, the others were not: {why}"
            raise TransitionRefused(says) from None
        refused += bad
    if refused:
        job_id, error = refused[0]
        raise TransitionRefused(
            f"{len(retried)} jobs were retried, {len(refused)} were not; the first one: job {job_id}: {error}"
        )
    if not retried:
        await _refuse(database, workflow, "retried")
    return len(retried)


async def _refuse(database: Database, workflow: UUID, what: str) -> None:
    rows = await database.run(WORKFLOW, {"id": workflow})
    if not rows:
        raise TransitionRefused(f"there is no workflow {workflow}")
    state = f"is {rows[0].outcome}" if rows[0].outcome else "runs, and none of its jobs has failed"
    raise TransitionRefused(f"workflow {workflow} {state}; it cannot be {what}")


def add_members_statement(worker_id: str, held: Held, kind: str, new: Sequence[NewJob]) -> TextClause:
    """Return the statement that adds members to a job's batch, for the job's own transaction.

    It returns a row for each member; none: the job has no batch, its batch has finished, or the job is lost.
    """
    return ADD_MEMBERS_UNLOCKED.bindparams(**_values(worker_id, held, kind, new))


async def add_members(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    kind: str,
    new: Sequence[NewJob],
    tries: int = 0,
) -> None:
    """Add members to the batch of a running job, in a transaction of its own; a repeat adds none twice.

    Raises:
        OwnershipLost: the run no longer owns the job.
        TransitionRefused: the job has no batch, or its batch has finished.
        LockTimeout: another member is adding to the batch, in a transaction that has not ended.
    """
    seconds = database.seconds_for(size_of(new), tries=tries)
    values, (job_id, token) = _values(worker_id, held, kind, new), held
    try:
        if await database.run(ADD_MEMBERS, values, seconds=seconds):
            return
    except RowRefused as error:
        if error.constraint != "jobs_pkey":
            raise
        return  # stored by an earlier try, whose answer was lost
    given = {"worker_id": worker_id, "job_id": job_id, "token": token}
    rows = await database.run(MAY_ADD, given)
    if not rows or not rows[0].mine:
        raise OwnershipLost(
            f"job {job_id}: token {token} no longer owns it, and adds nothing to its batch any more"
        )
    if rows[0].batch_id is None:
        raise TransitionRefused(f"job {job_id} belongs to no batch, so nothing can be added to that")
    raise TransitionRefused(
        f"batch {rows[0].batch_id} of job {job_id} has finished: nothing can be added to it"
    )


def _values(worker_id: str, held: Held, kind: str, new: Sequence[NewJob]) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "job_id": held[0],
        "token": held[1],
        "kind": kind,
        "ids": uuid_array(job.id for job in new),
        "payloads": [job.payload for job in new],
        "max_attempts": [job.max_attempts for job in new],
        "max_stalls": [job.max_stalls for job in new],
        "traceparents": [job.traceparent for job in new],
        "tracestates": [job.tracestate for job in new],
        "limit_keys": [job.limit_key for job in new],
        "priorities": [job.priority for job in new],
    }
