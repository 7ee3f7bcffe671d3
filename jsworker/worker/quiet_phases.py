"""Quiet phases: a job that blocks the event loop silences its process, so all its runs need longer limits."""

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
"""The pause before locked rows are tried again, and between checks of claims under way."""
_LONGEST_PAUSE_SECONDS: Final = 0.5


class QuietPhases:
    """Keeps the thresholds in the rows of a process as long as its announced quiet phases need."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._give_up_seconds = 4 * context.settings.statement_timeout
        self.until = 0.0
        """The boot time at which the last quiet phase of this process ends; 0 if there is none."""

    @property
    def seconds_left(self) -> float:
        """The seconds for which the process may be silent from now on; new claims must allow as much."""
        return max(0.0, self.until - boottime())

    def announce(self) -> None:
        """Note that a quiet phase has begun or ended, and report it to the supervisor."""
        self._look()
        if self._context.supervision is not None:
            self._context.supervision.quiet_until(self.until)

    async def cover_others(self) -> None:
        """Let the other runs of this process be silent for as long as the phase that was just announced.

        This includes jobs that are being claimed, whose claim may have been sent before the phase was known.
        After a database error some runs may lack it.
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
        """Restore thresholds after a phase, and lengthen those that lack one; called once a heartbeat.

        The heartbeat has just read what the rows allow, so what a late write has changed is repaired, too.
        """
        self._look()
        over = [run for run in self._context.in_flight.runs.values() if self._is_over(run)]
        with suppress(DatabaseUnavailable, DatabaseRefused):  # the next heartbeat tries again
            await self._write(over, 0.0)
            await self._lengthen()

    def _look(self) -> None:
        """Find the end of the last phase, without isolated runs, which are quiet in another process."""
        runs = self._context.in_flight.runs.values()
        here = (run for run in runs if run.phase is Phase.RUNNING and not run.isolated)
        self.until = max((run.quiet_until for run in here), default=0.0)

    async def _lengthen(self) -> bool:
        """Lengthen thresholds that are too short; return whether some still are, because of locked rows."""
        if not (seconds := self.seconds_left):
            return False
        # A change that is under way may be the end of an earlier phase.
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
                with suppress(TimeoutError):  # the job is announcing another phase right now
                    async with asyncio.timeout(0):
                        await run.thresholds_lock.acquire()
                        free[run.held] = run
            started = boottime()
            # Another phase may have begun since the thresholds were found to be over.
            meant = {held: run for held, run in free.items() if seconds or self._is_over(run)}
            thresholds = {held: run.thresholds(seconds) for held, run in meant.items()}
            allowed = {held: run.quiet_seconds for held, run in meant.items()}
            database, worker_id = self._context.database, self._context.worker_id
            if seconds:
                written = await heartbeat.set_thresholds_beside(
                    database, worker_id=worker_id, thresholds=thresholds
                )
            else:
                activities = {held: run.activity_seen for held, run in meant.items() if run.activity_seen}
                for run in meant.values():
                    run.quiet_seconds = 0.0  # the fence must hold even if no answer comes
                written = await heartbeat.restore_thresholds(
                    database, worker_id=worker_id, thresholds=thresholds, activities=activities
                )
            for held, run in meant.items():
                if held not in written:
                    run.quiet_seconds = allowed[held]
                    continue
                run.note_written(max(seconds, allowed[held]) if seconds else 0.0)  # a longer one stays
                run.beaten_at = max(run.beaten_at, started)
        finally:
            for run in free.values():
                run.thresholds_lock.release()
        return len(written) == len(runs)

    def _is_over(self, run: Run) -> bool:
        """Return whether the thresholds in a run's row are longer than any present phase needs."""
        return (
            bool(run.quiet_seconds)
            and run.activity_seen is not None
            and run.phase is not Phase.SETTLING
            and boottime() > max(run.quiet_until, self.until)
        )
