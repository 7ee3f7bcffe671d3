"""Enqueueing inside the application's own transaction: the job is there if, and only if, its rows are."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jsworker import JobClient, enqueue_statement
from jsworker.core.errors import InvalidName, InvalidPayload, SettingsError
from jsworker.core.settings import Settings
from tests.client.test_enqueue import ShipOrder
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

PLACE = text("INSERT INTO orders VALUES (7)")


@pytest.fixture(autouse=True)
async def _orders(rows: Rows) -> None:
    await rows.query("CREATE TABLE orders (number int PRIMARY KEY)")


@pytest.fixture
def url(settings: Settings) -> str:
    return settings.database_dsn().replace("postgresql://", "postgresql+psycopg://")


@pytest.fixture
async def session(url: str) -> AsyncIterator[AsyncSession]:
    engine: AsyncEngine = create_async_engine(url)
    async with AsyncSession(engine) as opened:
        yield opened
    await engine.dispose()


@pytest.fixture
def plain_session(url: str) -> Iterator[Session]:
    engine = create_engine(url)
    with Session(engine) as opened:
        yield opened
    engine.dispose()


async def test_an_async_session_commits_both_and_publishing_follows(
    client: JobClient, rows: Rows, session: AsyncSession, start: StartWorker
) -> None:
    await session.execute(PLACE)
    job = (await session.execute(enqueue_statement(KIND, {"n": 7}))).one()
    assert (job.created, job.dispatch) == (True, 1)
    assert await client.publish_pending() == 0
    assert await rows.query("SELECT id FROM jsworker.jobs") == []
    await session.commit()
    assert await client.publish_pending() == 1
    row = await rows.job(job.id)
    assert (row["status"], row["payload"]) == ("queued", {"n": 7})
    assert await client.publish_pending() == 0
    running = await start(scripted(echo))
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()


async def test_a_plain_session_commits_both_and_a_workers_relay_publishes(
    rows: Rows, plain_session: Session, start: StartWorker
) -> None:
    await start(scripted(echo))
    plain_session.execute(PLACE)
    job = plain_session.execute(enqueue_statement(KIND, {"n": 7})).one()
    plain_session.commit()
    assert (await rows.becomes(job.id, "completed"))["result"] == {"n": 7}
    assert await rows.value("SELECT number FROM orders") == 7


async def test_a_rollback_leaves_neither(
    client: JobClient, rows: Rows, session: AsyncSession, plain_session: Session
) -> None:
    await session.execute(PLACE)
    await session.execute(enqueue_statement(KIND, {}))
    await session.rollback()
    plain_session.execute(PLACE)
    plain_session.execute(enqueue_statement(KIND, {}))
    plain_session.rollback()
    assert await rows.query("SELECT id FROM jsworker.jobs") == []
    assert await rows.query("SELECT number FROM orders") == []
    assert await client.publish_pending() == 0


async def test_the_statement_tells_whether_a_live_job_holds_the_key(
    rows: Rows, session: AsyncSession
) -> None:
    statement = enqueue_statement(KIND, {"n": 1}, unique_key="order-7", delay=60.0, max_attempts=2)
    first = (await session.execute(statement)).one()
    await session.commit()
    again = (await session.execute(enqueue_statement(KIND, {"n": 2}, unique_key="order-7"))).one()
    await session.commit()
    assert (first.created, first.dispatch) == (True, 0)
    assert (again.id, again.created) == (first.id, False)
    row = await rows.job(first.id)
    assert (row["status"], row["payload"], row["max_attempts"]) == ("scheduled", {"n": 1}, 2)


async def test_a_statement_that_was_committed_creates_no_other_job(rows: Rows, session: AsyncSession) -> None:
    for key, has_row in ((None, False), ("order-8", True)):
        statement = enqueue_statement(KIND, {}, unique_key=key)
        job = (await session.execute(statement)).one()
        await session.commit()
        again = (await session.execute(statement)).one_or_none()
        await session.commit()
        assert again == ((job.id, False, job.dispatch) if has_row else None)
    assert len(await rows.query("SELECT id FROM jsworker.jobs")) == 2


async def test_many_statements_of_one_transaction_are_published_together(
    client: JobClient, rows: Rows, session: AsyncSession
) -> None:
    for n in range(25):
        await session.execute(enqueue_statement("ship-order", {"number": n}))
    await session.commit()
    assert await client.publish_pending() == 25

    async def marked() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == 25

    await eventually(marked)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("a.b", {}), InvalidName),
        ((ShipOrder, {"number": "many"}), InvalidPayload),
        ((KIND, "x" * 2**20), InvalidPayload),
    ],
    ids=["kind", "payload", "size"],
)
def test_the_statement_is_checked_when_it_is_made(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        enqueue_statement(*arguments)


def test_without_a_limit_of_its_own_the_statement_has_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JSWORKER_MAX_PAYLOAD_BYTES", "10")
    with pytest.raises(InvalidPayload, match="payload of 12 bytes exceeds JSWORKER_MAX_PAYLOAD_BYTES=10"):
        enqueue_statement(KIND, "x" * 10)
    enqueue_statement(KIND, "x" * 10, max_payload_bytes=12)
    monkeypatch.setenv("JSWORKER_MAX_PAYLOAD_BYTES", str(2**21))
    enqueue_statement(KIND, "x" * 2**20)
    monkeypatch.setenv("JSWORKER_MAX_PAYLOAD_BYTES", "ten")
    with pytest.raises(SettingsError, match=r"^JSWORKER_MAX_PAYLOAD_BYTES='ten' must be a whole number$"):
        enqueue_statement(KIND, {})


async def test_an_instant(rows: Rows, session: AsyncSession) -> None:
    at = datetime(2030, 5, 1, tzinfo=UTC)
    for created in (True, False):
        job = (await session.execute(enqueue_statement(KIND, {}, run_at=at, unique_key="a"))).one()
        assert (job.created, job.dispatch) == (created, 0)
    await session.commit()
    row = await rows.job(job.id)
    assert (row["status"], row["run_at"]) == ("scheduled", at)
