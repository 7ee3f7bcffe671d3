"""Two statements, one row: the winner's transaction is open, the loser waits or skips, and then loses.

That a loser waits is read from pg_blocking_pids; that it skips, from its answer while the winner still
holds the row.
"""

import asyncio
from uuid import UUID

import pytest
from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.predicates import ANY_AGE
from jsworker.ownership.statements import waiting
from jsworker.ownership.transitions import control, heartbeat, publish, reset
from jsworker.ownership.transitions.claim import look_at_refused
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.settle import Settled

from .calls import claimed, complete, release, reset_stale, suspect
from .rows import (
    KIND,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    event_names,
    insert_job,
    read_job,
)
from .winner import Winner


async def status_seen(database: Database, job_id: UUID) -> str:
    """Return what a worker sees of a job that was not in its claim's answer."""
    return (await look_at_refused(database, kind=KIND, ids=[job_id]))[job_id].status


class TestTwoClaims:
    async def test_the_second_skips_the_row_and_is_refused_once_the_first_is_done(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, OTHER_WORKER)
        assert await claimed(database, job_id) == []
        assert await status_seen(database, job_id) == "queued"
        winner.commit()
        assert await claimed(database, job_id) == []
        assert await status_seen(database, job_id) == "processing"
        job = read_job(sql, job_id)
        assert (job["worker_id"], job["fencing_token"], job["attempts"]) == (OTHER_WORKER, 1, 1)

    async def test_the_second_gets_the_job_when_the_first_is_undone(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, OTHER_WORKER)
        assert await claimed(database, job_id) == []
        winner.rollback()
        assert [(job.id, job.fencing_token) for job in await claimed(database, job_id)] == [(job_id, 1)]

    async def test_the_second_takes_the_rest_of_its_batch_at_once(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        ids = [insert_job(sql) for _ in range(5)]
        winner.claims(ids[2], OTHER_WORKER)
        assert {job.id for job in await claimed(database, *reversed(ids))} == {*ids} - {ids[2]}
        assert winner.blocked() == 0

    async def test_a_hundred_at_once_give_one_owner(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql)
        answers = await asyncio.gather(
            *(claimed(database, job_id, worker_id=f"worker-{place}") for place in range(100))
        )
        assert sum(len(answer) for answer in answers) == 1
        assert read_job(sql, job_id)["fencing_token"] == 1


class TestCompletionAgainstReset:
    async def test_reset_first(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.resets(running)
        loser = asyncio.create_task(complete(database, running))
        await winner.blocks()
        winner.commit()
        assert await loser is Settled.LOST
        job = read_job(sql, running)
        assert (job["status"], job["result"], job["stalls"]) == ("queued", None, 1)
        assert event_names(sql, running) == ["reset", "rejected"]

    async def test_reset_undone(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.resets(running)
        loser = asyncio.create_task(complete(database, running))
        await winner.blocks()
        winner.rollback()
        assert await loser is Settled.COMPLETED
        assert event_names(sql, running) == []

    async def test_completion_first(
        self, database: Database, sql: Sql, winner: Winner, running: UUID, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The winner commits only after the operator's statement has given the locked row up.
        monkeypatch.setattr("jsworker.ownership.refusals._PAUSES", (0.02,))
        late = suspect(sql, running)
        winner.completes(running)
        assert await reset_stale(database, late) == []
        taken = await reset.reset_by_operator(database, seen=[(running, 1)], reason="r")
        assert taken.resets == []
        winner.commit()
        assert await reset_stale(database, late) == []
        assert read_job(sql, running)["result"] == "winner"
        assert event_names(sql, running) == []

    async def test_a_heartbeat_is_faster_than_the_reset(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        late = suspect(sql, running)
        await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
        assert await reset_stale(database, late) == []

    async def test_two_sweepers_count_one_stall(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        late = suspect(sql, running)
        winner.resets(running)
        assert await reset_stale(database, late) == []
        winner.commit()
        assert await reset_stale(database, late) == []
        assert read_job(sql, running)["stalls"] == 1

    async def test_a_locked_row_keeps_no_neighbour_from_its_reset(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        neighbour = insert_job(sql, "processing", last_activity_at=ago(60))
        suspects = [suspect(sql, running), suspect(sql, neighbour)]
        winner.completes(running)
        assert [one.id for one in await reset_stale(database, *suspects)] == [neighbour]


class TestLateCompletion:
    @pytest.mark.parametrize("new_owner", [OTHER_WORKER, WORKER])
    async def test_after_a_new_claim(
        self, database: Database, sql: Sql, running: UUID, new_owner: str
    ) -> None:
        assert [one.id for one in await reset_stale(database, suspect(sql, running))] == [running]
        assert [job.fencing_token for job in await claimed(database, running, worker_id=new_owner)] == [2]
        before = read_job(sql, running)
        assert await complete(database, running, token=1) is Settled.LOST
        assert read_job(sql, running) == before
        assert event_names(sql, running) == ["reset", "claimed", "rejected"]

    async def test_beside_a_new_claim(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        assert [one.id for one in await reset_stale(database, suspect(sql, running))] == [running]
        winner.claims(running, OTHER_WORKER)
        assert await complete(database, running) is Settled.LOST
        winner.commit()
        job = read_job(sql, running)
        assert (job["status"], job["worker_id"], job["fencing_token"]) == ("processing", OTHER_WORKER, 2)


class TestReleaseAgainstReset:
    async def test_reset_first(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.resets(running)
        loser = asyncio.create_task(release(database, running))
        await winner.blocks()
        winner.commit()
        assert await loser is Settled.LOST
        job = read_job(sql, running)
        assert (job["status"], job["dispatch"], job["attempts"], job["stalls"]) == ("queued", 2, 1, 1)
        assert event_names(sql, running) == ["reset", "rejected"]

    async def test_release_first(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        late = suspect(sql, running)
        winner.releases(running)
        assert await reset_stale(database, late) == []
        winner.commit()
        assert await reset_stale(database, late) == []
        job = read_job(sql, running)
        assert (job["status"], job["dispatch"], job["attempts"], job["stalls"]) == ("queued", 2, 0, 0)
        assert event_names(sql, running) == ["released"]


class TestMark:
    async def test_claim_before_mark(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, needs_publish=True)
        await claimed(database, job_id)
        before = read_job(sql, job_id)
        assert await publish.mark(database, [publish.Sent(job_id, 1, 7, None)]) == 0
        assert read_job(sql, job_id) == before

    async def test_a_claim_beside_a_mark_is_not_refused_and_succeeds_after_it(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, needs_publish=True)
        winner.marks(job_id)
        assert await claimed(database, job_id) == []
        assert await status_seen(database, job_id) == "queued"
        winner.commit()
        assert [job.id for job in await claimed(database, job_id)] == [job_id]
        job = read_job(sql, job_id)
        assert (job["status"], job["stream_seq"], job["needs_publish"]) == ("processing", 7, False)

    async def test_a_claim_beside_a_publish_is_not_refused_and_succeeds_after_it(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, needs_publish=True)
        winner.run(publish.PUBLISH, {"limit": 10, "within": 1e9})
        assert await claimed(database, job_id) == []
        assert await status_seen(database, job_id) == "queued"
        winner.commit()
        assert [job.id for job in await claimed(database, job_id)] == [job_id]

    async def test_a_mark_does_not_wait_for_what_is_being_claimed(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id, other = insert_job(sql, needs_publish=True), insert_job(sql, needs_publish=True)
        winner.claims(job_id, OTHER_WORKER)
        sent = [publish.Sent(job_id, 1, 7, None), publish.Sent(other, 1, 8, None)]
        assert await publish.mark(database, sent) == 1
        winner.commit()
        assert (read_job(sql, job_id)["stream_seq"], read_job(sql, other)["stream_seq"]) == (None, 8)

    async def test_a_publish_skips_what_is_being_claimed(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id, other = insert_job(sql, needs_publish=True), insert_job(sql, needs_publish=True)
        winner.claims(job_id, OTHER_WORKER)
        assert [one.id for one in await publish.take_outgoing(database, limit=10)] == [other]

    async def test_a_slow_mark_leaves_the_newer_dispatch_to_be_published(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        change_job(sql, running, dispatch=1)
        await reset_stale(database, suspect(sql, running))
        assert await publish.mark(database, [publish.Sent(running, 1, 7, None)]) == 0
        assert read_job(sql, running)["needs_publish"]
        assert [one.dispatch for one in await publish.take_outgoing(database, limit=10)] == [2]


class TestLockOrder:
    """Statements that wait lock in the order of ids, whatever order they are given and the rows lie in."""

    async def test_lower_ids_first(self, database: Database, sql: Sql, winner: Winner) -> None:
        ids = sorted(new_job_id() for _ in range(9))
        for job_id in reversed(ids):
            insert_job(sql, id=job_id, needs_publish=True)
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": ids[4]})
        given = [*ids[6:], *ids[:6]]
        values = {"ids": given, "statuses": list(control.LIVE), **ANY_AGE.values()}
        cancelling = asyncio.create_task(database.run(waiting(control.CANCEL), values))
        await winner.blocks()
        free = sql.execute("SELECT id FROM jsworker.jobs ORDER BY id FOR UPDATE SKIP LOCKED").fetchall()
        assert [row["id"] for row in free] == ids[5:]
        winner.commit()
        assert len(await cancelling) == len(ids)
