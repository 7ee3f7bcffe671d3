"""PostgreSQL answers and refuses a statement: the worker is degraded until it has not done so for a while."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg.sql import SQL, Identifier, Literal
from sqlalchemy.engine import make_url

from jsworker import JobClient
from jsworker.core.errors import (
    DatabaseFailing,
    DatabaseRefused,
    DatabaseUnavailable,
    JsworkerError,
    TooManyConnections,
    TooManyFiles,
)
from jsworker.core.events import Events
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.refusals import RowRefused
from jsworker.worker import context as module
from jsworker.worker.context import DatabaseHealth
from tests.support.clock import Clock
from tests.support.polling import eventually
from tests.worker.processors import echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

DENIED = "permission denied for table jobs (SQLSTATE 42501)"


@pytest.fixture
async def role(rows: Rows) -> AsyncIterator[Identifier]:
    """A role with all the rights of a worker."""
    name = Identifier(f"worker_{secrets.token_hex(4)}")
    for statement in (
        "CREATE ROLE {} LOGIN",
        "GRANT USAGE ON SCHEMA jsworker TO {}",
        "GRANT ALL ON ALL TABLES IN SCHEMA jsworker TO {}",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA jsworker TO {}",
    ):
        await rows.connection.execute(SQL(statement).format(name))
    yield name
    for statement in ("DROP OWNED BY {}", "DROP ROLE {}"):
        await rows.connection.execute(SQL(statement).format(name))


async def test_a_worker_without_a_right_stays_degraded_and_goes_on_when_it_is_granted_again(
    client: JobClient,
    rows: Rows,
    role: Identifier,
    start: StartWorker,
    *,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = make_url(settings.database_dsn()).set(username=role.as_string().strip('"'))
    as_role = {"database_url": url.render_as_string(hide_password=False)}
    running = await start(scripted(echo), with_settings=settings.model_copy(update=as_role))
    health, refusals = running.worker._context.health, list[JsworkerError]()
    failed = health.failed

    def counted(error: JsworkerError) -> None:
        refusals.append(error)
        failed(error)

    monkeypatch.setattr(health, "failed", counted)
    await rows.connection.execute(SQL("REVOKE UPDATE ON jsworker.jobs FROM {}").format(role))
    job = await client.enqueue("scripted", {})

    async def refused_often() -> None:
        assert len(refusals) >= 5

    await eventually(refused_often)
    [degraded] = running.events.of("worker.degraded")
    assert (degraded["what"], DENIED in degraded["reason"]) == ("postgresql", True)
    assert running.events.of("worker.restored") == []
    status = running.worker.status()
    assert status is not None
    assert (status.readiness.postgresql, status.readiness.refusal) == (False, DENIED)

    await rows.connection.execute(SQL("GRANT UPDATE ON jsworker.jobs TO {}").format(role))
    await rows.becomes(job.id, "completed")
    monkeypatch.setattr(module, "_REFUSES_SECONDS", 0.0)
    await running.events.told("worker.restored")
    status = running.worker.status()
    assert status is not None
    assert (status.readiness.postgresql, status.readiness.refusal) == (True, None)
    await running.end()


FAILS = {
    "53100": "COPY (SELECT repeat('x', 1000000)) TO '/dev/full'",
    "58030": "PERFORM pg_read_binary_file('/proc/self/mem', 0, 1)",  # there is nothing at this address
}
"""Statements that a server cannot execute, by the SQLSTATE of its file system's answer."""


@pytest.mark.parametrize("sqlstate", FAILS)
async def test_a_worker_whose_claims_find_the_disk_full_or_broken_stays_degraded_until_they_are_taken(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch, sqlstate: str
) -> None:
    running = await start(scripted(echo, max_attempts=1))
    await rows.query("CREATE SEQUENCE refused")
    body = f"BEGIN PERFORM nextval('refused'); {FAILS[sqlstate]}; RETURN new; END"
    await rows.connection.execute(
        SQL("CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS {}").format(Literal(body))
    )
    await rows.query(
        "CREATE TRIGGER fails BEFORE UPDATE ON jsworker.jobs FOR EACH ROW "
        "WHEN (new.fencing_token > old.fencing_token) EXECUTE FUNCTION fails()"
    )
    job = await client.enqueue("scripted", {})

    async def refused_often() -> None:
        assert await rows.value("SELECT last_value FROM refused") >= 5

    await eventually(refused_often)
    [degraded] = running.events.of("worker.degraded")
    assert degraded["what"] == "postgresql"
    assert running.events.of("worker.restored") == []
    status = running.worker.status()
    assert status is not None
    assert (status.readiness.postgresql, status.readiness.refusal) == (
        False,
        degraded["reason"].rpartition(" refused a statement: ")[2],
    )
    assert str(status.readiness.refusal).endswith(f"(SQLSTATE {sqlstate})")

    await rows.query("DROP TRIGGER fails ON jsworker.jobs")
    row = await rows.becomes(job.id, "completed")
    monkeypatch.setattr(module, "_REFUSES_SECONDS", 0.0)
    await running.events.told("worker.restored")
    assert (len(running.events.of("worker.degraded")), row["errors"], row["attempts"]) == (1, 0, 1)
    assert not running.events.of("row.refused")
    await running.end()


