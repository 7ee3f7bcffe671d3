"""Connections that are reset while everything is under way, on either event loop."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import nats.errors
import pytest

from jsworker.core.errors import PublishFailed, StreamUnavailable
from jsworker.stream.liveness import Witness
from jsworker.stream.message import WireMessage
from tests.stream.desk import Desk, publish
from tests.stream.nats_server import NatsServer
from tests.stream.streams import INSTALLATION, TestStream, settings_for
from tests.support.event_loops import RunOnLoop, run_on_loop
from tests.support.polling import eventually
from tests.support.proxy import proxied

__all__ = ["run_on_loop"]

RESETS = 40


@pytest.fixture(autouse=True)
def _connect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jsworker.stream.connection._RECONNECT_SECONDS", 0.02)


def test_a_closed_transport_is_a_lost_connection_for_every_call(
    run_on_loop: RunOnLoop, tmp_path: Path
) -> None:
    run_on_loop(call_with_a_closed_transport(tmp_path))


async def call_with_a_closed_transport(folder: Path) -> None:
    """Close the transport when nats-py's flushing task has ended and its reading task knows nothing yet."""
    async with AsyncExitStack() as opened:
        server = NatsServer(folder)
        opened.push_async_callback(server.stop)
        await server.start()
        stream = TestStream(settings_for(server.url), installation_id=INSTALLATION)
        opened.push_async_callback(stream.close)
        await stream.connect()
        await stream.ensure(["resize"], {"resize": 600.0})

        async def publish_one() -> None:
            outcome = (await stream.publish_many([WireMessage(uuid4(), "resize", 1)], timeout=0.5))[0]
            if isinstance(outcome, PublishFailed):
                raise StreamUnavailable(str(outcome))

        client = stream.connection.client
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "publish": lambda: client.publish("x", b""),
            "request": lambda: client.request("x", b"", timeout=0.5),
            "close_inbox": lambda: client.close_inbox(number),
            "flush": lambda: stream.flush(1),
            "ping": client._send_ping,
            "publish_many": publish_one,
            "publish_raw": lambda: stream.publish_raw(stream.subject_of("resize"), b"x"),
            "state": stream.state,
            "prove": lambda: Witness(stream.connection, "me").prove(0.5),
        }
        for name, call in calls.items():
            await eventually(lambda: connected(stream))
            number = client.open_inbox("y", lambda *_: None)
            await client.flush(20)
            client._resp_sub_prefix = None  # as before the first request, which subscribes to the answers
            flusher = client._flusher_task
            assert flusher is not None
            flusher.cancel()
            await asyncio.wait({flusher})
            if name != "publish":  # which sends at once only what nothing waits before
                client.post("x", b"something that waits to be sent")
            client._abort()
            try:
                await call()
            except (StreamUnavailable, nats.errors.Error):
                pass
            except Exception as error:
                raise AssertionError(name) from error

            async def works_again() -> None:
                assert await stream.flush(1.0)

            await eventually(works_again)


def test_every_call_survives_resets_or_fails_as_its_callers_expect(
    run_on_loop: RunOnLoop, tmp_path: Path
) -> None:
    run_on_loop(call_everything_under_resets(tmp_path))


async def call_everything_under_resets(folder: Path) -> None:
    async with AsyncExitStack() as opened:
        server = NatsServer(folder)
        opened.push_async_callback(server.stop)
        await server.start()
        proxy, url = await opened.enter_async_context(proxied(server.url))
        stream = TestStream(settings_for(url), installation_id=INSTALLATION)
        opened.push_async_callback(stream.close)
        await stream.connect()
        await stream.ensure(["resize"], {"resize": 600.0})
        desk = Desk(stream, room=1000)
        opened.push_async_callback(desk.puller.stop)
        desk.puller.begin()
        working = [asyncio.create_task(again_and_again(call)) for call in calls_of(stream, desk)]
        rng = random.Random(4711)  # noqa: S311 -- a rhythm, no secret
        for _ in range(RESETS):
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            proxy.reset_connections()
            if rng.random() < 0.7:
                await eventually(lambda: connected(stream))
            broken = [task for task in working if task.done()]
            assert not broken, [task.exception() for task in broken]
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await eventually(lambda: connected(stream))
        await eventually(lambda: all_is_well(stream, desk))


def calls_of(stream: TestStream, desk: Desk) -> list[Callable[[], Awaitable[Any]]]:
    """Return everything that workers ask of a stream, in short."""
    witness = Witness(stream.connection, "me")

    async def publish_some() -> None:
        await stream.publish_many([WireMessage(uuid4(), "resize", 1) for _ in range(20)], timeout=0.5)

    async def answer() -> None:
        await desk.ack_all()
        await asyncio.sleep(0.001)

    return [
        publish_some,
        publish_some,
        answer,
        lambda: stream.publish_raw(stream.subject_of("resize"), b"x"),
        lambda: witness.prove(0.5),
        lambda: witness.ask("nobody", 0.5),
        stream.state,
        lambda: stream.consumer_state("resize"),
        lambda: stream.get(1),
        lambda: stream.flush(0.5),
        lambda: stream.ensure(["resize"], timeout=0.0),
    ]


async def again_and_again(call: Callable[[], Awaitable[Any]]) -> None:
    """Call for ever; the error that every caller expects is no end."""
    while True:
        with suppress(StreamUnavailable):
            await call()
        await asyncio.sleep(0.001)


async def connected(stream: TestStream) -> None:
    assert stream.connected


async def all_is_well(stream: TestStream, desk: Desk) -> None:
    await desk.ack_all()
    [job_id] = await publish(stream, 1)
    assert await Witness(stream.connection, "me").prove(5.0)

    async def delivered() -> None:
        assert job_id in desk.jobs

    await eventually(delivered)
