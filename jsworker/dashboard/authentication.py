"""Logins that come with the dashboard: a file of hashed passwords, and a proxy that authenticates users."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jsworker.core.errors import SettingsError
from jsworker.core.names import shown
from jsworker.dashboard.access import ACTIONS, Access

_log: Final = logging.getLogger(__name__)
_COST, _BLOCK, _PARALLEL = 2**15, 8, 1
_MEMORY_BYTES: Final = 64 * 1024 * 1024
_MOST_REMEMBERED: Final = 1000
_MOST_WAITING: Final = 20
_BUSY_SECONDS: Final = 2
"""About as long as ``_MOST_WAITING`` checks take."""
_FIELDS: Final = 3
_PROOF: Final = "x-jsworker-secret"
_LEAST_SECRET: Final = 16


def access_named(rights: str, name: str = "unnamed") -> Access:
    """Return the access for words separated by commas: ``read``, ``payloads``, ``all``, or actions.

    ``all`` is every action, and payloads. Raises ValueError for another word.
    """
    words = {word.strip() for word in rights.split(",")} - {""}
    unknown = words - ACTIONS - {"read", "all", "payloads"}
    if unknown or not words:
        known = ", ".join(["read", "payloads", "all", *sorted(ACTIONS)])
        raise ValueError(f"rights {shown(rights)} must be of these, separated by commas: {known}")
    everything = "all" in words
    actions = ACTIONS if everything else words & ACTIONS
    return Access(actions, payloads=everything or "payloads" in words, name=name)


def login_line(name: str, password: str, rights: str) -> str:
    """Return the line of a password file for a login: its name, the hash of its password, its rights.

    Raises ValueError for a name or rights that a line cannot hold.
    """
    if not name.isprintable() or not name.strip() or ":" in name:
        raise ValueError(f"login {shown(name)} must be printable characters without a colon")
    if name.startswith(("#", " ")):  # the line would be a comment, or lose the space
        raise ValueError(f"login {shown(name)} must not begin with # or a space")
    access_named(rights)
    salt = secrets.token_bytes(16)
    return f"{name}:scrypt${_text(salt)}${_text(_hashed(password, salt))}:{rights}"


class PasswordFile:
    """Asks for name and password, and checks them by a file with a line for each login; see ``login_line``.

    A file that has changed is read again. If a line is wrong then, a warning is logged and the previous
    logins stay in use; if the file cannot be read, that is logged, and all logins are refused with 503.
    Lines that begin with # are ignored. Use it only behind HTTPS.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the file; SettingsError: it cannot be read, or a line is wrong."""
        self._path = Path(path)
        self._stamp: tuple[int, ...] = ()
        self._logins: dict[str, tuple[bytes, bytes, Access]] = {}
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, Access] = {}
        # Each check takes 32 MiB and a tenth of a second.
        self._one_at_a_time = asyncio.Lock()
        self._checks = 0
        self._reported = ""
        self._read()

    async def __call__(self, request: Request) -> Access | Response:
        """Return the access of a request's login, a response that asks for one, or 503 if too many wait."""
        name, password = _credentials(request.headers.get("authorization", ""))
        if name and (found := await self._checked(name, password)):
            return found
        challenge = {"www-authenticate": 'Basic realm="jsworker", charset="UTF-8"'}
        return PlainTextResponse("log in\n", 401, challenge)

    async def _checked(self, name: str, password: str) -> Access | Response | None:
        try:
            self._read()
        except SettingsError as error:
            if str(error) != self._reported:
                _log.warning("%s; all logins are refused", error)
            self._reported = str(error)
            return PlainTextResponse("the logins cannot be read now; the dashboard's log says why\n", 503)
        self._reported = ""
        # Remembered, because a browser sends its login with every request.
        seen = hmac.new(self._key, f"{name}:{password}".encode(), hashlib.sha256).digest()
        if (known := self._known.get(seen)) is not None:
            return known
        if self._checks > _MOST_WAITING:  # one of them is running
            again = {"retry-after": str(_BUSY_SECONDS)}
            return PlainTextResponse("too many logins are being checked; try again\n", 503, again)
        logins = self._logins
        salt, wanted, access = logins.get(name, (b"", b"", Access.READ))
        self._checks += 1
        try:
            async with self._one_at_a_time:
                # An unknown name takes as long as a known one.
                found = await asyncio.to_thread(_hashed, password, salt or self._key[:16])
        finally:
            self._checks -= 1
        if logins is not self._logins:  # the file has changed meanwhile
            return await self._checked(name, password)
        if not hmac.compare_digest(found, wanted):
            return None
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[seen] = access
        return access

    def _read(self) -> None:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            content = self._path.read_bytes()
        except OSError as error:
            raise SettingsError(f"logins {self._path}: {error.strerror}") from None
        try:
            self._logins = _logins(self._path, content)
        except SettingsError as error:
            if not self._stamp:
                raise
            _log.warning("%s; the previous logins stay in use", error)
        else:
            self._known.clear()
        self._stamp = stamp


