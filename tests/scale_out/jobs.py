"""What the workers of these tests run, and the record of it outside of the database."""

import asyncio
import os
from pathlib import Path
from typing import Any

from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor
from jsworker.worker.pipeline import intake
from tests.faults.journal import Journal, records_folder
from tests.faults.workload import EFFECT

NO_ROW_VARIABLE = "SCALE_OUT_NO_ROW_SECONDS"
"""Seconds instead of a minute for which a message waits for its row: no test has a minute."""

_GATE_POLL_SECONDS = 0.02

if NO_ROW_VARIABLE in os.environ:
    intake._NO_ROW_SECONDS = float(os.environ[NO_ROW_VARIABLE])


class Recorded(JobProcessor[dict[str, Any]]):
    """A processor whose runs are told of in a file of its process."""

    async def setup(self) -> None:
        self.journal = Journal(records_folder(), "run")

    async def teardown(self) -> None:
        self.journal.close()

    def note(self, what: str, job: Job[dict[str, Any]]) -> None:
        """Tell of a run's begin or end."""
        self.journal.note(what, job=str(job.id), token=job.fencing_token)


class Brief(Recorded):
    """Waits, and returns."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.note("begin", job)
        await asyncio.sleep(job.payload["seconds"])
        self.note("end", job)


class Booked(Recorded):
    """Its effect and its completion are one commit, on a connection to a server that may fall silent."""

    timeout = 5.0
    backoff = Backoff(first=0.5, longest=2.0)

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.note("begin", job)
        await asyncio.sleep(job.payload["seconds"])
        async with job.transaction() as session:
            await session.execute(EFFECT, {"job_id": job.id, "token": job.fencing_token})
        self.note("end", job)


class Held(Recorded):
    """Waits until a file is there."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.note("begin", job)
        gate = Path(job.payload["gate"])
        while not gate.exists():  # noqa: ASYNC110, ASYNC240 -- another process makes it
            await asyncio.sleep(_GATE_POLL_SECONDS)
        self.note("end", job)

    async def on_lost(self, job: Job[dict[str, Any]]) -> None:
        self.note("lost", job)


TARGETS = tuple(f"{__name__}:{cls.__name__}" for cls in (Brief, Booked, Held))
