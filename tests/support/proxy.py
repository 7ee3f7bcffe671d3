"""A TCP relay before a server, with the faults of a network: cut, silent, one-way, slow, a lost answer."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from tests.support.listening import listening

_CHUNK_BYTES = 65536
_NO_LINGER = struct.pack("ii", 1, 0)
"""A socket that is closed at once and forgets what it has not sent: its peer gets a reset."""


class Proxy:
    """Relays between clients and one server.

    Attributes:
        port: where clients connect, on 127.0.0.1.
        refused: connections that were refused.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._links: set[_Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._losses: list[_Loss] = []
        self._refuses = False
        self.refused = 0
        self._swallows_requests = False
        self._swallows_answers = False
        self._delay = 0.0
        self._dribble_bytes = 0
        self.port = 0

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._refuses = True
        self.break_connections()

    def black_hole(self) -> None:
        """Swallow what either side sends; connections stay, and new ones are accepted."""
        self._swallows_requests = self._swallows_answers = True

    def swallow_requests(self) -> None:
        """Swallow what clients send; what the server sends still arrives."""
        self._swallows_requests = True

    def swallow_answers(self) -> None:
        """Swallow what the server sends; it gets, and executes, every request."""
        self._swallows_answers = True

    def slow_down(self, delay: float, *, dribble_bytes: int = 0) -> None:
        """Pass everything on late.

        Args:
            delay: seconds that each piece is held back; the pieces behind it wait too.
            dribble_bytes: size of a piece; 0: whatever arrives at once.
        """
        self._delay, self._dribble_bytes = delay, dribble_bytes

    def restore(self) -> None:
        """Relay again. Connections in which bytes were swallowed are broken: they are missing in them."""
        if self._swallows_requests or self._swallows_answers:
            self.break_connections()
        self._refuses = self._swallows_requests = self._swallows_answers = False
        self._delay, self._dribble_bytes = 0.0, 0

    def break_connections(self) -> None:
        """Close every connection at once."""
        for link in tuple(self._links):
            link.reset()

    def reset_connections(self) -> None:
        """End every connection with a reset (RST), as a firewall or a server's kernel does."""
        for link in tuple(self._links):
            link.reset(linger=False)

    def lose_next_answer(
        self, marker: bytes, *, hang: bool = False, then: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Lose the server's answer to the next request that contains ``marker``.

        The server has executed the request when the returned future is done.

        Args:
            marker: part of the request.
            hang: leave the client waiting, rather than break its connection.
            then: called at the moment of the loss.
        """
        loss = _Loss(marker, hang, then, asyncio.get_running_loop().create_future())
        self._losses.append(loss)
        return loss.happened

    def loss_of(self, before: bytes, data: bytes) -> "_Loss | None":
        """Take the loss that a request is to suffer, if any: one whose marker ends in ``data``.

        What stands in ``before`` alone was passed on, perhaps long before the loss was asked for.
        """
        for loss in self._losses:
            if loss.marker in before[1 - len(loss.marker) :] + data:
                self._losses.remove(loss)
                return loss
        return None

    @property
    def swallows_requests(self) -> bool:
        """Whether what clients send is swallowed."""
        return self._swallows_requests

    @property
    def swallows_answers(self) -> bool:
        """Whether what the server sends is swallowed."""
        return self._swallows_answers

    async def pass_on(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Send bytes on, slowly if so told."""
        while data:
            size = self._dribble_bytes or len(data)
            if self._delay:
                await asyncio.sleep(self._delay)
            writer.write(data[:size])
            await writer.drain()
            data = data[size:]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until either side closes."""
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        # At the end of a test it may be cancelled before it has begun.
        serving.add_done_callback(lambda ended: writer.transport.abort() if ended.cancelled() else None)

    async def close(self) -> None:
        """Break every connection and wait until nothing is left of them."""
        self.cut()
        while self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:  # the server is away, as it would be for the client
            writer.transport.abort()
            return
        if self._refuses:  # cut meanwhile: nobody would break this connection, and ``close`` wait for ever
            self.refused += 1
            writer.transport.abort()
            server_writer.transport.abort()
            return
        link = _Link(self, reader, writer, server_reader, server_writer)
        self._links.add(link)
        try:
            await link.relay()
        finally:
            self._links.discard(link)


@dataclass(frozen=True)
class _Loss:
    marker: bytes
    hang: bool
    then: Callable[[], None] | None
    happened: asyncio.Future[None]


class _Link:
    """One client's connection and its own to the server."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._server = (server_reader, server_writer)
        self._loss: _Loss | None = None
        self._lost = False

    async def relay(self) -> None:
        ways = [asyncio.create_task(self._requests()), asyncio.create_task(self._answers())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for _, writer in (self._client, self._server):
                writer.close()

    def reset(self, *, linger: bool = True) -> None:
        for _, writer in (self._client, self._server):
            connection = writer.get_extra_info("socket")
            if not linger and connection is not None and not writer.transport.is_closing():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    async def _requests(self) -> None:
        before = b""
        with suppress(ConnectionError):
            while data := await self._client[0].read(_CHUNK_BYTES):
                if self._proxy.swallows_requests:
                    continue
                self._loss = self._loss or self._proxy.loss_of(before, data)
                before = data[-1000:]
                await self._proxy.pass_on(data, self._server[1])

    async def _answers(self) -> None:
        with suppress(ConnectionError):
            while data := await self._server[0].read(_CHUNK_BYTES):
                if self._loss is not None and not self._lost:
                    self._lose(self._loss)
                if not self._proxy.swallows_answers and not self._lost:
                    await self._proxy.pass_on(data, self._client[1])

    def _lose(self, loss: _Loss) -> None:
        self._lost = True
        if not loss.happened.done():
            loss.happened.set_result(None)
        if loss.then is not None:
            loss.then()
        if not loss.hang:
            self.reset()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Run a proxy before the server of ``url`` and give the URL that leads through it."""
    parts = urlsplit(url)
    if parts.port is None:
        raise ValueError(f"{url} names no port")
    proxy = Proxy(parts.hostname or "127.0.0.1", parts.port)
    login, at, _ = parts.netloc.rpartition("@")
    async with listening(proxy.accept, proxy.close) as proxy.port:
        yield proxy, urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{proxy.port}"))
