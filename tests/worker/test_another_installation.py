"""Behind a worker's address appears the NATS of another installation: its stream is left alone."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import nats
import pytest
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.errors import PublishRefused, StreamUnavailable
from jsworker.core.settings import Settings
from jsworker.stream.liveness import Answer
from jsworker.stream.message import WireMessage
from jsworker.stream.topology import INSTALLATION
from jsworker.worker.maintenance import watches
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

MakeSettings = Callable[..., Settings]


class Places:
    """Two nats-servers that take turns at one address, each with a store of its own."""

    def __init__(self, folder: Path) -> None:
        for name in ("own", "others"):
            (folder / name).mkdir()
        self.own = NatsServer(folder / "own")
        self.others = NatsServer(folder / "others", port=self.own.port)

    async def make_their_stream(self, settings: Settings) -> None:
        """Give the others' server, which is down before and afterwards, a stream of another installation."""
        await self.others.start()
        theirs = TestStream(settings, installation_id=uuid4())
        await theirs.connect()
        await theirs.ensure([KIND])
        await theirs.close()
        await self.others.stop()


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[Places]:
    async with AsyncExitStack() as ends:
        made = Places(tmp_path)
        for server in (made.own, made.others):
            ends.push_async_callback(server.stop)
        yield made


def producer(settings: Settings) -> JobClient:
    """Return a client without NATS, which leaves all messages to workers."""
    return JobClient(Settings(database_url=settings.database_dsn()))


async def their_state(settings: Settings) -> dict[str, Any]:
    """Return what would change if somebody pulled, published or purged."""
    theirs = TestStream(settings, installation_id=None)
    await theirs.connect()
    state, consumer = await theirs.state(), await theirs.consumer_state(KIND)
    await theirs.close()
    delivered = consumer.delivered and consumer.delivered.consumer_seq
    return {
        "last": state.last_seq,
        "messages": state.messages,
        "delivered": delivered or 0,
        "requests": consumer.num_waiting or 0,
    }


async def is_reached(stream: TestStream) -> None:
    assert await stream.flush(1.0)


async def is_told_of_it(running: Running) -> None:
    """Wait until the worker has noticed whose stream this is."""

    async def told() -> None:
        degraded = running.events.of("worker.degraded")
        reasons = [each["reason"] for each in degraded if each["what"] == f"consumer {KIND}"]
        assert reasons
        assert "belongs to another installation" in reasons[-1]
        status = running.worker.status()
        assert status is not None
        assert not status.readiness.pulling

    await eventually(told)


async def goes_on(running: Running, rows: Rows, waiting: UUID) -> None:
    """Wait until a job that waits is published, and messages are pulled."""

    async def works() -> None:
        assert not (await rows.job(waiting))["needs_publish"]
        status = running.worker.status()
        assert status is not None
        assert (status.readiness.pulling, status.readiness.publishing) == (True, True)

    await eventually(works)


async def test_after_a_reconnect_nothing_is_pulled_published_or_purged_until_the_own_stream_is_back(
    places: Places,
    make_settings: MakeSettings,
    start: StartWorker,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "_LEFT_SECONDS", 0.0)
    monkeypatch.setattr(watches, "LOOK_SECONDS", 0.05)
    settings = make_settings(nats_url=places.own.url)
    await places.others.start()
    theirs = TestStream(settings, installation_id=uuid4())
    await theirs.connect()
    await theirs.ensure([KIND])
    await theirs.publish_many([WireMessage(uuid4(), kind, 1) for kind in (KIND, "ghost")])
    await theirs.close()
    left = await their_state(settings)
    await places.others.stop()
    await places.own.start()
    running = await start(scripted(echo), with_settings=settings)

    await places.own.stop()
    await places.others.start()
    await is_told_of_it(running)
    async with producer(settings) as client:
        jobs = [await client.enqueue(KIND, {"n": number}) for number in range(3)]
        for job in jobs:
            await rows.becomes(job.id, "completed")  # from the table
        waiting = await client.enqueue("ghost", {})
    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp() WHERE needs_publish")
    await running.worker._components.publisher.step()
    await running.worker._components._lost_messages.step()
    assert (await rows.job(waiting.id))["needs_publish"]
    assert await their_state(settings) == left
    assert not [each for each in running.events.of("stream.changed") if each["setting"] == "messages"]
    assert not running.events.of("message.republished")
    assert not await rows.query("SELECT * FROM jsworker.dead_messages")

    await places.others.stop(signal.SIGKILL)
    await places.own.start()
    await goes_on(running, rows, waiting.id)


