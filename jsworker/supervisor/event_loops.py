"""The event loop of a worker process: uvloop's, or asyncio's with threads of its own that look up hosts."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from jsworker.core.errors import SettingsError

_MOST_THREADS: Final = 32
"""Lookups by jobs use these threads, too: more than those of a few names whose servers never answer."""


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop, with threads for nothing but lookups of hosts.

    Jobs that use ``asyncio.to_thread`` may keep every thread of the default executor busy for hours. A worker
    that waited for one of these could not connect to its servers again, by their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lookups = ThreadPoolExecutor(_MOST_THREADS, "jsworker lookup")

    async def getaddrinfo(self, host: Any, port: Any, **kinds: int) -> Any:
        """Look up a host; a thread that cannot be started is an OSError, like any lookup that fails."""
        try:
            lookup = self.run_in_executor(self._lookups, partial(socket.getaddrinfo, host, port, **kinds))
        except RuntimeError as error:
            raise OSError(f"no thread for a lookup: {error}") from error
        return await lookup

    def close(self) -> None:
        """Close the loop without waiting for a lookup."""
        super().close()
        self._lookups.shutdown(wait=False)


def loop_factory(wanted: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the event loop. ``auto`` is uvloop where it is installed."""
    if wanted == "asyncio":
        return EventLoop
    try:
        import uvloop  # noqa: PLC0415 -- an extra
    except ImportError as error:
        if wanted == "auto":
            return EventLoop
        raise SettingsError(
            f"JSWORKER_EVENT_LOOP='{wanted}' cannot be used: {error};"
            " install it: pip install 'jsworker[uvloop]'"
        ) from None
    return uvloop.new_event_loop
