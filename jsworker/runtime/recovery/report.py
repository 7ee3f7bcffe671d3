"""What is told of jobs that were taken back, whichever rule gave them free."""

from collections import Counter
from collections.abc import Callable, Collection

from jsworker import fault_points
from jsworker.events import Events
from jsworker.ownership.refused_rows import RefusedRows
from jsworker.ownership.reset import Reset, TakenBack


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
    for job in taken.resets:
        _report_one(job, cause, events, together=len(taken.resets))
    if taken.resets:
        _report_all(taken.resets, cause, events)
        await fault_points.reach("after_reset_before_wake")
        on_requeued()
    await refused_rows.note("reset", taken.refused.items())
    return taken.resets


def _report_all(resets: Collection[Reset], cause: str, events: Events) -> None:
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
    stall = {"cause": cause, "counted": job.counted, "stalls": job.stalls}
    events.emit("job.stalled", **facts, **stall, together=together)
    match job.status:
        case "failed":
            events.emit("job.failed", **facts, error="stalled too often", stalls=job.stalls)
        case "cancelled":
            events.emit("job.cancelled", **facts)
        case _:
            events.emit("job.cleared", **facts, cause=cause, to=job.status, together=together)
