"""Two statements, one row: the winner's transaction is open, the loser waits or skips, and then loses.

That a loser waits is read from pg_blocking_pids; that it skips, from its answer while the winner still
holds the row.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from jsworker.errors import TransitionRefused
from jsworker.ownership import control, lease, outbox, reset, settle
from jsworker.ownership.claim import ClaimedJob, claim
from jsworker.ownership.database import Database
from jsworker.ownership.enqueue import Enqueued, NewJob, enqueue, enqueue_statement, new_job_id
from jsworker.ownership.reset import Suspect
from jsworker.ownership.settle import Completion, Failure, Return, Settled

from .rows import (
    KIND,
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    insert_job,
    read_events,
    read_job,
    read_value,
)
from .winner import Winner

Settle = Callable[[Database, UUID], Coroutine[None, None, Settled]]


@pytest.fixture
def winner(engine: Engine, sql: Sql) -> Iterator[Winner]:
    with Winner(engine, sql) as opened:
        yield opened


@pytest.fixture
def running(sql: Sql) -> UUID:
    """A job that ``WORKER`` runs with token 1, silent for twice its threshold."""
    return insert_job(sql, "processing", last_activity_at=ago(60))


async def claimed(database: Database, *job_ids: UUID, worker_id: str = WORKER) -> list[ClaimedJob]:
    taken = await claim(database, worker_id=worker_id, kind=KIND, ids=job_ids, limits=LIMITS)
    return taken.claimed


async def complete(database: Database, job_id: UUID, token: int = 1) -> Settled:
    runs = [Completion(job_id, token, '"loser"')]
    return (await settle.complete(database, worker_id=WORKER, runs=runs))[0]


async def fail(database: Database, job_id: UUID) -> Settled:
    runs = [Failure(job_id, 1, "broken", None, 60.0)]
    return (await settle.fail(database, worker_id=WORKER, runs=runs))[0]


async def release(database: Database, job_id: UUID) -> Settled:
    return (await settle.release(database, worker_id=WORKER, runs=[Return(job_id, 1, "shutdown")]))[0]


def seen(sql: Sql, job_id: UUID) -> Suspect:
    job = read_job(sql, job_id)
    return Suspect(job_id, KIND, WORKER, job["fencing_token"], job["last_activity_at"], 30.0, stale=True)


async def reset_stale(database: Database, *suspects: Suspect) -> list[UUID]:
    taken = await reset.reset_stale(
        database, worker_id=OTHER_WORKER, stale=suspects, reason="silent", counted=True
    )
    return [one.id for one in taken]


def answer(**job_ids: list[UUID]) -> lease.Beat:
    """Return the answer to a heartbeat; each job is held with token 1."""
    kinds = ("alive", "cancelled", "lost", "locked", "completed")
    return lease.Beat(**{kind: frozenset((one, 1) for one in job_ids.get(kind, [])) for kind in kinds})


def events(sql: Sql, job_id: UUID) -> list[str]:
    return [event["event"] for event in read_events(sql, job_id)]


class TestTwoClaims:
    async def test_the_second_waits_and_is_refused(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, OTHER_WORKER)
        loser = asyncio.create_task(claimed(database, job_id))
        await winner.blocks()
        winner.commit()
        assert await loser == []
        job = read_job(sql, job_id)
        assert (job["worker_id"], job["fencing_token"], job["attempts"]) == (OTHER_WORKER, 1, 1)

    async def test_the_second_gets_the_job_when_the_first_is_undone(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, OTHER_WORKER)
        loser = asyncio.create_task(claimed(database, job_id))
        await winner.blocks()
        winner.rollback()
        assert [(job.id, job.fencing_token) for job in await loser] == [(job_id, 1)]

    async def test_the_second_takes_the_rest_of_its_batch(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        ids = [insert_job(sql) for _ in range(5)]
        winner.claims(ids[2], OTHER_WORKER)
        loser = asyncio.create_task(claimed(database, *reversed(ids)))
        await winner.blocks()
        winner.commit()
        assert {job.id for job in await loser} == {*ids} - {ids[2]}

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
        assert events(sql, running) == ["reset", "rejected"]

    async def test_reset_undone(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.resets(running)
        loser = asyncio.create_task(complete(database, running))
        await winner.blocks()
        winner.rollback()
        assert await loser is Settled.COMPLETED
        assert events(sql, running) == []

    async def test_completion_first(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        suspect = seen(sql, running)
        winner.completes(running)
        assert await reset_stale(database, suspect) == []
        assert await reset.reset_by_operator(database, seen=[(running, 1)], reason="r") == []
        winner.commit()
        assert await reset_stale(database, suspect) == []
        assert read_job(sql, running)["result"] == "winner"
        assert events(sql, running) == []

    async def test_a_heartbeat_is_faster_than_the_reset(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        suspect = seen(sql, running)
        await lease.heartbeat(database, worker_id=WORKER, hand=[(running, 1)])
        assert await reset_stale(database, suspect) == []

    async def test_two_sweepers_count_one_stall(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        suspect = seen(sql, running)
        winner.resets(running)
        assert await reset_stale(database, suspect) == []
        winner.commit()
        assert await reset_stale(database, suspect) == []
        assert read_job(sql, running)["stalls"] == 1

    async def test_a_locked_row_keeps_no_neighbour_from_its_reset(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        neighbour = insert_job(sql, "processing", last_activity_at=ago(60))
        suspects = [seen(sql, running), seen(sql, neighbour)]
        winner.completes(running)
        assert await reset_stale(database, *suspects) == [neighbour]


class TestLateCompletion:
    @pytest.mark.parametrize("new_owner", [OTHER_WORKER, WORKER])
    async def test_after_a_new_claim(
        self, database: Database, sql: Sql, running: UUID, new_owner: str
    ) -> None:
        assert await reset_stale(database, seen(sql, running)) == [running]
        assert [job.fencing_token for job in await claimed(database, running, worker_id=new_owner)] == [2]
        before = read_job(sql, running)
        assert await complete(database, running, token=1) is Settled.LOST
        assert read_job(sql, running) == before
        assert events(sql, running) == ["reset", "claimed", "rejected"]

    async def test_beside_a_new_claim(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        assert await reset_stale(database, seen(sql, running)) == [running]
        winner.claims(running, OTHER_WORKER)
        assert await complete(database, running) is Settled.LOST
        winner.commit()
        job = read_job(sql, running)
        assert (job["status"], job["worker_id"], job["fencing_token"]) == ("processing", OTHER_WORKER, 2)


class TestHeartbeat:
    async def test_of_a_lost_claim(self, database: Database, sql: Sql, running: UUID) -> None:
        await reset_stale(database, seen(sql, running))
        await claimed(database, running, worker_id=OTHER_WORKER)
        before = read_job(sql, running)
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(running, 1)])
        assert beat == answer(lost=[running])
        assert read_job(sql, running) == before

    async def test_of_a_claim_that_is_just_being_lost(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.resets(running)
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(running, 1)])
        assert beat == answer(alive=[running], locked=[running])
        winner.commit()
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(running, 1)])
        assert beat == answer(lost=[running])

    async def test_while_the_run_is_settling(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        neighbour = insert_job(sql, "processing", last_activity_at=ago(20))
        winner.completes(running)
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(running, 1), (neighbour, 1)])
        assert beat == answer(alive=[running, neighbour], locked=[running])
        age = (
            "SELECT extract(epoch FROM clock_timestamp() - last_activity_at) FROM jsworker.jobs WHERE id = %s"
        )
        assert read_value(sql, age, neighbour) < 5
        assert winner.blocked() == 0
        winner.commit()
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(running, 1), (running, 2)])
        assert beat.completed == {(running, 1)}
        assert beat.lost == {(running, 2)}

    async def test_of_a_cancelled_run_whose_row_is_locked(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, "processing", cancel_requested=True)
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[(job_id, 1)])
        assert beat == answer(alive=[job_id], cancelled=[job_id], locked=[job_id])

    async def test_of_one_locked_row_waits_alone(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": running})
        alone = asyncio.create_task(lease.heartbeat_alone(database, worker_id=WORKER, held=(running, 1)))
        await winner.blocks()
        winner.commit()
        assert await alone

    async def test_alone_of_a_row_that_was_reset(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.resets(running)
        alone = asyncio.create_task(lease.heartbeat_alone(database, worker_id=WORKER, held=(running, 1)))
        await winner.blocks()
        winner.commit()
        assert not await alone


class TestReleaseAgainstReset:
    async def test_reset_first(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.resets(running)
        loser = asyncio.create_task(release(database, running))
        await winner.blocks()
        winner.commit()
        assert await loser is Settled.LOST
        job = read_job(sql, running)
        assert (job["status"], job["dispatch"], job["attempts"], job["stalls"]) == ("queued", 2, 1, 1)
        assert events(sql, running) == ["reset", "rejected"]

    async def test_release_first(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        suspect = seen(sql, running)
        winner.releases(running)
        assert await reset_stale(database, suspect) == []
        winner.commit()
        assert await reset_stale(database, suspect) == []
        job = read_job(sql, running)
        assert (job["status"], job["dispatch"], job["attempts"], job["stalls"]) == ("queued", 2, 0, 0)
        assert events(sql, running) == ["released"]


class TestCancel:
    async def test_fail_first_and_the_job_would_come_back(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.fails(running)
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.blocks()
        winner.commit()
        done = await cancel
        assert (done.cancelled, done.requested, done.final) == ([running], [], {})
        job = read_job(sql, running)
        assert (job["status"], job["cancel_requested"], job["errors"]) == ("cancelled", False, 1)
        assert events(sql, running) == ["error", "cancelled"]

    async def test_fail_first_and_for_good(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.fails(running, permanent="permanent")
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.blocks()
        winner.commit()
        assert (await cancel).final == {running: "failed"}
        assert events(sql, running) == ["failed"]

    async def test_fail_undone(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.fails(running)
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.blocks()
        winner.rollback()
        assert (await cancel).requested == [running]
        assert read_job(sql, running)["cancel_requested"]

    @pytest.mark.parametrize("settling", [fail, release])
    async def test_cancel_first(
        self, database: Database, sql: Sql, winner: Winner, running: UUID, *, settling: Settle
    ) -> None:
        winner.cancels(running)
        ending = asyncio.create_task(settling(database, running))
        await winner.blocks()
        winner.commit()
        assert await ending is Settled.CANCELLED
        job = read_job(sql, running)
        assert (job["status"], job["errors"], job["attempts"]) == ("cancelled", 1, 1)
        assert events(sql, running) == ["cancel_requested", "cancelled"]

    async def test_cancel_first_and_the_run_completes(
        self, database: Database, winner: Winner, running: UUID
    ) -> None:
        winner.cancels(running)
        ending = asyncio.create_task(complete(database, running))
        await winner.blocks()
        winner.commit()
        assert await ending is Settled.COMPLETED

    async def test_cancel_first_and_the_owner_is_stale(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        suspect = seen(sql, running)
        winner.cancels(running)
        assert await reset_stale(database, suspect) == []
        winner.commit()
        assert await reset_stale(database, suspect) == [running]
        assert read_job(sql, running)["status"] == "cancelled"

    async def test_reset_first_and_the_job_is_queued(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.resets(running)
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.blocks()
        winner.commit()
        assert (await cancel).cancelled == [running]
        job = read_job(sql, running)
        assert (job["status"], job["needs_publish"]) == ("cancelled", False)

    async def test_claim_first(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, WORKER)
        cancel = asyncio.create_task(control.cancel(database, [job_id]))
        await winner.blocks()
        winner.commit()
        assert (await cancel).requested == [job_id]

    async def test_cancel_before_claim(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.cancels(job_id)
        taking = asyncio.create_task(claimed(database, job_id))
        await winner.blocks()
        winner.commit()
        assert await taking == []
        assert read_job(sql, job_id)["status"] == "cancelled"

    async def test_cancel_before_promote(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(1))
        winner.cancels(job_id)
        assert await outbox.promote(database, limit=10) == 0
        winner.commit()
        assert await outbox.promote(database, limit=10) == 0
        assert read_job(sql, job_id)["status"] == "cancelled"

    async def test_a_job_that_is_retried_while_it_is_looked_at(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        """CANCEL saw it failed, the look afterwards finds it queued: it is live, so it is cancelled too."""
        held, retried = insert_job(sql), insert_job(sql, "failed")
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": held})
        cancel = asyncio.create_task(control.cancel(database, [held, retried]))
        await winner.blocks()
        await control.retry(database, retried)
        winner.commit()
        done = await cancel
        assert (set(done.cancelled), done.final) == ({held, retried}, {})


class TestMark:
    async def test_claim_before_mark(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, needs_publish=True)
        await claimed(database, job_id)
        before = read_job(sql, job_id)
        assert await outbox.mark(database, [outbox.Sent(job_id, 1, 7, None)]) == 0
        assert read_job(sql, job_id) == before

    async def test_a_claim_beside_a_mark_waits_and_succeeds(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, needs_publish=True)
        winner.marks(job_id)
        taking = asyncio.create_task(claimed(database, job_id))
        await winner.blocks()
        winner.commit()
        assert [job.id for job in await taking] == [job_id]
        job = read_job(sql, job_id)
        assert (job["status"], job["stream_seq"], job["needs_publish"]) == ("processing", 7, False)

    async def test_a_claim_beside_a_publish_waits_and_succeeds(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, needs_publish=True)
        winner.run(outbox.PUBLISH, {"limit": 10})
        taking = asyncio.create_task(claimed(database, job_id))
        await winner.blocks()
        winner.commit()
        assert [job.id for job in await taking] == [job_id]

    async def test_a_mark_beside_a_claim_finds_nothing_to_mark(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id, other = insert_job(sql, needs_publish=True), insert_job(sql, needs_publish=True)
        winner.claims(job_id, OTHER_WORKER)
        sent = [outbox.Sent(job_id, 1, 7, None), outbox.Sent(other, 1, 8, None)]
        marking = asyncio.create_task(outbox.mark(database, sent))
        await winner.blocks()
        winner.commit()
        assert await marking == 1
        assert (read_job(sql, job_id)["stream_seq"], read_job(sql, other)["stream_seq"]) == (None, 8)

    async def test_a_publish_skips_what_is_being_claimed(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id, other = insert_job(sql, needs_publish=True), insert_job(sql, needs_publish=True)
        winner.claims(job_id, OTHER_WORKER)
        assert [one.id for one in await outbox.take_outgoing(database, limit=10)] == [other]

    async def test_a_slow_mark_leaves_the_newer_dispatch_to_be_published(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        change_job(sql, running, dispatch=1)
        await reset_stale(database, seen(sql, running))
        assert await outbox.mark(database, [outbox.Sent(running, 1, 7, None)]) == 0
        assert read_job(sql, running)["needs_publish"]
        assert [one.dispatch for one in await outbox.take_outgoing(database, limit=10)] == [2]


class TestLockOrder:
    """Statements that wait lock in the order of ids, whatever order they are given and the rows lie in."""

    @pytest.mark.parametrize("statement", ["claim", "mark", "cancel"])
    async def test_lower_ids_first(
        self, database: Database, sql: Sql, winner: Winner, statement: str
    ) -> None:
        ids = sorted(new_job_id() for _ in range(9))
        for job_id in reversed(ids):
            insert_job(sql, id=job_id, needs_publish=True)
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": ids[4]})
        given = [*ids[6:], *ids[:6]]
        match statement:
            case "claim":
                waiting = asyncio.create_task(discard(claimed(database, *given)))
            case "mark":
                sent = [outbox.Sent(job_id, 1, 7, None) for job_id in given]
                waiting = asyncio.create_task(discard(outbox.mark(database, sent)))
            case _:
                waiting = asyncio.create_task(discard(control.cancel(database, given)))
        await winner.blocks()
        free = sql.execute("SELECT id FROM jsworker.jobs ORDER BY id FOR UPDATE SKIP LOCKED").fetchall()
        assert [row["id"] for row in free] == ids[5:]
        winner.commit()
        await waiting


async def discard(call: Coroutine[None, None, object]) -> None:
    await call


class TestKeyedEnqueue:
    async def test_beside_the_completion_of_the_holder(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        holder = insert_job(sql, "processing", unique_key="k-1")
        winner.completes(holder)
        new = NewJob(new_job_id(), "{}", unique_key="k-1")
        adding = asyncio.create_task(enqueue(database, KIND, new, publish_after=0.0))
        await winner.blocks()
        winner.commit()
        assert await adding == Enqueued(new.id, created=True)

    async def test_beside_a_completion_that_is_undone(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        holder = insert_job(sql, "processing", unique_key="k-1")
        winner.completes(holder)
        new = NewJob(new_job_id(), "{}", unique_key="k-1")
        adding = asyncio.create_task(enqueue(database, KIND, new, publish_after=0.0))
        await winner.blocks()
        winner.rollback()
        assert await adding == Enqueued(holder, created=False)

    async def test_beside_a_retry(self, database: Database, sql: Sql, winner: Winner) -> None:
        holder = insert_job(sql, "failed", unique_key="k-1")
        winner.retries(holder)
        new = NewJob(new_job_id(), "{}", unique_key="k-1")
        adding = asyncio.create_task(enqueue(database, KIND, new, publish_after=0.0))
        await winner.blocks()
        winner.commit()
        assert await adding == Enqueued(holder, created=False)


class TestRetry:
    async def test_two_at_once(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "failed")
        winner.retries(job_id)
        second = asyncio.create_task(control.retry(database, job_id))
        await winner.blocks()
        winner.commit()
        with pytest.raises(TransitionRefused, match=r"is queued; only a failed job can be retried$"):
            await second
        assert read_job(sql, job_id)["dispatch"] == 2

    async def test_beside_a_keyed_enqueue(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "failed", unique_key="k-1")
        new = NewJob(new_job_id(), "{}", unique_key="k-1")
        winner.run(enqueue_statement(KIND, new, publish_after=0.0))
        retrying = asyncio.create_task(control.retry(database, job_id))
        await winner.blocks()
        winner.commit()
        with pytest.raises(TransitionRefused, match=r"a live job holds its unique key$"):
            await retrying


class TestLockedWhileSettling:
    """A row that a batch skipped and that is still mine is settled alone, after whoever holds it."""

    async def test_it_keeps_no_neighbour_from_its_commit(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        ids = [insert_job(sql, "processing") for _ in range(50)]
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": ids[20]})
        runs = [Completion(job_id, 1, "{}") for job_id in ids]
        settling = asyncio.create_task(settle.complete(database, worker_id=WORKER, runs=runs))
        await winner.blocks()
        done = "SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'"
        assert read_value(sql, done) == 49
        winner.commit()
        assert await settling == [Settled.COMPLETED] * 50

    @pytest.mark.parametrize("undone", [False, True])
    async def test_behind_an_earlier_try_of_the_same_completion(
        self, database: Database, sql: Sql, winner: Winner, running: UUID, *, undone: bool
    ) -> None:
        winner.completes(running)
        second = asyncio.create_task(complete(database, running))
        await winner.blocks()
        winner.rollback() if undone else winner.commit()
        assert await second is Settled.COMPLETED
        assert read_job(sql, running)["result"] == ("loser" if undone else "winner")
        assert events(sql, running) == []

    async def test_behind_an_earlier_try_of_the_same_failure(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.fails(running)
        second = asyncio.create_task(fail(database, running))
        await winner.blocks()
        winner.commit()
        assert await second is Settled.SCHEDULED
        assert events(sql, running) == ["error"]

    async def test_a_row_that_is_refused_alone(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "processing", dispatch=2**63 - 1)
        winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        ending = asyncio.create_task(release(database, job_id))
        await winner.blocks()
        winner.commit()
        assert await ending is Settled.REFUSED
        assert read_job(sql, job_id)["status"] == "processing"
