"""CANCEL, RETRY and producers beside the owner: each sees the side of the other that was committed."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import TextClause

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import control, publish
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob, enqueue, new_job_id
from jsworker.ownership.transitions.enqueue_terms import statement_for
from jsworker.ownership.transitions.settle import Settled

from .calls import Settle, claimed, complete, fail, release, reset_stale, retry, suspect
from .rows import (
    KIND,
    WORKER,
    Sql,
    ago,
    event_names,
    insert_job,
    read_job,
)
from .winner import Winner


class TestCancel:
    async def test_fail_first_and_the_job_would_come_back(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.fails(running)
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.is_passed_over()
        winner.commit()
        done = await cancel
        assert (done.cancelled, done.requested, done.final) == ([running], [], {})
        job = read_job(sql, running)
        assert (job["status"], job["cancel_requested"], job["errors"]) == ("cancelled", False, 1)
        assert event_names(sql, running) == ["error", "cancelled"]

    async def test_fail_first_and_for_good(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.fails(running, permanent="permanent")
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.is_passed_over()
        winner.commit()
        assert (await cancel).final == {running: "failed"}
        assert event_names(sql, running) == ["failed"]

    async def test_fail_undone(self, database: Database, sql: Sql, winner: Winner, running: UUID) -> None:
        winner.fails(running)
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.is_passed_over()
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
        assert (job["status"], job["errors"], job["attempts"]) == ("cancelled", 0, 0)
        assert event_names(sql, running) == ["cancel_requested", "cancelled"]

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
        late = suspect(sql, running)
        winner.cancels(running)
        assert await reset_stale(database, late) == []
        winner.commit()
        assert [one.id for one in await reset_stale(database, late)] == [running]
        assert read_job(sql, running)["status"] == "cancelled"

    async def test_reset_first_and_the_job_is_queued(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        winner.resets(running)
        cancel = asyncio.create_task(control.cancel(database, [running]))
        await winner.is_passed_over()
        winner.commit()
        assert (await cancel).cancelled == [running]
        job = read_job(sql, running)
        assert (job["status"], job["needs_publish"]) == ("cancelled", False)

    async def test_claim_first(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, WORKER)
        cancel = asyncio.create_task(control.cancel(database, [job_id]))
        await winner.is_passed_over()
        winner.commit()
        assert (await cancel).requested == [job_id]

    async def test_cancel_before_claim(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.cancels(job_id)
        assert await claimed(database, job_id) == []
        winner.commit()
        assert await claimed(database, job_id) == []
        assert read_job(sql, job_id)["status"] == "cancelled"

    async def test_cancel_before_promote(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(1))
        winner.cancels(job_id)
        assert await publish.promote(database, limit=10) == 0
        winner.commit()
        assert await publish.promote(database, limit=10) == 0
        assert read_job(sql, job_id)["status"] == "cancelled"

    async def test_a_job_that_is_retried_while_it_is_looked_at(
        self, database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CANCEL saw it failed, the look afterwards finds it queued: it is live, so it is cancelled too."""
        job_id, run = insert_job(sql, "failed"), database.run

        async def retried_before_the_look(statement: TextClause, *given: Any, **options: Any) -> Any:
            if statement is control.MISSED and read_job(sql, job_id)["status"] == "failed":
                await retry(database, job_id)
            return await run(statement, *given, **options)

        monkeypatch.setattr(database, "run", retried_before_the_look)
        done = await control.cancel(database, [job_id])
        assert (done.cancelled, done.final) == ([job_id], {})


class TestRetry:
    async def test_two_at_once(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "failed")
        winner.retries(job_id)
        second = asyncio.create_task(retry(database, job_id))
        await winner.is_passed_over()
        winner.commit()
        with pytest.raises(
            TransitionRefused, match=r"is queued; only a failed or cancelled job can be retried$"
        ):
            await second
        assert read_job(sql, job_id)["dispatch"] == 2

    async def test_beside_a_keyed_enqueue(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "failed", unique_key="k-1")
        new = NewJob(new_job_id(), "{}", unique_key="k-1")
        winner.run(statement_for(KIND, new))
        retrying = asyncio.create_task(retry(database, job_id))
        await winner.blocks()
        winner.commit()
        with pytest.raises(TransitionRefused, match=r"a live job holds its unique key$"):
            await retrying


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
