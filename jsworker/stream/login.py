"""The login: addresses, credentials and TLS, tries within a time limit, and reasons of failures."""

import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from nats.aio.client import RawCredentials
from nats.errors import SecureConnWantedError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_before_delay, wait_random_exponential

from jsworker.core.errors import SettingsError, StreamRefused, StreamUnavailable
from jsworker.core.settings import Settings, redact_url
from jsworker.stream.nats_client import reason_of

_DEFAULT_PORT = 4222
_HUNG_UP = "closed the connection at once, as it does when its max_connections is reached"
_CLEAR_TEXT = "WRONG_VERSION_NUMBER"
_FROM_FILES = ("nats_url", "nats_user", "nats_password", "nats_token")
_USER_SEED = re.compile(r"\bSU[A-Z2-7]{56}\b")
_USER_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+\S+")
_CREDS_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+SU[A-Z2-7]{56}\b")


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
    """Read addresses, credentials and certificates, also those in files, which may have changed since.

    Raises SettingsError if one of them cannot be used.
    """
    settings = settings.read_again(_FROM_FILES)
    urls = [urlsplit(url) for url in map(str.strip, settings.nats_url.split(",")) if url]
    options = _credentials(settings, urls) | _tls(settings)
    require_tls = "tls" in options or any(url.scheme == "tls" for url in urls)
    return Login([_address(url) for url in urls], options, require_tls)


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
    if (path := settings.nats_creds_file) is not None:
        text = _read("JSWORKER_NATS_CREDS_FILE", path)
        if not (_USER_JWT.search(text) and _CREDS_SEED.search(text)):  # nats-py would search for ever
            raise SettingsError(f"JSWORKER_NATS_CREDS_FILE={path} must hold a user JWT and a user nkey seed")
        return {"user_credentials": RawCredentials(text)}
    if (path := settings.nats_nkey_seed_file) is not None:
        seed = _USER_SEED.search(_read("JSWORKER_NATS_NKEY_SEED_FILE", path))
        if seed is None:
            raise SettingsError(f"JSWORKER_NATS_NKEY_SEED_FILE={path} must hold a user nkey seed (SU…)")
        return {"nkeys_seed_str": seed.group()}
    if settings.nats_user is not None:
        password = settings.nats_password
        return {"user": settings.nats_user, "password": password.get_secret_value() if password else ""}
    if settings.nats_token is not None:
        return {"token": settings.nats_token.get_secret_value()}
    return _credentials_in(urls, settings)


def _credentials_in(urls: Sequence[SplitResult], settings: Settings) -> dict[str, Any]:
    """Return the login in the URLs, decoded: nats-py does not decode percent-encoded characters."""
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


def _read(variable: str, path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise SettingsError(f"{variable}={path} cannot be read: {_cause(error)}") from None


def _tls(settings: Settings) -> dict[str, ssl.SSLContext]:
    ca, certificate, key = settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key
    if ca is None and certificate is None:
        return {}
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
    return {"tls": context}


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unreadable").replace("_", " ").lower()
    return error.strerror or "unreadable"


def while_unavailable(seconds: float) -> AsyncRetrying:
    """Return attempts that are repeated on ``StreamUnavailable``; none begins after ``seconds``."""
    return AsyncRetrying(
        retry=retry_if_exception_type(StreamUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=1.0),
        stop=stop_before_delay(seconds),
        reraise=True,
    )


def login_error(error: Exception, servers: str) -> StreamRefused | StreamUnavailable:
    """Return the error of a failed connection: StreamUnavailable if another try may succeed."""
    nats = f"NATS at {servers}"
    match error:
        case SecureConnWantedError():
            return StreamRefused(f"{nats}: it offers no TLS, which tls:// and JSWORKER_NATS_TLS_CA ask for")
        case ssl.SSLError() if error.reason != _CLEAR_TEXT:
            return StreamRefused(f"{nats}: {_tls_fault(error)}")
        case _ if "authentication timeout" in (words := str(error).lower()):
            return StreamUnavailable(f"{nats} did not receive the login in time: authentication timeout")
        case _ if any(word in words for word in ("authorization", "authentication")):
            return StreamRefused(f"{nats} refused the login: authorization violation")
    return StreamUnavailable(f"{nats} {_outage(error)}")


def _tls_fault(error: ssl.SSLError) -> str:
    """Return why TLS cannot be spoken until a setting or a certificate is changed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate cannot be verified, {error.verify_message} (see JSWORKER_NATS_TLS_CA)"
    name = error.reason or "no handshake"
    if name in {"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_BAD_CERTIFICATE"}:
        return "it wants a client certificate that it trusts (see JSWORKER_NATS_TLS_CERT)"
    words = re.sub("^(SSL|TLS)V[0-9]+_ALERT_", "", name).replace("_", " ").lower()
    if re.search("ALERT_(CERTIFICATE|UNKNOWN_CA)", name):
        return f"it refuses the client's certificate, {words} (see JSWORKER_NATS_TLS_CERT)"
    return f"TLS failed, {words}"


def _outage(error: Exception) -> str:
    """Return what keeps a server from being reached or used at the moment."""
    match error:
        case ConnectionRefusedError():
            reason = "refused the connection: no server listens there"
        case socket.gaierror():
            reason = "cannot be found: the host name cannot be resolved"
        case TimeoutError():
            reason = "did not answer"
        case ssl.SSLError() | ConnectionResetError():  # an -ERR in clear text; what was sent came too late
            reason = _HUNG_UP
        case ConnectionError() if not str(error):  # as the TLS handshake raises it
            reason = _HUNG_UP
        case OSError():
            reason = f"cannot be reached: {error.strerror or error}"
        case _ if "expecting INFO" in str(error):
            reason = "sent no INFO: is it a nats-server? With TLS, handshake_first must be auto or false"
        case _:
            reason = f"cannot be used: {reason_of(error)}"
    return reason
