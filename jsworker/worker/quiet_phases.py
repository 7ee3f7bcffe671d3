"""Quiet phases: a job that keeps the event loop silences its whole process, so all its runs need time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.transitions import heartbeat
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import Phase, Run

_PAUSE_SECONDS: Final = 0.02
"""Before rows are tried again that a heartbeat, say, had locked, and between looks at claims on their way."""
_LONGEST_PAUSE_SECONDS: Final = 0.5


class QuietPhases:
    """Keeps the limits of silence in the rows of a process as long as its announced quiet phases need."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._give_up_seconds = 4 * context.settings.statement_timeout
        self.until = 0.0
        """Boot time at which the last phase of this process ends; 0: there is none."""

    @property
    def seconds_left(self) -> float:
        """For how long the process may be silent from now on; what it claims now must allow as much."""
        return max(0.0, self.until - boottime())

    def announce(self) -> None:
        """Note that a phase has begun or ended, and report it to the supervisor."""
        self._look()
        if self._context.supervision is not None:
            self._context.supervision.quiet_until(self.until)

    async def cover_others(self) -> None:
        """Let the other runs of this process be silent for as long as the phase that was just announced.

        Those too that are being claimed: their claim may have been sent before the phase was known. After an
        error of the database not all of them have it.
        """
        in_flight = self._context.in_flight
        claims = set(in_flight.claiming)
        deadline, pause = boottime() + self._give_up_seconds, _PAUSE_SECONDS
        while boottime() < deadline:
            claimed = claims.isdisjoint(in_flight.claiming)
            if not await self._lengthen() and claimed:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def follow(self) -> None:
        """Restore thresholds whose phase is over and lengthen those that still lack it; once a heartbeat."""
        self._look()
        over = [run for run in self._context.in_flight.runs.values() if self._is_over(run)]
        with suppress(DatabaseUnavailable, DatabaseRefused):  # the next heartbeat tries again
            await self._write(over, 0.0)
            await self._lengthen()

    def _look(self) -> None:
        """Find the end of the last phase: an isolated run is quiet in a process of its own."""
        runs = self._context.in_flight.runs.values()
        here = (run for run in runs if run.phase is Phase.RUNNING and not run.isolated)
        self.until = max((run.quiet_until for run in here), default=0.0)

    async def _lengthen(self) -> bool:
        """Write what runs lack, and return whether some still do: their rows are locked."""
        if not (seconds := self.seconds_left):
            return False
        # What is being changed at this moment may be the end of an earlier phase.
        lacking = [
            run
            for run in self._context.in_flight.runs.values()
            if run.quiet_seconds < seconds or run.thresholds_lock.locked()
        ]
        return not await self._write(lacking, seconds)

    async def _write(self, runs: Sequence[Run], seconds: float) -> bool:
        free: dict[Held, Run] = {}
        try:
            for run in runs:
                with suppress(TimeoutError):  # the job is just announcing another phase
                    async with asyncio.timeout(0):
                        await run.thresholds_lock.acquire()
                        free[run.held] = run
            started = boottime()
            # What was over may be needed again: another phase may have begun since.
            meant = {held: run for held, run in free.items() if seconds or self._is_over(run)}
            thresholds = {held: run.thresholds(seconds) for held, run in meant.items()}
            written = await heartbeat.set_thresholds_beside(
                self._context.database, worker_id=self._context.worker_id, thresholds=thresholds
            )
            for held in written:
                free[held].quiet_seconds = seconds
                free[held].beaten_at = max(free[held].beaten_at, started)
        finally:
            for run in free.values():
                run.thresholds_lock.release()
        return len(written) == len(runs)

    def _is_over(self, run: Run) -> bool:
        """Return whether the thresholds in a run's row are longer than any phase needs."""
        return (
            bool(run.quiet_seconds)
            and run.phase is not Phase.SETTLING
            and boottime() > max(run.quiet_until, self.until)
        )
