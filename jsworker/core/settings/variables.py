"""Environment variables: their names, values (secrets also from files) and URLs, and faults in them."""

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic_core import PydanticCustomError

from jsworker.core.names import printable, shown

PREFIX = "JSWORKER_"
FROM_FILES = (
    *("database_url", "database_password", "nats_url", "nats_user", "nats_password", "nats_token"),
    "encryption_keys",
)
HIDDEN = frozenset(FROM_FILES) - {"nats_user"}
TEST_SERVERS: Final = MappingProxyType(
    {"database_url": "JSWORKER_TEST_DATABASE_URL", "nats_url": "JSWORKER_TEST_NATS_URL"}
)
"""The variables that name servers for tests. Tests ignore those of workers, which may name real servers."""
_SERVICE_LINK = re.compile(r"\w+_(?:SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(?:TCP|UDP|SCTP)\w*)")

LONGEST_SECONDS = 1_000_000_000
"""Seconds (31 years) that every clock, interval and count of nanoseconds can hold."""

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^:/?#@,\s\[\]]{%s})(?::\d{1,5})?"
_DATABASE_URL = re.compile(
    r"(?P<scheme>postgresql|postgresql\+psycopg|postgres)://"
    r"(?:(?P<user>[^:/?#@\s]*)(?::(?P<password>[^/?#@\s]*))?@)?"
    rf"(?P<place>{_HOST % '0,'}(?:/[^?#@\s]*)?(?:\?[^#@\s]*)?)"
)
NATS_SERVER = re.compile(rf"(?:nats|tls)://(?:[^/?#@\s]*@)?{_HOST % '1,'}/?")
_PLACE = re.compile(r"[\w.-]+:\d{4,5}")
"""A host and its port, the commonest of what is no URL; anything else may be a password."""
_SECRET_IN_QUERY = re.compile(r"([?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


def variable_of(name: str) -> str:
    """Return the environment variable of a setting: ``ack_wait`` is ``JSWORKER_ACK_WAIT``."""
    return PREFIX + name.upper()


def changed_environment(environment: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
    """Return an environment in which settings have these values, for another process; None: not set.

    It contains secrets. Files that the environment names for these settings are not read there.
    """
    changed = dict(environment)
    for name, value in values.items():
        secret = getattr(value, "get_secret_value", None)
        # Empty, not left out: every setting that may be None reads it so.
        changed[variable_of(name)] = "" if value is None else str(value if secret is None else secret())
        changed.pop(f"{variable_of(name)}_FILE", None)
    return changed


def broken(rule: str) -> PydanticCustomError:
    """Return a fault: a rule that the value breaks; the line reads ``NAME=value`` and the rule."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def refused(line: str) -> PydanticCustomError:
    """Return a fault as a whole line, for values that must not be shown as they are."""
    return PydanticCustomError("line", "{line}", {"line": line})


def as_given(value: Any) -> str:
    """Return a value as it was written when it is a number, else quoted."""
    if isinstance(value, Path):
        return shown(str(value))
    try:
        number = math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        number = False
    return printable(str(value).strip(), 80) if number else shown(value)


def from_environment(names: Iterable[str]) -> dict[str, Any]:
    """Return for each setting that is set the text of its variable, or the fault found in reading it."""
    found = {name: _given(name, variable_of(name)) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def names_from_files() -> frozenset[str]:
    """Return the settings whose text the environment keeps in files."""
    return frozenset(name for name in FROM_FILES if os.environ.get(f"{variable_of(name)}_FILE"))


def _given(name: str, variable: str) -> Any:
    value = os.environ.get(variable)
    if name not in FROM_FILES:
        return value
    path = os.environ.get(f"{variable}_FILE")
    if path and value:
        return refused(f"{variable} and {variable}_FILE must not be set together: keep one")
    return _content(f"{variable}_FILE", path) if path else value or None


def _content(variable: str, path: str) -> Any:
    """Return a file's text without the newline at its end, or the fault."""
    try:
        text = Path(path).read_text("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        return refused(f"{variable}={shown(path)} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return refused(f"{variable}={shown(path)} must be a text file in UTF-8")
    return text or refused(f"{variable}={shown(path)} must not be an empty file")


def known_variables(names: Iterable[str]) -> list[str]:
    """Return every variable that sets one of these settings."""
    return [variable_of(name) for name in names] + [f"{variable_of(name)}_FILE" for name in FROM_FILES]


def no_setting(variable: str, names: Iterable[str]) -> str:
    """Return the warning line for a variable that is none of these settings; it suggests the likely one."""
    known = known_variables(names)
    if variable in known:  # given by code, as the path of a file
        return f"{variable} is read from the environment only"
    close = likely(variable, (one.removeprefix(PREFIX) for one in known))
    advice = f": did you mean {PREFIX}{close}?" if close else ""
    return f"{printable(variable, 200)} is no setting{advice}"


def likely(name: str, known: Iterable[str]) -> str | None:
    """Return the one of these names, in capitals and without JSWORKER_, that is likely meant, if any."""
    name = name.upper().removeprefix(PREFIX)
    if name == "HEARTBEAT_TIMEOUT":  # the command line's other name for the watchdog's time-out
        return "WATCHDOG_TIMEOUT"
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def is_service_link(variable: str, value: str) -> bool:
    """Return whether Kubernetes set this variable, for a Service whose name begins with jsworker."""
    return bool(_SERVICE_LINK.fullmatch(variable)) or value.startswith(("tcp://", "udp://", "sctp://"))


def redact_url(url: str) -> str:
    """Return a URL without what may be secret, however malformed it is."""
    scheme, found, rest = url.partition("://")
    if not found:
        return "***"
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    if not re.fullmatch(r"[\w.%+~-]*", user) or not (colon or scheme.startswith("postgres")):
        user = "***"  # a NATS user name without a password is a token
    if not at and not re.match(r"(\[[^\]]*\]|[^:/?#]*)(:\d*)?([/?#]|$)", place):
        place = place.partition(":")[0] + ":***"  # user:password of a URL without a host
    secret = f"{user}:***@" if colon and user != "***" else f"{user}@"
    place = _SECRET_IN_QUERY.sub(r"\1***", place)
    return f"{scheme}://{secret}{place}" if at else f"{scheme}://{place}"


def database_parts(url: str) -> dict[str, str]:
    """Return scheme, user, password (both still percent-encoded) and place of a database's URL."""
    if match := _DATABASE_URL.fullmatch(url):
        return match.groupdict(default="")
    if url.startswith(("postgresql://", "postgresql+psycopg://", "postgres://")):
        rule = "must read postgresql://user:password@host:port/database, special characters percent-encoded"
    else:
        rule = "must begin with postgresql://, postgresql+psycopg:// or postgres://"
    raise refused(f"{shown_url('database_url', url)} {rule}")


def shown_url(name: str, url: str) -> str:
    """Return ``VARIABLE=url`` for a fault, without what may be secret."""
    if _PLACE.fullmatch(url):
        return f"{variable_of(name)}={shown(url)}"
    return f"{variable_of(name)}={shown(redact_url(url))}" if "://" in url else variable_of(name)
