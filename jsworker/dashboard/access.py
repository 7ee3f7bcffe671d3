"""Who may do what: authorisation, and the checks by which no other web page acts in a viewer's name."""

import hashlib
import hmac
import inspect
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

ACTIONS: Final = frozenset(
    {
        *("retry", "cancel", "clear", "priority", "reschedule", "enqueue"),
        *("pause", "schedules", "workflows", "workers", "dead-messages", "repair"),
    }
)
"""What ``Access.actions`` may name: acts on jobs; pausing kinds and keys, and limits; acts on schedules,
workflows, workers and dead messages; the repairs of the doctor."""

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # With "no-referrer" browsers would send `Origin: null` with the dashboard's own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer; files that never change may be cached."""

_COOKIE: Final = "jsworker-csrf"
_TOKEN_CHARACTERS: Final = 43
_FORWARDED: Final = ("forwarded", "via", "x-real-ip", "x-forwarded-")
"""How the names of headers begin that proxies add."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a viewer may do. Everybody who has one may read, without payloads.

    Attributes:
        actions: which of ``ACTIONS``.
        payloads: whether payloads, results, checkpoints, steps and texts of errors are shown, and why jobs
            snooze or pause their keys. Encrypted ones never are.
        name: who it is, for the audit.
    """

    actions: Collection[str] = frozenset()
    payloads: bool = False
    name: str = "unnamed"

    READ: ClassVar["Access"]
    ALL: ClassVar["Access"]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.actions) - ACTIONS)
        if isinstance(self.actions, str) or unknown:
            raise ValueError(
                f"actions={self.actions!r} must be a set, of these: {', '.join(sorted(ACTIONS))}"
            )
        object.__setattr__(self, "actions", frozenset(self.actions))

    def may(self, action: str) -> bool:
        """Return whether the viewer may act so."""
        return action in self.actions


Access.READ = Access()
Access.ALL = Access(ACTIONS, payloads=True)

Allowed: TypeAlias = Access | Response | None
Authorize: TypeAlias = Callable[[Request], Allowed | Awaitable[Allowed]]
"""Returns what the sender of a request may do; None: nothing. A response is sent as it is: to a login."""


async def access_of(
    request: Request, authorize: Authorize | None, hosts: Collection[str] | None
) -> Access | Response:
    """Return what the sender of a request may do, or the refusal to send."""
    named = host_name(request.headers.get("host", ""))
    if hosts is not None and named not in hosts:
        return refusal(421, f"the dashboard does not answer to this host name: {named[:100]!r}")
    if authorize is None:
        if not (is_loopback(named) and _is_from_here(request)):
            return refusal(
                403, "the dashboard was started without a login: it answers to its own machine alone"
            )
        return Access.ALL
    found = authorize(request)
    if inspect.isawaitable(found):
        found = await found
    if isinstance(found, Access | Response):
        return found
    if found is not None:
        raise TypeError(f"authorize must return Access, a response or None, not {type(found).__name__}")
    return refusal(403, "you may not see the dashboard")


def _is_from_here(request: Request) -> bool:
    # A proxy on this machine speaks for others.
    if any(name.startswith(_FORWARDED) for name in request.headers):
        return False
    # Without an address it came by a socket file, as from a proxy.
    return request.client is not None and is_loopback(request.client.host)


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return the name of a ``Host`` header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def refusal(status: int, line: str) -> Response:
    """Return an answer of one line."""
    return PlainTextResponse(f"{line}\n", status)


class CsrfTokens:
    """Binds a form to the browser that it was shown in, by a cookie that other sites' requests do not carry.

    A process keeps nothing of it, so the next request may go to another one.
    """

    def __init__(self, request: Request) -> None:
        # The proxy that speaks HTTPS says so; who lies about it harms a cookie of their own.
        proto = request.headers.get("x-forwarded-proto", request.url.scheme)
        is_secure = proto == "https"
        # Browsers take a cookie of this name from this host alone.
        self._name = f"__Host-{_COOKIE}" if is_secure else _COOKIE
        self._is_secure = is_secure
        found = request.cookies.get(self._name, "")
        self._is_new = not (len(found) == _TOKEN_CHARACTERS and found.isascii())
        self._value = secrets.token_urlsafe(32) if self._is_new else found

    def token(self, access: Access) -> str:
        """Return what the forms of a viewer hold."""
        return hmac.new(self._value.encode(), access.name.encode(), hashlib.sha256).hexdigest()

    def remember(self, response: Response) -> None:
        """Give the browser its cookie."""
        if self._is_new:
            response.set_cookie(
                self._name, self._value, path="/", secure=self._is_secure, httponly=True, samesite="strict"
            )

    def refused(self, request: Request, access: Access, given: object) -> Response | None:
        """Return the refusal of a form that another site may have sent, else None."""
        if not is_own_origin(request):
            return refusal(403, "refused: the form was not sent by the dashboard's own page")
        is_right = (
            not self._is_new
            and isinstance(given, str)
            and hmac.compare_digest(given.encode(), self.token(access).encode())
        )
        return (
            None if is_right else refusal(403, "refused: the form is of another session; open the page anew")
        )


def is_own_origin(request: Request) -> bool:
    """Return whether a browser sent the request from a page of the same host."""
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    # The scheme may be that of a proxy before us.
    return found.scheme in {"http", "https"} and bool(host) and found.netloc.lower() == host.lower()
