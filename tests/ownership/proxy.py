"""A TCP relay before a server that can fall silent: a lost answer and a dead network are real ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sqlalchemy.engine import make_url


class Proxy:
    """Relays bytes between clients and one server.

    Attributes:
        answers: while cleared, what the server sends is swallowed.
        requests: while cleared, what clients send is swallowed.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._ways: set[asyncio.Task[None]] = set()
        self.answers = True
        self.requests = True

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until either side closes."""
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        there = asyncio.create_task(self._copy(reader, server_writer, "requests"))
        back = asyncio.create_task(self._copy(server_reader, writer, "answers"))
        self._ways |= {there, back}
        await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, server_writer):
            end.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if getattr(self, way):
                    sink.write(data)
                    await sink.drain()

    async def close(self) -> None:
        """Break every connection."""
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)


@asynccontextmanager
async def proxied(database_url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Run a proxy before a database and give its URL through the proxy."""
    url = make_url(database_url)
    proxy = Proxy(url.host or "127.0.0.1", url.port or 5432)
    listener = await asyncio.start_server(proxy.relay, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy, url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
    finally:
        listener.close()
        await proxy.close()
        await listener.wait_closed()
