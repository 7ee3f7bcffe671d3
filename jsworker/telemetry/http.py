"""A small HTTP server for probes and metrics that clients cannot harm.

One request a connection, no bodies, a deadline for each connection, and a limit to their number.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import h11

from jsworker.core.errors import JsworkerError
from jsworker.telemetry.logs import own_logger

_SECONDS: Final = 5.0
"""The longest time that a connection may last, however slow its client is."""
_CONNECTIONS: Final = 64
_HEAD_BYTES: Final = 16 * 1024
_READ_BYTES: Final = 4_096


class PortUnavailable(JsworkerError):
    """The port of health and metrics cannot be listened to."""


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a path."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[str], Response | Awaitable[Response]]
"""Returns the response, given the request's Accept header."""


class HttpServer:
    """Answers GET and HEAD on a few fixed paths."""

    def __init__(self, routes: Mapping[str, Route], *, seconds: float = _SECONDS) -> None:
        self._routes = routes
        self._seconds = seconds
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port; port 0 stands for any free one, ``::`` for IPv4 and IPv6."""
        where: dict[str, Any] = {"host": host, "port": port}
        try:
            if host == "::" and socket.has_dualstack_ipv6():  # asyncio would take no IPv4
                both = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
                where = {"sock": both}
            self._server = await asyncio.start_server(self._accept, limit=_HEAD_BYTES, **where)
        except (OSError, UnicodeError) as error:
            if "sock" in where:
                where["sock"].close()
            number = getattr(error, "errno", None)
            # asyncio's own text for a port that is taken names the address once more.
            reason = os.strerror(number) if number and number > 0 else str(error)
            raise PortUnavailable(
                f"JSWORKER_HTTP_PORT={port} on JSWORKER_HTTP_HOST={host} cannot be listened to: {reason}"
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end the open connections."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _CONNECTIONS:
            # Requests are answered within milliseconds, so the oldest connection is one that sends none.
            oldest, held = next(iter(self._connections.items()))
            del self._connections[oldest]
            held.transport.abort()  # not left to the task: if cancelled before it begins, it closes nothing
            oldest.cancel()
        task = asyncio.create_task(self._serve(reader, writer), name="jsworker http")
        self._connections[task] = writer
        task.add_done_callback(lambda _: self._connections.pop(task, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchange(reader, writer)
        except (TimeoutError, OSError, h11.LocalProtocolError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        with_body = True
        try:
            while (request := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            answer = _plain(error.error_status_hint, "not a request of HTTP/1.1")
        else:
            if not isinstance(request, h11.Request):  # the client disconnected without a request
                return
            answer, with_body = await self._answer(request), request.method != b"HEAD"
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Connection", "close"),
        ]
        if answer.status == 405:
            headers.append(("Allow", "GET, HEAD"))
        head = connection.send(h11.Response(status_code=answer.status, headers=headers)) or b""
        writer.write(head + answer.body if with_body else head)
        await writer.drain()
        writer.write_eof()
        while await reader.read(_READ_BYTES):  # read the rest; else the client might lose the response
            pass

    async def _answer(self, request: h11.Request) -> Response:
        if request.method not in (b"GET", b"HEAD"):
            return _plain(405, "only GET and HEAD")
        path = request.target.partition(b"?")[0].decode("ascii")
        route = self._routes.get(path)
        if route is None:
            return _plain(404, f"there are: {' '.join(self._routes)}")
        accept = next((value for name, value in request.headers if name == b"accept"), b"")
        try:
            answer = route(accept.decode("latin-1"))
            return answer if isinstance(answer, Response) else await answer
        except Exception:  # noqa: BLE001 -- a mistake of ours; the other paths still answer
            own_logger().exception("http.failed", path=path)
            return _plain(500, "this is a mistake in jsworker; see its log")


def _plain(status: int, words: str) -> Response:
    return Response(status, f"{words}\n".encode())
