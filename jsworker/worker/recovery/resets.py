"""RESET: takes back the jobs of a dead owner (rule 2), and emits the events of any rule's resets."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Final

from jsworker.core import fault_points
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, LockTimeout
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.schema import FINAL
from jsworker.ownership.transitions import reset, workers
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.reset import Reset, Suspect, TakenBack, take_unreported
from jsworker.ownership.transitions.workflows import batches_of
from jsworker.worker.supervision import DeadOwner

if TYPE_CHECKING:  # a parent of workers resets without importing NATS
    from jsworker.worker.context import WorkerContext

BY_OPERATOR: Final = "operator"
_LOOKS: Final = 4  # in a statement time-out
_FIRST_RETRY_SECONDS: Final = 0.1
_LONGEST_RETRY_SECONDS: Final = 2.0


async def reset_dead_owner(
    database: Database,
    dead: DeadOwner,
    *,
    worker_id: str,
    report: Callable[[TakenBack], Awaitable[None]],
    failed: Callable[[DatabaseUnavailable | DatabaseRefused], Awaitable[None]],
) -> str | None:
    """Take back all jobs of a dead owner, repeatedly until its last CLAIM cannot commit any more.

    A CLAIM may be on its way to the database when its process dies, and rows that its last statement has
    locked are skipped: the last RESET begins when no such statement can be left. If the database does not
    answer, this tries again without end. ``report`` is awaited with the result of each RESET, ``failed`` with
    each error of the database. Returns why the owner is not marked as stopped in the registry; None if it is.
    """
    in_line: reset.NotBegun = {}
    retry = 0.0
    while True:
        is_last = boottime() >= dead.settled_at
        try:
            taken = await reset.reset_dead(
                database,
                worker_id=worker_id,
                owner=dead.worker_id,
                reason=dead.reason,
                counted=dead.counted,
                culprits=dead.culprits,
                in_line=in_line,
            )
            await report(taken)
            if is_last:
                return await _mark_ended(database, dead.worker_id)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            await failed(error)
            pause = retry = min(_LONGEST_RETRY_SECONDS, max(_FIRST_RETRY_SECONDS, 2 * retry))
        else:
            retry = 0.0
            pause = min(database.seconds_for(0) / _LOOKS, dead.settled_at - boottime())
        await asyncio.sleep(pause)


async def _mark_ended(database: Database, worker_id: str) -> str | None:
    try:
        await workers.mark_stopped(database, worker_id=worker_id)
    except LockTimeout:  # the caller tries again
        raise
    except DatabaseRefused as error:  # not fatal: its jobs are taken back
        return str(error)
    return None


class DeadOwners:
    """Takes back, in a worker, the jobs of dead owners."""

    def __init__(self, context: "WorkerContext") -> None:
        self._context = context
        self._resetting: set[asyncio.Task[int]] = set()

    def begin(self, dead: DeadOwner) -> None:
        """Begin to take back the jobs of a dead sibling, and return at once."""
        resetting = asyncio.create_task(self.reset(dead), name=f"reset {dead.worker_id}")
        self._resetting.add(resetting)
        resetting.add_done_callback(self._resetting.discard)

    async def reset(self, dead: DeadOwner) -> int:
        """Take back all jobs that a dead owner holds or may still claim, and return their number."""
        jobs = 0

        async def report_and_count(taken: TakenBack) -> None:
            nonlocal jobs
            jobs += len(taken.resets)
            await report_taken(self._context, taken, cause="dead")

        await reset_dead_owner(
            self._context.database,
            dead,
            worker_id=self._context.worker_id,
            report=report_and_count,
            failed=self._context.unanswered,  # for example: its row of the registry is locked
        )
        return jobs

    async def close(self) -> None:
        """Cancel what is not finished: the parent, or the next worker on this host, does it."""
        for resetting in self._resetting:
            resetting.cancel()
        if self._resetting:
            await asyncio.wait(self._resetting)


async def report_taken(context: "WorkerContext", taken: TakenBack, *, cause: str) -> None:
    """Emit the events of a RESET, wake the relay, have batches checked, and set refused rows aside.

    ``cause`` is the rule.
    """
    report_resets(taken.resets, cause=cause, events=context.events)
    if taken.resets:
        await fault_points.reach("after_reset_before_wake")
        context.requeued.notify()
        ended = [job.id for job in taken.resets if job.status in FINAL]
        for batch in await batches_of(context.database, ended):
            context.batches.touch(batch)
    await context.refused_rows.note("reset", taken.refused.items())


async def report_operators(database: Database, *, events: Events) -> None:
    """Emit the events of jobs taken back by operators, whose commands have no subscribers of events."""
    while resets := await take_unreported(database):
        report_resets(resets, cause=BY_OPERATOR, events=events)


def report_resets(resets: Collection[Reset], *, cause: str, events: Events) -> None:
    """Emit events for each job, and one for all together if their owners were silent or dead."""
    by_operator, together = cause == BY_OPERATOR, len(resets)
    for job in resets:
        facts: dict[str, object] = {"job_id": str(job.id), "kind": job.kind}
        facts |= {"fencing_token": job.fencing_token, "owner": job.owner}
        if by_operator:  # never a stall
            events.emit("job.cleared", **facts, cause=cause, to=job.status)
        else:
            stall = {"cause": cause, "counted": job.counted, "stalls": job.stalls, "together": together}
            events.emit("job.stalled", **facts, **stall)
        match job.status:
            case "failed":
                events.emit("job.failed", **facts, error="stalled too often", stalls=job.stalls)
            case "cancelled":
                events.emit("job.cancelled", **facts)
            case "queued" | "scheduled" if not by_operator:
                events.emit("job.cleared", **facts, cause=cause, to=job.status, together=together)
    if resets and not by_operator:
        events.emit(
            "stale.recovered",
            jobs=together,
            owners=sorted({job.owner for job in resets}),
            cause=cause,
            counted=sum(job.counted for job in resets),
            to=dict(Counter(job.status for job in resets)),
        )


def report_taken_over(claimed: Collection[ClaimedJob], seen: Collection[Suspect], *, events: Events) -> None:
    """Emit the events of jobs that were claimed directly from silent owners."""
    owners = {row.id: row.worker_id for row in seen}
    stalled = [
        Reset(
            id=job.id,
            kind=job.kind,
            status="processing",
            fencing_token=job.fencing_token - 1,
            dispatch=job.dispatch,
            owner=owners[job.id],
            counted=True,
            stalls=job.stalls,
        )
        for job in claimed
    ]
    report_resets(stalled, cause="stale", events=events)
