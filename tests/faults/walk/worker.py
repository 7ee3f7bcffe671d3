"""A simulated worker: the rules for claims, heartbeats and outcomes, with faults between the steps."""

import asyncio
import random
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from jsworker.core.clock import boottime
from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import (
    admission,
    claim,
    heartbeat,
    republish,
    reset,
    settle,
    workers,
    workflow_control,
    workflows,
)
from jsworker.ownership.transitions.claim import ClaimedJob, RunLimits
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.reset import Suspect, TakenBack
from jsworker.ownership.transitions.settle import Completion, Failure, Return, Settled
from jsworker.ownership.transitions.workers import WorkerRow
from tests.faults.history import Run
from tests.faults.walk.bus import Bus, Message
from tests.faults.workload import EFFECT

HEARTBEAT_SECONDS = 0.08
STALE_SECONDS = 0.35
KINDS = ("ordinary", "transactional", "limited")
"""Of jobs by themselves; members of batches are also growing or doomed."""

_LIMITS = RunLimits(STALE_SECONDS, None, None, max_attempts=10_000, max_stalls=10_000)
_PAUSE_SECONDS = (0.2, 0.8)
_STRAY_SECONDS = 0.15


@dataclass
class World:
    """What all actors share.

    Attributes:
        faults: whether anything goes wrong at all; off in the end.
        sweeps: whether lost messages are looked for, and old rows claimed without one.
        strays: whether orphaned claims are released.
        habits: what a mutant does outside of SQL.
    """

    database: Database
    engine: AsyncEngine
    bus: Bus
    dice: random.Random
    sweeps: bool
    strays: bool
    habits: frozenset[str]
    faults: bool = True
    pids: int = 1000
    kinds: dict[UUID, str] = field(default_factory=dict)
    ticks: dict[int, list[float]] = field(default_factory=dict)
    pods: dict[int, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def chance(self, share: float) -> bool:
        """Throw the dice for a fault."""
        return self.faults and self.dice.random() < share

    def note_resets(self, taken: TakenBack) -> None:
        """Keep what the database refused of a reset."""
        self.refusals += [f"RESET of {job}" for job in taken.refused]

    async def some_time(self, most: float) -> None:
        """Let others act."""
        await asyncio.sleep(self.dice.uniform(0.0, most))


class Worker:
    """One life of a worker on a hostname."""

    def __init__(self, world: World, hostname: str) -> None:
        world.pids += 1
        self.pid = world.pids
        self.id = f"{hostname}-{self.pid}-{secrets.token_hex(4)}"
        self._world = world
        self._hostname = hostname
        self._in_flight: dict[UUID, ClaimedJob] = {}
        self._claiming: set[UUID] = set()
        # One admission at a time: a read-back would find what another has just been given.
        self._admitting = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._tasks: set[asyncio.Task[None]] = set()
        world.ticks[self.pid] = [boottime()]
        world.pods[self.pid] = hostname

    async def live(self) -> None:
        """Work until cancelled, which is a crash: nothing is handed back."""
        try:
            await self._reconcile()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                for _ in range(3):
                    group.create_task(self._consume())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pause(self) -> None:
        """Freeze, as SIGSTOP does."""
        self._awake.clear()
        await asyncio.sleep(self._world.dice.uniform(*_PAUSE_SECONDS))
        self._awake.set()

    async def take_over(self, stale: list[Suspect]) -> None:
        """Claim jobs from their stale owners, as the claim's stale-owner arm does."""
        for suspect in stale:
            if suspect.id in self._in_flight or suspect.id in self._claiming:
                continue
            self._claiming.add(suspect.id)
            try:
                taken = await claim.claim_stale(
                    self._world.database, worker_id=self.id, kind=suspect.kind, seen=[suspect], limits=_LIMITS
                )
            finally:
                self._claiming.discard(suspect.id)
            for row in taken.claimed:
                self._adopt(row)

    async def _reconcile(self) -> None:
        """Take back what earlier lives of this host still hold: on it lives one process at a time."""
        me = WorkerRow(
            id=self.id,
            hostname=self._hostname,
            pod_uid=None,
            container=None,
            boot_id=None,
            pid_namespace=None,
            pid=self.pid,
            process_started=None,
            kinds=KINDS,
            concurrency=3,
            version="walk",
            heartbeat_interval=HEARTBEAT_SECONDS,
        )
        await workers.seen(self._world.database, me, state="running")
        for life in await workers.earlier_lives(self._world.database, worker=me):
            self._world.note_resets(
                await reset.reset_dead(
                    self._world.database, worker_id=self.id, owner=life.id, reason="a new life"
                )
            )

    async def _beat(self) -> None:
        while True:
            await self._awake.wait()
            self._world.ticks[self.pid].append(boottime())
            hand = [(row.id, row.fencing_token) for row in self._in_flight.values()]
            if "beat for all rows" in self._world.habits:
                hand = hand or [(UUID(int=0), 0)]  # also with nothing in hand
            beat = await heartbeat.heartbeat(self._world.database, worker_id=self.id, in_flight=hand)
            for job, token in beat.lost:
                if job in self._in_flight and self._in_flight[job].fencing_token == token:
                    del self._in_flight[job]
            if self._world.strays:
                await self._release_strays()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _release_strays(self) -> None:
        strays = await heartbeat.orphaned_claims(
            self._world.database,
            worker_id=self.id,
            in_flight=[(row.id, row.fencing_token) for row in self._in_flight.values()],
            claiming=list(self._claiming),
            older_than=_STRAY_SECONDS,
        )
        gone = [Return(*stray, "orphaned claim") for stray in strays if stray[0] not in self._in_flight]
        if gone:
            self._note(await settle.release(self._world.database, worker_id=self.id, runs=gone), "release")

    async def _consume(self) -> None:
        while True:
            await self._awake.wait()
            if message := self._world.bus.deliver():
                await self._take(message)
            elif self._world.sweeps and self._world.dice.random() < 0.2:
                await self._take_old_rows()
            await self._world.some_time(0.01)

    async def _take(self, message: Message) -> None:
        held = self._in_flight.get(message.job)
        if held is not None:
            if message.dispatch <= held.dispatch or "ack newer copies" in self._world.habits:
                self._world.bus.ack(message)
            else:
                self._world.bus.nak(message, 0.1)
        elif message.job in self._claiming:
            self._world.bus.nak(message, 0.05)
        else:
            await self._claim(message.job, message)

    async def _take_old_rows(self) -> None:
        besides = [*self._in_flight, *self._claiming]
        kind = self._world.dice.choice(KINDS)
        for job in await republish.waiting(
            self._world.database, kind=kind, older_than=0.3, limit=3, besides=besides
        ):
            if job not in self._in_flight and job not in self._claiming:
                self._world.kinds[job] = kind
                await self._claim(job, None)

    async def _claim(self, job: UUID, message: Message | None) -> None:
        self._claiming.add(job)
        try:
            if self._world.kinds[job] == "limited":
                async with self._admitting:
                    for row in await self._claimed(job, message):
                        self._adopt(row)
                return
            rows = await self._claimed(job, message)
        finally:
            self._claiming.discard(job)
        await self._awake.wait()
        for row in rows:
            self._adopt(row)

    async def _claimed(self, job: UUID, message: Message | None) -> list[ClaimedJob]:
        """Claim a job; now and then the request or its answer is lost, and then the read-back decides.

        What was held of its key before may be claimed in its place.
        """
        lost_request, lost_answer = self._world.chance(0.08), self._world.chance(0.15)
        claimed: list[ClaimedJob] = []
        if not lost_request:
            claimed = await self._taken(job)
        if lost_request or lost_answer:
            if "ack unclear claims" in self._world.habits:
                if message is not None:
                    self._world.bus.ack(message)
                return []
            if self._world.chance(0.5):  # the read-back is given up: the row may be an orphaned claim
                if message is not None:
                    self._world.bus.nak(message, 0.05)
                return []
            claimed = await self._read_back(job)
            if not claimed and message is not None:
                self._world.bus.nak(message, 0.05)
                return []
        if message is not None:
            if any(row.id == job for row in claimed) or not await self._is_queued(job):
                self._world.bus.ack(message)
            else:
                self._world.bus.nak(message, 0.02)
        return claimed

    async def _taken(self, job: UUID) -> list[ClaimedJob]:
        how: dict[str, Any] = {"worker_id": self.id, "kind": self._world.kinds[job], "ids": [job]}
        database = self._world.database
        if how["kind"] == "limited":
            taken = await admission.admit(database, **how, limits=_LIMITS, besides=list(self._in_flight))
        else:
            taken = await claim.claim(database, **how, limits=_LIMITS)
        self._world.refusals += [f"CLAIM of {refused}" for refused in taken.refused_rows]
        return taken.claimed

    async def _read_back(self, job: UUID) -> list[ClaimedJob]:
        kind = self._world.kinds[job]
        if kind != "limited":
            return await claim.read_back(self._world.database, worker_id=self.id, ids=[job])
        hand = list(self._in_flight)
        return await claim.read_back_admitted(
            self._world.database, worker_id=self.id, kind=kind, besides=hand
        )

    async def _free(self, key: str) -> None:
        """Claim what is held of a key of which a slot has fallen free."""
        async with self._admitting:
            taken = await admission.admit(
                self._world.database,
                worker_id=self.id,
                kind="limited",
                limits=_LIMITS,
                keys=[key],
                most=1,
                besides=list(self._in_flight),
            )
            for row in taken.claimed:
                self._adopt(row)

    async def _is_queued(self, job: UUID) -> bool:
        """Look at a job that a claim did not take: one whose row was locked is not refused."""
        if "ack skipped claims" in self._world.habits:
            return False
        rows = await claim.look_at_refused(
            self._world.database, worker_id=self.id, kind=self._world.kinds[job], ids=[job]
        )
        return job in rows and rows[job].status == "queued"

    def _adopt(self, row: ClaimedJob) -> None:
        self._in_flight[row.id] = row
        self._spawn(self._run(row))

    def _spawn(self, steps: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, row: ClaimedJob) -> None:
        started = boottime()
        long = self._world.chance(0.5)
        await self._world.some_time(2 * STALE_SECONDS if long else 0.05)
        await self._awake.wait()
        how = self._world.dice.random()
        try:
            if row.kind == "growing" and self._world.chance(0.7):
                await self._add_member(row)
            await self._end(row, how if self._world.faults else 1.0)
            if not self._world.chance(0.3):  # else it dies before it could look after what follows
                if row.batch_id is not None:
                    await workflows.advance(self._world.database, [row.batch_id])
                if row.limit_key is not None:
                    await self._free(row.limit_key)
        except RowRefused as refused:
            self._world.refusals.append(str(refused))
        finally:
            self._world.runs.append(
                Run(str(row.id), row.kind, row.fencing_token, self.pid, started, boottime(), "finish")
            )
            if self._in_flight.get(row.id) is row:
                del self._in_flight[row.id]

    async def _end(self, row: ClaimedJob, how: float) -> None:
        held = row.id, row.fencing_token
        database = self._world.database
        if how < 0.25:
            failure = Failure(*held, error="as it happens", permanent=None, delay=0.02)
            self._note(await settle.fail(database, worker_id=self.id, runs=[failure]), "fail")
        elif how < 0.5:
            back = Return(*held, "as it happens")
            self._note(await settle.release(database, worker_id=self.id, runs=[back]), "release")
        elif row.kind == "doomed":
            failure = Failure(*held, error="as always", permanent="attempts", delay=0.02)
            self._note(await settle.fail(database, worker_id=self.id, runs=[failure]), "fail")
        elif row.kind == "transactional":
            await self._complete_in_transaction(row)
        else:
            done = Completion(*held, f'{{"token": {row.fencing_token}}}')
            for _ in range(2 if self._world.chance(0.2) else 1):  # the first answer was lost
                self._note(await settle.complete(database, worker_id=self.id, runs=[done]), "complete")

    async def _add_member(self, row: ClaimedJob) -> None:
        new = [NewJob(new_job_id(), "{}")]
        with suppress(OwnershipLost):
            await workflow_control.add_members(
                self._world.database,
                worker_id=self.id,
                held=(row.id, row.fencing_token),
                kind="ordinary",
                new=new,
            )

    async def _complete_in_transaction(self, row: ClaimedJob) -> None:
        done = Completion(row.id, row.fencing_token, f'{{"token": {row.fencing_token}}}')
        async with AsyncSession(self._world.engine) as session:
            await session.execute(EFFECT, {"job_id": row.id, "token": row.fencing_token})
            result = await session.execute(settle.complete_statement(self.id, done))
            if result.first() is not None:
                await session.commit()

    def _note(self, settled: list[Settled], write: str) -> None:
        self._world.refusals += [write for each in settled if each is Settled.REFUSED]