@pytest.mark.hurried
async def test_behind_anothers_nats_nobody_is_taken_for_gone_and_the_worker_knows_that_nobody_asks_it(
    places: Places, make_settings: MakeSettings, start: StartWorker
) -> None:
    settings = make_settings(nats_url=places.own.url)
    await places.make_their_stream(settings)
    await places.own.start()
    running = await start(scripted(echo), with_settings=settings)
    presence = running.worker._components.presence

    async def asks() -> None:
        assert presence.reachable()
        assert await presence.ask("nobody") is Answer.NO_RESPONDERS

    await eventually(asks)
    await places.own.stop()
    await places.others.start()
    await is_told_of_it(running)
    await rounds_pass(count_rounds(running.worker._components.presences), 5)  # two would do on its own NATS
    assert not presence.reachable()
    assert await presence.ask("nobody") is Answer.UNKNOWN

    async def nats_itself_answers() -> None:  # on a busy machine not each time within so short a time-out
        assert await presence.answered_by("nobody") is Answer.NO_RESPONDERS

    await eventually(nats_itself_answers)
    assert not presence.reachable()
    assert await presence.ask("nobody") is Answer.UNKNOWN
    await places.others.stop(signal.SIGKILL)
    await places.own.start()
    await eventually(asks)


async def test_verdicts_wait_for_the_own_stream(
    places: Places, make_settings: MakeSettings, start: StartWorker, rows: Rows
) -> None:
    """Both streams have delivered their first message; the verdict about it names no more than its number."""
    settings = make_settings(nats_url=places.own.url, ack_wait=1000.0)
    await places.others.start()
    theirs = TestStream(settings, installation_id=uuid4())
    await theirs.connect()
    await theirs.ensure([KIND])
    await theirs.publish_many([WireMessage(uuid4(), KIND, 1)])
    await theirs.close()
    client = await nats.connect(places.others.url)
    consumer = await client.jetstream().pull_subscribe_bind(KIND, stream=settings.stream)
    await consumer.fetch(1)
    await client.close()
    left = await their_state(settings)
    await places.others.stop()
    await places.own.start()
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=settings)
    async with JobClient(settings) as enqueuing:
        job = await enqueuing.enqueue(KIND, {})
        await gate.met()
    context = running.worker._context
    assert context.in_flight.runs[job.id].delivery is not None
    await places.own.stop()
    await places.others.start()
    await is_told_of_it(running)
    gate.open()
    await rows.becomes(job.id, "completed")

    async def is_answered() -> None:
        assert not context.in_flight.runs

    await eventually(is_answered)
    assert await context.stream.flush()
    assert await their_state(settings) == left
    await places.others.stop(signal.SIGKILL)
    await places.own.start()
    await running.stream_is_empty()


async def test_the_stream_is_found_to_be_the_own_one_as_soon_as_it_is_back_while_nothing_is_pulled(
    places: Places, make_settings: MakeSettings, start: StartWorker
) -> None:
    await places.own.start()
    slow = {
        "heartbeat_interval": 100.0,
        "crash_threshold": 300.0,
        "stale_threshold": 1000.0,
        "ack_wait": 5000.0,
    }
    running = await start(scripted(echo), with_settings=make_settings(nats_url=places.own.url, **slow))
    components = running.worker._components
    await components.stop_pullers()
    await components.shape.stop()  # which would find it out within half a minute

    async def is_known() -> None:
        assert running.worker._context.stream.is_own
        assert components.presence.answers
        assert components.presence.reachable()

    async def is_away() -> None:
        assert not components.presence.reachable()

    await eventually(is_known)
    await places.own.stop()
    await eventually(is_away)
    await places.own.start()
    await eventually(is_known)


