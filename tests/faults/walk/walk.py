"""The walk itself: producers, relays, sweepers, operators and workers, then silence, then the checker."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import control, enqueue, publish, republish, reset
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.publish import Sent
from jsworker.ownership.transitions.reset import Suspect
from tests.faults.checker import Verdict, check
from tests.faults.collect import read_database
from tests.faults.history import Cancel, History, Life, Try
from tests.faults.walk.bus import Bus
from tests.faults.walk.worker import HEARTBEAT_SECONDS, KINDS, STALE_SECONDS, Worker, World

HOSTS = ("h-1", "h-10", "h-2")
"""The first is a prefix of the second."""

_JOBS = 70
_WALK_SECONDS = 1.0
_STUCK_SECONDS = 0.7
_LAST_SECONDS = 8.0
_RULES = frozenset({"errors of innocent jobs", "unexplained duplicate runs", "died by itself", "never seen"})
"""Rules about processes and injected faults: a walk has neither."""

# What takes seconds in the protocol takes a fraction of one here.
HURRY = (
    text(
        "UPDATE jsworker.jobs SET run_at = clock_timestamp() "
        "WHERE status = 'scheduled' AND run_at > clock_timestamp()"
    ),
    text(
        "UPDATE jsworker.jobs SET publish_after = clock_timestamp() + interval '0.15 seconds' "
        "WHERE needs_publish AND publish_after > clock_timestamp() + interval '0.3 seconds'"
    ),
)
LIVE = text("SELECT count(*) AS live FROM jsworker.jobs WHERE finished_at IS NULL")
MOVES = text("SELECT coalesce(max(seq), 0) AS seq FROM faults.moves")
LOCK = text("SELECT id FROM jsworker.jobs WHERE status = 'queued' LIMIT 4 FOR NO KEY UPDATE SKIP LOCKED")
SOME = text(
    "SELECT id, fencing_token FROM jsworker.jobs WHERE status = ANY(:statuses) ORDER BY random() LIMIT 3"
)


@dataclass(frozen=True)
class Options:
    """How a walk goes.

    Attributes:
        sweeps: republish lost messages and claim old rows; else no message is ever lost.
        loses_messages: whether the bus loses some.
        strays: release rows in nobody's hand.
        habits: of workers and producers, outside of SQL: what a mutant does wrong there.
    """

    seed: int
    sweeps: bool = True
    loses_messages: bool = True
    strays: bool = True
    habits: frozenset[str] = frozenset()


class Walk:
    """One walk over one database."""

    def __init__(self, url: str, options: Options) -> None:
        self._url = url
        self._options = options
        dice = random.Random(options.seed)  # noqa: S311 -- repeatable on purpose
        database = Database(url, statement_timeout=5.0, pool_size=16)
        self._world = World(
            database=database,
            engine=create_async_engine(database.url, pool_size=8),
            bus=Bus(dice, ids_of_jobs="message ids of jobs" in options.habits),
            dice=dice,
            sweeps=options.sweeps,
            strays=options.strays,
            habits=options.habits,
        )
        self._world.bus.loss = 0.1 if options.loses_messages else 0.0
        self._workers: dict[str, Worker] = {}
        self._history = History(started=boottime())
        self._watched: dict[UUID, tuple[Suspect, float]] = {}

    async def run(self) -> Verdict:
        """Walk, wait for silence, and judge."""
        actors: list[Callable[[], Awaitable[None]]] = [
            self._relay,
            self._relay,
            self._sweep,
            self._sweep,
            self._operate,
            self._lock,
            self._hurry,
        ]
        tasks = [asyncio.create_task(_again(act, self._world)) for act in actors]
        tasks += [asyncio.create_task(self._host(hostname)) for hostname in HOSTS]
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(self._produce(), self._walk())
                self._world.faults = False
                self._world.bus.loss = 0.0
                self._history.quiet_since = boottime()
                await self._wait_for_silence(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._world.engine.dispose()
            await self._world.database.close()
        return self._judge()

    def _judge(self) -> Verdict:
        read_database(self._history, self._url)
        self._history.runs = self._world.runs
        self._history.refusals = self._world.refusals
        self._history.lives = [
            Life(pid, self._world.pods[pid], tuple(ticks)) for pid, ticks in self._world.ticks.items()
        ]
        verdict = check(self._history, heartbeat_interval=HEARTBEAT_SECONDS)
        for rule in _RULES:
            verdict.findings.pop(rule)
        return verdict

    async def _walk(self) -> None:
        """Let faults happen for a while; a walk that the database has refused once needs no more of them."""
        until = boottime() + _WALK_SECONDS
        while boottime() < until and not self._world.refusals:  # noqa: ASYNC110 -- and the time is up some day
            await asyncio.sleep(0.05)

    async def _wait_for_silence(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until every job has ended, or nothing moves any more."""
        deadline, last, since = boottime() + _LAST_SECONDS, -1, boottime()
        while boottime() < deadline:
            for task in tasks:
                if task.done():
                    task.result()
            [live] = await self._world.database.run(LIVE)
            [moved] = await self._world.database.run(MOVES)
            if live.live == 0 or self._world.refusals:
                self._history.drained = boottime()
                return  # one that the database refused has failed anyway
            if moved.seq != last:
                last, since = moved.seq, boottime()
            elif boottime() - since > _STUCK_SECONDS:
                return
            await asyncio.sleep(0.05)

    async def _produce(self) -> None:
        for number in range(_JOBS):
            kind = self._world.dice.choice(KINDS)
            job = enqueue.NewJob(id=new_job_id(), payload="{}", unique_key=f"walk-{number}")
            self._world.kinds[job.id] = kind
            await enqueue.enqueue(self._world.database, kind, job, publish_after=5.0)
            self._history.tries.append(Try(f"walk-{number}", kind, "ok", str(job.id), boottime()))
            if not self._world.chance(0.2):  # else the producer dies between its commit and its message
                self._world.bus.publish(job.id, 1)
                await self._world.some_time(0.02)
                await publish.mark(self._world.database, [Sent(job.id, 1, 1, None)])
            await self._world.some_time(0.02)

    async def _relay(self) -> None:
        await publish.promote(self._world.database, limit=50)
        outgoing = await publish.take_outgoing(self._world.database, limit=50)
        for job in outgoing:
            self._world.bus.publish(job.id, job.dispatch)
        if self._world.chance(0.5):
            await asyncio.sleep(0.1)  # a slow relay: its marks come late
        if outgoing and not self._world.chance(0.1):  # else it dies before it could mark anything
            await publish.mark(
                self._world.database, [Sent(job.id, job.dispatch, 1, None) for job in outgoing]
            )
        await asyncio.sleep(0.04)

    async def _sweep(self) -> None:
        late = (
            await reset.look_for_late(self._world.database, heartbeat_interval=HEARTBEAT_SECONDS, limit=500)
        ).suspects
        stale = self._proven(late)
        if stale and self._world.chance(0.6):
            await self._world.some_time(0.6)  # what was seen is old when it is acted upon
        if stale and self._workers and self._world.chance(0.3):
            await self._world.dice.choice(list(self._workers.values())).take_over(stale)
        elif stale:
            self._world.note_resets(
                await reset.reset_stale(
                    self._world.database, worker_id="sweeper", stale=stale, reason="silent", counted=True
                )
            )
        if self._world.sweeps:
            await self._republish()
        await asyncio.sleep(0.05)

    def _proven(self, late: list[Suspect]) -> list[Suspect]:
        """Return what was seen stale and unmoved for a third of the threshold."""
        now, watched = boottime(), {}
        for row in late:
            before = self._watched.get(row.id)
            same = before is not None and before[0].last_activity_at == row.last_activity_at
            watched[row.id] = (row, before[1] if before is not None and same else now)
        self._watched = watched
        return [row for row, since in watched.values() if row.stale and now - since > STALE_SECONDS / 3]

    async def _republish(self) -> None:
        page = await republish.posted(self._world.database, after=None, older_than=0.1, limit=100)
        gone = [(row.id, row.dispatch) for row in page if not self._world.bus.holds(row.id, row.dispatch)]
        await republish.republish(self._world.database, worker_id="sweeper", gone=gone)

    async def _operate(self) -> None:
        if self._world.faults:
            for job_id, token in await self._some("processing"):
                if self._world.chance(0.15):
                    seen = [(job_id, token)]
                    self._world.note_resets(
                        await reset.reset_by_operator(self._world.database, seen=seen, reason="told so")
                    )
            for job_id, _ in (await self._some("queued", "scheduled", "processing"))[:1]:
                if self._world.chance(0.5):
                    await self._cancel(job_id)
        await self._world.some_time(0.04)

    async def _cancel(self, job_id: UUID) -> None:
        started = boottime()
        answer = await control.cancel(self._world.database, [job_id])
        heard = job_id in (*answer.cancelled, *answer.requested)
        self._history.cancels.append(Cancel(str(job_id), started, boottime(), heard))

    async def _some(self, *statuses: str) -> list[tuple[UUID, int]]:
        rows = await self._world.database.run(SOME, {"statuses": list(statuses)})
        return [(row.id, row.fencing_token) for row in rows]

    async def _lock(self) -> None:
        """Hold locks on queued jobs for a moment, as a slow MARK does."""
        if self._world.faults:
            async with self._world.engine.begin() as connection:
                await connection.execute(LOCK)
                await asyncio.sleep(0.03)
        await self._world.some_time(0.02)

    async def _hurry(self) -> None:
        for statement in HURRY:
            await self._world.database.run(statement)
        await asyncio.sleep(0.05)

    async def _host(self, hostname: str) -> None:
        """Keep one worker alive on a host, but for its crashes and pauses."""
        while True:
            worker = Worker(self._world, hostname)
            self._workers[hostname] = worker
            life = asyncio.create_task(worker.live())
            try:
                while not life.done():
                    await self._world.some_time(0.4)
                    if self._world.chance(0.4):
                        await worker.pause()
                    elif self._world.chance(0.6 if hostname == HOSTS[0] else 0.3):
                        break
            finally:
                life.cancel()
                with suppress(asyncio.CancelledError):
                    await life


async def _again(act: Callable[[], Awaitable[None]], world: World) -> None:
    while True:
        try:
            await act()
        except RowRefused as refused:
            world.refusals.append(str(refused))
        except (DatabaseUnavailable, DatabaseRefused) as error:
            world.refusals.append(f"unexpected: {error}")


async def walk(url: str, options: Options) -> Verdict:
    """Walk over a prepared database and return the verdict."""
    return await Walk(url, options).run()
