"""Rules 2 and 3 beside others that want the same row: one reset each, and no claim of the dead survives."""

import asyncio
from functools import partial
from uuid import UUID

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import heartbeat, reset
from jsworker.ownership.transitions.reset import Suspect, TakenBack
from jsworker.ownership.transitions.settle import Settled

from .calls import claimed, complete, suspect
from .rows import (
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    counters,
    event_names,
    insert_job,
    read_job,
    read_value,
)
from .winner import Winner

SWEEPERS = 6


async def evidence(database: Database) -> TakenBack:
    return await reset.reset_dead(database, worker_id=OTHER_WORKER, owner=WORKER, reason="killed")


async def witness(database: Database, *seen: Suspect) -> TakenBack:
    return await reset.reset_crashed(database, worker_id=OTHER_WORKER, crashed=seen, reason="silent")


class TestTwoSweepers:
    async def test_many_at_once_reset_each_row_once(self, database: Database, sql: Sql) -> None:
        ids = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(700)]
        seen = [suspect(sql, job_id) for job_id in ids]
        calls = [partial(evidence, database), partial(witness, database, *seen)] * (SWEEPERS // 2)
        taken = await asyncio.gather(*(call() for call in calls))
        resets = [one.id for answer in taken for one in answer.resets]
        assert len(resets) == len(set(resets))
        left = await evidence(database)  # what one of them held locked when another came by
        assert sorted([*resets, *(one.id for one in left.resets)]) == sorted(ids)
        assert {counters(read_job(sql, job_id)) for job_id in ids} == {(1, 0, 1)}
        assert read_value(sql, "SELECT count(*) FROM jsworker.job_events") == len(ids)

    async def test_evidence_skips_what_another_takes_back(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        neighbour = insert_job(sql, "processing")
        winner.resets(running)
        assert [one.id for one in (await evidence(database)).resets] == [neighbour]
        winner.commit()
        assert (await evidence(database)).resets == []
        assert counters(read_job(sql, running)) == (1, 0, 1)


class TestOutcomeOfTheDead:
    async def test_its_completion_committed_first(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        seen = suspect(sql, running)
        winner.completes(running)
        assert ((await evidence(database)).resets, (await witness(database, seen)).resets) == ([], [])
        winner.commit()
        assert ((await evidence(database)).resets, (await witness(database, seen)).resets) == ([], [])
        assert read_job(sql, running)["result"] == "winner"
        assert event_names(sql, running) == []

    async def test_its_completion_was_undone(self, database: Database, winner: Winner, running: UUID) -> None:
        winner.completes(running)
        assert (await evidence(database)).resets == []
        winner.rollback()
        assert [one.id for one in (await evidence(database)).resets] == [running]

    @pytest.mark.parametrize("rule", ["dead", "crashed"])
    async def test_a_completion_that_comes_after_the_reset(
        self, database: Database, sql: Sql, running: UUID, rule: str
    ) -> None:
        taken = await (evidence(database) if rule == "dead" else witness(database, suspect(sql, running)))
        assert len(taken.resets) == 1
        before = read_job(sql, running)
        assert await complete(database, running) is Settled.LOST
        assert read_job(sql, running) == before
        assert event_names(sql, running) == ["reset", "rejected"]


class TestClaimOfTheDead:
    async def test_it_commits_after_the_first_reset_and_falls_to_the_second(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        late = insert_job(sql)
        winner.claims(late, WORKER)
        assert [one.id for one in (await evidence(database)).resets] == [running]
        winner.commit()
        assert read_job(sql, late)["worker_id"] == WORKER
        assert [one.id for one in (await evidence(database)).resets] == [late]
        assert (read_job(sql, late)["status"], counters(read_job(sql, late))) == ("queued", (1, 0, 1))

    async def test_a_job_that_another_has_claimed_meanwhile_stays_with_it(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        assert len((await evidence(database)).resets) == 1
        assert [job.fencing_token for job in await claimed(database, running, worker_id=OTHER_WORKER)] == [2]
        assert (await evidence(database)).resets == []
        assert read_job(sql, running)["worker_id"] == OTHER_WORKER


async def test_a_heartbeat_is_faster_than_two_witnesses(database: Database, sql: Sql, running: UUID) -> None:
    seen = suspect(sql, running)
    await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
    assert (await witness(database, seen)).resets == []
    assert read_job(sql, running)["status"] == "processing"
