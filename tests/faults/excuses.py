"""Which fault explains that a worker was taken for dead, or let a job go."""

from bisect import bisect_left, bisect_right
from itertools import pairwise

from tests.faults.history import Fault, History, Life, pid_of, pod_of

AFTERMATH_SECONDS = 3.0
"""For so long after a fault its victims may still be finding their way back."""

NOBODY_INJECTED = frozenset({"paused", "slow machine", "crowded machine"})
"""Excuses that are no faults of the harness: the machine was too busy for the time scale."""

_ANY = frozenset({"process", "loop", "database", "nats", "rows"})
_CLOCK_SLACK_SECONDS = 0.05
_STOPPED_SECONDS = 1.0
"""Between the last sign of a process and the line of the worker that has ended it."""
_TOLD_LATE_SECONDS = 0.5
"""A heartbeat's failure is told when its statement has timed out, which may be after the reset."""


class Excuses:
    """Answers from the harness's own log of faults, and from the ticks of the workers' event loops."""

    def __init__(self, history: History, *, heartbeat_interval: float) -> None:
        self._history = history
        self._longest_gap = 2.0 * heartbeat_interval

    def is_dead(self, worker: str, at: float) -> bool:
        """Tell whether a worker never gave a sign of life again after a moment."""
        life = self._history.life_of(pid_of(worker), at)
        return life is None or life.last_sign is None or life.last_sign <= at + _CLOCK_SLACK_SECONDS

    def for_silence(self, worker: str, job: str, start: float, end: float) -> str | None:
        """Return what made a worker's heartbeats fail within a time; None: nothing that is known.

        A pause that nobody injected (a busy machine) counts: the worker cannot have beaten in it. So does a
        crowded machine, if the worker itself said that its heartbeats failed.
        """
        return (
            self._fault(worker, job, start, end, {"process", "loop", "database", "rows"})
            or ("dead" if self.is_dead(worker, end) else None)
            or self._slowness(worker, start, end)
            or self.for_failed_heartbeats(worker, start, end)
        )

    def for_failed_heartbeats(self, worker: str, start: float, end: float) -> str | None:
        """Return why heartbeats failed of which the worker itself said that they did, if no fault did it."""
        failed = self._history.failed_heartbeats.get(worker, [])
        told = any(start <= at <= end + _TOLD_LATE_SECONDS for at in failed)
        return self._crowd(start, end) if told else None

    def was_ended_by_worker(self, life: Life, at: float) -> bool:
        """Tell whether the process of a job that runs alone was ended by its worker with the run.

        The worker says at that moment that it has stopped a run: this one, or before any has begun in the
        process, one for which it was meant. A run that has begun is given two heartbeats to stop; that it
        does not is fine on a crowded machine alone.
        """
        begun = [run for run in self._history.runs if run.pid == life.pid]
        unfinished = {run.job for run in begun if run.how is None}
        if begun and not (unfinished and self.is_crowded(at)):
            return False
        told = (
            (when, job)
            for worker, stops in self._history.stops.items()
            if pid_of(worker) == life.parent and pod_of(worker) == life.pod
            for when, job in stops
        )
        return any(
            (job in unfinished and -self._longest_gap - _STOPPED_SECONDS < when - at < _STOPPED_SECONDS)
            if begun
            else abs(when - at) < _STOPPED_SECONDS
            for when, job in told
        )

    def is_crowded(self, at: float) -> bool:
        """Tell whether the machine was crowded around a moment."""
        return self._crowd(at - _STOPPED_SECONDS, at + _STOPPED_SECONDS) is not None

    def for_letting_go(self, worker: str, job: str, start: float, end: float) -> str | None:
        """Return why a worker may have released a job, or missed it in the first place."""
        fault = self._fault(worker, job, start, end, _ANY)
        return fault or self._slowness(worker, start, end) or self._crowd(start, end)

    def for_error(self, worker: str, job: str, start: float, end: float) -> str | None:
        """Return why an innocent job may have ended in an error: its own database connection failed.

        A crowded machine is no excuse: it breaks no connection.
        """
        fault = self._fault(worker, job, start, end, _ANY)
        return fault or self._slowness(worker, start, end)

    def for_unknown_claim(self, start: float, end: float) -> str | None:
        """Return why an owner may never have learned of its claim, and have sent no heartbeat for it.

        On a crowded machine the answer to a claim comes after its time-out, and so does that to the search
        for orphaned claims.
        """
        return self._crowd(start, end)

    def _crowd(self, start: float, end: float) -> str | None:
        crowded = any(began <= end and ended >= start for began, ended in self._history.crowded)
        return "crowded machine" if crowded else None

    def _slowness(self, worker: str, start: float, end: float) -> str | None:
        if self._paused(worker, start, end):
            return "paused"
        slow = any(began <= end and ended >= start for began, ended in self._history.slow)
        return "slow machine" if slow else None

    def _fault(
        self, worker: str, job: str, start: float, end: float, touches: set[str] | frozenset[str]
    ) -> str | None:
        pod = pod_of(worker)
        for fault in self._history.faults:
            if fault.hits(pod, start - AFTERMATH_SECONDS, end, touches) and _concerns(fault, worker, job):
                return fault.name
        return None

    def _paused(self, worker: str, start: float, end: float) -> bool:
        life = self._history.life_of(pid_of(worker), end)
        return life is not None and longest_gap(life, start, end) > self._longest_gap


def _concerns(fault: Fault, worker: str, job: str) -> bool:
    if fault.pids and pid_of(worker) not in fault.pids:
        return False
    return job in fault.jobs or fault.touches != {"rows"}


def longest_gap(life: Life, start: float, end: float) -> float:
    """Return the longest time without a tick of the event loop within a time."""
    first = max(bisect_left(life.ticks, start) - 1, 0)
    last = min(bisect_right(life.ticks, end), len(life.ticks) - 1)
    window = [max(tick, start) for tick in life.ticks[first : last + 1]]
    gaps = [after - before for before, after in pairwise(window)]
    if life.ticks and life.ticks[-1] < end:
        gaps.append(end - max(life.ticks[-1], start))
    return max(gaps, default=0.0)
