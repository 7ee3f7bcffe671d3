"""RETRY of a batch's members: the batch is opened again, and jobs cancelled because of it are held again.

One transaction of several statements, each with a snapshot of its own. The first increments the workflow's
revision and keeps its row locked: meanwhile no NEEDS decides by batches that are being opened, and one that
has begun before takes no effect.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from psycopg.errors import LockNotAvailable
from sqlalchemy import TextClause

from jsworker.core.errors import LockTimeout, TransitionRefused
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, Transaction, uuid_array
from jsworker.ownership.refusals import RowLocked
from jsworker.ownership.statements import condition, filled, sql
from jsworker.ownership.transitions.audit import AuditEntry

_SECONDS: Final = 600.0
"""All jobs of a workflow may have to be held again, in one transaction: a million take minutes."""

_PARTS: Final = {
    "may_be_retried": condition(predicates.may_be_retried),
    "cancelled_for_needs": condition(predicates.cancelled_for_needs),
    "is_over": condition(predicates.is_over),
    "not_cancelled": sql(predicates.not_cancelled),
    "briefly": sql(statements.WAITS_BRIEFLY),
}


def _statement(template: str) -> TextClause:
    return filled(template, **_PARTS)


MOVE_ON = _statement("""
UPDATE jsworker.workflows AS w SET revision = w.revision + 1, finished_at = NULL, outcome = NULL
FROM jsworker.batches AS b
WHERE b.id = CAST(:batch AS uuid) AND w.id = b.workflow AND {not_cancelled}
RETURNING w.id
""")
WORKFLOW_OF = _statement("SELECT b.workflow FROM jsworker.batches AS b WHERE b.id = CAST(:batch AS uuid)")

# Opens the batches of the retried jobs, then the batches that need one of these and have members cancelled
# for their needs, and so on. From here on the transaction waits only briefly: a job's own transaction that adds to
# its batch keeps that locked.
REOPEN = _statement("""
WITH RECURSIVE opened(id) AS (
  SELECT j.batch_id FROM jsworker.jobs AS j JOIN jsworker.batches AS b ON b.id = j.batch_id
  WHERE j.id = ANY(CAST(:ids AS uuid[])) AND ({may_be_retried}) AND b.workflow = CAST(:workflow AS uuid)
  UNION
  SELECT n.batch FROM opened JOIN jsworker.batch_needs AS n ON n.needs = opened.id
  WHERE EXISTS (SELECT FROM jsworker.jobs AS j WHERE j.batch_id = n.batch AND {cancelled_for_needs})
), mine AS (
  SELECT b.id FROM jsworker.batches AS b JOIN opened ON opened.id = b.id
  WHERE {briefly} ORDER BY b.id FOR NO KEY UPDATE OF b
)
UPDATE jsworker.batches AS b SET
  generation = b.generation + 1, finished_at = NULL, outcome = NULL, propagated = false
