"""The walk itself: producers, relays, sweepers, operators and workers, then silence, then the checker."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, TransitionRefused
from jsworker.core.schedule_rules import Every
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import (
    admission,
    control,
    enqueue,
    limits,
    publish,
    republish,
    reset,
    schedules,
    workflows,
)
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.limits import Numbers
from jsworker.ownership.transitions.publish import Sent
from jsworker.ownership.transitions.reset import Suspect
from jsworker.ownership.transitions.schedules import NewSchedule
from jsworker.ownership.transitions.workflow_enqueue import NewBatch, enqueue_workflow
from tests.faults.checker import Verdict, check
from tests.faults.collect import read_database
from tests.faults.flow_control import Watch
from tests.faults.history import Cancel, History, Life, Try
from tests.faults.walk.bus import Bus
from tests.faults.walk.worker import HEARTBEAT_SECONDS, KINDS, STALE_SECONDS, Worker, World
from tests.faults.workload import WORKFLOW
from tests.ownership.calls import reschedule, retry

HOSTS = ("h-1", "h-10", "h-2")
"""The first is a prefix of the second."""

_JOBS = 70
_FLOWS = 4
_NUMBERS = {"": Numbers(2), "tenant-0": Numbers(1), "tenant-1": Numbers(3, 100, 1.0)}
"""Of limited jobs, by key."""
_SCHEDULE = "every-second"
_INSTANT = timedelta(seconds=1)
_MOST_CANCELS = 5
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
LIVE = text(
    "SELECT (SELECT count(*) FROM jsworker.jobs WHERE finished_at IS NULL)"
    " + (SELECT count(*) FROM jsworker.workflows WHERE finished_at IS NULL)"
    " + (SELECT count(*) FROM jsworker.batches WHERE NOT propagated) AS live"
)
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
        strays: release orphaned claims.
        looks_after: wake what is held, and finish batches, that nobody else came back to.
        habits: of workers and producers, outside of SQL: what a mutant does wrong there.
    """

    seed: int
    sweeps: bool = True
    loses_messages: bool = True
    strays: bool = True
    looks_after: bool = True
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
            self._look_after,
            self._fire,
            self._fire,
            self._lock,
            self._hurry,
        ]
        await self._prepare()
        tasks = [asyncio.create_task(_again(act, self._world)) for act in actors]
        tasks += [asyncio.create_task(self._host(hostname)) for hostname in HOSTS]
        watch = Watch(lambda query: self._world.database.run(text(query)))
        tasks.append(asyncio.create_task(watch.watch()))
        try:
            async with asyncio.timeout(120):
                await asyncio.gather(self._produce(), self._produce_workflows(), self._walk())
                await schedules.pause(self._world.database, _SCHEDULE)
                self._world.faults = False
                self._world.bus.loss = 0.0
                self._history.quiet_since = boottime()
                await self._wait_for_silence(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._history.broken = watch.broken
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
            tenant = self._world.dice.choice([*_NUMBERS]) if kind == "limited" else None
            job = NewJob(new_job_id(), "{}", f"walk-{number}", limit_key=tenant)
            self._world.kinds[job.id] = kind
            await enqueue.enqueue(self._world.database, kind, job, publish_after=5.0)
            self._history.tries.append(Try(f"walk-{number}", kind, "ok", str(job.id), boottime()))
            if not self._world.chance(0.2):  # else the producer dies between its commit and its message
                self._world.bus.publish(job.id, 1)
                await self._world.some_time(0.02)
                await publish.mark(self._world.database, [Sent(job.id, 1, 1, None)])
            await self._world.some_time(0.02)

    async def _prepare(self) -> None:
        database = self._world.database
        for key, numbers in _NUMBERS.items():
            await limits.set_numbers(database, "limited", key, numbers)
        # Always due: its instants lie in the past.
        first = (await schedules.database_now(database)).replace(microsecond=0) - 10_000 * _INSTANT
        new = NewSchedule(_SCHEDULE, "ordinary", "{}", Every(seconds=1), first)
        await schedules.add(database, new, replace=False)

    async def _produce_workflows(self) -> None:
        for number in range(_FLOWS):
            parts, beside, after = (
                [NewJob(new_job_id(), "{}") for _ in range(members)] for members in (3, 1, 2)
            )
            kind = self._world.dice.choice(["growing", "doomed"])
            first = NewBatch(new_job_id(), "parts", "limited", "cancel", [], parts)
            second = NewBatch(new_job_id(), "beside", kind, "cancel", [], beside)
            how = self._world.dice.choice(["cancel", "run"])
            last = NewBatch(new_job_id(), "after", "ordinary", how, [first.id, second.id], after)
            workflow, name = new_job_id(), f"flow-{number}"
            await enqueue_workflow(
                self._world.database, workflow=workflow, name=name, batches=[first, second, last]
            )
            self._history.tries.append(Try(name, WORKFLOW, "ok", str(workflow), boottime()))
            await self._world.some_time(0.2)

    async def _look_after(self) -> None:
        """Do what every scan does: wake what may begin, and finish what has ended."""
        if self._options.looks_after:
            database = self._world.database
            for key in await admission.waiting_keys(database):
                if key.jobs:
                    await admission.wake(database, worker_id="sweeper", kind=key.kind, keys=[key.key])
            left = await workflows.left_undone(database)
            await workflows.advance(database, left.batches, needs=left.needs, workflows=left.workflows)
        await self._world.some_time(0.1)

    async def _fire(self) -> None:
        """Fire what is due, which the other one has perhaps done meanwhile."""
        for due in await schedules.upcoming(self._world.database):
            await self._world.some_time(0.04)
            await schedules.fire(
                self._world.database, due, seen=due.next_at, instant=due.next_at, then=due.next_at + _INSTANT
            )
        await self._world.some_time(0.08)

    async def _relay(self) -> None:
        await publish.promote(self._world.database, limit=50)
        outgoing = await publish.take_outgoing(self._world.database, limit=50)
        for job in outgoing:
            self._world.kinds[job.id] = job.kind
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
            live = self._world.dice.choice([("processing",), ("queued", "scheduled", "processing")])
            for job_id, _ in (await self._some(*live))[:1]:
                if self._world.chance(0.5):
                    await self._cancel(job_id)
            for job_id, _ in (await self._some("failed"))[:1]:
                with suppress(TransitionRefused):
                    await retry(self._world.database, job_id)
            for job_id, _ in (await self._some("scheduled"))[:1]:
                with suppress(TransitionRefused):
                    await reschedule(self._world.database, job_id, datetime.now(UTC))
            if self._world.chance(0.1):
                await limits.pause(
                    self._world.database,
                    "limited",
                    self._world.dice.choice([*_NUMBERS]),
                    seconds=0.15,
                    paused_by="operator",
                    reason=None,
                )
        await self._world.some_time(0.04)

    async def _cancel(self, job_id: UUID) -> None:
        started = time.time()
        for _ in range(_MOST_CANCELS):  # refused, because others kept it locked: an operator asks again
            answer = await control.cancel(self._world.database, [job_id])
            if job_id not in answer.refused:
                break
        heard = job_id in (*answer.cancelled, *answer.requested)
        self._history.cancels.append(Cancel(str(job_id), started, time.time(), heard))

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
