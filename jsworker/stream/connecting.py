"""Connecting, attempt by attempt, with a time limit and a clear reason. nats-py has neither."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import nats.errors
from tenacity import AsyncRetrying, retry_if_exception_type, stop_before_delay, wait_random_exponential

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.stream.login import Login
from jsworker.stream.nats_client import Client, end_tasks, reason_of

_ABANDON_SECONDS: Final = 2.0
"""For nats-py to end; it takes a moment, but for a cancellation that it swallowed while sending."""
_ATTEMPT_SECONDS: Final = 0.2
"""At least, for one attempt."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Called when something happens to an open connection, on the event loop; they must not block."""

    on_error: Callable[[Client, Exception], None]
    on_lost: Callable[[Client], None]
    on_restored: Callable[[Client], None]


async def open_client(login: Login, listeners: Listeners, options: dict[str, Any], seconds: float) -> Client:
    """Return a connected client; ``options`` are further ones of nats-py.

    Raises:
        StreamUnavailable: no server answered in time.
        StreamRefused: login or TLS was refused; raised at once, for trying again does not help.
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
            left = max(deadline - clock(), _ATTEMPT_SECONDS)  # else it could only report that it had no time
            return await _Attempt(login, listeners).run(options, left)
    raise AssertionError("unreachable: the last attempt raises")


class _Attempt:
    """One client's first connection: every server is tried once."""

    def __init__(self, login: Login, listeners: Listeners) -> None:
        self._login = login
        self._listeners = listeners
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
        """Also close a client that was just connected while the caller was cancelled: nothing else does."""
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
            raise _login_error(error, self._login.shown) from error
        if not self._client.is_connected:  # nats-py takes an end of file during the login for success
            raise StreamUnavailable(f"NATS at {self._login.shown} closed the connection during the login")
        self._connected = True

    async def _on_error(self, error: Exception) -> None:
        if self._connected:
            self._listeners.on_error(self._client, error)
        elif self._trying:
            self._failures += 1
            fault = _login_error(error, self._login.shown)
            if isinstance(fault, StreamRefused) or self._failures >= len(self._login.servers):
                raise fault from error  # the way out of nats-py's endless loop

    async def _on_lost(self) -> None:
        if self._connected:
            self._listeners.on_lost(self._client)

    async def _on_restored(self) -> None:
        if self._connected:
            self._listeners.on_restored(self._client)


def _login_error(error: Exception, servers: str) -> StreamRefused | StreamUnavailable:
    """Return why a connection could not be made: refused for good, or worth another try."""
    match error:
        case ssl.SSLError() | nats.errors.SecureConnWantedError():
            return StreamRefused(f"NATS at {servers}: {_tls_error(error)}")
        case _ if any(word in str(error).lower() for word in ("authorization", "authentication")):
            return StreamRefused(f"NATS at {servers} refused the login: authorization violation")
        case ConnectionRefusedError():
            reason = "refused the connection: nobody listens there"
        case socket.gaierror():
            reason = "cannot be found: the host name cannot be resolved"
        case TimeoutError():
            reason = "did not answer"
        case OSError():
            reason = f"cannot be reached: {error.strerror or error}"
        case _:
            reason = f"cannot be used: {reason_of(error)}"
    return StreamUnavailable(f"NATS at {servers} {reason}")


def _tls_error(error: ssl.SSLError | nats.errors.SecureConnWantedError) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"its TLS certificate cannot be verified, {error.verify_message} (see JSWORKER_NATS_TLS_CA)"
            )
        case ssl.SSLError(reason="TLSV13_ALERT_CERTIFICATE_REQUIRED" | "SSLV3_ALERT_BAD_CERTIFICATE"):
            return "it wants a client certificate that it trusts (see JSWORKER_NATS_TLS_CERT)"
        case ssl.SSLError(reason=str(reason)) if re.search("ALERT_(CERTIFICATE|UNKNOWN_CA)", reason):
            return f"it refuses the client's certificate, {_words(reason)} (see JSWORKER_NATS_TLS_CERT)"
        case ssl.SSLError():
            return f"TLS failed, {_words(error.reason or 'no handshake')}"
        case _:
            return "it offers no TLS, which tls:// and JSWORKER_NATS_TLS_CA ask for"


def _words(reason: str) -> str:
    """Return OpenSSL's name of a reason as words."""
    return re.sub(r"^(SSL|TLS)V\d+_ALERT_", "", reason).replace("_", " ").lower()
