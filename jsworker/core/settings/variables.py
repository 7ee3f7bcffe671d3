"""How a setting is named outside, and how a fault names it: variable, value, rule."""

import math
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from jsworker.core.names import printable, shown

PREFIX = "JSWORKER_"

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
