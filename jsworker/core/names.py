"""The rules for names that travel in subjects, keys and rows, and how foreign text is shown in one line.

Checked names are exactly ``str``: a member of ``class Kind(str, Enum)`` is formatted as ``Kind.MEMBER``.
"""

import ipaddress
import re
import shlex
from collections.abc import Callable
from typing import Any

from jsworker.core.errors import InvalidName

_KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_KEY_CHARACTERS = 255
_LONGEST_CELL = 300
_NO_CONTROLS = re.compile("[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*").fullmatch


def check_kind(kind: str) -> str:
    """Return ``kind`` when it may name a kind of job: one token of a NATS subject, so it holds no dot."""
    if not is_kind(kind):
        raise InvalidName(f"kind {shown(kind)} must match ^[a-z0-9][a-z0-9_-]{{0,63}}$")
    return str.__str__(kind)


def is_kind(name: str) -> bool:
    """Return whether this may name a kind of job."""
    return isinstance(name, str) and _KIND.fullmatch(name) is not None


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_unique_key(key: str) -> str:
    """Return ``key`` when it is text of 1 to 255 printable characters (``str.isprintable``)."""
    return check_text(key, "unique key")


def check_step_name(name: str) -> str:
    """Return ``name`` when it may name a step of a job, by the rule of unique keys."""
    return check_text(name, "step")


def check_limit_key(key: str) -> str:
    """Return ``key`` when limits can count by it, by the rule of unique keys."""
    return check_text(key, "limit key")


def check_limit_key_of_row(key: str) -> str:
    """Return ``key`` when a job's row can have it, so that operators can act on every existing key.

    It allows keys that ``check_limit_key`` refuses: other languages and versions of Python write rows too.
    """
    return check_text(key, "limit key", _NO_CONTROLS)


def check_text(name: str, what: str, allowed: Callable[[str], Any] = str.isprintable) -> str:
    """Return ``name`` when it is text of 1 to 255 allowed characters; else an error names ``what`` it is."""
    if not isinstance(name, str) or not 1 <= len(name) <= _KEY_CHARACTERS or not allowed(name):
        raise InvalidName(f"{what} {shown(name)} must be text of 1 to {_KEY_CHARACTERS} printable characters")
    return str.__str__(name)


def kebab_case(name: str) -> str:
    """Return a class name in kebab-case: ``AnalyzeRepo`` becomes ``analyze-repo``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name)
    return words.strip("_").lower()


def short_id(job_id: object) -> str:
    """Return the last eight digits of a job's id; the first ones are the same for all jobs of a minute."""
    return str(job_id)[-8:]


def shown(value: object) -> str:
    """Return a value for an error line: quoted, control characters escaped, cut at 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str, limit: int) -> str:
    """Return text for one line: control characters as escapes, at most ``limit`` characters."""
    line = _cut(text, limit)
    if line.isprintable():
        return line
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line), limit)


def cell(value: object) -> str:
    """Return a value for one line, as ``printable`` does, up to 300 characters; None is empty."""
    return "" if value is None else printable(str(value), _LONGEST_CELL)


def headline(text: str | None) -> str:
    """Return the first line of a text, as ``cell`` does."""
    return cell(text.strip().partition("\n")[0]) if text else ""


def storable(text: str) -> str:
    """Return text with NUL and lone surrogates, which PostgreSQL does not store, as escapes."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def shell_word(text: str) -> str:
    """Return text as one word for bash or zsh; what is not printable is escaped, as ``$'…'`` allows."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (c if c.isprintable() and c not in "\\'" else f"\\U{ord(c):08x}" for c in text)
    return f"$'{''.join(escaped)}'"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
