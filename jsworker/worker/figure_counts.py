"""What this worker has done, counted in memory for the figures that people look at.

Runs are counted where they are claimed and answered, without an event, which would cost more than the
counting. What sweeps end is counted from their events.
"""

from bisect import bisect_left

from jsworker.core.clock import DURATION_BUCKETS
from jsworker.core.events import Event, Events
from jsworker.ownership.transitions.settle import Settled
from jsworker.ownership.transitions.statistics import KindFigures
from jsworker.telemetry.worker_status import KindLabels


class FigureCounts:
    """What was done of each kind since the last ``take``."""

    def __init__(self, events: Events) -> None:
        self._of_kind: dict[str, KindFigures] = {}
        self._kinds = KindLabels()
        events.on("job.failed", self._swept)
        events.on("job.cancelled", self._swept)
        events.on("jobs.expired", self._expired)

    def claimed(self, kind: str, waited: float | None) -> None:
        """Count a run that began, after its job had been due for so many seconds."""
        figures = self._of(kind)
        figures.started += 1
        if waited is not None:
            figures.wait_seconds += waited
            figures.waits[bisect_left(DURATION_BUCKETS, waited)] += 1

    def ended(self, kind: str, settled: Settled, seconds: float) -> None:
        """Count what became of a run; one that was lost, handed back or snoozed is none of the figures."""
        figures = self._of(kind)
        match settled:
            case Settled.COMPLETED:
                figures.completed += 1
            case Settled.SCHEDULED:
                figures.errors += 1
            case Settled.FAILED:
                figures.failed += 1
            case Settled.CANCELLED:
                figures.cancelled += 1
            case _:
                return
        figures.run_seconds += seconds
        figures.runs[bisect_left(DURATION_BUCKETS, seconds)] += 1

    def take(self) -> dict[str, KindFigures]:
        """Return what was counted, and begin anew."""
        taken, self._of_kind = self._of_kind, {}
        return taken

    def _of(self, kind: str) -> KindFigures:
        figures = self._of_kind.get(kind)
        if figures is None:
            figures = self._of_kind.setdefault(self._kinds.label(kind), KindFigures())
        return figures

    def _swept(self, event: Event) -> None:
        if "seconds" in event.fields:  # of a run, which was counted
            return
        figures = self._of(str(event.fields["kind"]))
        if event.name == "job.failed":
            figures.failed += 1
        else:
            figures.cancelled += 1

    def _expired(self, event: Event) -> None:
        self._of(str(event.fields["kind"])).expired += event.fields["jobs"]
