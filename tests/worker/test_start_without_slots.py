"""A worker that finds no free connection at its start: supervised, it waits; in an application it says so."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import pytest
from sqlalchemy.engine import make_url

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from jsworker.worker.worker import Worker
from tests.worker.processors import echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running
from tests.worker.tied import RecordedSupervision

CONNECT_SECONDS = 0.5


@pytest.fixture
async def role(rows: Rows) -> AsyncIterator[str]:
    """A role to which PostgreSQL answers: too many connections."""
    name = f"crowded_{secrets.token_hex(4)}"
    await rows.query(f"CREATE ROLE {name} LOGIN CONNECTION LIMIT 0")
    yield name
    await rows.query(f"DROP ROLE {name}")


@pytest.fixture
def crowded(make_settings: Callable[..., Settings], role: str) -> Settings:
    url = make_url(make_settings().database_dsn()).set(username=role)
    return make_settings(database_url=url.render_as_string(hide_password=False))


async def test_a_supervised_worker_waits_for_a_connection(crowded: Settings, role: str, rows: Rows) -> None:
    running = Running(
        Worker([scripted(echo)], crowded, supervision=RecordedSupervision(), connect_seconds=CONNECT_SECONDS)
    )
    running.worker.on("*", running.events)
    starting = asyncio.create_task(running.worker.start())
    [told] = await running.events.told("worker.degraded")
    assert told["what"] == "start"
    assert "too many connections" in told["reason"]
    patience_ends = boottime() + 3 * CONNECT_SECONDS
    while boottime() < patience_ends:
        await asyncio.sleep(0.1)
        assert not starting.done()
    await rows.query(f"ALTER ROLE {role} SUPERUSER CONNECTION LIMIT -1")
    async with asyncio.timeout(30.0):
        await starting
    await running.events.told("worker.restored")
    await running.end()


async def test_an_applications_worker_gives_up(crowded: Settings) -> None:
    worker = Worker([scripted(echo)], crowded, connect_seconds=CONNECT_SECONDS)
    with pytest.raises(DatabaseUnavailable, match="too many connections"):
        await worker.start()


async def test_a_server_that_is_not_there_is_not_waited_for(make_settings: Callable[..., Settings]) -> None:
    away = make_settings(database_url="postgresql://postgres@127.0.0.1:1/jobs")
    worker = Worker(
        [scripted(echo)], away, supervision=RecordedSupervision(), connect_seconds=CONNECT_SECONDS
    )
    with pytest.raises(DatabaseUnavailable, match="refused"):
        await worker.start()
