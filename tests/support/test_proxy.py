"""The proxy does to a connection what it says, and nothing after it is restored."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied

_SHORT = 0.3
"""Seconds in which an answer that is not held back has long come."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


class Echo:
    """A server that keeps what it got, and sends it back."""

    def __init__(self) -> None:
        self.got = b""
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(ConnectionError):
            while data := await reader.read(1000):
                self.got += data
                writer.write(data)
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, Proxy]]:
    served = Echo()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with proxied(f"tcp://127.0.0.1:{port}") as (proxy, _):
        yield served, proxy
    server.close()
    await server.wait_closed()


@pytest.fixture
async def connect(echo: tuple[Echo, Proxy]) -> AsyncIterator[Connect]:
    opened: list[Streams] = []

    async def connect_once() -> Streams:
        opened.append(await asyncio.open_connection("127.0.0.1", echo[1].port))
        return opened[-1]

    yield connect_once
    for _, writer in opened:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _say(streams: Streams, data: bytes) -> bytes:
    streams[1].write(data)
    await streams[1].drain()
    async with asyncio.timeout(5):
        return await streams[0].readexactly(len(data))


async def _hears_nothing(streams: Streams) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(_SHORT):
            await streams[0].read(1)


async def _is_broken(streams: Streams) -> None:
    async with asyncio.timeout(5):
        try:
            assert await streams[0].read(1) == b""
        except ConnectionError:
            return


async def test_swallowed_requests_do_not_arrive_and_what_the_server_says_does(
    echo: tuple[Echo, Proxy],
    connect: Connect,
) -> None:
    server, proxy = echo
    streams = await connect()
    assert await _say(streams, b"one") == b"one"
    proxy.swallow_requests()
    streams[1].write(b"two")
    await _hears_nothing(streams)
    server.writers[0].write(b"by itself")
    assert await streams[0].readexactly(9) == b"by itself"
    assert server.got == b"one"
    proxy.restore()
    await _is_broken(streams)
    assert await _say(await connect(), b"three") == b"three"


async def test_swallowed_answers_follow_requests_that_arrived(
    echo: tuple[Echo, Proxy], connect: Connect
) -> None:
    server, proxy = echo
    streams = await connect()
    proxy.swallow_answers()
    streams[1].write(b"one")

    async def arrived() -> None:
        assert server.got == b"one"

    await eventually(arrived)
    await _hears_nothing(streams)
    proxy.restore()
    await _is_broken(streams)


async def test_a_slow_proxy_holds_every_piece_back(echo: tuple[Echo, Proxy], connect: Connect) -> None:
    _, proxy = echo
    streams = await connect()
    proxy.slow_down(0.05, dribble_bytes=2)
    began = time.monotonic()
    assert await _say(streams, b"123456") == b"123456"
    assert (
        time.monotonic() - began >= 4 * 0.05
    )  # three pieces one way; the last of them once more on the other
    proxy.restore()
    assert await _say(streams, b"on the same connection") == b"on the same connection"


async def test_a_reset_is_no_orderly_end(echo: tuple[Echo, Proxy], connect: Connect) -> None:
    served, proxy = echo
    reader, writer = await connect()
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"
    proxy.reset_connections()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    reader, writer = await connect()
    writer.write(b"pong")
    assert await reader.readexactly(4) == b"pong"
    assert served.got == b"pingpong"


async def test_a_connection_that_is_cancelled_before_it_is_served_is_closed(echo: tuple[Echo, Proxy]) -> None:
    _, proxy = echo

    def accept_and_cancel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy.accept(reader, writer)
        for serving in proxy._serving:
            serving.cancel()

    async with await asyncio.start_server(accept_and_cancel, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_connection_that_is_being_made_is_cut_too(
    echo: tuple[Echo, Proxy], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, proxy = echo
    open_connection = asyncio.open_connection

    async def cut_meanwhile(host: str, port: int) -> Streams:
        made = await open_connection(host, port)
        if port != proxy.port:
            proxy.cut()
        return made

    monkeypatch.setattr(asyncio, "open_connection", cut_meanwhile)
    reader, _ = await connect()
    with suppress(ConnectionError):
        assert await reader.read() == b""
    assert proxy.refused == 1
    await asyncio.wait_for(proxy.close(), 60.0)


async def test_a_connection_that_is_accepted_as_the_proxy_closes_is_closed_with_it() -> None:
    others = asyncio.all_tasks()
    async with proxied("tcp://127.0.0.1:1") as (proxy, _):
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
        for _ in range(2):  # it is accepted, and the task that makes its transport has not begun
            await asyncio.sleep(0)
    with client:
        assert asyncio.all_tasks() == others
        client.setblocking(False)
        with suppress(ConnectionError):
            async with asyncio.timeout(30):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
