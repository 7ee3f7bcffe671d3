"""What a nats-server shows on its monitoring port alone: how often it syncs to the disk."""

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import h11

from jsworker.core.errors import JsworkerError, SettingsError
from jsworker.core.settings import redact_url

_SECONDS: Final = 3.0
_LARGEST_ANSWER: Final = 4 * 2**20
_READ_BYTES: Final = 65_536
_DEFAULT_PORT: Final = 8222


class MonitoringSilent(JsworkerError):
    """A monitoring address did not answer as a nats-server does."""


@dataclass(frozen=True, slots=True)
class ServerConfiguration:
    """What a server says of itself; ``sync_seconds`` is None when it does not say."""

    name: str
    jetstream: bool
    sync_always: bool
    sync_seconds: float | None


def check_address(url: str) -> str:
    """Return a monitoring address as it is asked: ``http://host:port``."""
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
    """Ask a server for its configuration, at an address that ``check_address`` returned."""
    try:
        async with asyncio.timeout(_SECONDS):
            answer = await _get(urlsplit(url))
    except (OSError, h11.ProtocolError) as error:
        raise MonitoringSilent(f"{url} cannot be read: {_reason(error)}") from None
    try:
        return _configuration(json.loads(answer))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MonitoringSilent(
            f"{url} does not answer as the monitoring port of a nats-server does"
        ) from None


async def _get(parts: SplitResult) -> bytes:
    """Ask directly: a proxy of the environment does not lead to a port inside the cluster."""
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else _DEFAULT_PORT)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = [("Host", parts.netloc), ("Connection", "close")]
        request = h11.Request(method="GET", target=f"{parts.path}/varz", headers=headers)
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        return await _body(connection, reader)
    finally:
        writer.close()


async def _body(connection: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    body = b""
    while len(body) < _LARGEST_ANSWER:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            case h11.Response(status_code=status, reason=reason) if status != HTTPStatus.OK:
                raise h11.RemoteProtocolError(f"it answered {status} {reason.decode()}")
            case h11.Data(data=data):
                body += data
            case h11.EndOfMessage() | h11.ConnectionClosed():
                break
    return body


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
