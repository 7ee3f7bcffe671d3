"""SNOOZE: a run ends without an outcome, and its job waits for as long as it asked; no attempt is counted."""

import sqlalchemy as sa

from jsworker.ownership import statements
from jsworker.ownership.predicates import held_by_me, is_superseded, locked_of_mine, worker_id
from jsworker.ownership.statements import NO_OWNER, NOW, compiled, given_array, given_runs, j, waiting
from jsworker.ownership.transitions.settle import Settlement, Snoozing


def _snooze() -> sa.TextClause:
    """Return SNOOZE. One snooze too many fails the job and is an error; a cancellation counts nothing."""
    run = given_runs(
        "run",
        reason=given_array("reasons", sa.Text),
        delay=given_array("delays", sa.Double),
        most=given_array("most", sa.Integer),
        error=given_array("errors", sa.Text),
    )
    next_status = sa.case(
        (j.c.cancel_requested, "cancelled"),
        (j.c.snoozes >= run.c.most, "failed"),
        (is_superseded, "cancelled"),
        else_="scheduled",
    )
    row = locked_of_mine(run, next_status.label("next"), *run.c["reason", "delay", "most", "error"])
    again, failed = row.c.next == "scheduled", row.c.next == "failed"
    superseded = sa.and_(row.c.next == "cancelled", ~j.c.cancel_requested)
    counted = sa.and_(again, row.c.most.is_not(None))
    snoozed = (
        sa.update(j)
        .values(
            status=row.c.next,
            errors=j.c.errors + sa.case((failed, 1), else_=0),
            attempts=j.c.attempts - sa.case((failed, 0), else_=1),
            snoozes=j.c.snoozes + sa.case((counted, 1), else_=0),
            last_error=sa.case((failed, row.c.error), else_=j.c.last_error),
            failure_reason=sa.case((failed, "snoozes"), (superseded, "superseded")),
            cleared=False,
            clear_reason=sa.null(),
            run_at=sa.case((again, NOW + statements.seconds(row.c.delay)), else_=j.c.run_at),
            finished_at=sa.case((~again, NOW)),
            **NO_OWNER,
        )
        .where(j.c.id == row.c.id, held_by_me)
        .returning(
            *j.c["id", "status", "fencing_token", "run_at", "snoozes"],
            sa.func.coalesce(j.c.failure_reason, row.c.reason).label("reason"),
            row.c.error,
        )
        .cte("snoozed")
    )
    again, failed = snoozed.c.status == "scheduled", snoozed.c.status == "failed"
    became = sa.case((again, "snoozed"), else_=snoozed.c.status)
    detail = statements.json_object(
        reason=snoozed.c.reason,
        snoozes=snoozed.c.snoozes,
        run_at=sa.case((again, snoozed.c.run_at)),
    )
    logged = statements.entry(
        snoozed,
        became,
        worker_id=worker_id,
        error=sa.case((failed, snoozed.c.error)),
        detail=sa.func.jsonb_strip_nulls(detail),
    )
    return compiled(sa.select(snoozed.c.id, became.label("status"), snoozed.c.fencing_token).add_cte(logged))


SNOOZE = _snooze()
_COLUMNS = {"reasons": "reason", "delays": "delay", "most": "most", "errors": "error"}
snooze: Settlement[Snoozing] = Settlement("snooze", SNOOZE, waiting(SNOOZE), _COLUMNS)
"""Puts jobs off; each becomes SNOOZED, FAILED, CANCELLED or LOST, unless its row is refused or locked."""
