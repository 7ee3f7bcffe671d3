"""A statement's answer never comes: it was executed, it was not, or it is executed later."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from sqlalchemy import Engine, text

from jsworker.core.errors import DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import heartbeat, settle
from jsworker.ownership.transitions.claim import claim, fetch_content, read_back
from jsworker.ownership.transitions.settle import Completion, Return, Settled
from tests.support.proxy import Proxy, proxied

from .polling import answered, eventually
from .rows import KIND, LIMITS, OTHER_WORKER, WORKER, Sql, ago, change_job, insert_job, read_job
from .winner import Winner

ONE = text("SELECT 1 AS one")


@pytest_asyncio.fixture
async def network(database_url: str, sql: Sql) -> AsyncIterator[tuple[Proxy, Database]]:
    """A database behind a network that can fall silent; its deadline is short."""
    async with proxied(database_url) as (proxy, url):
        behind = Database(url, statement_timeout=1.0)
        await answered(lambda: behind.run(ONE))
        # What runs by key is prepared with its first execution, which is an answer of its own.
        nothing: Sequence[UUID] = [uuid4()]
        await answered(lambda: claim(behind, worker_id=WORKER, kind=KIND, ids=nothing, limits=LIMITS))
        completion = Completion(nothing[0], 1, None)
        await answered(lambda: settle.complete(behind, worker_id=WORKER, runs=[completion]))
        yield proxy, behind
        await behind.close()


async def claim_unanswered(behind: Database, *job_ids: UUID) -> None:
    with pytest.raises(DatabaseUnavailable):
        await claim(behind, worker_id=WORKER, kind=KIND, ids=job_ids, limits=LIMITS)


async def test_a_claim_that_was_executed_is_read_back(
    network: tuple[Proxy, Database], database: Database, sql: Sql
) -> None:
    proxy, behind = network
    ids = [insert_job(sql, payload='{"n": 1}', traceparent="00-aa") for _ in range(3)]
    refused = insert_job(sql, "processing", worker_id=OTHER_WORKER)
    proxy.swallow_answers()
    await claim_unanswered(behind, *ids, refused)
    await eventually(lambda: read_job(sql, ids[0])["status"] == "processing", "the claim is committed")
    found = await read_back(database, worker_id=WORKER, ids=[*ids, refused])
    assert {(job.id, job.fencing_token, job.dispatch, job.payload) for job in found} == {
        (job_id, 1, 1, None) for job_id in ids
    }
    fetched = [await fetch_content(database, worker_id=WORKER, claimed=job) for job in found]
    assert {(job.payload, job.checkpoint) for job in fetched} == {('{"n": 1}', None)}
    assert {job.traceparent for job in found} == {"00-aa"}
    proxy.restore()
    assert len(await answered(lambda: read_back(behind, worker_id=WORKER, ids=ids))) == 3


async def test_a_claim_that_never_arrived_is_not(
    network: tuple[Proxy, Database], database: Database, sql: Sql
) -> None:
    proxy, behind = network
    job_id = insert_job(sql)
    proxy.swallow_requests()
    await claim_unanswered(behind, job_id)
    assert await read_back(database, worker_id=WORKER, ids=[job_id]) == []
    assert read_job(sql, job_id)["status"] == "queued"


async def test_a_claim_that_is_executed_later_is_a_stray(
    network: tuple[Proxy, Database], database: Database, sql: Sql, engine: Engine
) -> None:
    proxy, behind = network
    job_id = insert_job(sql)
    with Winner(engine, sql) as holder:
        holder.locks_the_table()
        claiming = asyncio.create_task(claim_unanswered(behind, job_id))
        await holder.blocks()
        proxy.swallow_requests()  # so that no cancel reaches the server
        await claiming
        assert await read_back(database, worker_id=WORKER, ids=[job_id]) == []
        holder.commit()
    await eventually(lambda: read_job(sql, job_id)["status"] == "processing", "the claim is committed")
    assert await orphaned_claims(database) == {}
    change_job(sql, job_id, claimed_at=ago(60))
    orphaned = await orphaned_claims(database)
    assert orphaned == {(job_id, 1): heartbeat.Orphan(ended=False, has_key=False)}
    runs = [Return(*held, "orphaned claim") for held in orphaned]
    assert await settle.release(database, worker_id=WORKER, runs=runs) == [Settled.QUEUED]
    job = read_job(sql, job_id)
    assert (job["status"], job["attempts"], job["needs_publish"]) == ("queued", 0, True)


async def orphaned_claims(database: Database) -> dict[heartbeat.Held, heartbeat.Orphan]:
    return await heartbeat.orphaned_claims(
        database, worker_id=WORKER, in_flight=[], claiming=[], older_than=6.0
    )


async def test_a_claim_whose_deadline_strikes_is_undone_on_the_server(
    database_url: str, database: Database, sql: Sql, engine: Engine
) -> None:
    """While the network works the driver cancels what it gave up, so nothing is left to be read back."""
    job_id = insert_job(sql)
    hasty = Database(database_url, statement_timeout=0.3)
    await answered(lambda: hasty.run(ONE))
    with Winner(engine, sql) as holder:
        holder.locks_the_table()
        await claim_unanswered(hasty, job_id)
        await holder.blocks(0)
        holder.commit()
    taken = await claim(database, worker_id=OTHER_WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
    assert [(job.id, job.fencing_token) for job in taken.claimed] == [(job_id, 1)]
    await hasty.close()


async def test_a_completion_that_was_executed_counts(
    network: tuple[Proxy, Database], database: Database, sql: Sql
) -> None:
    proxy, behind = network
    job_id = insert_job(sql, "processing")
    runs = [Completion(job_id, 1, '"once"')]
    proxy.swallow_answers()
    with pytest.raises(DatabaseUnavailable):
        await settle.complete(behind, worker_id=WORKER, runs=runs)
    await eventually(lambda: read_job(sql, job_id)["status"] == "completed", "the completion is committed")
    after = read_job(sql, job_id)
    proxy.restore()
    again = await answered(lambda: settle.complete(behind, worker_id=WORKER, runs=runs))
    assert again == [Settled.COMPLETED]
    assert read_job(sql, job_id) == after
