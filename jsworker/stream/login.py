"""Getting in: addresses, credentials and TLS, and connecting within a time limit, with a clear reason."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

import nats.errors
from nats.aio.client import RawCredentials
from tenacity import AsyncRetrying, retry_if_exception_type, stop_before_delay, wait_random_exponential

from jsworker.core.errors import SettingsError, StreamRefused, StreamUnavailable
from jsworker.core.settings import Settings, redact_url
from jsworker.stream.nats_client import Client, end_tasks, reason_of

_DEFAULT_PORT = 4222
_USER_SEED = re.compile(r"\bSU[A-Z2-7]{56}\b")
_USER_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+\S+")
_CREDS_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+SU[A-Z2-7]{56}\b")
_ABANDON_SECONDS: Final = 2.0
"""For nats-py to end; it takes a moment, but for a cancellation that it swallowed while sending."""
_ATTEMPT_SECONDS: Final = 0.2
"""At least, for one attempt."""


@dataclass(frozen=True, slots=True)
class Login:
    """How to reach the servers; ``options`` are nats-py's for login and TLS and hold secrets."""

    servers: list[str]
    options: dict[str, Any] = field(repr=False)
    require_tls: bool

    @property
    def shown(self) -> str:
        """The servers for an error line: ``a:4222, b:4222``."""
        return ", ".join(server.partition("://")[2] for server in self.servers)


def login_of(settings: Settings) -> Login:
    """Read addresses, credentials and certificates; raises SettingsError for what cannot be used."""
    urls = [urlsplit(url) for url in map(str.strip, settings.nats_url.split(",")) if url]
    tls = _tls_context(settings)
    options = _credentials(settings, urls)
    if tls is not None:
        options["tls"] = tls
    return Login(
        servers=[_address(url) for url in urls],
        options=options,
        require_tls=tls is not None or any(url.scheme == "tls" for url in urls),
    )


def _address(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    try:
        port = url.port or _DEFAULT_PORT
    except ValueError:
        raise SettingsError(
            f"JSWORKER_NATS_URL={redact_url(url.geturl())} must hold a port up to 65535"
        ) from None
    return f"{url.scheme}://{host}:{port}"


def _credentials(settings: Settings, urls: Sequence[SplitResult]) -> dict[str, Any]:
    """Return nats-py's login options: the settings' own, else what the URLs hold."""
    if settings.nats_creds_file is not None:
        return {"user_credentials": _creds(settings.nats_creds_file)}
    if settings.nats_nkey_seed_file is not None:
        return {"nkeys_seed_str": _nkey_seed(settings.nats_nkey_seed_file)}
    if settings.nats_user is not None:
        password = settings.nats_password
        return {"user": settings.nats_user, "password": password.get_secret_value() if password else ""}
    if settings.nats_token is not None:
        return {"token": settings.nats_token.get_secret_value()}
    return _credentials_in(urls, settings)


def _credentials_in(urls: Sequence[SplitResult], settings: Settings) -> dict[str, Any]:
    """nats-py takes the user info of a URL as it stands; percent signs in it mean other characters."""
    logins = {(url.username, url.password) for url in urls if url.username is not None}
    if not logins:
        return {}
    if len(logins) > 1:
        raise SettingsError(
            f"JSWORKER_NATS_URL={settings.redacted_nats_url()} "
            "must hold the same user and password for every server"
        )
    user, password = logins.pop()
    if password is None:
        return {"token": unquote(user or "")}
    return {"user": unquote(user or ""), "password": unquote(password)}


def _creds(path: Path) -> RawCredentials:
    """Read the file here: nats-py, searching for missing marks, would read on for ever."""
    text = _read("JSWORKER_NATS_CREDS_FILE", path)
    if not (_USER_JWT.search(text) and _CREDS_SEED.search(text)):
        raise SettingsError(f"JSWORKER_NATS_CREDS_FILE={path} must hold a user JWT and a user nkey seed")
    return RawCredentials(text)


def _nkey_seed(path: Path) -> str:
    seed = _USER_SEED.search(_read("JSWORKER_NATS_NKEY_SEED_FILE", path))
    if seed is None:
        raise SettingsError(f"JSWORKER_NATS_NKEY_SEED_FILE={path} must hold a user nkey seed (SU…)")
    return seed.group()


def _read(variable: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{variable}={path} cannot be read: {_cause(error)}") from None


def _tls_context(settings: Settings) -> ssl.SSLContext | None:
    ca, certificate, key = settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key
    if ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise SettingsError(f"JSWORKER_NATS_TLS_CA={ca} must hold certificates: {_cause(error)}") from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise SettingsError(
                f"JSWORKER_NATS_TLS_CERT={certificate} and JSWORKER_NATS_TLS_KEY={key} "
                f"must be a certificate and its key: {_cause(error)}"
            ) from None
    return context


def _cause(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unreadable").replace("_", " ").lower()
    return error.strerror or "unreadable" if isinstance(error, OSError) else "not a text"


@dataclass(frozen=True, slots=True)
class Listeners:
    """Called on the event loop with a client, also with one that is not returned yet; they must not block."""

    on_error: Callable[[Client, Exception], None]
    on_lost: Callable[[Client], None]
    on_restored: Callable[[Client], None]


def while_unavailable(seconds: float) -> AsyncRetrying:
    """Return attempts at what raises ``StreamUnavailable``; none begins when ``seconds`` have gone by."""
    return AsyncRetrying(
        retry=retry_if_exception_type(StreamUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=1.0),
        stop=stop_before_delay(seconds),
        reraise=True,
    )


async def open_client(login: Login, listeners: Listeners, options: dict[str, Any], seconds: float) -> Client:
    """Return a connected client; ``options`` are further ones of nats-py.

    Raises:
        StreamUnavailable: no server answered in time.
        StreamRefused: login or TLS was refused; raised at once, for trying again does not help.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    async for attempt in while_unavailable(seconds):
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

    async def run(self, options: dict[str, Any], seconds: float) -> Client:
        connecting = asyncio.create_task(self._connect(options), name="connect to nats")
        try:
            await self._await(connecting, seconds)
        except BaseException:
            await self._abandon(connecting)
            raise
        return self._client

    async def _await(self, connecting: asyncio.Task[None], seconds: float) -> None:
        await asyncio.wait({connecting}, timeout=seconds)
        if not connecting.done():
            raise StreamUnavailable(f"NATS at {self._login.shown} did not answer within {seconds:.3g} s")
        await connecting

    async def _abandon(self, connecting: asyncio.Task[None]) -> None:
        """Also close a client that was just connected while the caller was cancelled: nothing else does."""
        self._trying = False
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
        self._trying = False

    async def _on_error(self, error: Exception) -> None:
        if not self._trying:
            self._listeners.on_error(self._client, error)
            return
        self._failures += 1
        fault = _login_error(error, self._login.shown)
        if isinstance(fault, StreamRefused) or self._failures >= len(self._login.servers):
            raise fault from error  # the way out of nats-py's endless loop

    async def _on_lost(self) -> None:
        self._listeners.on_lost(self._client)

    async def _on_restored(self) -> None:
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
