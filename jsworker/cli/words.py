"""Values in words for people."""

from datetime import UTC, datetime
from typing import Any

from jsworker.core.names import printable
from jsworker.ownership.queries.reading import FarTime

_LONGEST_CELL = 300
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def seconds_in_words(seconds: float) -> str:
    """Return a duration in its largest unit: ``42s``, ``3m``, ``5h``, ``2d``."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"


def since(time: datetime | None) -> str:
    """Return how long ago something was."""
    if time is None or isinstance(time, FarTime):
        return cell(time)
    return seconds_in_words((datetime.now(UTC) - time).total_seconds())


def until(time: datetime) -> str:
    """Return in how long something will be."""
    if isinstance(time, FarTime):
        return cell(time)
    return seconds_in_words((time - datetime.now(UTC)).total_seconds())


def cell(value: Any) -> str:
    """Return a value for one line: no control characters, not too long."""
    return "" if value is None else printable(str(value), _LONGEST_CELL)


def headline(text: str | None) -> str:
    """Return the first line of a text."""
    return cell(text.strip().partition("\n")[0]) if text else ""


def moment(time: datetime | None, *, milliseconds: bool = False) -> str:
    """Return a time for people: local, to the second."""
    if time is None or isinstance(time, FarTime):
        return cell(time)
    local = time.astimezone()
    text = f"{local:%Y-%m-%d %H:%M:%S}"
    return f"{text}.{local.microsecond // 1000:03d}" if milliseconds else text
