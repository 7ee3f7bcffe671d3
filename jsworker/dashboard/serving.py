"""Serves the dashboard by itself, with uvicorn, until the process gets a signal."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from jsworker.core.errors import JsworkerError

PORT: Final = 8100
"""The default port."""
_BACKLOG: Final = 2048
_HEAD_SECONDS: Final = 10.0
"""From the begin of a connection, or from the last response, until the next request's head is complete."""
_CLOSING_SECONDS: Final = 20
"""Time for actions and for responses that are being sent; Kubernetes kills the process after 30 s."""
_INTERRUPTED_SECONDS: Final = 3.0
"""Time for actions that were interrupted then, to note it and to respond."""


class PortTaken(JsworkerError):
    """The dashboard cannot listen there."""


class _Connection(H11Protocol):
    """Ends when the next request does not come in time; uvicorn keeps one with half a request for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._ends = self.loop.call_later(_HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._ends.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # the next request may be there already
            self._ends = self.loop.call_later(_HEAD_SECONDS, self.transport.close)


class _Server(uvicorn.Server):
    """Leaves signals to ``serve``: uvicorn would raise them again when it ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without ``port`` on 8100, or on a free port if that is taken.

    ``::`` takes IPv4, too. Raises PortTaken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    tries = (PORT, 0) if port is None else (port,)
    for number in tries:
        try:
            return socket.create_server((host, number), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            if error.errno is not None and error.errno < 0:  # the name could not be looked up
                says = str(error.strerror).partition(" (")[0]
                raise PortTaken(f"the dashboard cannot listen on {host}: {says}") from None
            if number == tries[-1]:
                why = os.strerror(error.errno) if error.errno is not None else error
                raise PortTaken(f"the dashboard cannot listen on {host}:{number}: {why}") from None
    raise AssertionError


async def serve(app: Starlette, listening: socket.socket, *, started: Callable[[], None]) -> None:
    """Serve the dashboard until SIGINT or SIGTERM; a second one interrupts what is still being done.

    ``started`` is called first, when connections are already accepted.
    """
    config = uvicorn.Config(
        app,
        http=_Connection,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()

    def end() -> None:
        if server.should_exit:
            for task in server.server_state.tasks:
                task.cancel()
        server.should_exit = True
        app.state.site.poller.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    started()  # the kernel accepts connections already
    try:
        await server.serve(sockets=[listening])
        if interrupted := set(server.server_state.tasks):
            await asyncio.wait(interrupted, timeout=_INTERRUPTED_SECONDS)
    finally:
        with suppress(OSError):
            listening.close()


def address_of(listening: socket.socket) -> str:
    """Return the dashboard's address for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
