"""Quiet phases: a job that keeps the event loop silences its whole process, so all its runs get patience."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, OwnershipLost
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import heartbeat
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.run import Phase, Run

_PAUSE_SECONDS: Final = 0.02
"""Before rows are tried again that a heartbeat, say, had locked, and between looks at claims on their way."""
_LONGEST_PAUSE_SECONDS: Final = 0.5


class QuietPhases:
    """Keeps the limits of silence in the rows of a process as long as its announced quiet phases need.

    Attributes:
        until: boot time at which the last phase of this process ends; 0: there is none.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._patience_seconds = 2 * context.settings.statement_timeout
        self.until = 0.0

    @property
    def seconds_left(self) -> float:
        """For how long the process may be silent from now on: what it claims now needs so much patience."""
        return max(0.0, self.until - boottime())

    def announce(self) -> None:
        """Note that a phase has begun or ended, and tell whoever supervises the process."""
        self._look()
        if self._context.supervision is not None:
            self._context.supervision.quiet_until(self.until)

    async def cover_others(self) -> None:
        """Give the other runs of this process as much patience as the phase that has just been announced.

        Those too that are being claimed: their claim may have been sent before the phase was known.

        Raises:
            DatabaseUnavailable: not all of them have it.
        """
        await self._wait_for_claims()
        deadline, pause = boottime() + self._patience_seconds, _PAUSE_SECONDS
        while await self._lengthen() and boottime() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def follow(self) -> None:
        """Take back patience that is needed no more, and give it to runs that lack it; once a heartbeat."""
        self._look()
        over = [run for run in self._context.in_flight.runs.values() if self._is_over(run)]
        try:
            await self._end_own(run for run in over if run.quiet_until)
            await self._write([run for run in over if not run.quiet_until and self._is_over(run)], 0.0)
            await self._lengthen()
        except (DatabaseUnavailable, DatabaseRefused):
            return  # the next heartbeat tries again

    def _look(self) -> None:
        """Find the end of the last phase: a run in quarantine is quiet in a process of its own."""
        ends = (run.quiet_until for run in self._context.in_flight.runs.values() if run.is_quiet_here)
        self.until = max(ends, default=0.0)

    async def _wait_for_claims(self) -> None:
        under_way = set(self._context.in_flight.claiming)
        for _ in range(int(self._patience_seconds / _PAUSE_SECONDS)):
            if not under_way & self._context.in_flight.claiming.keys():
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _lengthen(self) -> bool:
        """Write what runs lack, and tell whether some still do: somebody has locked their rows."""
        if not (seconds := self.seconds_left):
            return False
        # What is being changed at this moment may be the end of an earlier phase.
        lacking = [
            run
            for run in self._context.in_flight.runs.values()
            if run.quiet_seconds < seconds or run.patience_lock.locked()
        ]
        return not await self._write(lacking, seconds)

    async def _write(self, runs: Sequence[Run], seconds: float) -> bool:
        """Give runs patience for so long a phase, and tell whether all have it."""
        free: dict[Held, Run] = {}
        try:
            for run in runs:
                if await _acquired(run.patience_lock):
                    free[run.held] = run
            started = boottime()
            # What was over may be needed again: another phase may have begun since.
            meant = {held: run for held, run in free.items() if seconds or self._is_over(run)}
            patience = {held: run.patience(seconds) for held, run in meant.items()}
            written = await heartbeat.set_patience_beside(
                self._context.database, worker_id=self._context.worker_id, patience=patience
            )
            for held in written:
                free[held].quiet_seconds = seconds
                free[held].beaten_at = max(free[held].beaten_at, started)
        finally:
            for run in free.values():
                run.patience_lock.release()
        return len(written) == len(runs)

    async def _end_own(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if not await _acquired(run.patience_lock):  # the job is just announcing another phase
                continue
            try:  # until that is answered, the job announces none
                if self._is_over(run):
                    await self._end(run)
            finally:
                run.patience_lock.release()

    async def _end(self, run: Run) -> None:
        try:
            await heartbeat.set_patience(
                self._context.database,
                worker_id=self._context.worker_id,
                held=run.held,
                **run.patience(0.0),
                announced=False,
            )
        except (OwnershipLost, RowRefused):
            return  # the next heartbeat tells, or tries this one again
        run.quiet_seconds = 0.0

    def _is_over(self, run: Run) -> bool:
        """Tell whether patience is in a run's row that neither its own phase nor another one's needs."""
        return (
            bool(run.quiet_seconds)
            and run.phase is not Phase.SETTLING
            and boottime() > max(run.quiet_until, self.until)
        )


async def _acquired(lock: asyncio.Lock) -> bool:
    """Acquire a lock, unless somebody has it or waits for it."""
    try:
        async with asyncio.timeout(0):
            return await lock.acquire()
    except TimeoutError:
        return False
