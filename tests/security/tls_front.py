"""TLS before the PostgreSQL of the wheel, which was built without: what PgBouncer does in front of a server.

Client, certificates and checks are the real ones; behind the front everything travels in clear text.
"""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from urllib.parse import urlsplit

from tests.stream.certificates import Authority, Pair
from tests.support.listening import listening

T = TypeVar("T")

SSL_REQUEST = 80877103
_GSS_REQUEST = 80877104
_CHUNK_BYTES = 65_536


class TlsFront:
    """Greets PostgreSQL's clients, asks them for TLS, and passes on what they say.

    Attributes:
        port: where it listens.
        encrypted: connections that were passed on after a handshake.
        clear: first bytes of clients that did not ask for TLS; they are sent away.
    """

    def __init__(self, url: str, pair: Pair, clients: Authority | None) -> None:
        self._target = urlsplit(url)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate, pair.key)
        if clients is not None:
            self._context.load_verify_locations(clients.certificate)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.port = 0
        self.encrypted = 0
        self.clear: list[bytes] = []
        self._serving: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until either side closes."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: writer.close())  # it may be cancelled before it has begun

    async def close(self) -> None:
        """End every connection."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            if not await self._greeted(reader, writer):
                return
            tunnel = _Tunnel(self._context, reader, writer)
            await tunnel.shake_hands()
            self.encrypted += 1
            await self._relay(tunnel)

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while True:
            request = await reader.readexactly(8)
            _, code = struct.unpack("!II", request)
            if code == SSL_REQUEST:
                writer.write(b"S")
                return True
            if code != _GSS_REQUEST:
                self.clear.append(request)
                return False
            writer.write(b"N")

    async def _relay(self, tunnel: "_Tunnel") -> None:
        reader, writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        ways = [
            asyncio.create_task(_pass_on(tunnel.read, writer.write, writer.drain)),
            asyncio.create_task(_pass_on(lambda: reader.read(_CHUNK_BYTES), tunnel.write, tunnel.flush)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.transport.abort()  # first: the task may be cancelled while it waits for the ways
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


class _Tunnel:
    """The server's end of a TLS connection. Unlike asyncio's own it tells the client why it sends it away."""

    def __init__(
        self, context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def shake_hands(self) -> None:
        try:
            await self._until(self._tls.do_handshake)
        finally:
            await self.flush()

    async def read(self) -> bytes:
        try:
            return await self._until(lambda: self._tls.read(_CHUNK_BYTES))
        except ssl.SSLZeroReturnError:
            return b""

    def write(self, data: bytes) -> None:
        self._tls.write(data)

    async def flush(self) -> None:
        self._writer.write(self._outgoing.read())
        await self._writer.drain()

    async def _until(self, step: Callable[[], T]) -> T:
        """Take a step, and read for as long as it wants more."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await self.flush()
                data = await self._reader.read(_CHUNK_BYTES)
                if not data:
                    raise EOFError from None
                self._incoming.write(data)


async def _pass_on(
    read: Callable[[], Awaitable[bytes]],
    write: Callable[[bytes], object],
    flush: Callable[[], Awaitable[object]],
) -> None:
    while data := await read():
        write(data)
        await flush()


@asynccontextmanager
async def behind_tls(url: str, pair: Pair, *, clients: Authority | None = None) -> AsyncIterator[TlsFront]:
    """Put a database behind TLS; ``clients``: whoever shows no certificate of this authority is sent away."""
    front = TlsFront(url, pair, clients)
    async with listening(front.accept, front.close) as front.port:
        yield front
