"""Expiry: what was not claimed in time is refused by CLAIM and ended by a sweep; what was claimed goes on."""

import asyncio
from typing import Literal

import pytest
from psycopg.errors import CheckViolation
from sqlalchemy import text

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import publish
from jsworker.ownership.transitions.claim import look_at_refused
from jsworker.ownership.transitions.enqueue import Enqueued, JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import enqueue_many, enqueue_one
from jsworker.ownership.transitions.expire import expire
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.settle import Settled

from .calls import claimed, complete, fail, retry
from .rows import (
    KIND,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    event_names,
    insert_job,
    read_events,
    read_job,
    read_value,
)
from .winner import Winner

HOUR = JobTerms(expires_in=3600.0)


async def test_a_job_is_given_its_time_by_the_database(database: Database, sql: Sql) -> None:
    one = NewJob(new_job_id(), "{}", unique_key="a", terms=HOUR)
    many = [NewJob(new_job_id(), "{}", delay=60.0, terms=HOUR) for _ in range(3)]
    assert (await enqueue_one(database, KIND, one, publish_after=0.0)).created
    assert len(await enqueue_many(database, KIND, many)) == 3
    for job in (one, *many):
        row = read_job(sql, job.id)
        assert 3590 < (row["expires_at"] - row["created_at"]).total_seconds() < 3610
        assert row["status"] == ("scheduled" if job.delay else "queued")


@pytest.mark.parametrize("state", ["scheduled", "queued"])
async def test_what_has_expired_is_cancelled(database: Database, sql: Sql, state: str) -> None:
    job_id = insert_job(sql, state, expires_at=ago(1), needs_publish=state == "queued")
    assert [(row.id, row.kind) for row in await expire(database, limit=10)] == [(job_id, KIND)]
    job = read_job(sql, job_id)
    assert (job["status"], job["failure_reason"], job["needs_publish"]) == ("cancelled", "expired", False)
    assert job["finished_at"] is not None
    [event] = read_events(sql, job_id)
    assert (event["event"], event["detail"]["reason"]) == ("cancelled", "expired")
    assert list(await expire(database, limit=10)) == []


async def test_claim_refuses_it_before_the_sweep_and_says_why(database: Database, sql: Sql) -> None:
    over, in_time, plain = (
        insert_job(sql, expires_at=ago(1)),
        insert_job(sql, expires_at=ago(-60)),
        insert_job(sql),
    )
    assert {job.id for job in await claimed(database, over, in_time, plain)} == {in_time, plain}
    refused = await look_at_refused(database, kind=KIND, ids=[over], worker_id=WORKER)
    assert refused[over].status == "expired"
    assert event_names(sql, over) == []


async def test_a_claim_is_a_beginning(database: Database, sql: Sql) -> None:
    """However a job comes back that was claimed in time, it is done."""
    running = insert_job(sql, "processing", expires_at=ago(1))
    back = insert_job(sql, "queued", expires_at=ago(1), fencing_token=1)
    retried = insert_job(sql, "failed", expires_at=ago(1))
    await retry(database, retried)
    assert list(await expire(database, limit=10)) == []
    assert {job.id for job in await claimed(database, back, retried)} == {back, retried}
    assert await complete(database, running) is Settled.COMPLETED


async def test_what_comes_due_too_late_expires_all_the_same(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "scheduled", expires_at=ago(1), run_at=ago(1))
    assert await publish.promote(database, limit=10) == 1
    assert await claimed(database, job_id) == []
    assert [row.id for row in await expire(database, limit=10)] == [job_id]


async def test_two_sweeps_at_once_cancel_each_job_once(database: Database, sql: Sql) -> None:
    ids = {insert_job(sql, expires_at=ago(1)) for _ in range(40)}
    rounds = await asyncio.gather(*(expire(database, limit=15) for _ in range(4)))
    found = [row.id for rows in rounds for row in rows]
    assert len(found) == len(set(found)) == 40
    assert set(found) == ids
    assert read_value(sql, "SELECT count(*) FROM jsworker.job_events") == 40


async def test_a_claim_that_is_faster(database: Database, sql: Sql, winner: Winner) -> None:
    """The row is claimed right before its time, and its commit comes after it."""
    job_id = insert_job(sql, expires_at=ago(-3600))
    winner.claims(job_id, OTHER_WORKER)
    assert list(await expire(database, limit=10)) == []
    winner.commit()
    change_job(sql, job_id, expires_at=ago(1))
    assert list(await expire(database, limit=10)) == []
    assert read_job(sql, job_id)["status"] == "processing"


async def test_a_claim_behind_an_uncommitted_sweep(database: Database, sql: Sql, winner: Winner) -> None:
    from jsworker.ownership.transitions.expire import EXPIRE  # noqa: PLC0415 -- the winner's alone

    job_id = insert_job(sql, expires_at=ago(1))
    winner.run(EXPIRE, {"limit": 1})
    assert await claimed(database, job_id) == []
    winner.rollback()
    assert await claimed(database, job_id) == []  # undone, and expired all the same
    assert [row.id for row in await expire(database, limit=10)] == [job_id]


