"""The owner's own duty: a run is stopped before anybody may start it elsewhere, and ends with its process."""

from collections.abc import Callable
from typing import Final

from jsworker.events import Events
from jsworker.runtime.clock import boottime
from jsworker.runtime.presence import Presence
from jsworker.runtime.run import Hand, Phase, Run, Stop
from jsworker.runtime.ties import Ties

_GRACE_HEARTBEATS: Final = 2
"""For so many intervals a thread may go on after it was told to stop; the fence leaves as much time."""

_DEADLY: Final = frozenset({Stop.TIMEOUT, Stop.NO_PROGRESS, Stop.LOST, Stop.FENCED, Stop.CANCELLED})


class Fence:
    """Watches how old each run's last successful sign of life is."""

    def __init__(
        self,
        *,
        heartbeat_interval: float,
        statement_timeout: float,
        hand: Hand,
        heard_at: Callable[[], float],
        presence: Presence,
        ties: Ties | None,
        events: Events,
    ) -> None:
        """Wire the fence.

        Args:
            heartbeat_interval: seconds.
            statement_timeout: seconds.
            hand: what this process has in hand.
            heard_at: boot time at which the last answered heartbeat was sent.
            presence: whether others who ask find this worker.
            ties: to whom it is told that a thread ignores its stop; None: nobody can end it.
            events: the worker's own.
        """
        self._heartbeat_interval = heartbeat_interval
        self._statement_timeout = statement_timeout
        self._hand = hand
        self._heard_at = heard_at
        self._presence = presence
        self._ties = ties
        self._events = events
        self._reported: set[Run] = set()

    async def step(self) -> None:
        """Look at every run, also while a heartbeat waits for its answer."""
        now = boottime()
        unheard = now - self._heard_at() > 1.5 * self._heartbeat_interval
        gone = unheard and not self._presence.reachable()
        ignoring: list[Run] = []
        for run in self._hand.runs.values():
            if unheard:
                self.check(run, gone=gone)
            if run.told_at is not None and self._ignores_its_stop(run, now):
                ignoring.append(run)
        if ignoring:
            self._condemn(ignoring)

    def check(self, run: Run, *, gone: bool = False) -> None:
        """Stop a run whose last sign of life is so old that others may soon take its job.

        Args:
            run: the run.
            gone: whether two witnesses would find nobody, so that rule 3 may act long before rule 1.
        """
        limits, silent = run.kind.limits, boottime() - run.beaten_at - run.quiet_seconds
        stale, crash = limits.stale_after, limits.crash_after
        margin = 2 * self._heartbeat_interval + self._statement_timeout
        too_old = stale is not None and silent > stale - margin
        if too_old or (gone and crash is not None and silent > crash - self._heartbeat_interval):
            if run.stop is None and run.phase is not Phase.SETTLING:
                self._events.emit("job.fenced", **run.facts(), seconds_without_heartbeat=round(silent, 3))
            run.signal(Stop.FENCED)

    def _ignores_its_stop(self, run: Run, now: float) -> bool:
        return (
            run.phase is Phase.RUNNING
            and not run.kind.is_async  # a coroutine is cancelled for good; a thread cannot be
            and not run.quarantined  # its own process is ended, not this one
            and run.stop in _DEADLY
            and run.told_at is not None
            and now - run.told_at > _GRACE_HEARTBEATS * self._heartbeat_interval
        )

    def _condemn(self, runs: list[Run]) -> None:
        """Have this process ended: nothing else ends a thread, and its job must not start beside it."""
        for run in runs:
            if run not in self._reported:
                self._reported.add(run)
                reason = (
                    f"its thread goes on although it was told to stop: {run.stop.value}" if run.stop else ""
                )
                self._events.emit("worker.degraded", what=f"job {run.id}", reason=reason)
        if self._ties is not None:
            self._ties.condemn([run.held for run in runs], "a thread ignores that it was told to stop")
