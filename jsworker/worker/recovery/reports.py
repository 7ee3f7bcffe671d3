"""Events of jobs that were taken back, by whichever rule: one for each job and one for all together."""

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from jsworker.core import fault_points
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.reset import Reset, TakenBack, take_unreported

if TYPE_CHECKING:
    from jsworker.worker.context import WorkerContext

BY_OPERATOR: Final = "operator"


async def report_taken(context: "WorkerContext", taken: TakenBack, *, cause: str) -> None:
    """Emit the events of a RESET, have jobs published, and set refused rows aside.

    Args:
        context: the worker's.
        taken: the answer of the RESET.
        cause: the rule by which: ``stale``, ``crashed`` or ``dead``.

    Raises:
        DatabaseUnavailable, DatabaseRefused: what was refused is not set aside.
    """
    report_resets(taken.resets, cause=cause, events=context.events)
    if taken.resets:
        await fault_points.reach("after_reset_before_wake")
        context.requeued.notify()
    await context.refused_rows.note("reset", taken.refused.items())


async def report_operators(database: Database, *, events: Events) -> None:
    """Emit events of jobs that operators have taken back since: their command has no subscribers.

    Raises:
        DatabaseUnavailable, DatabaseRefused: not all are reported.
    """
    while resets := await take_unreported(database):
        report_resets(resets, cause=BY_OPERATOR, events=events)


def report_resets(resets: Collection[Reset], *, cause: str, events: Events) -> None:
    """Emit one event for each job and, where their owners were silent or dead, one for all together."""
    for job in resets:
        _report_one(job, cause, events, together=len(resets))
    if not resets or cause == BY_OPERATOR:
        return
    events.emit(
        "stale.recovered",
        jobs=len(resets),
        owners=sorted({job.owner for job in resets}),
        cause=cause,
        counted=sum(job.counted for job in resets),
        to=dict(Counter(job.status for job in resets)),
    )


def _report_one(job: Reset, cause: str, events: Events, *, together: int) -> None:
    facts = {"job_id": str(job.id), "kind": job.kind, "fencing_token": job.fencing_token, "owner": job.owner}
    if cause == BY_OPERATOR:  # no stall, whatever its owner did: so each has a line of its own
        events.emit("job.cleared", **facts, cause=cause, to=job.status)
    else:
        stall = {"cause": cause, "counted": job.counted, "stalls": job.stalls}
        events.emit("job.stalled", **facts, **stall, together=together)
    match job.status:
        case "failed":
            events.emit("job.failed", **facts, error="stalled too often", stalls=job.stalls)
        case "cancelled":
            events.emit("job.cancelled", **facts)
        case _ if cause != BY_OPERATOR:
            events.emit("job.cleared", **facts, cause=cause, to=job.status, together=together)
