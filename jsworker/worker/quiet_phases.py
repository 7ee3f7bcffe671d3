"""Quiet phases: a job that blocks the event loop silences its process, so all its runs need longer limits."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
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
_TRIES_TO_RESTORE: Final = 2
"""A report of progress that was under way before may spoil the first one."""


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
        runs = self._context.in_flight.runs.values()
        over = [run for run in runs if run.quiet_seconds and self._is_over(run)]
        with suppress(DatabaseUnavailable, DatabaseRefused):  # the next heartbeat tries again
            await self._restore(over)
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
        async with AsyncExitStack() as locks:
            # A job that is announcing another phase right now has the lock.
            free = [run for run in runs if await _acquired(run.thresholds_lock, 0.0, locks)]
            started = boottime()
            written = await heartbeat.set_thresholds_beside(
                self._context.database,
                worker_id=self._context.worker_id,
                thresholds={run.held: run.thresholds(seconds) for run in free},
            )
            for run in free:
                if run.held in written:
                    run.note_written(max(seconds, run.quiet_seconds))  # a longer one stays
                    run.beaten_at = max(run.beaten_at, started)
        return len(written) == len(runs)

    async def _restore(self, over: Sequence[Run]) -> None:
        async with AsyncExitStack() as locks:
            free = [run for run in over if await _acquired(run.thresholds_lock, 0.0, locks)]
            # The end is written only if nothing is written after the heartbeat that precedes it.
            waits = [_acquired(run.order_lock, _LONGEST_PAUSE_SECONDS, locks) for run in free]
            in_order = await asyncio.gather(*waits)
            left = {run.held: run for run, has_order in zip(free, in_order, strict=True) if has_order}
            for _ in range(_TRIES_TO_RESTORE):
                if left:
                    left = await self._left_after_restoring(left)

    async def _left_after_restoring(self, runs: Mapping[Held, Run]) -> dict[Held, Run]:
        database, worker_id, started = self._context.database, self._context.worker_id, boottime()
        beat = await heartbeat.heartbeat(database, worker_id=worker_id, in_flight=runs)
        # Another phase may have begun since the thresholds were found to be over.
        ended = {held: runs[held] for held in beat.activities if self._is_over(runs[held])}
        for run in ended.values():
            # The fence must hold even if no answer comes. If nothing is written, the next heartbeat finds
            # what the row allows.
            run.quiet_seconds = 0.0
        written = await heartbeat.restore_thresholds(
            database,
            worker_id=worker_id,
            thresholds={held: run.thresholds(0.0) for held, run in ended.items()},
            activities=beat.activities,
        )
        for held in written:
            ended[held].note_written(0.0)
            ended[held].beaten_at = max(ended[held].beaten_at, started)
        return {held: run for held, run in ended.items() if held not in written}

    def _is_over(self, run: Run) -> bool:
        """Return whether a run needs no longer thresholds than usual for any present phase."""
        return run.phase is not Phase.SETTLING and boottime() > max(run.quiet_until, self.until)


async def _acquired(lock: asyncio.Lock, seconds: float, locks: AsyncExitStack) -> bool:
    """Return whether a lock was acquired within ``seconds``; ``locks`` releases it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await locks.enter_async_context(lock)
            return True
    return False
