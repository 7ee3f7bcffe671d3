"""Notes when the machine itself is too slow for the time scale, which is nobody's fault and no proof."""

import asyncio
from contextlib import suppress
from pathlib import Path

import psycopg

from jsworker.core.clock import boottime

_PRESSURE = Path("/proc/pressure/cpu")
_PRESSURE_SECONDS = 0.5
_CROWDED_SHARE = 0.5
_INTERVAL_SECONDS = 0.05
_SLOW_SECONDS = 0.12


class Slowness:
    """Asks PostgreSQL something trivial again and again, without a proxy, and takes the time.

    Attributes:
        times: from when to when an answer took too long, or this process itself did not come to ask.
        crowded: from when to when the kernel saw processes wait for a processor for most of the time.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.times: list[tuple[float, float]] = []
        self.crowded: list[tuple[float, float]] = []

    async def watch(self) -> None:
        """Watch until cancelled. An error is no slowness: the server is down because a fault took it down."""
        while True:
            with suppress(psycopg.Error, OSError):
                connection = await psycopg.AsyncConnection.connect(
                    self._url, autocommit=True, connect_timeout=2
                )
                async with connection:
                    await self._ask(connection)
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def watch_processors(self) -> None:
        """Watch the kernel's account of waiting until cancelled; without one nothing is ever crowded."""
        while (waited := _waited_seconds()) is not None:
            began = boottime()
            await asyncio.sleep(_PRESSURE_SECONDS)
            now, then = boottime(), _waited_seconds()
            if then is not None and then - waited > _CROWDED_SHARE * (now - began):
                self.crowded.append((began, now))

    async def _ask(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        while True:
            began = boottime()
            await asyncio.sleep(_INTERVAL_SECONDS)
            await connection.execute("SELECT 1")
            if boottime() - began > _INTERVAL_SECONDS + _SLOW_SECONDS:
                self.times.append((began, boottime()))


def _waited_seconds() -> float | None:
    """Return for how long, since the machine started, some process waited for a processor."""
    try:
        first = _PRESSURE.read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    return int(first.rpartition("total=")[2]) / 1e6
