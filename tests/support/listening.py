"""Servers of the tests' own process, which leave nothing open at their end, and where they can listen."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

_ACCEPTING_STEPS = 10
"""Of the event loop, more than it takes from a connection's arrival to ``accept``."""


def has_ipv6() -> bool:
    """Return whether servers can listen on ::1; the kernel may know IPv6 without any such address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return socket.has_dualstack_ipv6()
    except OSError:
        return False


@asynccontextmanager
async def listening(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None], close: Callable[[], Awaitable[None]]
) -> AsyncIterator[int]:
    """Listen on a free port of 127.0.0.1, and yield it; ``close`` ends what was accepted."""
    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        # Python 3.11 leaves a connection open, with a warning, that it has accepted when its server closes.
        for each in listener.sockets:
            with suppress(RuntimeError):  # uvloop's
                asyncio.get_running_loop().remove_reader(each.fileno())
        for _ in range(_ACCEPTING_STEPS):
            await asyncio.sleep(0)
        listener.close()
        await close()
        await listener.wait_closed()
