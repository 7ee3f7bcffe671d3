"""A client without NATS, or without a database: a committed job is accepted, all else is one clear line."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from sqlalchemy.ext.asyncio import create_async_engine

from jsworker import JobClient, enqueue_statement
from jsworker.core.errors import (
    DatabaseUnavailable,
    MigrationMissing,
    SettingsError,
    StreamRefused,
)
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.enqueue import Enqueued
from jsworker.stream.jetstream import Stream
from tests.stream.nats_server import NatsServer
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.support.servers import TestServers
from tests.worker.processors import KIND, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

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
    monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 0.3)
    monkeypatch.setattr("jsworker.client.client_publisher._RESERVED_SECONDS", 3600.0)
    running = await start(scripted(echo))
    async with JobClient(make_settings(nats_url=NOBODY)) as client:
        assert client.unpublished_because is not None
        assert "127.0.0.1:1" in client.unpublished_because
        assert "hunter2" not in client.unpublished_because
        assert await client.publish_pending() == 0
        single = await client.enqueue(KIND, {"n": 1})
        many = await client.enqueue_many(KIND, [{"n": 2}] * 10)
        for job in (single, *many):
            await rows.becomes(job.id, "completed")  # relays do not leave it to the client
    await running.stream_is_empty()


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Return a server that is not started yet."""
    server = NatsServer(tmp_path)
    yield server
    await server.stop()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 0.3)


async def is_published(rows: Rows, job: Enqueued) -> None:
    """Wait until a job's message is in the stream, by this client, for there is no worker."""

    async def marked() -> None:
        assert (await rows.job(job.id))["stream_seq"] is not None

    await eventually(marked)


@pytest.mark.usefixtures("_impatient")
async def test_a_client_opened_without_nats_connects_when_nats_is_there(
    rows: Rows, make_settings: MakeSettings, nats_server: NatsServer
) -> None:
    told = Recorder()
    client = JobClient(make_settings(nats_url=nats_server.url))
    client.events.on("*", told)
    async with client:
        [degraded] = told.of("worker.degraded")
        assert degraded["what"] == "publishing"
        assert "no server listens there" in degraded["reason"]
        during = await client.enqueue(KIND, {})
        assert await client.publish_pending() == 0
        assert "no server listens there" in str(client.unpublished_because)
        await nats_server.start()
        await told.told("worker.restored")
        assert await client.publish_pending() == 1
        assert client.unpublished_because is None
        await is_published(rows, during)
        await is_published(rows, await client.enqueue(KIND, {}))


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("nobody_listens", [True, False], ids=["refused", "silent"])
async def test_a_client_that_is_still_connecting_closes_at_once(
    make_settings: MakeSettings, nats_server: NatsServer, *, nobody_listens: bool
) -> None:
    if not nobody_listens:
        await nats_server.start()
        nats_server.freeze()
    before = asyncio.all_tasks()
    told = Recorder()
    client = JobClient(make_settings(nats_url=nats_server.url))
    client.events.on("*", told)
    await client.open()
    await told.told("worker.degraded")  # the next attempt is on its way
    async with asyncio.timeout(10.0):
        await client.close()
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before


@pytest.mark.usefixtures("_impatient")
async def test_a_login_that_is_refused_later_is_noted_and_tried_again(
    rows: Rows, make_settings: MakeSettings, nats_server: NatsServer
) -> None:
    nats_server.configure('authorization { user: me, password: "another" }')
    told = Recorder()
    client = JobClient(make_settings(nats_url=nats_server.url.replace("//", "//me:hunter2@")))
    client.events.on("*", told)
    async with client:
        await nats_server.start()
        job = await client.enqueue(KIND, {})
        await told.told("worker.degraded", times=2)
        assert await client.publish_pending() == 0
        assert "refused the login" in str(client.unpublished_because)
        assert "hunter2" not in str(told.events)
        nats_server.configure('authorization { user: me, password: "hunter2" }')
        await nats_server.restart()
        await told.told("worker.restored")
        await client.publish_pending()
        await is_published(rows, job)


@pytest.fixture
async def stranger(
    servers: TestServers, make_settings: MakeSettings, nats_server: NatsServer
) -> Callable[[], JobClient]:
    """Makes clients of another installation, with the same names on the same NATS."""
    url = servers.postgres.create_database("a_strangers", template="jsworker_template")
    return lambda: JobClient(make_settings(database_url=url, nats_url=nats_server.url))


@pytest.mark.usefixtures("_impatient")
async def test_nothing_is_published_into_another_installations_stream_found_later(
    rows: Rows, make_settings: MakeSettings, nats_server: NatsServer, stranger: Callable[[], JobClient]
) -> None:
    await nats_server.start()
    async with stranger():
        await nats_server.stop()
    told = Recorder()
    client = JobClient(make_settings(nats_url=nats_server.url))
    client.events.on("*", told)
    async with client:
        await nats_server.start()
        await told.told("worker.degraded", times=2)
        job = await client.enqueue(KIND, {})
        await client.enqueue_many(KIND, [{}] * 3)
        assert await client.publish_pending() == 0
        assert "belongs to another installation" in str(client.unpublished_because)
        row = await rows.job(job.id)
        assert (row["needs_publish"], row["stream_seq"]) == (True, None)
    async with stranger() as owner:
        assert owner.publisher.stream is not None
        assert (await owner.publisher.stream.state()).messages == 0


