"""URLs of servers: what they may look like, their parts, and how they are shown without secrets."""

import re

from jsworker.core.names import shown
from jsworker.core.settings.variables import refused, variable_of

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^:/?#@,\s\[\]]{%s})(?::\d{1,5})?"
_DATABASE_URL = re.compile(
    r"(?P<scheme>postgresql|postgresql\+psycopg|postgres)://"
    r"(?:(?P<user>[^:/?#@\s]*)(?::(?P<password>[^/?#@\s]*))?@)?"
    rf"(?P<place>{_HOST % '0,'}(?:/[^?#@\s]*)?(?:\?[^#@\s]*)?)"
)
NATS_SERVER = re.compile(rf"(?:nats|tls)://(?:[^/?#@\s]*@)?{_HOST % '1,'}/?")
_SECRET_IN_QUERY = re.compile(r"([?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


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
    return f"{variable_of(name)}={shown(redact_url(url))}" if "://" in url else variable_of(name)
