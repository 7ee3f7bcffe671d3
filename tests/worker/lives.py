"""Other lives of workers and the jobs that they hold, inserted as evidence finds them."""

import subprocess
import sys
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.workers import WorkerRow
from jsworker.worker.recovery.earlier_lives import identify
from tests.worker.rows import Rows

KIND = "elsewhere"
"""A kind that no worker of these tests processes."""


def ended_pid() -> int:
    """Return the pid of a process that has just ended and was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class Lives:
    """Registers other workers, each with a running job of its own."""

    def __init__(self, database: Database, rows: Rows, settings: Settings) -> None:
        self._database = database
        self._rows = rows
        self.me = identify(settings, [KIND])
        self.jobs: dict[str, UUID] = {}

    async def add(
        self, worker_id: str, *, answers: bool = False, job: bool = True, **changes: Any
    ) -> WorkerRow:
        """Register another life of this process's surroundings; keyword arguments replace its columns."""
        worker = replace(self.me, id=worker_id, **changes)
        await workers.seen(self._database, worker, state="running", answers=answers)
        if job:
            self.jobs[worker_id] = await self.hold(worker_id)
        return worker

    async def hold(
        self,
        worker_id: str,
        *,
        silent_for: float = 0.0,
        stale_after: float | None = 600.0,
        crash_after: float | None = None,
        cleared: bool = False,
    ) -> UUID:
        """Insert a running job of a worker, whose last sign of life is so many seconds old."""
        job_id = uuid4()
        await self._rows.query(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, worker_id, fencing_token, attempts,"
            " max_attempts, max_stalls, dispatch, queued_at, claimed_at, stale_after, crash_after,"
            " last_activity_at, cleared) VALUES (%s, %s, '{}', 'processing', %s, 1, 1, 5, 3, 1, now(),"
            " clock_timestamp(), make_interval(secs => %s), make_interval(secs => %s),"
            " clock_timestamp() - make_interval(secs => %s), %s)",
            job_id,
            KIND,
            worker_id,
            stale_after,
            crash_after,
            silent_for,
            cleared,
        )
        return job_id

    async def kept(self) -> set[str]:
        """Return the workers whose jobs are still theirs."""
        held = await self._rows.query("SELECT id FROM jsworker.jobs WHERE status = 'processing'")
        ids = {row["id"] for row in held}
        return {worker_id for worker_id, job_id in self.jobs.items() if job_id in ids}

    async def causes(self) -> set[str]:
        """Return the causes of all resets."""
        told = await self._rows.query(
            "SELECT DISTINCT detail ->> 'cause' AS cause FROM jsworker.job_events WHERE event = 'reset'"
        )
        return {row["cause"] for row in told}