async def test_a_row_that_is_refused_keeps_none_of_the_others(database: Database, sql: Sql) -> None:
    bad, good = insert_job(sql, expires_at=ago(2)), insert_job(sql, expires_at=ago(1))
    sql.execute(
        "ALTER TABLE jsworker.jobs ADD CONSTRAINT stays CHECK (status <> 'cancelled' OR message IS NULL)"
    )
    change_job(sql, bad, message="stays")
    refused = RefusedRows(database, worker_id=WORKER)
    try:
        assert [row.id for row in await expire(database, limit=1, refused_rows=refused)] == []
        assert [row.id for row in await expire(database, limit=1, refused_rows=refused)] == [good]
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT stays")
    assert read_job(sql, bad)["status"] == "queued"


@pytest.mark.parametrize("instant", ["infinity", "-infinity", "0044-03-15 BC"])
async def test_no_producer_writes_what_python_cannot_read(sql: Sql, instant: str) -> None:
    with pytest.raises(CheckViolation, match="jobs_expires_at"):
        insert_job(sql, expires_at=instant)


def again(scope: Literal["live", "waiting"], *, expires_in: float | None = 3600.0) -> NewJob:
    return NewJob(new_job_id(), "{}", "a", terms=JobTerms(scope=scope, expires_in=expires_in))


@pytest.mark.parametrize("expires_in", [3600.0, None])
@pytest.mark.parametrize("scope", ["live", "waiting"])
@pytest.mark.parametrize("many", [False, True])
async def test_a_call_after_its_expiry_is_a_job_of_its_own(
    database: Database, sql: Sql, scope: Literal["live", "waiting"], expires_in: float | None, *, many: bool
) -> None:
    """No sweep has come yet: all workers are away, say."""
    first = await enqueue_one(database, KIND, again(scope), publish_after=0.0)
    change_job(sql, first.id, expires_at=ago(1))
    job = again(scope, expires_in=expires_in)
    if many:
        [second] = await enqueue_many(database, KIND, [job])
    else:
        second = await enqueue_one(database, KIND, job, publish_after=0.0)
    assert second == Enqueued(job.id, created=True)
    row = read_job(sql, first.id)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "expired")
    assert event_names(sql, first.id) == ["cancelled"]
    assert await enqueue_one(database, KIND, again(scope), publish_after=0.0) == Enqueued(
        job.id, created=False
    )


@pytest.mark.parametrize("scope", ["live", "waiting"])
async def test_the_holder_of_a_key_is_none_that_has_ended(
    database: Database, sql: Sql, scope: Literal["live", "waiting"]
) -> None:
    first = await enqueue_one(database, KIND, again(scope), publish_after=0.0)
    await claimed(database, first.id)
    await complete(database, first.id)
    second = await enqueue_one(database, KIND, again(scope), publish_after=0.0)
    assert second.created
    assert await enqueue_one(database, KIND, again(scope), publish_after=0.0) == Enqueued(
        second.id, created=False
    )


async def test_a_window_that_is_over_is_not_held_by_what_has_expired(database: Database, sql: Sql) -> None:
    terms = JobTerms(scope="window", unique_for=60.0, expires_in=3600.0)
    first, second, third = (NewJob(new_job_id(), "{}", "a", terms=terms) for _ in range(3))
    await enqueue_one(database, KIND, first, publish_after=0.0)
    sql.execute("UPDATE jsworker.unique_windows SET until = clock_timestamp()")
    assert not (await enqueue_one(database, KIND, second, publish_after=0.0)).created
    change_job(sql, first.id, expires_at=ago(1))
    assert (await enqueue_one(database, KIND, third, publish_after=0.0)).created


async def test_what_was_claimed_once_keeps_its_key_past_its_expiry(database: Database, sql: Sql) -> None:
    first = await enqueue_one(database, KIND, again("live"), publish_after=0.0)
    await claimed(database, first.id)
    change_job(sql, first.id, expires_at=ago(1))
    for end in (None, fail):
        if end is not None:
            await end(database, first.id)
        answers = await enqueue_many(database, KIND, [again("live")])
        answers.append(await enqueue_one(database, KIND, again("live"), publish_after=0.0))
        assert answers == [Enqueued(first.id, created=False)] * 2


async def test_what_is_locked_just_then_is_told(database: Database, sql: Sql, winner: Winner) -> None:
    first = await enqueue_one(database, KIND, again("live"), publish_after=0.0)
    change_job(sql, first.id, expires_at=ago(1))
    winner.run(text("SELECT 1 FROM jsworker.jobs FOR UPDATE"))
    with pytest.raises(TransitionRefused, match="try again"):
        await enqueue_one(database, KIND, again("live"), publish_after=0.0)
    winner.rollback()
    assert (await enqueue_one(database, KIND, again("live"), publish_after=0.0)).created
