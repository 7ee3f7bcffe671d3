"""One event a minute about the work of a worker: the progress of ``jsworker run`` in its log."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from jsworker.core.clock import boottime
from jsworker.ownership.transitions.settle import Settled
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import Phase

_NAMES: Final = {Settled.COMPLETED: "completed", Settled.FAILED: "failed", Settled.SCHEDULED: "to_retry"}


class WorkSummary:
    """Emits ``worker.status`` while there is work to report, and once more when all of it is done."""

    def __init__(self, context: WorkerContext, ended: Mapping[Settled, int]) -> None:
        """Prepare; ``ended`` counts the ended runs of this worker by the outcome of their jobs."""
        self._context = context
        self._ended = ended
        self._reported: Counter[Settled] = Counter()
        self._reported_at = boottime()

    async def step(self) -> None:
        """Report the runs that have ended since the last call, and the jobs in flight."""
        now, runs = boottime(), list(self._context.in_flight.runs.values())
        done = Counter(self._ended) - self._reported
        seconds, self._reported_at = now - self._reported_at, now
        if not runs and not done:
            return
        self._reported += done
        begun = [run for run in runs if run.phase is not Phase.WAITING]
        oldest = min(begun, key=lambda run: run.began_at, default=None)
        self._context.events.emit(
            "worker.status",
            running=len(begun),
            claimed_ahead=len(runs) - len(begun),
            done=sum(done.values()),
            **{name: done[settled] for settled, name in _NAMES.items() if done[settled]},
            in_seconds=round(seconds, 1),
            oldest=None if oldest is None else str(oldest.id),
            oldest_seconds=None if oldest is None else round(now - oldest.began_at, 1),
        )
