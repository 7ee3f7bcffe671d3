"""Many actors at once on few keys: never two that run or that wait, no statement refused, every job ends."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import claim, control, publish, reset, settle
from jsworker.ownership.transitions.enqueue import JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import enqueue_one
from jsworker.ownership.transitions.expire import expire
from jsworker.ownership.transitions.settle import Settled
from jsworker.ownership.transitions.waiting_keys import defer, wake

from .calls import retry
from .rows import KIND, LIMITS, OTHER_WORKER, Sql, read_value

STEPS, ACTORS, KEYS = 150, 6, 3
TERMS = (
    JobTerms(scope="waiting"),
    JobTerms(scope="waiting", expires_in=0.05),
    JobTerms(scope="debounce", debounce=0.01, debounce_max=0.05),
)


class Actor:
    """A worker that does what comes to its mind, and what it must: it defers, and wakes."""

    def __init__(self, database: Database, name: str, seed: int) -> None:
        self.database = database
        self.name = name
        self.random = random.Random(seed)  # noqa: S311 -- no secret
        self.held: dict[UUID, int] = {}
        self.refused: list[Any] = []

    async def act(self) -> None:
        acts: list[Callable[[], Awaitable[None]]] = [
            *[self.enqueue] * 3,
            *[self.claim] * 6,
            *[self.end] * 4,
            self.sweep,
            self.take_back,
            self.operate,
        ]
        await self.random.choice(acts)()

    async def enqueue(self) -> None:
        job = NewJob(new_job_id(), "{}", f"k-{self.random.randrange(KEYS)}")
        job = job._replace(terms=self.random.choice(TERMS))
        while True:
            try:
                await enqueue_one(self.database, KIND, job, publish_after=0.0)
            except TransitionRefused as error:  # as it says: of three tries each met another holder
                assert "is taken and freed too fast; try again" in str(error)  # noqa: PT017
            else:
                return

    async def claim(self) -> None:
        ids = await self.ids("queued")
        if not ids:
            return
        taken = await claim.claim(self.database, worker_id=self.name, kind=KIND, ids=ids, limits=LIMITS)
        self.refused += taken.refused_rows.values()
        self.held |= {job.id: job.fencing_token for job in taken.claimed}
        rows = await claim.look_at_refused(self.database, kind=KIND, ids=ids)
        behind = [job_id for job_id, row in rows.items() if row.status == "behind"]
        if behind:
            await defer(self.database, behind)

    async def end(self) -> None:
        if not self.held:
            return
        run = self.random.choice(list(self.held.items()))
        del self.held[run[0]]
        refusals: settle.Refusals = {}
        how: dict[str, Any] = {"worker_id": self.name, "refusals": refusals}
        match self.random.randrange(4):
            case 0 | 1:
                [settled] = await settle.complete(self.database, runs=[settle.Completion(*run, "{}")], **how)
            case 2:
                failure = settle.Failure(*run, "broken", None, 0.01)
                [settled] = await settle.fail(self.database, runs=[failure], **how)
            case _:
                [settled] = await settle.release(self.database, runs=[settle.Return(*run, "shutdown")], **how)
        self.refused += refusals.values()
        if settled in (Settled.COMPLETED, Settled.FAILED, Settled.CANCELLED) and self.random.random() < 0.7:
            await wake(self.database, [run[0]])  # else the worker died right before

    async def sweep(self) -> None:
        await publish.promote(self.database, limit=10)
        await expire(self.database, limit=10)

    async def take_back(self) -> None:
        owner = self.random.choice([self.name, OTHER_WORKER])
        taken = await reset.reset_dead(self.database, worker_id=OTHER_WORKER, owner=owner, reason="killed")
        self.refused += taken.refused.values()
        if owner == self.name:
            self.held.clear()

    async def operate(self) -> None:
        ids = await self.ids("failed") if self.random.random() < 0.5 else []
        if ids:
            try:
                await retry(self.database, ids[0])
            except TransitionRefused as error:
                assert "holds its unique key" in str(error) or "only a failed or cancelled job" in str(error)  # noqa: PT017
        elif ids := await self.ids("processing") if self.random.random() < 0.5 else await self.ids("queued"):
            await control.cancel(self.database, [self.random.choice(ids)])

    async def ids(self, status: str) -> list[UUID]:
        query = text("SELECT id FROM jsworker.jobs WHERE status = :status")
        return [row.id for row in await self.database.run(query, {"status": status})]


DUE = """
UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE status = 'scheduled'
"""


@pytest.mark.parametrize("seed", range(3))
async def test_walk(database: Database, sql: Sql, seed: int) -> None:
    actors = [Actor(database, f"actor-{place}", 100 * seed + place) for place in range(ACTORS)]

    async def walk(actor: Actor) -> None:
        for _ in range(STEPS):
            await actor.act()

    superseded = "SELECT count(*) FROM jsworker.jobs WHERE failure_reason = 'superseded'"
    for _ in range(20):  # a walk may go by without the case that it is for
        await asyncio.gather(*(walk(actor) for actor in actors))
        if read_value(sql, superseded):
            break
        sql.execute(DUE)  # else jobs that wait out a back-off of seconds hold all keys for the next walks
    live = "SELECT count(*) FROM jsworker.jobs WHERE status IN ('scheduled', 'queued', 'processing')"
    for _ in range(100):  # no faults any more: everything ends
        if not read_value(sql, live):
            break
        for actor in actors:
            sql.execute(DUE)
            await publish.promote(database, limit=100)
            await actor.claim()
            runs = [settle.Completion(*run, "{}") for run in actor.held.items()]
            actor.held.clear()
            if runs:
                await settle.complete(database, worker_id=actor.name, runs=runs)
        await expire(database, limit=100)
    assert read_value(sql, live) == 0
    assert [refused for actor in actors for refused in actor.refused] == []
    assert read_value(sql, superseded) > 0
    overlaps = """
    SELECT count(*) FROM jsworker.jobs WHERE waiting_key IS NULL OR attempts <> errors + stalls
      + CASE WHEN status = 'completed' THEN 1 ELSE 0 END
    """
    assert read_value(sql, overlaps) == 0
