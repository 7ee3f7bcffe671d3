"""Getting in: addresses, credentials and TLS, and connecting within a time limit, with a clear reason."""

import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import nats.errors
from nats.aio.client import RawCredentials
from tenacity import AsyncRetrying, retry_if_exception_type, stop_before_delay, wait_random_exponential

from jsworker.core.errors import SettingsError, StreamRefused, StreamUnavailable
from jsworker.core.settings import Settings, redact_url
from jsworker.stream.nats_client import reason_of

_DEFAULT_PORT = 4222
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


def while_unavailable(seconds: float) -> AsyncRetrying:
    """Return attempts at what raises ``StreamUnavailable``; none begins when ``seconds`` have gone by."""
    return AsyncRetrying(
        retry=retry_if_exception_type(StreamUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=1.0),
        stop=stop_before_delay(seconds),
        reraise=True,
    )


def login_error(error: Exception, servers: str) -> StreamRefused | StreamUnavailable:
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
