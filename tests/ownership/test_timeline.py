"""What the timeline tells: each thing once, and nothing that did not happen."""

from collections.abc import Callable, Coroutine
from uuid import UUID

import pytest

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions import claim, heartbeat, timeline
from jsworker.ownership.transitions.settle import Completion, Settled

from .calls import complete, fail, release
from .rows import KIND, OTHER_WORKER, WORKER, Sql, change_job, event_names, insert_job, read_events, read_job

Write = Callable[[Database, UUID], Coroutine[None, None, object]]


async def progress(database: Database, job_id: UUID) -> None:
    await heartbeat.update_progress(
        database, worker_id=WORKER, held=(job_id, 1), stage="s", progress=0.5, message=None
    )


async def checkpoint(database: Database, job_id: UUID) -> None:
    await heartbeat.save_checkpoint(database, worker_id=WORKER, held=(job_id, 1), checkpoint="[1]")


async def quiet(database: Database, job_id: UUID) -> None:
    await heartbeat.set_thresholds(
        database, worker_id=WORKER, held=(job_id, 1), stale_after=90.0, crash_after=None
    )


async def in_transaction(database: Database, job_id: UUID) -> None:
    sessions = Sessions(database, worker_id=WORKER, size=1, lock_seconds=5.0)
    try:
        async with sessions.transaction(lambda: Completion(job_id, 1, "{}")):
            pass
    finally:
        await sessions.close()


async def in_plain_transaction(database: Database, job_id: UUID) -> None:
    sessions = Sessions(database, worker_id=WORKER, size=1, lock_seconds=5.0)
    try:
        with sessions.sync_transaction(lambda: Completion(job_id, 1, "{}")):
            pass
    finally:
        await sessions.close()


SIGNS: dict[str, Write] = {"progress": progress, "checkpoint": checkpoint, "quiet": quiet}
OUTCOMES: dict[str, Write] = {"complete": complete, "fail": fail, "release": release}
TRANSACTIONS: dict[str, Write] = {"async": in_transaction, "sync": in_plain_transaction}


def insert_event(sql: Sql, job_id: UUID, event: str, worker_id: str) -> None:
    sql.execute(
        "INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)"
        """ VALUES (%s, %s, %s, 1, '{"write": "complete"}')""",
        [job_id, event, worker_id],
    )


async def rejected(write: Write, database: Database, job_id: UUID) -> None:
    try:
        assert await write(database, job_id) is Settled.LOST
    except OwnershipLost:
        return


