"""The owner beside those who hold its rows: heartbeats are not lost, outcomes wait for the lock."""

import asyncio
from uuid import UUID

import pytest
from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import heartbeat, settle
from jsworker.ownership.transitions.settle import Completion, Settled

from .calls import claimed, complete, fail, release, reset_stale, suspect
from .rows import (
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    event_names,
    insert_job,
    read_job,
    read_value,
)
from .winner import Winner


def answer(**job_ids: list[UUID]) -> heartbeat.Beat:
    """Return the answer to a heartbeat; each job is held with token 1."""
    kinds = ("alive", "cancelled", "lost", "locked", "completed")
    held = {kind: frozenset((one, 1) for one in job_ids.get(kind, [])) for kind in kinds}
    renewed = held["alive"] - held["locked"]
    return heartbeat.Beat(**held, silences=dict.fromkeys(renewed, LIMITS.stale_after), activities={})


class TestHeartbeat:
    async def test_of_a_lost_claim(self, database: Database, sql: Sql, running: UUID) -> None:
        await reset_stale(database, suspect(sql, running))
        await claimed(database, running, worker_id=OTHER_WORKER)
        before = read_job(sql, running)
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
        assert beat == answer(lost=[running])
        assert read_job(sql, running) == before

    async def test_of_a_claim_that_is_just_being_lost(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.resets(running)
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
        assert beat == answer(alive=[running], locked=[running])
        winner.commit()
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
        assert beat == answer(lost=[running])

    async def test_while_the_run_is_settling(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        neighbour = insert_job(sql, "processing", last_activity_at=ago(20))
        winner.completes(running)
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1), (neighbour, 1)])
        assert beat._replace(activities={}) == answer(alive=[running, neighbour], locked=[running])
        age = (
            "SELECT extract(epoch FROM clock_timestamp() - last_activity_at) FROM jsworker.jobs WHERE id = %s"
        )
        assert read_value(sql, age, neighbour) < 5
        assert winner.blocked() == 0
        winner.commit()
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1), (running, 2)])
        assert beat.completed == {(running, 1)}
        assert beat.lost == {(running, 2)}

    async def test_of_a_cancelled_run_whose_row_is_locked(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, "processing", cancel_requested=True)
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(job_id, 1)])
        assert beat == answer(alive=[job_id], cancelled=[job_id], locked=[job_id])

    async def test_of_one_locked_row_waits_alone(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": running})
        alone = asyncio.create_task(heartbeat.heartbeat_alone(database, worker_id=WORKER, held=(running, 1)))
        await winner.blocks()
        winner.commit()
        assert await alone

    async def test_alone_of_a_row_that_was_reset(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.resets(running)
        alone = asyncio.create_task(heartbeat.heartbeat_alone(database, worker_id=WORKER, held=(running, 1)))
        await winner.blocks()
        winner.commit()
        assert not await alone


class TestLockedWhileSettling:
    """A row that a batch skipped and that is still mine is settled alone, once its lock is free."""

    async def test_it_keeps_no_neighbour_from_its_commit(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        ids = [insert_job(sql, "processing") for _ in range(50)]
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": ids[20]})
        runs = [Completion(job_id, 1, "{}") for job_id in ids]
        settled = await settle.complete(database, worker_id=WORKER, runs=runs, wait=False)
        assert settled == [Settled.COMPLETED] * 20 + [Settled.LOCKED] + [Settled.COMPLETED] * 29
        done = "SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'"
        assert read_value(sql, done) == 49
        alone = asyncio.create_task(settle.complete(database, worker_id=WORKER, runs=[runs[20]]))
        await winner.blocks()
        winner.commit()
        assert await alone == [Settled.COMPLETED]

    @pytest.mark.parametrize("undone", [False, True])
    async def test_behind_an_earlier_try_of_the_same_completion(
        self, database: Database, sql: Sql, winner: Winner, running: UUID, *, undone: bool
    ) -> None:
        winner.completes(running)
        second = asyncio.create_task(complete(database, running, result='"loser"'))
        await winner.blocks()
        winner.rollback() if undone else winner.commit()
        assert await second is Settled.COMPLETED
        assert read_job(sql, running)["result"] == ("loser" if undone else "winner")
        assert event_names(sql, running) == []

    async def test_behind_an_earlier_try_of_the_same_failure(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.fails(running)
        second = asyncio.create_task(fail(database, running))
        await winner.blocks()
        winner.commit()
        assert await second is Settled.SCHEDULED
        assert event_names(sql, running) == ["error"]

    async def test_a_row_that_is_refused_alone(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "processing", dispatch=2**53)
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        ending = asyncio.create_task(release(database, job_id))
        await winner.blocks()
        winner.commit()
        assert await ending is Settled.REFUSED
        assert read_job(sql, job_id)["status"] == "processing"
