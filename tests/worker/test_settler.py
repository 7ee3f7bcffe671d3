"""Outcomes that are written alone: errors that come at once are no reason to try again at once."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy.engine import make_url

from jsworker.core.errors import DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import settle
from jsworker.ownership.transitions.heartbeat import Orphan, orphaned_claims
from jsworker.ownership.transitions.settle import Completion, Failure, Settled
from jsworker.worker.context import DatabaseHealth
from jsworker.worker.pipeline.outcomes import Interrupted, Snoozed
from jsworker.worker.pipeline.settling import Settler
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.processors import KIND
from tests.worker.rows import Rows

OWNER = "owner"


class Tries:
    """COMPLETE as it is, counted."""

    def __init__(self) -> None:
        self.count = 0

    async def complete(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return await settle.complete(*arguments, **named)


def new_settler(database: Database) -> tuple[Settler, DatabaseHealth]:
    context = make_context(database, worker_id=OWNER)
    return Settler(context), context.health


async def running_job(rows: Rows) -> UUID:
    job_id = uuid4()
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at, worker_id, fencing_token,"
        " attempts, claimed_at, last_activity_at, started_at)"
        " VALUES (%s, %s, '{}', 'processing', 1, now(), %s, 1, 1, now(), now(), now())",
        *(job_id, KIND, OWNER),
    )
    return job_id


@pytest.fixture
async def role(rows: Rows) -> AsyncIterator[str]:
    """A role that may have one connection; its heartbeats' is that one."""
    name = f"crowded_{secrets.token_hex(4)}"
    await rows.connection.execute(SQL("CREATE ROLE {} LOGIN CONNECTION LIMIT 1").format(Identifier(name)))
    yield name
    await rows.connection.execute(SQL("DROP ROLE {}").format(Identifier(name)))


async def test_a_large_result_is_not_sent_again_once_it_is_committed(database_url: str, rows: Rows) -> None:
    async with proxied(database_url) as (proxy, url), Database(url, statement_timeout=10.0) as database:
        settler, _ = new_settler(database)
        for length, times in ((100_000, 1), (10, 2)):
            tries, job_id = Tries(), await running_job(rows)
            lost = proxy.lose_next_answer(b'"lost')
            completion = Completion(job_id, 1, json.dumps("lost" + "x" * length))
            assert await settler._persist(tries.complete, completion) is Settled.COMPLETED
            assert (lost.done(), tries.count) == (True, times)
            assert (await rows.job(job_id))["result"] == "lost" + "x" * length


@pytest.mark.parametrize(("by_another", "became"), [(False, Settled.COMPLETED), (True, Settled.LOST)])
async def test_a_large_result_that_did_not_arrive_is_sent_again(
    database_url: str, rows: Rows, *, by_another: bool, became: Settled
) -> None:
    tries, job_id = Tries(), await running_job(rows)
    completion = Completion(job_id, 1, json.dumps("x" * 100_000))

    async def complete(*arguments: Any, **named: Any) -> Any:
        if not tries.count:
            tries.count += 1
            if by_another:  # under the same token, as after a failover that has lost a claim
                await rows.query("UPDATE jsworker.jobs SET worker_id = 'another' WHERE id = %s", job_id)
                other = Completion(job_id, 1, "1")
                await settle.complete(database, worker_id="another", runs=[other])
            raise DatabaseUnavailable("it takes long")
        return await tries.complete(*arguments, **named)

    async with Database(database_url, statement_timeout=10.0) as database:
        settler, _ = new_settler(database)
        assert await settler._persist(complete, completion) is became
        assert tries.count == 2


async def test_an_outcome_that_finds_a_server_read_only_is_tried_again_after_growing_pauses(
    database_url: str, rows: Rows
) -> None:
    name = Identifier(make_url(database_url).database or "")
    await rows.connection.execute(
        SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
    )
    database, tries = Database(database_url, statement_timeout=10.0), Tries()
    settler, health = new_settler(database)
    job_id = await running_job(rows)
    settling = asyncio.create_task(settler._persist(tries.complete, Completion(job_id, 1, None)))

    async def is_tried() -> None:
        assert tries.count

    try:
        await eventually(is_tried)
        await asyncio.sleep(1.0)
        assert tries.count <= 8
        assert health.up  # the heartbeats' connection answers
        await rows.connection.execute(
            SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name)
        )
        async with asyncio.timeout(20.0):
            assert await settling is Settled.COMPLETED
    finally:
        settling.cancel()
        await settler.close()
        await database.close()


