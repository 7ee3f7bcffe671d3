"""Payloads and checkpoints that are too large to come with the claim: fetched by the run that needs them."""

import asyncio
from itertools import count
from typing import Final

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, OwnershipLost, may_answer_later
from jsworker.ownership.transitions import claim
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.run import Run, Stop

_AT_ONCE: Final = 3
"""Each takes its part of the line, and a connection that other statements need too."""
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0


class Values:
    """Fetches the values of runs in hand; heartbeats keep the jobs meanwhile, however long it takes."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, run: Run) -> bool:
        """Complete what was claimed; a run that is stopped meanwhile is cancelled in here.

        A value that does not come in time is asked for again, each time with more time: handed back, the job
        would go from worker to worker for ever.

        Returns:
            Whether it was fetched; False: the job is lost, and the run told so.

        Raises:
            DatabaseRefused: PostgreSQL cannot give it; not for a login that it refuses, perhaps for a moment.
        """
        for tries in count():
            try:
                async with self._turns:
                    run.claimed = await claim.fetch_content(
                        self._context.database,
                        worker_id=self._context.worker_id,
                        claimed=run.claimed,
                        tries=tries,
                    )
            except OwnershipLost:
                run.stop, run.should_stop = Stop.LOST, True
                return False
            except (DatabaseUnavailable, DatabaseRefused) as error:
                if not may_answer_later(error):
                    raise
                await asyncio.sleep(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(tries, 5)))
            else:
                return True
        raise AssertionError
