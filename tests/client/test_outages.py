"""A client without NATS, or without a database: a committed job is accepted, all else is one clear line."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from sqlalchemy.ext.asyncio import create_async_engine

from jsworker.client import JobClient, enqueue_statement
from jsworker.embedded import EmbeddedNats
from jsworker.errors import (
    DatabaseUnavailable,
    MigrationMissing,
    SettingsError,
    StreamRefused,
    StreamUnavailable,
)
from jsworker.settings import Settings
from jsworker.stream.jetstream import Stream
from tests.runtime.processors import KIND, echo, scripted
from tests.runtime.rows import Rows
from tests.runtime.running import StartWorker
from tests.support.polling import eventually
from tests.support.servers import TestServers, new_servers_folder

pytestmark = pytest.mark.usefixtures("patient")

NOBODY = "nats://user:hunter2@127.0.0.1:1"
MakeSettings = Callable[..., Settings]


async def test_the_environment_tells_where_everything_is(
    rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    monkeypatch.setenv("JSWORKER_NATS_URL", settings.nats_url)
    monkeypatch.setenv("JSWORKER_STREAM", "NOT_THIS_ONE")
    async with JobClient.from_env(stream=settings.stream, subject_prefix=settings.subject_prefix) as client:
        job = await client.enqueue(KIND, {})
        assert client.unpublished_because is None
    row = await rows.job(job.id)
    assert (row["status"], row["needs_publish"]) == ("queued", False)


async def test_a_missing_variable_is_named() -> None:
    with pytest.raises(SettingsError, match="JSWORKER_DATABASE_URL"):
        JobClient.from_env()


async def test_without_nats_at_its_start_a_client_enqueues_and_a_workers_relay_publishes(
    rows: Rows, make_settings: MakeSettings, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jsworker.client.job_client._CONNECT_SECONDS", 0.3)
    running = await start(scripted(echo))
    async with JobClient(make_settings(nats_url=NOBODY)) as client:
        assert client.unpublished_because is not None
        assert "127.0.0.1:1" in client.unpublished_because
        assert "hunter2" not in client.unpublished_because
        with pytest.raises(StreamUnavailable, match=r"127\.0\.0\.1:1"):
            await client.publish_pending()
        single = await client.enqueue(KIND, {"n": 1})
        many = await client.enqueue_many(KIND, [{"n": 2}] * 10)
        for job in (single, *many):
            await rows.becomes(job.id, "completed", seconds=3.0)  # sooner than a client's own five seconds
    await running.stream_is_empty()


@pytest.fixture
async def nats_server() -> AsyncIterator[EmbeddedNats]:
    folder = new_servers_folder()
    server = EmbeddedNats(folder / "nats")
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


async def test_when_nats_goes_away_later_jobs_are_accepted_and_published_when_it_is_back(
    rows: Rows, make_settings: MakeSettings, nats_server: EmbeddedNats
) -> None:
    async with JobClient(make_settings(nats_url=nats_server.url)) as client:
        before = await client.enqueue(KIND, {})
        nats_server.stop()
        during = await client.enqueue(KIND, {})
        many = await client.enqueue_many(KIND, [{}] * 5)
        assert (await rows.job(during.id))["needs_publish"]
        assert client.unpublished_because is not None
        nats_server.start()
        # The client's own five seconds are over.
        await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp() WHERE needs_publish")

        async def published() -> None:
            try:
                await client.publish_pending()
            except StreamUnavailable as error:
                raise AssertionError from error
            for job in (before, during, *many):
                assert not (await rows.job(job.id))["needs_publish"]

        await eventually(published, seconds=20.0)


async def test_what_the_stream_does_not_take_is_not_counted_as_published(
    client: JobClient,
    rows: Rows,
    js: JetStreamContext,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = create_async_engine(client.database.url)
    async with engine.begin() as connection:
        await connection.execute(enqueue_statement(KIND, {}))
    await engine.dispose()
    monkeypatch.setattr("jsworker.client.job_client._PUBLISH_SECONDS", 0.3)
    await js.delete_stream(settings.stream)
    assert Stream.publish_many.__kwdefaults__ is not None
    monkeypatch.setitem(Stream.publish_many.__kwdefaults__, "timeout", 0.3)
    assert await client.publish_pending() == 0
    assert await rows.value("SELECT needs_publish FROM jsworker.jobs")
    assert client.unpublished_because is not None
    client.unpublished_because = None
    job = await client.enqueue(KIND, {})  # accepted all the same
    assert (await rows.job(job.id))["needs_publish"]
    assert f"message {job.id}:1 was not stored" in (client.unpublished_because or "")


async def test_without_a_database_a_client_says_so_in_one_line(make_settings: MakeSettings) -> None:
    client = JobClient(make_settings(database_url="postgresql://me:hunter2@127.0.0.1:1/nothing"))
    for call in (client.open(), client.enqueue(KIND, {}), client.get("0" * 32)):
        with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1/nothing") as refusal:
            await call
        assert "\n" not in str(refusal.value)
        assert "hunter2" not in str(refusal.value)
    await client.close()


async def test_an_empty_database_is_refused_with_the_command_that_helps(
    servers: TestServers, make_settings: MakeSettings
) -> None:
    url = servers.postgres.create_database("empty_for_the_client")
    before = asyncio.all_tasks()
    with pytest.raises(MigrationMissing, match="jsworker db upgrade"):
        async with JobClient(make_settings(database_url=url)):
            raise AssertionError
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before


async def test_a_stream_of_another_installation_is_refused(
    client: JobClient, servers: TestServers, make_settings: MakeSettings
) -> None:
    other = servers.postgres.create_database("another_installation", template="jsworker_template")
    before = asyncio.all_tasks()
    with pytest.raises(StreamRefused, match="belongs to another installation"):
        async with JobClient(make_settings(database_url=other)):
            raise AssertionError
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before


async def test_closing_twice_and_without_opening_does_no_harm(settings: Settings, tmp_path: Path) -> None:
    client = JobClient(settings)
    await client.close()
    await client.open()
    await client.close()
    await client.close()
