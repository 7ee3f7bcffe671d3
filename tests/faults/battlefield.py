"""What nemeses act on, and the log of what they did."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob, enqueue, new_job_id
from tests.faults.fleet import Fleet, Pod
from tests.faults.history import Fault
from tests.faults.journal import Journal
from tests.faults.stores import Stores

_POLL_SECONDS = 0.05


@dataclass
class Running:
    """A fault while it lasts; whoever makes it says here whom it hit."""

    touches: set[str]
    pods: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    fired: bool = True


@dataclass
class Battlefield:
    """Servers, fleet and dice of one run.

    Attributes:
        settings: as the harness itself uses them, on the servers' own ports.
        client_settings: the same for producers, by name.
        stale_seconds: the fleet's stale threshold.
        faults: what was done so far.
    """

    stores: Stores
    fleet: Fleet
    settings: Settings
    client_settings: Mapping[str, Any]
    stale_seconds: float
    folder: Path
    dice: random.Random
    journal: Journal
    faults: list[Fault] = field(default_factory=list)

    @asynccontextmanager
    async def fault(
        self,
        name: str,
        *touches: str,
        pods: Iterable[Pod] = (),
        pids: Iterable[int] = (),
        jobs: Iterable[str] = (),
    ) -> AsyncIterator[Running]:
        """Record a fault from here to the end of the block."""
        running = Running(set(touches), {pod.hostname for pod in pods}, set(pids), set(jobs))
        started = boottime()
        self.journal.note("begin", fault=name)
        try:
            yield running
        except BaseException:
            running.fired = False
            raise
        finally:
            fault = Fault(
                name=name,
                start=started,
                end=boottime(),
                touches=frozenset(running.touches),
                pods=frozenset(running.pods),
                pids=frozenset(running.pids),
                jobs=frozenset(running.jobs),
                fired=running.fired,
            )
            self.faults.append(fault)
            facts = {"pods": sorted(fault.pods), "pids": sorted(fault.pids), "jobs": sorted(fault.jobs)}
            self.journal.note("end", fault=name, began=started, fired=fault.fired, **facts)

    async def working_pod(self, seconds: float = 20.0) -> Pod:
        """Wait for a pod that works and return it.

        Raises:
            TimeoutError: there was none; the fleet is in ruins.
        """
        pod, _ = await self.victim(seconds)
        return pod

    async def victim(self, seconds: float = 20.0) -> tuple[Pod, int]:
        """Wait for a worker process and return it with its pod, any of them.

        At least half of the fleet works when this returns: a fault is for somebody to recover from.

        Raises:
            TimeoutError: there was none; the fleet is in ruins.
        """
        async with asyncio.timeout(seconds):
            while True:
                ready = [(pod, pid) for pod in self.fleet.pods if pod.wanted for pid in pod.workers()]
                if ready and 2 * len(ready) >= len(self.fleet.pods) * self.settings.processes:
                    return self.dice.choice(ready)
                await asyncio.sleep(_POLL_SECONDS)

    async def until(self, check: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        """Wait until something is true; tell whether it became so in time."""
        deadline = boottime() + seconds
        while boottime() < deadline:
            if await check():
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def enqueue(
        self, kind: str, *, count: int = 1, published: bool = True, **payload: Any
    ) -> list[str]:
        """Enqueue jobs of a special kind, recorded like a producer's; not published, they are the relays'."""
        keys = [f"special-{kind}-{len(self.faults)}-{self.dice.randrange(10**9)}-{n}" for n in range(count)]
        producer = Journal(self.folder, "producer")
        for key in keys:
            producer.note("try", key=key, number=0, kind=kind)
        payloads = [{"key": key, **payload} for key in keys]
        async with JobClient(self.settings) as client:
            if published:
                enqueued: list[Enqueued] = [*await client.enqueue_many(kind, payloads, unique_keys=keys)]
            else:
                enqueued = [
                    await enqueue(
                        client.database,
                        kind,
                        NewJob(new_job_id(), json.dumps(each), each["key"]),
                        publish_after=0.0,
                    )
                    for each in payloads
                ]
            found = [str(each.id) for each in enqueued]
            for key, job in zip(keys, found, strict=True):
                producer.note("ok", key=key, number=0, job=job)
        producer.close()
        return found

    async def owner_of(self, job: str, seconds: float = 10.0) -> str | None:
        """Wait until somebody has claimed a job and return its worker id; None when nobody does in time."""
        query = "SELECT worker FROM faults.moves WHERE job_id = %s AND worker <> '' ORDER BY seq LIMIT 1"
        owner: str | None = None

        async def owned() -> bool:
            nonlocal owner
            rows = await self.stores.execute(query, job)
            owner = str(rows[0][0]) if rows else None
            return owner is not None

        await self.until(owned, seconds)
        return owner

    async def ends(self, jobs: Iterable[str], seconds: float) -> bool:
        """Wait until jobs have ended."""
        ids = list(jobs)
        query = "SELECT count(*) FROM jsworker.jobs WHERE id = ANY(%s::uuid[]) AND finished_at IS NULL"

        async def ended() -> bool:
            return (await self.stores.execute(query, ids))[0][0] == 0

        return await self.until(ended, seconds)


Nemesis = Callable[[Battlefield], Awaitable[None]]
