"""All jobs that match: counted, changed in one go, told as one action."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from jsworker import JobClient
from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.failures import list_failures
from jsworker.ownership.transitions import audit, control
from tests.support.polling import eventually
from tests.worker.processors import KIND
from tests.worker.rows import Rows


async def fail(rows: Rows, *job_ids: Any, error: str = "OSError: the disk is full") -> None:
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'failed', attempts = 1, errors = 1, needs_publish = false,"
        " finished_at = clock_timestamp(), failure_reason = 'attempts', last_error = %s WHERE id = ANY(%s)",
        error,
        list(job_ids),
    )


async def test_all_that_match_are_retried_as_one_action(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await client.enqueue_many(KIND, [{"n": n} for n in range(7)])
    await fail(rows, *(job.id for job in jobs[:5]))
    await fail(rows, jobs[5].id, error="KeyError: 'n'")
    full = client.select(status="failed", kind=KIND, error="DISK is full")
    assert await full.count() == (5, True)
    assert await full.count(most=3) == (3, False)
    monkeypatch.setattr(listing, "PAGE", 1)
    assert await client.select(status="failed", error="no such").count(seconds=0.0) == (0, False)
    done = await full.retry(actor="ann")
    assert (done.matched, done.changed, done.refused) == (5, 5, {})
    assert await full.count() == (0, True)
    assert [job.id for job in await client.list(status="failed")] == [jobs[5].id]
    [action] = await client.audit()
    assert (action.action_id, action.actor, action.action) == (done.action_id, "ann", "retry")
    asked = {"kind": KIND, "status": ["failed"], "error": "not recorded"}
    assert (action.target, action.matched, action.changed) == ({"jobs": asked}, 5, 5)
    assert list(await client.audit(after=action.action_id)) == []


async def test_jobs_that_fail_again_meanwhile_are_retried_once(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await client.enqueue_many(KIND, [{"n": n} for n in range(5)])
    await fail(rows, *(job.id for job in jobs))
    monkeypatch.setattr(listing, "PAGE", 1)
    retry_all, tries = control.retry_all, 0

    async def fails_again(database: Database, ids: Sequence[UUID], **how: Any) -> Any:
        nonlocal tries
        tries += 1
        assert tries <= len(jobs)
        done = await retry_all(database, ids, **how)
        await fail(rows, *ids)
        return done

    monkeypatch.setattr(control, "retry_all", fails_again)
    [group] = (await list_failures(client.database)).groups
    done = await client.select(status="failed", kind=KIND, failure=group.failure).retry()
    assert (done.matched, done.changed) == (5, 5)


async def test_the_audit_says_that_an_action_was_interrupted(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await client.enqueue_many(KIND, [{"n": n} for n in range(3)])
    await fail(rows, *(job.id for job in jobs))
    monkeypatch.setattr(listing, "PAGE", 1)
    retry_all, is_second = control.retry_all, asyncio.Event()

    async def retries_one(database: Database, ids: Sequence[UUID], **how: Any) -> Any:
        if await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'queued'"):
            is_second.set()
            await asyncio.Event().wait()
        return await retry_all(database, ids, **how)

    monkeypatch.setattr(control, "retry_all", retries_one)
    action = asyncio.create_task(client.select(status="failed", kind=KIND).retry())
    await asyncio.wait_for(is_second.wait(), 60)
    action.cancel()
    with pytest.raises(asyncio.CancelledError):
        await action
    [noted] = await client.audit()
    asked = {"kind": KIND, "status": ["failed"]}
    assert noted.target == {"jobs": asked, "interrupted": True}
    assert (noted.matched, noted.changed) == (2, 1)


async def test_an_action_is_interrupted_though_the_audit_is_locked(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_INTERRUPTED_SECONDS", 0.1)
    await client.enqueue(KIND, {}, delay=60.0)

    async def waits() -> None:
        waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'jsworker.audit'::regclass AND NOT granted"
        assert await rows.value(waiting)

    async with rows.connection.transaction():
        await rows.query("LOCK TABLE jsworker.audit IN SHARE MODE")
        action = asyncio.create_task(client.select(status="scheduled", kind=KIND).cancel())
        await eventually(waits)
        action.cancel()
        with pytest.raises(asyncio.CancelledError):
            await action


async def test_jobs_that_are_moved_to_a_later_time_are_moved_once(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.enqueue_many(KIND, [{}] * 3, delay=60.0)
    monkeypatch.setattr(listing, "PAGE", 1)
    when = datetime.now(UTC) + timedelta(days=3)
    done = await client.select(status="scheduled", kind=KIND).reschedule(when)
    assert (done.matched, done.changed) == (3, 3)
    assert await rows.value("SELECT count(*) FROM jsworker.job_events WHERE event = 'rescheduled'") == 3


async def test_waiting_jobs_are_moved_and_cancelled(client: JobClient, rows: Rows) -> None:
    jobs = await client.enqueue_many(KIND, [{}, {}], delay=60.0, limit_key="tenant-7")
    other = await client.enqueue(KIND, {}, delay=60.0)
    when = datetime.now(UTC) + timedelta(days=3)
    waiting = client.select(status="scheduled", key="tenant-7")
    assert (await waiting.reschedule(when)).changed == 2
    assert (await waiting.set_priority("low")).changed == 2
    found = await client.list(status="scheduled", key="tenant-7")
    assert {job.id for job in found} == {job.id for job in jobs}
    assert {(job.run_at, job.priority) for job in found} == {(when, "low")}
    assert (await waiting.cancel()).changed == 2
    assert (await waiting.cancel()).changed == 0
    assert [job.id for job in await client.list(status="scheduled")] == [other.id]
    told = [(each.action, each.matched, each.changed) for each in await client.audit()]
    assert told == [("cancel", 0, 0), ("cancel", 2, 2), ("set_priority", 2, 2), ("reschedule", 2, 2)]


async def test_a_job_that_is_locked_by_others_is_named(client: JobClient, rows: Rows) -> None:
    [locked, *others] = await client.enqueue_many(KIND, [{}] * 20, delay=60.0)
    waiting = client.select(status="scheduled", kind=KIND)
    reason = "locked by another transaction: try again"
    async with rows.connection.transaction():
        await rows.query("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", locked.id)
        for done in [
            await waiting.reschedule(datetime.now(UTC) + timedelta(days=3)),
            await waiting.set_priority("low"),
            await waiting.cancel(),
        ]:
            assert (done.matched, done.changed) == (20, len(others))
            assert list(done.refused) == [locked.id]
            assert f"job {locked.id} cannot be" in done.refused[locked.id]
            assert done.refused[locked.id].endswith(f": {reason}")
        with pytest.raises(TransitionRefused, match=f"^job {locked.id} cannot be rescheduled: {reason}$"):
            await client.reschedule(locked.id, datetime.now(UTC) + timedelta(days=3))


async def test_what_cannot_be_done_is_refused_before_anything_is(client: JobClient) -> None:
    with pytest.raises(ValueError, match="acts only on jobs that are cancelled or failed"):
        await client.select(status="queued").retry()
    with pytest.raises(ValueError, match="nothing can be done to a completed job"):
        client.select(status="completed")
    with pytest.raises(ValueError, match="error=' ' must be"):
        client.select(status="failed", error=" ")
    with pytest.raises(TypeError, match="reason=7"):
        await client.select(status="processing").clear(7)  # type: ignore[arg-type]
    assert list(await client.audit()) == []


async def test_a_call_without_an_actor_is_told_by_the_timeline_alone(client: JobClient) -> None:
    job = await client.enqueue(KIND, {}, delay=60.0)
    await client.set_priority(job.id, "high")
    await client.reschedule(job.id, datetime.now(UTC) + timedelta(days=1))
    await client.cancel(job.id)
    assert list(await client.audit()) == []
    await client.retry(job.id, actor="ann")
    assert [action.action for action in await client.audit()] == ["retry"]


async def test_pauses_limits_and_schedules_are_told(client: JobClient) -> None:
    await client.pause(KIND, "tenant-7", reason="night", actor="ann")
    await client.resume(KIND, "tenant-7")
    paused, resumed = reversed(await client.audit())
    assert (paused.actor, paused.action) == ("ann", "pause")
    assert paused.target == {"kind": KIND, "key": "tenant-7", "reason": "night"}
    assert resumed.action == "resume"
    assert "@" in resumed.actor  # the user of this process, and its machine
