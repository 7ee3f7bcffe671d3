"""Streams on real nats-servers, which the tests may kill."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from nats.aio.client import Client as NatsClient

from jsworker.events import Event, Events
from jsworker.settings import Settings
from jsworker.stream.client import Client
from jsworker.stream.jetstream import Stream
from tests.stream.nats_server import NatsServer

INSTALLATION = UUID("00000000-0000-4000-8000-000000000001")

StartServer = Callable[..., Awaitable[NatsServer]]
OpenStream = Callable[..., Awaitable["TestStream"]]


class TestStream(Stream):
    """A stream that remembers what it told."""

    __test__ = False

    def __init__(self, settings: Settings, *, installation_id: UUID | None, **options: Any) -> None:
        self.told: list[Event] = []
        events = Events()
        events.on("*", self.told.append)
        super().__init__(
            settings, installation_id=installation_id, events=events, client_name="test", **options
        )

    def told_of(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.told if event.name == name]


def settings_for(url: str, **changes: Any) -> Settings:
    return Settings(**{"database_url": "postgresql://nobody@localhost/nothing", "nats_url": url} | changes)


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
async def plain(server: NatsServer) -> AsyncIterator[NatsClient]:
    """Return a connection for looking at the server from outside."""

    async def silent(_: Exception) -> None:
        return

    client = Client(require_tls=False)  # nats-py's own, but for a flush that can be relied on
    await client.connect(server.url, error_cb=silent)
    yield client
    await client.close()
