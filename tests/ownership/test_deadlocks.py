"""Every multi-row statement beside every other, rows in random order: none waits in a circle."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import UUID

import pytest
from sqlalchemy import text

from jsworker.core.errors import DatabaseRefused, OwnershipLost, TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import (
    claim,
    control,
    enqueue,
    enqueue_terms,
    heartbeat,
    publish,
    republish,
    reset,
    settle,
    snooze,
    steps,
)
from jsworker.ownership.transitions.child_jobs import complete_with_child_jobs
from jsworker.ownership.transitions.workflow_enqueue import NewBatch, enqueue_workflow

from .calls import retry
from .deadlocks import deadlocks, hasty_deadlock_detection
from .flows import sweep
from .polling import eventually
from .rows import KIND, WORKER, Sql, insert_job

SECONDS = 5.0
BATCHES = 8
KEYS = [f"key-{place}" for place in range(60)]
LATE = claim.RunLimits(stale_after=0.0, crash_after=0.0, timeout=None, max_attempts=3, max_stalls=3)
"""A limit that every silence is beyond, so that the stale rule applies at once."""

NO_SILENCE = {"stale_after": 0.0, "crash_after": 0.0}
MOST_OPEN = 30

JOBS = text(
    "SELECT id, status, fencing_token, dispatch FROM jsworker.jobs"
    " WHERE (unique_key IS NOT NULL OR batch_id IS NOT NULL AND status <> 'completed')"
    " AND kind NOT LIKE 'child-%'"
)
OPEN = text("SELECT id FROM jsworker.workflows WHERE finished_at IS NULL")


class Storm:
    """Random batches, each of one statement."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._random = random.Random(seed)  # noqa: S311 -- a schedule, not a secret
        self._steps: dict[str, Callable[[], Awaitable[int]]] = {
            "enqueue": self.enqueue,
            "claim": self.claim,
            "heartbeat": self.heartbeat,
            "complete": self.complete,
            "complete with children": self.complete_with_children,
            "fail": self.fail,
            "release": self.release,
            "snooze": self.snooze,
            "keep a step": self.keep_step,
            "save a checkpoint": self.save_checkpoint,
            "quiet": self.quiet,
            "quiet beside": self.quiet_beside,
            "quiet over": self.quiet_over,
            "reset stale": self.reset_stale,
            "reset crashed": self.reset_crashed,
            "reset dead": self.reset_dead,
            "reset by operator": self.reset_by_operator,
            "claim stale": self.claim_stale,
            "republish": self.republish,
            "skip": self.skip,
            "publish": self.publish,
            "mark": self.mark,
            "promote": self.promote,
            "cancel": self.cancel,
            "retry": self.retry,
            "enqueue a workflow": self.enqueue_workflow,
            "advance": self.advance,
        }

    async def run(self, seconds: float, written: Counter[str]) -> None:
        """Send batches until the time is over and each statement has written rows."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(+written) < len(self._steps):
            name = self._random.choice(list(self._steps))
            written[name] += await self._steps[name]()

    async def jobs(self, *statuses: str) -> list[tuple[UUID, int, int]]:
        """Return some jobs in random order."""
        found = [row for row in await self._database.run(JOBS) if row.status in statuses]
        some = self._random.sample(found, min(len(found), 40))
        return [(row.id, row.fencing_token, row.dispatch) for row in some]

    async def enqueue(self) -> int:
        delay = self._random.choice([0.0, 0.001])
        new = [keyed(key, delay) for key in self._random.sample(KEYS, 30)]
        return sum(one.created for one in await enqueue_terms.enqueue_many(self._database, KIND, new))

    async def claim(self) -> int:
        ids = [one[0] for one in await self.jobs("queued")]
        taken = await claim.claim(self._database, worker_id=WORKER, kind=KIND, ids=ids, limits=LATE)
        return len(taken.claimed)

    async def heartbeat(self) -> int:
        hand = [(one[0], one[1]) for one in await self.jobs("processing")]
        return len((await heartbeat.heartbeat(self._database, worker_id=WORKER, in_flight=hand)).alive)

    async def complete(self) -> int:
        runs = [settle.Completion(one[0], one[1], "{}") for one in (await self.jobs("processing"))[:10]]
        return accepted(await settle.complete(self._database, worker_id=WORKER, runs=runs))

    async def complete_with_children(self) -> int:
        """Complete some jobs at once whose children have the same keys, some of them with a delay."""
        kind = f"child-{enqueue.new_job_id().hex}"

        async def complete(job_id: UUID, token: int) -> int:
            keys = self._random.sample(KEYS, 20)
            children = [enqueue.ChildJob(kind, keyed(key, 60.0 * self.coin())) for key in keys]
            runs = [settle.Completion(job_id, token, "{}", children)]
            return accepted(await complete_with_child_jobs(self._database, worker_id=WORKER, runs=runs))

        held = (await self.jobs("processing"))[:5]
        return sum(await asyncio.gather(*(complete(*one[:2]) for one in held)))

    async def fail(self) -> int:
        held = await self.jobs("processing")
        reasons = [self._random.choice([None, "permanent"]) for _ in held]
        runs = [settle.Failure(one[0], one[1], "e", why, 0.0) for one, why in zip(held, reasons, strict=True)]
        return accepted(await settle.fail(self._database, worker_id=WORKER, runs=runs))

    async def release(self) -> int:
        runs = [settle.Return(one[0], one[1], "r") for one in await self.jobs("processing")]
        return accepted(await settle.release(self._database, worker_id=WORKER, runs=runs))

    async def snooze(self) -> int:
        held = await self.jobs("processing")
        runs = [settle.Snoozing(one[0], one[1], "r", 0.0, 5, "e") for one in held]
        return accepted(await snooze.snooze(self._database, worker_id=WORKER, runs=runs))

    async def keep_step(self) -> int:
        kept = 0
        for one in (await self.jobs("processing"))[:5]:
            with suppress(OwnershipLost):
                held = one[0], one[1]
                kept += await steps.keep_step(
                    self._database, worker_id=WORKER, held=held, name=str(one[1]), result="1"
                )
        return kept

    async def save_checkpoint(self) -> int:
        return await self.write_owned(heartbeat.save_checkpoint, checkpoint="1")

    async def quiet(self) -> int:
        return await self.write_owned(heartbeat.set_thresholds, **NO_SILENCE)

    async def write_owned(self, write: Callable[..., Awaitable[object]], **values: object) -> int:
        written = 0
        for one in (await self.jobs("processing"))[:5]:
            with suppress(OwnershipLost):
                await write(self._database, worker_id=WORKER, held=one[:2], **values)
                written += 1
        return written

    async def quiet_beside(self) -> int:
        thresholds = {one[:2]: NO_SILENCE for one in await self.jobs("processing")}
        written = await heartbeat.set_thresholds_beside(
            self._database, worker_id=WORKER, thresholds=thresholds
        )
        return len(written)

    async def quiet_over(self) -> int:
        hand = [one[:2] for one in await self.jobs("processing")]
        beat = await heartbeat.heartbeat(self._database, worker_id=WORKER, in_flight=hand)
        renewed = [held for held in hand if held in beat.activities]
        restored = await heartbeat.restore_thresholds(
            self._database,
            worker_id=WORKER,
            thresholds=dict.fromkeys(renewed, NO_SILENCE),
            activities=beat.activities,
        )
        return len(restored)

    async def reset_stale(self) -> int:
        taken = await reset.reset_stale(
            self._database, worker_id=WORKER, stale=await self.late(), reason="r", counted=self.coin()
        )
        return len(taken.resets)

    async def reset_crashed(self) -> int:
        taken = await reset.reset_crashed(
            self._database, worker_id=WORKER, crashed=await self.late(), reason="r", counted=self.coin()
        )
        return len(taken.resets)

    async def reset_dead(self) -> int:
        taken = await reset.reset_dead(
            self._database, worker_id=WORKER, owner=WORKER, reason="r", counted=self.coin()
        )
        return len(taken.resets)

    async def reset_by_operator(self) -> int:
        seen = [(one[0], one[1]) for one in await self.jobs("processing")]
        return len((await reset.reset_by_operator(self._database, seen=seen, reason="r")).resets)

    async def late(self) -> list[reset.Suspect]:
        found = await reset.look_for_late(self._database, heartbeat_interval=0.0, limit=40)
        self._random.shuffle(found.suspects)
        return found.suspects

    def coin(self) -> bool:
        return self._random.random() < 0.5

    async def claim_stale(self) -> int:
        taken = await claim.claim_stale(
            self._database, worker_id=WORKER, kind=KIND, seen=await self.late(), limits=LATE
        )
        return len(taken.claimed)

    async def republish(self) -> int:
        gone = [(one[0], one[2]) for one in await self.jobs("queued")]
        return len(await republish.republish(self._database, worker_id=WORKER, gone=gone))

    async def skip(self) -> int:
        ids = [one[0] for one in await self.jobs("processing")]
        return len(await claim.look_at_refused(self._database, kind=KIND, ids=ids, worker_id="other"))

    async def publish(self) -> int:
        return len(await publish.take_outgoing(self._database, limit=40))

    async def mark(self) -> int:
        sent = [publish.Sent(one[0], one[2], 1, None) for one in await self.jobs("queued")]
        return await publish.mark(self._database, sent)

    async def promote(self) -> int:
        return await publish.promote(self._database, limit=40)

    async def cancel(self) -> int:
        ids = [one[0] for one in (await self.jobs("scheduled", "queued", "processing"))[:5]]
        answer = await control.cancel(self._database, ids)
        return len(answer.cancelled) + len(answer.requested)

    async def retry(self) -> int:
        failed = await self.jobs("failed")
        for one in failed[:1]:
            with suppress(TransitionRefused):
                await retry(self._database, one[0])
                return 1
        return 0

    async def enqueue_workflow(self) -> int:
        """Enqueue a workflow in which each batch needs all before it, unless many are open."""
        if len(await self._database.run(OPEN)) >= MOST_OPEN:
            return 0
        batches: list[NewBatch] = []
        for place in range(4):
            jobs = [enqueue.NewJob(enqueue.new_job_id(), "{}")]
            needs = [batch.id for batch in batches]
            batches.append(NewBatch(enqueue.new_job_id(), f"batch-{place}", KIND, "run", needs, jobs))
        self._random.shuffle(batches)
        await enqueue_workflow(self._database, workflow=enqueue.new_job_id(), name="storm", batches=batches)
        return len(batches)

    async def advance(self) -> int:
        done = await sweep(self._database)
        return len(done.batches) + done.woken + done.cancelled


def keyed(key: str, delay: float) -> enqueue.NewJob:
    """Return a job as a client makes it."""
    terms = enqueue.JobTerms() if delay else None
    return enqueue.NewJob(enqueue.new_job_id(), "{}", key, delay, terms=terms)


def accepted(settled: list[settle.Settled]) -> int:
    return sum(one is not settle.Settled.LOST for one in settled)


async def test_no_deadlock_in_a_storm(database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jsworker.ownership.database._CONFLICT_TRIES", 1)  # a deadlock fails the test at once
    before = deadlocks(sql)
    with hasty_deadlock_detection(sql):
        database = Database(database_url, statement_timeout=10.0, pool_size=BATCHES)
        written: Counter[str] = Counter()
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as storms:
            for seed in range(BATCHES):
                storms.create_task(Storm(database, seed).run(SECONDS, written))
        await database.close()
    await no_connection_left(sql)
    assert deadlocks(sql) == before


async def test_a_deadlock_would_be_seen(database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in opposite orders, as the statements would lock them without their ORDER BY."""
    monkeypatch.setattr("jsworker.ownership.database._CONFLICT_TRIES", 1)
    before = deadlocks(sql)
    for _ in range(300):
        insert_job(sql)
    with hasty_deadlock_detection(sql):
        database = Database(database_url, statement_timeout=10.0)
        lock = "SELECT id FROM jsworker.jobs ORDER BY id {} FOR NO KEY UPDATE"

        async def collide() -> None:
            while True:
                orders = (database.run(text(lock.format(order))) for order in ("ASC", "DESC"))
                for answer in await asyncio.gather(*orders, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        raise answer

        with pytest.raises(DatabaseRefused, match="40P01"):
            await asyncio.wait_for(collide(), 30.0)
        await database.close()
    await no_connection_left(sql)
    assert deadlocks(sql) > before


async def no_connection_left(sql: Sql) -> None:
    """Wait for the ends of jsworker's backends: each reports its figures when it ends."""
    backends = """
        SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'jsworker'
    """
    await eventually(lambda: sql.execute(backends).rowcount == 0, "every backend has ended")