async def test_a_stream_that_cannot_be_made_fit_is_refused_at_the_start(
    js: JetStreamContext, settings: Settings
) -> None:
    subjects = [f"{settings.subject_prefix}.*"]
    await js.add_stream(name=settings.stream, subjects=subjects, retention="limits")
    client = JobClient(settings)
    with pytest.raises(StreamRefused, match="cannot be used: retention=limits, must be workqueue"):
        await client.__aenter__()


async def test_a_stream_that_became_another_installations_is_found_with_the_next_connection(
    js: JetStreamContext,
    servers: TestServers,
    settings: Settings,
    make_settings: MakeSettings,
) -> None:
    url = servers.postgres.create_database("a_later_strangers", template="jsworker_template")
    told = Recorder()
    async with proxied(settings.nats_url) as (proxy, through):
        client = JobClient(make_settings(nats_url=through))
        client.events.on("*", told)
        async with client:
            proxy.cut()
            await told.told("worker.degraded")
            await js.delete_stream(settings.stream)
            async with JobClient(make_settings(database_url=url)):
                proxy.restore()
                await told.told("worker.degraded", times=2)
                await client.enqueue(KIND, {})
                assert await client.publish_pending() == 0
                assert "belongs to another installation" in str(client.unpublished_because)
                assert (await js.stream_info(settings.stream)).state.messages == 0


async def test_with_nats_frozen_only_the_first_call_waits_for_it(
    rows: Rows, make_settings: MakeSettings, nats_server: NatsServer
) -> None:
    await nats_server.start()
    clock = asyncio.get_running_loop().time
    async with JobClient(make_settings(nats_url=nats_server.url)) as client:
        await is_published(rows, await client.enqueue(KIND, {}))
        nats_server.freeze()
        first = await client.enqueue(KIND, {})
        assert "did not answer" in str(client.unpublished_because)
        began = clock()
        during = [await client.enqueue(KIND, {}) for _ in range(10)]
        assert await client.publish_pending() == 0
        assert clock() - began < 16.0  # 20 s and more, if each of them waited for its own time-out
        assert "did not answer" in str(client.unpublished_because)
        waiting = "SELECT publish_after <= clock_timestamp() FROM jsworker.jobs WHERE id = %s"
        assert await rows.value(waiting, during[-1].id)  # any worker may publish it
        nats_server.thaw()

        async def answers_again() -> None:
            await client.enqueue(KIND, {})
            assert client.publisher.silent_because is None

        await eventually(answers_again)
        await is_published(rows, await client.enqueue(KIND, {}))
        await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp() WHERE needs_publish")
        await client.publish_pending()
        for job in (first, *during):
            await is_published(rows, job)


async def test_a_database_that_fails_after_the_commit_is_noted_by_publish_pending(
    make_settings: MakeSettings, database_url: str
) -> None:
    async with (
        proxied(database_url) as (proxy, url),
        JobClient(make_settings(database_url=url)) as client,
    ):
        proxy.cut()
        assert await client.publish_pending() == 0
        assert "PostgreSQL" in str(client.unpublished_because)
        proxy.restore()


async def test_when_nats_goes_away_later_jobs_are_accepted_and_published_when_it_is_back(
    rows: Rows, make_settings: MakeSettings, nats_server: NatsServer
) -> None:
    await nats_server.start()
    async with JobClient(make_settings(nats_url=nats_server.url)) as client:
        before = await client.enqueue(KIND, {})
        await nats_server.stop()
        during = await client.enqueue(KIND, {})
        many = await client.enqueue_many(KIND, [{}] * 5)
        assert (await rows.job(during.id))["needs_publish"]
        assert client.unpublished_because is not None
        await nats_server.start()
        # The client's own five seconds are over.
        await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp() WHERE needs_publish")

        async def published() -> None:
            await client.publish_pending()
            for job in (before, during, *many):
                assert not (await rows.job(job.id))["needs_publish"]

        await eventually(published)


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
    monkeypatch.setattr("jsworker.client.client_publisher._PUBLISH_SECONDS", 0.3)
    await js.delete_stream(settings.stream)
    assert Stream.publish_many.__kwdefaults__ is not None
    monkeypatch.setitem(Stream.publish_many.__kwdefaults__, "timeout", 0.3)
    assert await client.publish_pending() == 0
    assert await rows.value("SELECT needs_publish FROM jsworker.jobs")
    assert client.unpublished_because is not None
    client.publisher.unpublished_because = None
    job = await client.enqueue(KIND, {})  # accepted all the same
    assert (await rows.job(job.id))["needs_publish"]
    assert "was not stored" in (client.unpublished_because or "")


async def test_without_a_database_a_client_says_so_in_one_line(make_settings: MakeSettings) -> None:
    client = JobClient(make_settings(database_url="postgresql://me:hunter2@127.0.0.1:1/nothing"))
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1/nothing") as refusal:
        await client.open()
    assert "\n" not in str(refusal.value)
    assert "hunter2" not in str(refusal.value)
    with pytest.raises(RuntimeError, match="the client is not open"):
        await client.enqueue(KIND, {})


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
