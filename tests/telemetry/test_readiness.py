"""Readiness of a real worker tells the schema's present level, while others migrate or replace it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url

from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.database import OLDEST_REVISION, REVISIONS
from jsworker.ownership.upgrading import upgrade_database
from jsworker.supervisor.children import FleetView, PlaceView
from jsworker.supervisor.probes import readyz
from jsworker.telemetry.http import Response
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.support.proxy import proxied

HEAD = REVISIONS[-1]
LEVEL_OF_ANOTHER = "UPDATE jsworker.alembic_version SET version_num = %s"


class Nothing(JobProcessor[dict[str, Any]]):
    async def process(self, job: Job[dict[str, Any]]) -> None: ...


@pytest.fixture
async def worker(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    # A refused statement counts for so long, also if the schema is there again at once.
    monkeypatch.setattr("jsworker.worker.context._REFUSES_SECONDS", 1.0)
    async with Worker([Nothing], settings) as started:
        yield started


def probe(worker: Worker) -> Response:
    """Ask for readiness as a supervisor answers it, from what its child has reported."""
    status = worker.status()
    assert status is not None
    place = PlaceView(
        number=1,
        was_ready=True,
        ready=True,
        silent_seconds=0.0,
        limit=2.0,
        report_seconds=0.0,
        readiness=status.readiness,
    )
    return readyz(FleetView([place], stopping=False, deaths={}, now=0.0))


async def answers(worker: Worker, status: int, part: str) -> str:
    """Wait until readiness is told like this, and return what is told."""

    async def told() -> str:
        answer = probe(worker)
        assert (answer.status, part in answer.body.decode()) == (status, True), answer.body
        return answer.body.decode()

    return await eventually(told)


async def test_a_newer_schema_is_told_and_no_reason_to_be_unready(worker: Worker, database_url: str) -> None:
    await answers(worker, 200, f"migration: {HEAD}\n")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(LEVEL_OF_ANOTHER, ["9999"])
    await answers(worker, 200, "migration: 9999\n")


async def test_a_schema_that_is_too_old_is_no_longer_enough(worker: Worker, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(LEVEL_OF_ANOTHER, [OLDEST_REVISION])
        await answers(worker, 200, f"migration: {OLDEST_REVISION}\n")
        older = REVISIONS[REVISIONS.index(OLDEST_REVISION) - 1]
        connection.execute(LEVEL_OF_ANOTHER, [older])
        needed = f"this version needs {OLDEST_REVISION} or later: run `jsworker"
        await answers(worker, 503, f"migration: the database is at migration {older}, {needed}")
        connection.execute(LEVEL_OF_ANOTHER, [HEAD])
        await answers(worker, 200, f"migration: {HEAD}\n")


async def test_a_schema_that_is_gone_is_named_until_it_is_back(worker: Worker, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("ALTER SCHEMA jsworker RENAME TO away")  # waits for no lock of the worker's
    await answers(worker, 503, "migration: the database has no jsworker schema: run `jsworker db upgrade`\n")
    await asyncio.to_thread(upgrade_database, database_url)
    await answers(worker, 200, f"migration: {HEAD}\n")


async def test_a_database_that_is_away_leaves_the_level_that_was_known(settings: Settings) -> None:
    async with (
        proxied(settings.database_url) as (proxy, url),
        Worker([Nothing], settings.model_copy(update={"database_url": url})) as worker,
    ):
        proxy.cut()
        told = await answers(worker, 503, "postgresql: PostgreSQL at ")
        await worker._components.database_watch.step()
        assert "migration" not in told + probe(worker).body.decode()
        proxy.restore()
        await answers(worker, 200, f"migration: {HEAD}\n")


async def test_a_database_that_takes_no_writes_is_named_until_it_does(
    worker: Worker, database_url: str
) -> None:
    name = Identifier(make_url(database_url).database or "")
    sessions = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
        connection.execute(sessions)
        says = await answers(worker, 503, "is read-only, as a standby is")
        assert "(SQLSTATE 25006); nothing is pulled" in says
        connection.execute(SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
        connection.execute(sessions)
    await answers(worker, 200, "postgresql: ok\n")
