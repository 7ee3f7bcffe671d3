"""The kill: SIGKILL for a worker that surely holds jobs at that moment, however short the jobs are."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from jsworker.demo.fleet import WorkerProcess
from jsworker.ownership.database import Database
from jsworker.ownership.queries import survey
from jsworker.ownership.transitions.heartbeat import Held

# What a frozen worker sent just before it froze is committed by then.
_SETTLE_SECONDS = 0.05
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed while it held jobs.

    Attributes:
        worker: the victim.
        at: when it was killed, by the database's clock.
        held: the runs that it held, as job id and fencing token: those that others must take over.
    """

    worker: WorkerProcess
    at: datetime
    held: frozenset[Held]


async def try_to_kill(workers: Sequence[WorkerProcess], database: Database) -> Kill | None:
    """Freeze workers for a moment and kill the one that holds most jobs; None when nobody holds any.

    A worker is killed only if two looks, some time apart, find the very same runs in its hands while it is
    frozen: none of them can have ended in between. The others go on after at most 0.2 seconds.
    """
    try:
        for worker in workers:
            worker.freeze()
        return await _kill_one(workers, database)
    finally:
        for worker in workers:
            if not worker.killed:
                worker.thaw()


async def _kill_one(frozen: Sequence[WorkerProcess], database: Database) -> Kill | None:
    by_id = {worker.id: worker for worker in frozen if worker.id is not None}
    before = await survey.holdings(database, by_id)
    for _ in range(_LOOKS):
        if not before.by_worker:
            return None
        await asyncio.sleep(_SETTLE_SECONDS)
        now = await survey.holdings(database, by_id)
        unchanged = [owner for owner, held in now.by_worker.items() if before.by_worker.get(owner) == held]
        if unchanged and now.at is not None:
            owner = max(unchanged, key=lambda each: len(now.by_worker[each]))
            by_id[owner].kill()
            return Kill(by_id[owner], now.at, now.by_worker[owner])
        before = now
    return None
