"""The fence: an owner stops its runs before another worker may start them, and ends with them if it must.

A run whose long time-out has passed is stopped here, too.
"""

from collections.abc import Callable
from typing import Final

from jsworker.core.clock import boottime
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import Phase, Run, StopReason
from jsworker.worker.presence import Presence
from jsworker.worker.recovery.sweeper import BELIEVED_SECONDS

_GRACE_HEARTBEATS: Final = 2
"""For so many intervals a run may go on after its stop; the fence leaves as much time."""

_CANCELLATIONS: Final = 2
"""A coroutine is cancelled so often before it counts as one that ignores its stop."""

_DEADLY: Final = frozenset(
    {StopReason.TIMEOUT, StopReason.NO_PROGRESS, StopReason.LOST, StopReason.FENCED, StopReason.CANCELLED}
)


class Fence:
    """Watches how old each run's last successful sign of life is."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        heard_at: Callable[[], float],
        presence: Presence,
        on_ignored: Callable[[Run], None],
    ) -> None:
        """Prepare; ``heard_at`` returns the boot time at which the last answered heartbeat began."""
        self._context = context
        self._heartbeat_interval = context.settings.heartbeat_interval
        self._heard_at = heard_at
        self._presence = presence
        self._on_ignored = on_ignored

    async def step(self) -> None:
        """Look at every run, also while a heartbeat waits for its answer."""
        now = boottime()
        unheard = now - self._heard_at() > 1.5 * self._heartbeat_interval
        gone = unheard and not self._presence.reachable()
        ignoring: list[Run] = []
        for run in self._context.in_flight.runs.values():
            if run.is_overdue(now):
                run.signal(StopReason.TIMEOUT)
            if unheard:
                self.check(run, gone=gone)
            if self._ignores_its_stop(run, now):
                ignoring.append(run)
        if ignoring:
            self._request_kill(ignoring)
        for run in self._context.in_flight.given_up:
            if now - run.cancelled_at > self._grace_of(run):
                run.cancel_again()

    def check(self, run: Run, *, gone: bool = False) -> None:
        """Stop a run whose last sign of life is so old that others may soon take its job.

        ``gone``: two witnesses would get no answer, so that rule 3 may act long before rule 1.
        """
        limits, silent = run.kind.limits, boottime() - run.beaten_at - run.quiet_seconds
        stale, crash = limits.stale_after, limits.crash_after
        margin = 2 * self._heartbeat_interval + self._context.settings.statement_timeout
        too_old = stale is not None and silent > stale - margin
        unbelieved = crash is not None and silent > crash + BELIEVED_SECONDS - margin
        if (
            too_old
            or unbelieved
            or (gone and crash is not None and silent > crash - self._heartbeat_interval)
        ):
            if run.stop is None and run.phase is not Phase.SETTLING:
                self._context.events.emit(
                    "job.fenced", **run.facts(), seconds_without_heartbeat=round(silent, 3)
                )
            run.signal(StopReason.FENCED)

    def _ignores_its_stop(self, run: Run, now: float) -> bool:
        """Return whether a run goes on for too long; before, a coroutine is cancelled once more."""
        if run.first_cancelled_at is None:
            return False
        # Isolated, its own process is ended, not this one.
        if run.phase is not Phase.RUNNING or run.quarantined or run.stop not in _DEADLY:
            return False
        if not run.kind.is_async:  # a thread cannot be cancelled
            return now - run.first_cancelled_at > self._grace_of(run)
        if now - run.cancelled_at <= self._grace_of(run):
            return False
        if run.cancellations < _CANCELLATIONS:
            run.cancel_again()
            return False
        return True

    def _grace_of(self, run: Run) -> float:
        """Return the seconds that a run may go on after each cancellation, or a thread after its stop."""
        grace = _GRACE_HEARTBEATS * self._heartbeat_interval
        return grace / _CANCELLATIONS if run.kind.is_async and run.is_urgent else grace

    def _request_kill(self, runs: list[Run]) -> None:
        """Have this process killed: nothing else ends these runs, and no job may run twice at a time."""
        for run in runs:
            if not run.ignores_stop:
                self._on_ignored(run)
        if self._context.supervision is not None:
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            named = f"job {runs[0].id}{more} went on although it was told to stop: {runs[0].stop_in_words}"
            self._context.supervision.request_kill(
                [run.held for run in runs], f"its process was ended, because {named}"
            )
