"""What went wrong with NATS, as one line for the people who read it."""

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import nats.errors
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from jsworker.core.errors import StreamRefused, StreamUnavailable

_NOT_ENABLED_FOR_ACCOUNT = 10039
_NOT_ENABLED = 10076


class NotThere(StreamUnavailable):
    """The stream, the consumer or the message does not exist."""


class ApiRefused(StreamRefused):
    """JetStream, or the server before it, refused a request.

    Args:
        what: what the request was about.
        reason: the server's own words.
        code: JetStream's number of the reason.
    """

    def __init__(self, what: str, reason: str, code: int | None = None) -> None:
        self.reason = reason
        self.code = code
        super().__init__(f"{what}: {reason}")


def login_fault(error: Exception, servers: str) -> StreamRefused | StreamUnavailable:
    """Return why a connection could not be made: refused for good, or worth another try.

    Args:
        error: what nats-py met.
        servers: the servers' addresses, without credentials.
    """
    match error:
        case ssl.SSLError() | nats.errors.SecureConnWantedError():
            return StreamRefused(f"NATS at {servers}: {_tls_fault(error)}")
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


def _tls_fault(error: ssl.SSLError | nats.errors.SecureConnWantedError) -> str:
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


def reason_of(error: Exception) -> str:
    """Return an error of nats-py in the server's own words."""
    if isinstance(error, APIError):
        return error.description or f"JetStream answered {error.code}"
    return str(error).removeprefix("nats: ") or type(error).__name__


def jetstream_disabled(error: Exception) -> bool:
    """Tell whether the server said so; no answer at all proves nothing in a cluster."""
    return isinstance(error, APIError) and error.err_code in {_NOT_ENABLED, _NOT_ENABLED_FOR_ACCOUNT}


@contextmanager
def api_faults(what: str) -> Iterator[None]:
    """Turn what nats-py raises into errors of ours.

    Args:
        what: the request, as in ``{what}: the reason``.

    Raises:
        NotThere: what was asked for does not exist.
        StreamUnavailable: nobody answered; worth another try.
        StreamRefused: JetStream says no.
    """
    try:
        yield
    except NotFoundError as error:
        raise NotThere(f"{what}: {reason_of(error)}") from error
    except APIError as error:
        if jetstream_disabled(error):
            raise StreamRefused(f"{what}: JetStream is not enabled on this server or account") from error
        if isinstance(error, ServiceUnavailableError):
            raise StreamUnavailable(f"{what}: {error.description or 'JetStream does not answer'}") from error
        raise ApiRefused(what, reason_of(error), error.err_code) from error
    except (nats.errors.Error, OSError) as error:
        raise StreamUnavailable(f"{what}: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError) as error:  # nats-py parses without checking
        raise StreamUnavailable(f"{what}: the answer is no JetStream answer") from error
