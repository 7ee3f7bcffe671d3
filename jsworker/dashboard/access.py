"""Who may do what: authorisation, and checks that keep other web pages from acting in a viewer's name."""

import hashlib
import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jsworker.core.names import is_loopback

ACTIONS: Final = frozenset(
    {
        *("retry", "cancel", "clear", "priority", "reschedule", "enqueue"),
        *("pause", "schedules", "workflows", "workers", "dead-messages", "repair"),
    }
)
"""Names for ``Access.actions``: actions on jobs; pausing kinds and keys, and limits; actions on schedules,
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
"""Headers of every response; static files have another cache-control, which lets browsers keep them."""

_COOKIE: Final = "jsworker-csrf"
_TOKEN_CHARACTERS: Final = 43
_FORWARDED: Final = ("forwarded", "via", "x-real-ip", "x-forwarded-")
"""Beginnings of the names of headers that proxies add."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a viewer may do. Any access allows reading, but without payloads.

    Attributes:
        actions: which of ``ACTIONS``.
        payloads: whether payloads, results, checkpoints, steps and texts of errors are shown, and why jobs
            snooze or pause their keys. Encrypted values are never shown.
        name: the viewer's name, for the audit.
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
        """Return whether the viewer may take this action."""
        return action in self.actions


Access.READ = Access()
Access.ALL = Access(ACTIONS, payloads=True)

Allowed: TypeAlias = Access | Response | None
Authorize: TypeAlias = Callable[[Request], Allowed | Awaitable[Allowed]]
"""Returns the access of a request's sender; None: no access. A response (to a login) is sent as it is."""


async def access_of(
    request: Request, authorize: Authorize | None, hosts: Collection[str] | None
) -> Access | Response:
    """Return the access of a request's sender, or the response to send instead."""
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
    # A proxy on this machine may pass on a request of another machine.
    if any(name.startswith(_FORWARDED) for name in request.headers):
        return False
    # A request without an address came through a socket file, as from a proxy.
    return request.client is not None and is_loopback(request.client.host)


def host_name(host: str) -> str:
    """Return the name of a ``Host`` header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def refusal(status: int, line: str) -> Response:
    """Return a response of one line."""
    return PlainTextResponse(f"{line}\n", status)


class CsrfTokens:
    """Binds a form to the browser that it was shown in, by a cookie that other sites' requests do not carry.

    The server stores nothing of it, so the next request may go to another process.
    """

    def __init__(self, request: Request) -> None:
        # A proxy that serves HTTPS sets this header; a client that forges it affects only its own cookie.
        proto = request.headers.get("x-forwarded-proto", request.url.scheme)
        is_secure = proto == "https"
        # Browsers accept a cookie whose name begins so only from this host itself.
        self._name = f"__Host-{_COOKIE}" if is_secure else _COOKIE
        self._is_secure = is_secure
        found = request.cookies.get(self._name, "")
        self._is_new = not (len(found) == _TOKEN_CHARACTERS and found.isascii())
        self._value = secrets.token_urlsafe(32) if self._is_new else found

    def token(self, access: Access) -> str:
        """Return the token for the forms of a viewer."""
        return hmac.new(self._value.encode(), access.name.encode(), hashlib.sha256).hexdigest()

    def remember(self, response: Response) -> None:
        """Set the browser's cookie, unless it has one."""
        if self._is_new:
            response.set_cookie(
                self._name, self._value, path="/", secure=self._is_secure, httponly=True, samesite="strict"
            )

    def is_own(self, access: Access, given: object) -> bool:
        """Return whether a form holds the token that was shown to this viewer in this browser."""
        return (
            not self._is_new
            and isinstance(given, str)
            and hmac.compare_digest(given.encode(), self.token(access).encode())
        )


def is_own_origin(request: Request) -> bool:
    """Return whether a browser sent the request from a page of the same host."""
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    return is_own_address(request, request.headers.get("origin", ""))


def is_own_address(request: Request, address: str) -> bool:
    """Return whether an address is one of the host to which the request was sent."""
    host = request.headers.get("host", "")
    try:
        found = urlsplit(address)
    except ValueError:
        return False
    # The scheme is not compared: a proxy in front of the dashboard may use another one.
    return found.scheme in {"http", "https"} and bool(host) and found.netloc.lower() == host.lower()
