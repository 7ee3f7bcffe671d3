"""The kinds of jobs of a fault run. Each run is recorded outside of the database."""

import asyncio
import os
import random
import re
import signal
import time
from typing import Any

import psycopg
from sqlalchemy import text

from jsworker.core.errors import Fail, Retry
from jsworker.core.job import Job
from jsworker.core.limits import Limit, Rate
from jsworker.core.processor import Backoff, JobProcessor
from jsworker.core.schedule_rules import Every
from tests.faults.history import FINAL
from tests.faults.process_life import process_life

_SLICE_SECONDS = 0.05
_INNOCENT_ATTEMPTS = 60
"""So many errors no outage of a fault run can give an innocent job."""

EFFECT = text("INSERT INTO faults.effects (job_id, token) VALUES (:job_id, :token)")

# The log tells in which order effects were accepted; the guard is the one that users are told to write.
FENCED_EFFECT = """
WITH accepted AS (
  INSERT INTO faults.ledger AS l (job_id, fence) VALUES (%(job)s, %(token)s)
  ON CONFLICT (job_id) DO UPDATE SET fence = excluded.fence WHERE l.fence < excluded.fence
  RETURNING job_id, fence
)
INSERT INTO faults.ledger_log (job_id, fence) SELECT job_id, fence FROM accepted
"""


class Recorded(JobProcessor[dict[str, Any]]):
    """A processor whose process ticks."""

    max_stalls = 20
    max_attempts = _INNOCENT_ATTEMPTS
    backoff = Backoff(first=0.2, factor=1.5, longest=2.0)

    async def setup(self) -> None:
        process_life().begin()

    async def teardown(self) -> None:
        await process_life().end()


class Ordinary(Recorded):
    """Waits, and reports progress on its way."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            await asyncio.sleep(job.payload["seconds"] / 2)
            if job.payload["seconds"] > 1:
                await job.update_progress(stage="half", progress=0.5)
            await asyncio.sleep(job.payload["seconds"] / 2)
        return {"token": job.fencing_token}


class Threaded(Recorded):
    """A plain function that looks now and then whether it should stop."""

    def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            until = time.monotonic() + job.payload["seconds"]
            while time.monotonic() < until:
                if job.should_stop:
                    raise Retry
                time.sleep(_SLICE_SECONDS)
        return {"token": job.fencing_token}


class Transactional(Recorded):
    """Its effect and its completion are one commit."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        with process_life().run(job):
            await asyncio.sleep(job.payload["seconds"])
            async with job.transaction(result={"token": job.fencing_token}) as session:
                await session.execute(EFFECT, {"job_id": job.id, "token": job.fencing_token})
                await asyncio.sleep(job.payload.get("hold", 0.0))


class Fenced(Recorded):
    """Its effect is elsewhere, guarded by the fencing token."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            await asyncio.sleep(job.payload["seconds"])
            url = os.environ["JSWORKER_DATABASE_URL"]
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=2)
            async with connection:
                await connection.execute(FENCED_EFFECT, {"job": job.id, "token": job.fencing_token})
        return {"token": job.fencing_token}


class Flaky(Recorded):
    """Fails now and then, by its own fault."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            await asyncio.sleep(job.payload["seconds"])
            if random.random() < 0.3:  # noqa: S311 -- a fault, not a secret
                raise ValueError("as it happens")
        return {"token": job.fencing_token}


class Doomed(Recorded):
    """Fails until its attempts are used up."""

    max_attempts = 3

    async def process(self, job: Job[dict[str, Any]]) -> None:
        with process_life().run(job):
            raise ValueError("as always")


class Poisonous(Recorded):
    """Kills its process in every run."""

    max_stalls = 3

    async def process(self, job: Job[dict[str, Any]]) -> None:
        with process_life().run(job):
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)


class LoopBlocking(Recorded):
    """Blocks the event loop in its first run, for the payload's seconds."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            if job.fencing_token == 1:
                time.sleep(job.payload["seconds"])  # noqa: ASYNC251 -- the fault itself
        return {"token": job.fencing_token}


class GilHolding(Recorded):
    """Keeps every thread of its process from running in its first run: a search that takes for ever."""

    def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            if job.fencing_token == 1:
                re.match("(a+)+$", "a" * 40 + "b")
        return {"token": job.fencing_token}


class Quiet(Recorded):
    """Announces that it will be silent, and is, in its first run."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            if job.fencing_token == 1:
                await job.quiet(job.payload["seconds"] + 2.0)
                time.sleep(job.payload["seconds"])  # noqa: ASYNC251 -- as announced
        return {"token": job.fencing_token}


class Deaf(Recorded):
    """A plain function that ignores its time-out in its first run."""

    timeout = 0.8

    def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            if job.fencing_token == 1:
                time.sleep(job.payload["seconds"])
        return {"token": job.fencing_token}


class Limited(Ordinary):
    """At most two of each tenant run at once; some tenants have numbers of their own."""

    limit = Limit(2, key="tenant")


class Rated(Ordinary):
    """So many begin in a second."""

    rate = Rate(5, per=1.0)


class EverySecond(Recorded):
    """Each second has its job, also those in which no worker lived."""

    schedule = Every(seconds=1, catch_up=1000)

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            await asyncio.sleep(_SLICE_SECONDS)
        return {"token": job.fencing_token}


class Growing(Recorded):
    """Adds members to its batch, in the commit that completes it."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        with process_life().run(job):
            await asyncio.sleep(job.payload["seconds"])
            new = [{"seconds": job.payload["seconds"]}] * 2
            async with job.transaction(result={"token": job.fencing_token}) as session:
                added = (await session.execute(job.add_to_batch_statement("ordinary", new))).all()
                if len(added) != len(new):
                    raise RuntimeError(f"{len(added)} members were added, not {len(new)}")


class Merging(Recorded):
    """Reads what the members came to that its batch waited for: all of them must have ended."""

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        with process_life().run(job):
            statuses = [member.status async for member in job.results_of("parts")]
            if len(statuses) < job.payload["parts"] or not FINAL.issuperset(statuses):
                raise Fail(f"the members of parts are {statuses}")
        return {"token": job.fencing_token}


KINDS: tuple[type[Recorded], ...] = (
    Ordinary,
    Threaded,
    Transactional,
    Fenced,
    Flaky,
    Doomed,
    Poisonous,
    LoopBlocking,
    GilHolding,
    Quiet,
    Deaf,
    Limited,
    Rated,
    EverySecond,
    Growing,
    Merging,
)

WORKFLOW = "workflow"
"""What a producer's order of a workflow has instead of a kind."""

SCHEDULES = frozenset({EverySecond.kind})
"""Names of schedules: those of their kinds."""

MOST_RUNNING = {"tenant-0": 1, "tenant-1": 3, "tenant-2": None, "tenant-3": None}
"""Keys of limited jobs, and the numbers that an operator has set for some."""

TARGETS = tuple(f"{__name__}:{kind.__name__}" for kind in KINDS)
"""What ``jsworker run`` is told."""

FAILS_FOR = {"doomed": "attempts", "poisonous": "stalled"}
"""Kinds whose jobs must fail, and for what reason; all others must complete."""

NEVER_ERRS = frozenset({"transactional"})
"""Kinds that use the database through ``job.transaction()`` alone: a server's fault is no error of theirs."""