class ProxyHeaders:
    """Takes the user from a proxy that has asked an identity provider, as oauth2-proxy does.

    The proxy proves itself by the header ``X-Jsworker-Secret``; without it, a request is refused. It must
    remove this header and those of the user and the groups from the requests that it receives; a request
    with one of them twice is refused. Names are read as UTF-8.
    """

    def __init__(
        self,
        secret: str,
        *,
        groups: Mapping[str, Access] | None = None,
        everybody: Access | None = None,
        user_header: str = "x-forwarded-user",
        groups_header: str = "x-forwarded-groups",
    ) -> None:
        """Define the access of users and groups.

        Args:
            secret: what the proxy sends; at least 16 characters.
            groups: the access of each group's members; members of several groups have the rights of all.
            everybody: the access of users of none of these groups; None: no access.
            user_header, groups_header: where the proxy names the user, and the groups separated by commas.

        Raises:
            SettingsError: the secret is too short.
        """
        if len(secret) < _LEAST_SECRET:
            raise SettingsError(f"the secret of the proxy must have at least {_LEAST_SECRET} characters")
        self._secret = secret.encode()
        self._groups = dict(groups or {})
        self._everybody = everybody
        self._headers = user_header, groups_header

    def __call__(self, request: Request) -> Access | None:
        """Return the access of a request's user; None: no access, or the request is not from the proxy."""
        given = _values(request, _PROOF)
        if len(given) != 1 or not hmac.compare_digest(given[0], self._secret):
            return None
        users, named = (_values(request, header) for header in self._headers)
        if len(users) != 1 or not users[0] or len(named) > 1:
            return None
        user, groups = (b",".join(values).decode(errors="replace") for values in (users, named))
        member_of = {group.strip() for group in groups.split(",")}
        held = [access for group, access in self._groups.items() if group in member_of]
        if not held and self._everybody is not None:
            held = [self._everybody]
        if not held:
            return None
        actions = frozenset[str]().union(*(access.actions for access in held))
        return Access(actions, payloads=any(access.payloads for access in held), name=user)


def _values(request: Request, header: str) -> list[bytes]:
    """Return a header's values as they came; Starlette reads them as Latin-1."""
    return [value.encode("latin-1") for value in request.headers.getlist(header)]


def _logins(path: Path, content: bytes) -> dict[str, tuple[bytes, bytes, Access]]:
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise SettingsError(f"logins {path}: must be UTF-8 text") from None
    return dict(
        _login(f"logins {path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    )


def _login(where: str, line: str) -> tuple[str, tuple[bytes, bytes, Access]]:
    parts = line.strip().split(":")
    if len(parts) == _FIELDS and parts[1].count("$") == _FIELDS - 1 and parts[1].startswith("scrypt$"):
        name, (_, salt, wanted) = parts[0], parts[1].split("$")
        try:
            return name, (_bytes(salt), _bytes(wanted), access_named(parts[2], name))
        except binascii.Error:
            pass
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
    raise SettingsError(f"{where}: must be as `jsworker dashboard --new-login NAME` prints it")


def _credentials(header: str) -> tuple[str, str]:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:  # no base64, or no UTF-8
        return "", ""
    return name, password


def _hashed(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=_COST, r=_BLOCK, p=_PARALLEL, maxmem=_MEMORY_BYTES)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
