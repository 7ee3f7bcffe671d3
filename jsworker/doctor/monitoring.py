"""What a nats-server shows on its monitoring port alone: how often it syncs to the disk."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from jsworker.core.errors import JsworkerError, SettingsError
from jsworker.core.settings import redact_url

_SECONDS: Final = 3.0
_LARGEST_ANSWER: Final = 4 * 2**20
_DEFAULT_PORT: Final = 8222


class MonitoringSilent(JsworkerError):
    """A monitoring address did not answer as a nats-server does."""


@dataclass(frozen=True, slots=True)
class ServerConfiguration:
    """What a server says of itself.

    Attributes:
        name: what it calls itself.
        jetstream: whether JetStream is on.
        sync_always: it syncs every message to the disk before it acknowledges it.
        sync_seconds: else it syncs so often; None: it does not say.
    """

    name: str
    jetstream: bool
    sync_always: bool
    sync_seconds: float | None


def check_address(url: str) -> str:
    """Return a monitoring address as it is asked: ``http://host:port``.

    Raises:
        SettingsError: it is none.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        fits = fits and (parts.hostname or "").encode("idna") != b""
        fits = fits and parts.username is None and not parts.query and not parts.fragment
    except ValueError:  # also a host name that cannot be one
        fits = False
    if not fits:
        rule = f"must read http://host:{_DEFAULT_PORT}, the monitoring address of a nats-server"
        raise SettingsError(f"--nats-monitoring {redact_url(url)} {rule}")
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/varz")).geturl()


async def read_configuration(url: str) -> ServerConfiguration:
    """Ask a server for its configuration.

    Args:
        url: what ``check_address`` returned.

    Raises:
        MonitoringSilent: there was no answer, or not that of a nats-server.
    """
    return await asyncio.to_thread(_read, url)


def _read(url: str) -> ServerConfiguration:
    parts = urlsplit(url)
    began = time.monotonic()
    try:
        answer = _get(parts)
        if time.monotonic() - began >= _SECONDS:  # cut off by ourselves, and cut where it may look whole
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        late = time.monotonic() - began >= _SECONDS  # whatever it looks like: we have hung up
        reason = _reason(TimeoutError() if late else error)
        raise MonitoringSilent(f"{url} cannot be read: {reason}") from None
    try:
        return _configuration(json.loads(answer))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MonitoringSilent(
            f"{url} does not answer as the monitoring port of a nats-server does"
        ) from None


def _get(parts: SplitResult) -> bytes:
    """Ask directly: a proxy of the environment does not lead to a port inside the cluster."""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    default = 443 if parts.scheme == "https" else _DEFAULT_PORT
    connection = kind(parts.hostname or "", parts.port or default, timeout=_SECONDS)
    # For the whole of the answer: the time-out of a connection counts for each of its bytes anew.
    deadline = threading.Timer(_SECONDS, _hang_up, [connection])
    try:
        connection.connect()
        deadline.start()
        connection.request("GET", f"{parts.path}/varz")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"it answered {response.status} {response.reason}")
        return response.read(_LARGEST_ANSWER)
    finally:
        deadline.cancel()
        connection.close()


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError):  # it has been closed meanwhile
        connection.sock.shutdown(socket.SHUT_RDWR)


def _configuration(answer: dict[str, Any]) -> ServerConfiguration:
    jetstream = answer.get("jetstream") or {}
    config = jetstream.get("config") or {}
    nanoseconds = config.get("sync_interval")
    return ServerConfiguration(
        name=str(answer.get("server_name") or answer["server_id"]),
        jetstream=bool(config),
        sync_always=bool(config.get("sync_always")),
        sync_seconds=None if nanoseconds is None else float(nanoseconds) / 1e9,
    )


def _reason(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "nothing listens there"
        case TimeoutError():
            return f"no answer within {_SECONDS:g} s"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return str(error) or type(error).__name__
