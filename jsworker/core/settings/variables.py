"""Environment variables: their names, their values (secrets also from files), and faults in them."""

import difflib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from jsworker.core.names import printable, shown

PREFIX = "JSWORKER_"
FROM_FILES = ("database_url", "database_password", "nats_url", "nats_user", "nats_password", "nats_token")
HIDDEN = frozenset(FROM_FILES) - {"nats_user"}
_SERVICE_LINK = re.compile(r"\w+_(?:SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(?:TCP|UDP|SCTP)\w*)")

LONGEST_SECONDS = 1_000_000_000
"""Seconds (31 years) that every clock, interval and count of nanoseconds can hold."""


def variable_of(name: str) -> str:
    """Return the environment variable of a setting: ``ack_wait`` is ``JSWORKER_ACK_WAIT``."""
    return PREFIX + name.upper()


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


def from_environment(name: str) -> Any:
    """Return a variable's text, None when it is not set, or the fault that was found on the way."""
    variable = variable_of(name)
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
    """Return the line that warns of a variable which is none of these settings, with the likely one."""
    if variable == "JSWORKER_HEARTBEAT_TIMEOUT":  # the command line's other name for the watchdog's
        close = ["WATCHDOG_TIMEOUT"]
    else:
        known = [one.removeprefix(PREFIX) for one in known_variables(names)]
        close = difflib.get_close_matches(variable.removeprefix(PREFIX), known, n=1)
    advice = f": did you mean {PREFIX}{close[0]}?" if close else ""
    return f"{printable(variable, 200)} is no setting{advice}"


def is_service_link(variable: str, value: str) -> bool:
    """Return whether Kubernetes set it, for a Service whose name begins with jsworker."""
    return bool(_SERVICE_LINK.fullmatch(variable)) or value.startswith(("tcp://", "udp://", "sctp://"))
