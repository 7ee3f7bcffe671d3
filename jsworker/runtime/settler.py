"""The way out: outcomes are written in natural batches and kept until the database has answered."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from jsworker.batcher import Batcher
from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.lease import Held
from jsworker.ownership.settle import Completion, Failure, Return, Settled, complete, fail, release
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.outcome import Completed, Failed, HandedBack, Lost, Outcome
from jsworker.runtime.run import Run

_BATCH = 500

EndedT = TypeVar("EndedT")


class Settler:
    """Writes outcomes; a finished outcome outlives an outage of the database."""

    def __init__(
        self,
        *,
        worker_id: str,
        database: Database,
        health: DatabaseHealth,
        died: Callable[[str, BaseException], None],
    ) -> None:
        self._health = health
        write = partial(self._persist, database=database, worker_id=worker_id)
        self._completions: Batcher[Completion, Settled] = Batcher(
            "completions", partial(write, complete), limit=_BATCH, died=died
        )
        self._failures: Batcher[Failure, Settled] = Batcher(
            "failures", partial(write, fail), limit=_BATCH, died=died
        )
        self._returns: Batcher[Return, Settled] = Batcher(
            "releases", partial(write, release), limit=_BATCH, died=died
        )

    async def settle(self, run: Run, outcome: Outcome) -> Settled:
        """Write a run's outcome and tell what became of the job. May take as long as an outage lasts."""
        match outcome:
            case Completed(result):
                return await self._completed(run, result)
            case Failed(error, permanent, delay):
                return await self._failures.submit(Failure(*run.held, error, permanent, delay))
            case HandedBack(reason):
                return await self._returns.submit(Return(*run.held, reason))
            case Lost():
                return Settled.LOST

    async def release(self, held: Sequence[Held], reason: str) -> Sequence[Settled]:
        """Release claims of this worker that are in nobody's hand."""
        answers = [self._returns.submit(Return(job_id, token, reason)) for job_id, token in held]
        return await asyncio.gather(*answers)

    async def flush(self) -> None:
        """Wait until every outcome given so far is written."""
        for batcher in (self._completions, self._failures, self._returns):
            await batcher.flush()

    async def close(self) -> None:
        """Give up outcomes that are not written; their jobs go back by the stale rule."""
        for batcher in (self._completions, self._failures, self._returns):
            await batcher.close()

    async def _completed(self, run: Run, result: str | None) -> Settled:
        settled = await self._completions.submit(Completion(*run.held, result))
        if settled is Settled.REFUSED:
            refused = Failure(*run.held, "PostgreSQL refused the result as jsonb", "result", 0.0)
            return await self._failures.submit(refused)
        return settled

    async def _persist(
        self,
        statement: Callable[..., Awaitable[Sequence[Settled]]],
        runs: Sequence[EndedT],
        *,
        database: Database,
        worker_id: str,
    ) -> Sequence[Settled]:
        while True:
            try:
                settled = await statement(database, worker_id=worker_id, runs=runs)
            except (DatabaseUnavailable, DatabaseRefused) as error:
                self._health.failed(error)
                await self._health.wait_until_up()
            else:
                self._health.answered()
                return settled