async def test_a_broken_disk_costs_a_checkpoint_no_try(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await rows.query("CREATE SEQUENCE saved")
    body = f"BEGIN IF nextval('saved') <= 2 THEN {FAILS['58030']}; END IF; RETURN new; END"
    await rows.connection.execute(
        SQL("CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS {}").format(Literal(body))
    )
    await rows.query(
        "CREATE TRIGGER fails BEFORE UPDATE ON jsworker.jobs FOR EACH ROW "
        "WHEN (new.checkpoint IS DISTINCT FROM old.checkpoint) EXECUTE FUNCTION fails()"
    )

    async def process(job: Job[Any]) -> None:
        await job.save_checkpoint({"page": 7})

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue("scripted", {})
    row = await rows.becomes(job.id, "completed")
    assert (row["errors"], row["attempts"], row["checkpoint"]) == (0, 1, {"page": 7})
    assert await rows.value("SELECT last_value FROM saved") == 3


def refusal(reason: str, sqlstate: str) -> DatabaseRefused:
    error = DatabaseRefused(f"PostgreSQL at db:5432/app refused a statement: {reason}")
    error.sqlstate = sqlstate
    return error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "boottime", made)
    return made


@pytest.fixture
def told() -> Recorder:
    return Recorder()


@pytest.fixture
def health(told: Recorder) -> DatabaseHealth:
    events = Events()
    events.on("*", told)
    return DatabaseHealth(events)


def test_work_goes_on_with_the_next_answer_and_the_report_ends_when_nothing_was_refused_for_a_while(
    health: DatabaseHealth, told: Recorder, clock: Clock
) -> None:
    for _ in range(3):
        health.failed(refusal(DENIED, "42501"))
        assert not health.up
        clock.now += module._REFUSES_SECONDS - 1
        health.answered()
        assert (health.up, health.degraded, health.refusal) == (True, True, DENIED)
    assert told.names() == ["worker.degraded"]
    clock.now += 1
    health.answered()
    assert (health.up, health.degraded, health.refusal) == (True, False, None)
    assert told.names() == ["worker.degraded", "worker.restored"]


def test_each_reason_is_told_once(health: DatabaseHealth, told: Recorder, clock: Clock) -> None:
    for _ in range(3):
        for table in ("jobs", "job_events"):
            health.failed(refusal(f"permission denied for table {table}", "42501"))
        clock.now += 1
        health.answered()
    assert [event["reason"].rsplit(" ")[-1] for event in told.of("worker.degraded")] == ["jobs", "job_events"]
    assert told.of("worker.restored") == []


def test_an_outage_ends_with_the_first_answer_whatever_was_refused_before(
    health: DatabaseHealth, told: Recorder, clock: Clock
) -> None:
    health.failed(refusal(DENIED, "42501"))
    clock.now += 1
    health.answered()
    health.failed(DatabaseUnavailable())
    assert (health.degraded, health.refusal) == (True, None)
    health.answered()
    assert not health.degraded
    assert told.names() == ["worker.degraded", "worker.degraded", "worker.restored"]


def test_a_login_that_is_refused_during_an_outage_is_told(health: DatabaseHealth, told: Recorder) -> None:
    for _ in range(2):
        health.failed(DatabaseUnavailable("the server closed the connection"))
        for _ in range(3):
            health.failed(DatabaseRefused("refused the login"))
        health.answered()
    assert told.names() == ["worker.degraded", "worker.degraded", "worker.restored"] * 2


def test_a_refused_row_is_told_once_between_two_outages(health: DatabaseHealth, told: Recorder) -> None:
    for _ in range(2):
        for _ in range(3):
            health.failed(RowRefused("P0001", None))
            health.answered()
        health.failed(DatabaseUnavailable())
        health.answered()
    assert told.names() == ["row.refused", "worker.degraded", "worker.restored"] * 2


def test_a_full_disk_is_told_once_whatever_file_it_is_about(
    health: DatabaseHealth, told: Recorder, clock: Clock
) -> None:
    for block in range(3):
        error = DatabaseFailing(f"PostgreSQL at db refused a statement: could not write block {block}")
        error.sqlstate = "53100"
        health.failed(error)
        clock.now += 1
        health.answered()
        assert (health.degraded, health.refusal) == (True, f"could not write block {block}")
    clock.now += module._REFUSES_SECONDS
    health.answered()
    assert (health.degraded, health.refusal) == (False, None)
    assert told.names() == ["worker.degraded", "worker.restored"]


@pytest.mark.parametrize("error", [TooManyFiles, TooManyConnections])
def test_a_lack_of_connections_is_told_once_while_open_ones_answer(
    health: DatabaseHealth, told: Recorder, clock: Clock, error: type[DatabaseUnavailable]
) -> None:
    for _ in range(3):
        health.failed(error("ulimit -n"))
        assert not health.up
        clock.now += 1
        health.answered()
        assert (health.up, health.degraded, health.silence) == (True, True, "ulimit -n")
    clock.now += module._REFUSES_SECONDS
    health.answered()
    assert (health.degraded, health.silence) == (False, None)
    assert told.names() == ["worker.degraded", "worker.restored"]


async def test_meanwhile_the_worker_is_not_ready_but_says_that_postgresql_answers(start: StartWorker) -> None:
    components = (await start(scripted(echo))).worker._components
    health = components._context.health
    health.failed(TooManyConnections("none is left"))
    assert not components.status(draining=False).readiness.answered
    health.answered()
    readiness = components.status(draining=False).readiness
    assert (readiness.postgresql, readiness.answered, readiness.silence) == (False, True, "none is left")


@pytest.mark.parametrize("sqlstate", ["55000", "40P01", "XX000"])
def test_what_is_refused_for_the_moment_ends_with_the_first_answer(
    health: DatabaseHealth, told: Recorder, sqlstate: str
) -> None:
    health.failed(refusal("not now", sqlstate))
    assert (health.degraded, health.refusal) == (True, None)
    health.answered()
    assert not health.degraded
    assert told.names() == ["worker.degraded", "worker.restored"]