async def test_an_outcome_that_gets_no_connection_makes_the_database_unavailable(
    database_url: str, rows: Rows, role: str
) -> None:
    url = make_url(database_url).set(username=role).render_as_string(hide_password=False)
    database, tries = Database(url, statement_timeout=10.0), Tries()
    settler, health = new_settler(database)
    job_id = await running_job(rows)
    await database.ping()
    settling = asyncio.create_task(settler._persist(tries.complete, Completion(job_id, 1, None)))

    async def told() -> None:
        assert not health.up

    try:
        await eventually(told)
        assert tries.count == 1
        await rows.connection.execute(
            SQL("ALTER ROLE {} SUPERUSER CONNECTION LIMIT -1").format(Identifier(role))
        )
        health.answered()
        async with asyncio.timeout(20.0):
            assert await settling is Settled.COMPLETED
    finally:
        settling.cancel()
        await settler.close()
        await database.close()


@asynccontextmanager
async def a_key_being_taken(rows: Rows, database_url: str) -> AsyncIterator[UUID]:
    """A producer whose open transaction inserts the next job of the key that a running one has."""
    async with await psycopg.AsyncConnection.connect(database_url) as producer:
        keyed = await running_job(rows)
        await rows.query("UPDATE jsworker.jobs SET waiting_key = 'a' WHERE id = %s", keyed)
        await producer.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, waiting_key, status, dispatch, needs_publish,"
            " publish_after, queued_at) VALUES (%s, %s, '{}', 'a', 'queued', 1, true, now(), now())",
            (uuid4(), KIND),
        )
        yield keyed
        await producer.rollback()


async def is_waited_for(rows: Rows) -> None:
    [found] = await rows.query(
        "SELECT count(*) AS n FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    assert found["n"] == 1


OUTCOMES: list[Any] = [
    pytest.param(Snoozed("later", 60.0, counted=True), id="a snooze that is refused"),
    pytest.param(Interrupted("a server's fault", "faults", 60.0), id="too many faults"),
]


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_failure_that_waits_for_its_key_is_written_alone(
    database_url: str, rows: Rows, outcome: Any
) -> None:
    database = Database(database_url, statement_timeout=60.0)
    settler, _ = new_settler(database)
    other = await running_job(rows)
    await rows.query("ALTER TABLE jsworker.jobs ADD CONSTRAINT of_this_test CHECK (snoozes = 0)")
    try:
        async with a_key_being_taken(rows, database_url) as keyed:
            await rows.query(
                "INSERT INTO jsworker.job_events (job_id, event, detail)"
                """ SELECT %s, 'released', '{"server_fault": "x"}' FROM generate_series(1, 16)""",
                keyed,
            )
            kind = SimpleNamespace(processor=SimpleNamespace(max_snoozes=9))
            claimed = SimpleNamespace(waiting_key="a")
            run: Any = SimpleNamespace(held=(keyed, 1), id=keyed, claimed=claimed, kind=kind, refusal=None)
            settling = asyncio.create_task(settler.settle(run, outcome))
            await eventually(lambda: is_waited_for(rows))
            async with asyncio.timeout(20.0):
                assert await settler._failed(Failure(other, 1, "broken", None, 60.0)) is Settled.SCHEDULED
            assert not settling.done()
        async with asyncio.timeout(20.0):
            assert await settling is Settled.SCHEDULED
    finally:
        await rows.query("ALTER TABLE jsworker.jobs DROP CONSTRAINT of_this_test")
        await settler.close()
        await database.close()


@pytest.mark.parametrize("ended", [False, True])
async def test_an_orphaned_claim_that_waits_for_its_key_is_let_go_alone(
    database_url: str, rows: Rows, *, ended: bool
) -> None:
    database = Database(database_url, statement_timeout=60.0)
    settler, _ = new_settler(database)
    other = await running_job(rows)
    try:
        async with a_key_being_taken(rows, database_url) as keyed:
            found = await orphaned_claims(
                database, worker_id=OWNER, in_flight=[], claiming=[], older_than=0.0
            )
            assert {job_id: orphan.has_key for (job_id, _), orphan in found.items()} == {
                keyed: True,
                other: False,
            }
            first = settler.let_go((keyed, 1), "orphaned", Orphan(ended, has_key=True))
            await eventually(lambda: is_waited_for(rows))
            async with asyncio.timeout(20.0):
                second = await settler.let_go((other, 1), "orphaned", Orphan(ended, has_key=False))
            assert second is (Settled.SCHEDULED if ended else Settled.QUEUED)
            assert not first.done()
        async with asyncio.timeout(20.0):
            assert await first is second
    finally:
        await settler.close()
        await database.close()
