"""The relay beside very many due jobs: it goes on publishing, and no batch is too large for the database."""

from collections.abc import Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.worker.maintenance import relay as relay_module
from jsworker.worker.maintenance.relay import Relay
from tests.support.contexts import make_context
from tests.worker.rows import Rows

DUE = "UPDATE jsworker.jobs SET run_at = clock_timestamp() - interval '1 minute'"


@pytest.fixture
def new_relay(client: JobClient) -> Callable[[Database], Relay]:
    assert client.publisher.stream is not None
    return lambda database: Relay(make_context(database, stream=client.publisher.stream))


async def test_each_batch_of_due_jobs_is_published_before_the_next_one_is_promoted(
    client: JobClient, rows: Rows, new_relay: Callable[[Database], Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_BATCH", 10)
    relay, unpublished = new_relay(client.database), list[int]()
    await client.enqueue_many("elsewhere", [{}] * 35, delay=3600.0)
    await rows.query(DUE)
    publish = relay._publisher.publish

    async def counted() -> Any:
        unpublished.append(await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'queued'"))
        return await publish()

    monkeypatch.setattr(relay._publisher, "publish", counted)
    await relay.step()
    assert unpublished == [10, 20, 30, 35]


async def test_where_a_batch_takes_too_long_fewer_due_jobs_are_promoted_at_once(
    client: JobClient,
    rows: Rows,
    settings: Settings,
    new_relay: Callable[[Database], Relay],
) -> None:
    await client.enqueue_many("elsewhere", [{}] * 300, delay=3600.0)
    await rows.query(DUE)
    await rows.query(
        "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(0.01); RETURN new; END $$"
    )
    await rows.query(
        "CREATE TRIGGER slow BEFORE UPDATE ON jsworker.jobs FOR EACH ROW"
        " WHEN (old.status = 'scheduled') EXECUTE FUNCTION public.slow()"
    )
    async with Database(settings.database_dsn(), statement_timeout=1.5) as database:
        relay = new_relay(database)
        for _ in range(60):
            relay._health.answered()
            relay._promoting.hurry()  # its rest after a slow search is another test
            await relay.step()
            left = await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'scheduled'")
            if not left:
                break
    assert left == 0
