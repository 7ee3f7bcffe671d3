"""One attempt after the other to connect, with a time limit and a clear reason. nats-py has neither."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import nats.errors
from tenacity import AsyncRetrying, retry_if_exception_type, stop_before_delay, wait_random_exponential

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.stream.cancelling import end_tasks
from jsworker.stream.faults import login_fault
from jsworker.stream.login import Login
from jsworker.stream.nats_client import Client

_ABANDON_SECONDS = 2.0
"""For nats-py to end; it takes a moment, but for a cancellation that it swallowed while sending."""


@dataclass(frozen=True, slots=True)
class Ears:
    """Who listens to an open connection. All are called on the event loop and must not block."""

    on_error: Callable[[Client, Exception], None]
    on_lost: Callable[[Client], None]
    on_restored: Callable[[Client], None]


_LEAST_SECONDS: Final = 0.2
"""For an attempt."""


async def open_client(login: Login, ears: Ears, options: dict[str, Any], seconds: float) -> Client:
    """Return a connected client.

    Args:
        login: where to go and how to enter.
        ears: told about errors, losses and reconnects from then on.
        options: further options of nats-py.
        seconds: how long to try.

    Raises:
        StreamUnavailable: nobody answered in time.
        StreamRefused: login or TLS was refused; said at once, for trying again does not help.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StreamUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=1.0),
        stop=stop_before_delay(seconds),
        reraise=True,
    ):
        with attempt:
            left = max(deadline - clock(), _LEAST_SECONDS)  # else it could only say that it had no time
            return await _Attempt(login, ears).run(options, left)
    raise AssertionError("unreachable: the last attempt raises")


class _Attempt:
    """One client's way to its first connection: every server is tried once."""

    def __init__(self, login: Login, ears: Ears) -> None:
        self._login = login
        self._ears = ears
        self._client = Client(require_tls=login.require_tls)
        self._failures = 0
        self._trying = True
        self._connected = False

    async def run(self, options: dict[str, Any], seconds: float) -> Client:
        connecting = asyncio.create_task(self._connect(options), name="connect to nats")
        try:
            await self._await(connecting, seconds)
        except BaseException:
            await self._abandon(connecting)
            raise
        self._trying = False
        return self._client

    async def _await(self, connecting: asyncio.Task[None], seconds: float) -> None:
        await asyncio.wait({connecting}, timeout=seconds)
        if not connecting.done():
            raise StreamUnavailable(f"NATS at {self._login.shown} did not answer within {seconds:.3g} s")
        await connecting

    async def _abandon(self, connecting: asyncio.Task[None]) -> None:
        """Close also what has just been connected while the caller was cancelled: nobody else would."""
        self._trying = self._connected = False
        try:
            await end_tasks({connecting}, _ABANDON_SECONDS)
        finally:
            await self._client.discard(_ABANDON_SECONDS)

    async def _connect(self, options: dict[str, Any]) -> None:
        try:
            await self._client.connect(
                self._login.servers,
                error_cb=self._on_error,
                disconnected_cb=self._on_lost,
                reconnected_cb=self._on_restored,
                **self._login.options,
                **options,
            )
        except (nats.errors.Error, OSError) as error:
            raise login_fault(error, self._login.shown) from error
        if not self._client.is_connected:  # nats-py takes an end of file during the login for success
            raise StreamUnavailable(f"NATS at {self._login.shown} closed the connection during the login")
        self._connected = True

    async def _on_error(self, error: Exception) -> None:
        if self._connected:
            self._ears.on_error(self._client, error)
        elif self._trying:
            self._failures += 1
            fault = login_fault(error, self._login.shown)
            if isinstance(fault, StreamRefused) or self._failures >= len(self._login.servers):
                raise fault from error  # the way out of nats-py's endless loop

    async def _on_lost(self) -> None:
        if self._connected:
            self._ears.on_lost(self._client)

    async def _on_restored(self) -> None:
        if self._connected:
            self._ears.on_restored(self._client)
