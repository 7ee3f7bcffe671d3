"""Streams on real nats-servers, which the tests may kill."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from nats.aio.client import Client as NatsClient

from jsworker.stream.nats_client import Client
from tests.stream.desk import Desk
from tests.stream.nats_server import NatsServer
from tests.stream.streams import INSTALLATION, TestStream, settings_for

StartServer = Callable[..., Awaitable[NatsServer]]
OpenStream = Callable[..., Awaitable[TestStream]]
OpenDesk = Callable[..., Awaitable[Desk]]


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    async with AsyncExitStack() as started:

        async def start(extra: str = "", **options: Any) -> NatsServer:
            server = NatsServer(tmp_path, extra=extra, **options)
            started.push_async_callback(server.stop)
            await server.start()
            return server

        yield start


@pytest.fixture
async def server(start_server: StartServer) -> NatsServer:
    return await start_server()


@pytest.fixture
async def open_stream(server: NatsServer) -> AsyncIterator[OpenStream]:
    """Return connected streams; keyword arguments are settings, or options of the stream."""
    async with AsyncExitStack() as opened:

        async def open_(
            *,
            installation_id: UUID | None = INSTALLATION,
            options: dict[str, Any] | None = None,
            **changes: Any,
        ) -> TestStream:
            settings = settings_for(**{"url": server.url} | changes)
            stream = TestStream(settings, installation_id=installation_id, **(options or {}))
            opened.push_async_callback(stream.close)
            await stream.connect()
            return stream

        yield open_


@pytest.fixture
async def stream(open_stream: OpenStream) -> TestStream:
    """Return a stream with a consumer of the kind ``resize``."""
    stream = await open_stream()
    await stream.ensure(["resize"], {"resize": 600.0})
    return stream


@pytest.fixture
async def open_desk() -> AsyncIterator[OpenDesk]:
    """Return desks whose pullers pull; keyword arguments are those of the desk."""
    async with AsyncExitStack() as opened:

        async def open_(stream: TestStream, **options: Any) -> Desk:
            desk = Desk(stream, **options)
            opened.push_async_callback(desk.puller.stop)
            desk.puller.begin()
            return desk

        yield open_


@pytest.fixture
async def plain(server: NatsServer) -> AsyncIterator[NatsClient]:
    """Return a connection for looking at the server from outside."""

    async def silent(_: Exception) -> None:
        return

    client = Client(require_tls=False)  # nats-py's own, but for a flush that can be relied on
    await client.connect(server.url, error_cb=silent)
    yield client
    await client.close()