class TestLateWrites:
    @pytest.mark.parametrize("name", [*SIGNS, *OUTCOMES])
    async def test_each_is_told_once(self, database: Database, sql: Sql, name: str) -> None:
        job_id = insert_job(sql, "processing", worker_id=OTHER_WORKER, fencing_token=2)
        before = read_job(sql, job_id)
        for _ in range(3):
            await rejected((SIGNS | OUTCOMES)[name], database, job_id)
        assert read_job(sql, job_id) == before
        assert read_events(sql, job_id) == [
            {
                "event": "rejected",
                "worker_id": WORKER,
                "fencing_token": 1,
                "error": None,
                "detail": {"write": name},
            }
        ]

    async def test_each_kind_of_write_by_itself(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, fencing_token=1)
        for write in (*SIGNS.values(), *OUTCOMES.values(), *SIGNS.values()):
            await rejected(write, database, job_id)
        logged = [event["detail"]["write"] for event in read_events(sql, job_id)]
        assert logged == [*SIGNS, *OUTCOMES]

    async def test_each_run_by_itself(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, fencing_token=3)
        for token in (1, 2, 1):
            assert await complete(database, job_id, token) is Settled.LOST
        assert [event["fencing_token"] for event in read_events(sql, job_id)] == [1, 2]

    @pytest.mark.parametrize("write", [*SIGNS.values(), *OUTCOMES.values()])
    async def test_after_another_run_has_completed_the_job(
        self, database: Database, sql: Sql, write: Write
    ) -> None:
        job_id = insert_job(sql, "completed", fencing_token=2)
        await rejected(write, database, job_id)
        assert event_names(sql, job_id) == ["rejected"]

    async def test_whatever_else_the_timeline_tells(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, fencing_token=1)
        insert_event(sql, job_id, "other", WORKER)
        insert_event(sql, job_id, "rejected", OTHER_WORKER)
        assert await complete(database, job_id) is Settled.LOST
        assert event_names(sql, job_id) == ["other", "rejected", "rejected"]

    @pytest.mark.parametrize("write", TRANSACTIONS.values(), ids=TRANSACTIONS)
    async def test_of_the_jobs_own_transaction(self, database: Database, sql: Sql, write: Write) -> None:
        job_id = insert_job(sql, "processing", fencing_token=2)
        await rejected(write, database, job_id)
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["detail"]) == ("rejected", {"write": "complete"})
        assert await complete(database, job_id) is Settled.LOST
        assert read_events(sql, job_id) == [event]

    @pytest.mark.parametrize("write", [*SIGNS.values(), *TRANSACTIONS.values()])
    async def test_not_after_the_runs_own_completion(
        self, database: Database, sql: Sql, write: Write
    ) -> None:
        job_id = insert_job(sql, "processing")
        await in_transaction(database, job_id)
        with pytest.raises(OwnershipLost):
            await write(database, job_id)
        assert event_names(sql, job_id) == []

    async def test_not_when_it_was_accepted(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        for write in (*SIGNS.values(), complete):
            await write(database, job_id)
        assert event_names(sql, job_id) == []


class TestSkips:
    async def skip(self, database: Database, *ids: UUID, worker_id: str | None = OTHER_WORKER) -> None:
        found = await claim.look_at_refused(database, kind=KIND, ids=ids, worker_id=worker_id)
        assert set(found) == set(ids)

    async def test_of_a_live_job(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", fencing_token=3)
        await self.skip(database, job_id)
        assert read_events(sql, job_id) == [
            {
                "event": "skipped",
                "worker_id": OTHER_WORKER,
                "fencing_token": 3,
                "error": None,
                "detail": {"owner": WORKER, "token": 3},
            }
        ]

    async def test_once_for_each_run_and_worker(self, database: Database, sql: Sql) -> None:
        job_id, neighbour = insert_job(sql, "processing"), insert_job(sql, "processing")
        for worker_id in (OTHER_WORKER, OTHER_WORKER, "gamma-3-cccc", OTHER_WORKER):
            await self.skip(database, job_id, neighbour, worker_id=worker_id)
        change_job(sql, job_id, fencing_token=2)
        await self.skip(database, job_id)
        logged = [(event["worker_id"], event["fencing_token"]) for event in read_events(sql, job_id)]
        assert logged == [(OTHER_WORKER, 1), ("gamma-3-cccc", 1), (OTHER_WORKER, 2)]
        assert event_names(sql, neighbour) == ["skipped"] * 2

    async def test_whatever_else_the_timeline_tells(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        insert_event(sql, job_id, "rejected", OTHER_WORKER)
        await self.skip(database, job_id)
        assert event_names(sql, job_id) == ["rejected", "skipped"]

    @pytest.mark.parametrize("status", ["scheduled", "queued", "completed", "failed", "cancelled"])
    async def test_not_of_a_job_that_nobody_runs(self, database: Database, sql: Sql, status: str) -> None:
        job_id = insert_job(sql, status)
        await self.skip(database, job_id)
        assert event_names(sql, job_id) == []

    @pytest.mark.parametrize("worker_id", [WORKER, None])
    async def test_not_of_its_own_job_nor_by_nobody(
        self, database: Database, sql: Sql, worker_id: str | None
    ) -> None:
        job_id = insert_job(sql, "processing")
        await self.skip(database, job_id, worker_id=worker_id)
        assert event_names(sql, job_id) == []


class TestFence:
    async def note(
        self,
        database: Database,
        job_id: UUID,
        *,
        worker_id: str = WORKER,
        token: int = 1,
        silent: float = 1.5,
    ) -> None:
        await timeline.note_fence(
            database, worker_id=worker_id, held=(job_id, token), seconds_without_heartbeat=silent
        )

    async def test_it_is_told_once_however_often_it_is_noted(self, database: Database, sql: Sql) -> None:
        job_id, other = insert_job(sql, "processing"), insert_job(sql, "processing")
        for each in (job_id, other, job_id):
            await self.note(database, each)
        detail = {"seconds_without_heartbeat": 1.5}
        fenced = {"event": "fenced", "worker_id": WORKER, "fencing_token": 1, "error": None, "detail": detail}
        assert read_events(sql, job_id) == read_events(sql, other) == [fenced]

    async def test_of_each_run_by_itself(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        runs = [(WORKER, 1), (OTHER_WORKER, 1), (WORKER, 2)]
        for worker_id, token in runs:
            await self.note(database, job_id, worker_id=worker_id, token=token)
        logged = [(event["worker_id"], event["fencing_token"]) for event in read_events(sql, job_id)]
        assert logged == runs

    async def test_whatever_else_the_timeline_tells(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        insert_event(sql, job_id, "rejected", WORKER)
        await self.note(database, job_id)
        assert event_names(sql, job_id) == ["rejected", "fenced"]


async def test_an_error_after_the_completion_is_told_of_the_run_that_completed_the_job(
    database: Database, sql: Sql
) -> None:
    job_id = insert_job(sql, "completed", completed_by=WORKER)
    other = insert_job(sql, "processing")
    for each, worker_id, token in [
        (job_id, WORKER, 1),
        (job_id, OTHER_WORKER, 1),
        (job_id, WORKER, 2),
        (other, WORKER, 1),
    ]:
        await timeline.note_error_after_completion(
            database, worker_id=worker_id, held=(each, token), error="ValueError: late"
        )
    [event] = read_events(sql, job_id)
    assert (event["event"], event["error"]) == ("error_after_completion", "ValueError: late")
    assert (event["worker_id"], event["fencing_token"]) == (WORKER, 1)
    assert read_events(sql, other) == []
