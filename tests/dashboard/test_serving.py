"""Connections to the dashboard, before anybody has logged in: none is kept for half a request."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from jsworker import JobClient
from jsworker.dashboard import dashboard, serving

HEAD = b"%b HTTP/1.1\r\nHost: 127.0.0.1\r\n"
PAGE = HEAD % b"GET /kinds" + b"\r\n"
REFUSED = HEAD % b"POST /kinds" + b"Content-Length: 1000\r\n\r\n"
OPEN_PAGE = HEAD % b"GET /kinds" + b"Accept: text/event-stream\r\n\r\n"
HALF = HEAD % b"GET /kinds" + b"X: "


@pytest.fixture
async def port(client: JobClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a dashboard that waits for a request for two seconds."""
    monkeypatch.setattr(serving, "_HEAD_SECONDS", 2.0)
    listening = serving.listen("127.0.0.1", 0)
    port: int = listening.getsockname()[1]
    started = asyncio.Event()
    running = asyncio.create_task(serving.serve(dashboard(client), listening, started=started.set))
    await started.wait()
    yield port
    signal.raise_signal(signal.SIGTERM)
    await running


async def answered(port: int, sent: bytes) -> bytes:
    """Send this, and then a byte now and then; return what is answered until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)

    async def read() -> bytes:
        found = b""
        with suppress(ConnectionResetError):  # by a byte that came after the end
            while part := await reader.read(10_000):
                found += part
        return found

    reading = asyncio.create_task(read())
    while not reading.done():
        if sent:
            writer.write(b"x")
        await asyncio.wait({reading}, timeout=0.2)
    writer.close()
    return reading.result()


async def test_half_a_request_ends_its_connection(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(OPEN_PAGE)
    await reader.readuntil(b"retry: 1000")
    async with asyncio.timeout(60.0):
        found = await asyncio.gather(*(answered(port, sent) for sent in (b"", HALF, PAGE + HALF, REFUSED)))
    assert [answer[:12] for answer in found] == [b"", b"", b"HTTP/1.1 200", b"HTTP/1.1 405"]
    assert not reader.at_eof()  # a response may last as long as it likes
    writer.close()