FROM mine WHERE b.id = mine.id
RETURNING b.id
""")

# Lets NEEDS look again at finished needs of the opened batches: they may finish before members are held.
LOOK_AGAIN = _statement("""
WITH mine AS (
  SELECT b.id FROM jsworker.batches AS b
  WHERE b.finished_at IS NOT NULL AND b.id IN (
    SELECT n.needs FROM jsworker.batch_needs AS n WHERE n.batch = ANY(CAST(:batches AS uuid[])))
  ORDER BY b.id FOR NO KEY UPDATE OF b
)
UPDATE jsworker.batches AS b SET propagated = false FROM mine WHERE b.id = mine.id
""")

# A member cancelled by itself may have needs that failed: it is held, and NEEDS cancels it like the others.
RETRY_MEMBERS = _statement("""
WITH dead AS MATERIALIZED (
  SELECT j.id, j.status, j.failure_reason, EXISTS (
      SELECT FROM jsworker.batches AS b JOIN jsworker.batch_needs AS n ON n.batch = b.id
      JOIN jsworker.batches AS need ON need.id = n.needs
      WHERE b.id = j.batch_id AND (need.finished_at IS NULL
        OR b.on_failure = 'cancel' AND need.outcome <> 'completed')) AS waits
  FROM jsworker.jobs AS j
  WHERE j.id = ANY(CAST(:ids AS uuid[])) AND j.batch_id = ANY(CAST(:batches AS uuid[])) AND ({may_be_retried})
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), retried AS (
  UPDATE jsworker.jobs AS j SET
    status = CASE WHEN dead.waits THEN 'scheduled' ELSE 'queued' END,
    held_by = CASE WHEN dead.waits THEN 'needs' END,
    held_at = CASE WHEN dead.waits THEN clock_timestamp() END,
    due_at = NULL, behind = NULL,
    run_at = CASE WHEN NOT dead.waits THEN j.run_at END,
    dispatch = j.dispatch + CASE WHEN dead.waits THEN 0 ELSE 1 END,
    needs_publish = NOT dead.waits,
    publish_after = clock_timestamp(),
    queued_at = CASE WHEN dead.waits THEN j.queued_at ELSE clock_timestamp() END,
    attempts = 0, errors = 0, stalls = 0, snoozes = 0, finished_at = NULL, failure_reason = NULL, clear_reason = NULL,
    cancel_requested = false, cleared = false,
    expires_at = CASE WHEN NOT {is_over} THEN j.expires_at END
  FROM dead WHERE j.id = dead.id AND ({may_be_retried})
  RETURNING j.id, j.fencing_token, j.dispatch, dead.status, dead.failure_reason
), entries AS (
  INSERT INTO jsworker.job_events (job_id, event, fencing_token, detail)
  SELECT r.id, 'retried', r.fencing_token, jsonb_build_object(
    'dispatch', r.dispatch, 'was', r.status, 'failed_for', r.failure_reason)
  FROM retried AS r
)
SELECT id FROM retried
""")

HOLD_AGAIN = _statement("""
WITH mine AS MATERIALIZED (
  SELECT j.id FROM jsworker.jobs AS j
  WHERE j.batch_id = ANY(CAST(:batches AS uuid[])) AND {cancelled_for_needs} ORDER BY j.id FOR NO KEY UPDATE OF j
), held AS (
  UPDATE jsworker.jobs AS j SET
    status = 'scheduled', held_by = 'needs', held_at = clock_timestamp(), run_at = NULL, finished_at = NULL,
    failure_reason = NULL
  FROM mine WHERE j.id = mine.id AND {cancelled_for_needs}
  RETURNING j.id, j.fencing_token
)
INSERT INTO jsworker.job_events (job_id, event, fencing_token, detail)
SELECT held.id, 'held', held.fencing_token, jsonb_build_object('held_by', 'needs', 'key', '') FROM held
RETURNING job_id AS id
""")


class _NoneIsLeft(Exception):
    """None of the members can be retried any more, or all of them are locked."""


async def retry_members(
    database: Database,
    batch: UUID,
    ids: Sequence[UUID],
    *,
    done: set[UUID],
    entry: AuditEntry | None = None,
) -> Sequence[Row]:
    """Put failed or cancelled jobs of the workflow of a batch back into the queue; return the retried ones.

    ``done`` gets their ids, too: calls for the members that are left may be refused.

    Raises:
        TransitionRefused: the workflow was cancelled or is gone, or another transaction has locked a batch, or a
            job that is to be held again.
        RowRefused: PostgreSQL refuses a row; none is retried. RowLocked: another transaction takes a unique key.
    """

    async def write(transaction: Transaction) -> Sequence[Row]:
        moved = await transaction.run(MOVE_ON, {"batch": batch})
        if not moved:
            rows = await transaction.run(WORKFLOW_OF, {"batch": batch})
            why = f"workflow {rows[0].workflow} was cancelled" if rows else "its workflow is gone"
            raise TransitionRefused(why)
        given = {"ids": uuid_array(ids)}
        rows = await transaction.run(REOPEN, given | {"workflow": moved[0].id})
        if not rows:
            raise _NoneIsLeft  # retried by somebody else meanwhile: the workflow stays as it is
        opened = {"batches": uuid_array(row.id for row in rows)}
        await transaction.run(LOOK_AGAIN, opened)
        try:
            retried = await transaction.run(RETRY_MEMBERS, given | opened)
        except LockNotAvailable:
            raise RowLocked from None
        if not retried:
            raise _NoneIsLeft
        await transaction.run(HOLD_AGAIN, opened)
        if entry is not None:
            await entry.note(transaction, changed=len(retried))
        return retried

    try:
        rows = await database.in_transaction(write, seconds=_SECONDS)
    except _NoneIsLeft:
        return []
    except LockTimeout:
        says = f"batch {batch}, or what needs it, is locked by another transaction: try again"
        raise TransitionRefused(says) from None
    done.update(row.id for row in rows)
    return rows