@pytest.mark.hurried
async def test_where_jetstream_is_silent_after_a_reconnect_killed_owners_are_found_all_the_same(
    places: Places, make_settings: MakeSettings, start: StartWorker, tmp_path: Path
) -> None:
    """As that of a cluster without a leader, which answers no request; pullers of eight kinds ask it, too."""
    await places.own.start()
    kinds = [scripted(echo, kind=f"kind-{number}") for number in range(8)]
    running = await start(*kinds, with_settings=make_settings(nats_url=places.own.url))
    presence, stream = running.worker._components.presence, running.worker._context.stream

    async def asks() -> None:
        assert presence.reachable()
        assert await presence.ask("nobody") is Answer.NO_RESPONDERS

    await eventually(asks)
    await places.own.stop()
    without = NatsServer(tmp_path, jetstream=False, port=places.own.port)
    await without.start()
    silent = await nats.connect(without.url)
    await silent.subscribe("$JS.API.>")
    await silent.flush()
    try:
        await eventually(asks)
        await rounds_pass(count_rounds(running.worker._components.presences), 5)
        await eventually(asks)  # one answer may come too late on a busy machine
        assert not stream.is_own
    finally:
        await silent.close()
        await without.stop()


async def test_messages_under_way_are_not_sent_again_to_another_installation(
    places: Places, make_settings: MakeSettings
) -> None:
    settings = make_settings(nats_url=places.own.url)
    await places.make_their_stream(settings)
    await places.own.start()
    stream = TestStream(settings, installation_id=uuid4())
    await stream.connect()
    await stream.ensure([KIND])
    places.own.freeze()
    messages = [WireMessage(uuid4(), KIND, 1) for _ in range(3)]
    publishing = asyncio.create_task(stream.publish_many(messages, timeout=60.0))
    await places.own.stop(signal.SIGKILL)
    await places.others.start()
    for outcome in await publishing:
        assert isinstance(outcome, PublishRefused)
        assert "belongs to another installation" in str(outcome)
    await stream.close()
    assert (await their_state(settings))["last"] == 0


@pytest.mark.parametrize("kinds", [[], [KIND]], ids=["without consumers", "with one of another ack_wait"])
async def test_no_consumer_is_made_or_changed_in_a_stream_that_was_not_looked_at(
    places: Places, make_settings: MakeSettings, kinds: list[str]
) -> None:
    """The connection is lost after the stream was looked at, before its consumers are."""
    settings = make_settings(nats_url=places.own.url)
    await places.others.start()
    theirs = TestStream(settings, installation_id=uuid4())
    await theirs.connect()
    await theirs.ensure(kinds, {KIND: settings.ack_wait / 2})
    await places.others.stop()
    await places.own.start()
    own = TestStream(settings, installation_id=uuid4())
    await own.connect()
    await own.ensure([KIND])
    await places.own.stop()
    await places.others.start()
    for stream in (own, theirs):
        await eventually(partial(is_reached, stream))
    before = await theirs.listed_consumers()
    with pytest.raises(StreamUnavailable, match="the connection to NATS was lost"):
        await own.keep_consumer_in_shape(KIND)
    after = await theirs.listed_consumers()
    assert {name: info.config for name, info in after.items()} == {
        name: info.config for name, info in before.items()
    }
    await own.close()
    await theirs.close()


async def test_a_stream_that_becomes_anothers_on_the_same_connection_is_left_alone_as_well(
    settings: Settings,
    start: StartWorker,
    js: JetStreamContext,
    rows: Rows,
) -> None:
    async def belongs_to(installation: str) -> None:
        config = (await js.stream_info(settings.stream)).config
        metadata = {**(config.metadata or {}), INSTALLATION: installation}
        await js.update_stream(replace(config, metadata=metadata))
        await running.worker._components.shape._step()
        running.worker._context.room.notify()  # else pullers look within seconds

    running = await start(scripted(echo))
    own = ((await js.stream_info(settings.stream)).config.metadata or {})[INSTALLATION]
    await belongs_to(str(uuid4()))
    await is_told_of_it(running)

    async def no_request_is_left() -> None:
        assert (await their_state(settings))["requests"] == 0

    await eventually(no_request_is_left)
    before = await their_state(settings)
    async with producer(settings) as client:
        job = await client.enqueue(KIND, {})
        await rows.becomes(job.id, "completed")
        waiting = await client.enqueue("ghost", {})
    await running.worker._components.publisher.step()
    assert await their_state(settings) == before
    await belongs_to(own)
    await goes_on(running, rows, waiting.id)
