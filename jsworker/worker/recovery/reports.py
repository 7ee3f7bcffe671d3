"""What is told of jobs that were taken back, whichever rule gave them free: of each one event."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from jsworker.core import fault_points
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.reset import Reset, TakenBack, take_unreported

BY_OPERATOR: Final = "operator"


async def report(
    taken: TakenBack,
    *,
    cause: str,
    events: Events,
    refused_rows: RefusedRows,
    on_requeued: Callable[[], None],
) -> list[Reset]:
    """Tell of each job and of all together, and wake whoever publishes.

    Args:
        taken: the answer of a RESET.
        cause: the rule that gave the jobs free: ``stale``, ``crashed`` or ``dead``.
        events: told.
        refused_rows: sets aside what was refused, and tells it once.
        on_requeued: called when any job waits to be published.

    Returns:
        The jobs that were taken back.

    Raises:
        DatabaseUnavailable, DatabaseRefused: what was refused is not set aside.
    """
    tell(taken.resets, cause=cause, events=events)
    if taken.resets:
        await fault_points.reach("after_reset_before_wake")
        on_requeued()
    await refused_rows.note("reset", taken.refused.items())
    return taken.resets


async def report_operators(database: Database, *, events: Events) -> None:
    """Tell of jobs that operators have taken back since, which they could tell nobody.

    Raises:
        DatabaseUnavailable, DatabaseRefused: not all are told.
    """
    while resets := await take_unreported(database):
        tell(resets, cause=BY_OPERATOR, events=events)


def tell(resets: Collection[Reset], *, cause: str, events: Events) -> None:
    """Tell of each job that was taken back, and of all together where their owners were silent or dead."""
    for job in resets:
        _tell_one(job, cause, events, together=len(resets))
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


def _tell_one(job: Reset, cause: str, events: Events, *, together: int) -> None:
    facts = {"job_id": str(job.id), "kind": job.kind, "fencing_token": job.fencing_token, "owner": job.owner}
    if cause == BY_OPERATOR:  # no stall, whatever its owner did: so each is told in a line of its own
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
