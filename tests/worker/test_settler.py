"""Outcomes that are written alone: errors that come at once are no reason to try again at once."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy.engine import make_url

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import settle
from jsworker.ownership.transitions.settle import Completion, Settled
from jsworker.worker.context import DatabaseHealth
from jsworker.worker.pipeline.settling import Settler
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.worker.processors import KIND
from tests.worker.rows import Rows

pytestmark = pytest.mark.unhurried

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
    try:
        await asyncio.sleep(1.0)
        assert 1 <= tries.count <= 8
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
