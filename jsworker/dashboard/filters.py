"""How pages show values: times as distances, with the exact time on hover; numbers; durations; JSON."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from jinja2 import pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from jsworker.core.names import printable, short_id
from jsworker.core.priorities import PRIORITIES
from jsworker.core.strict_json import plain
from jsworker.ownership.pool import FarTime

_UNITS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "m"), (1.0, "s"))
_LONGEST_LINE: Final = 200
_TYPE: Final = re.compile(r"[A-Za-z_][\w.]{0,99}(?=:|$)", re.ASCII | re.MULTILINE)
_EXCEPTION: Final = re.compile(r"(Error|Exception|Timeout|Warning|Exit|Interrupt|Group)$")
_TRACEBACK: Final = "Traceback (most recent call last):"
# The reason that a worker writes when a job pauses its key.
_JOB_PAUSED: Final = re.compile(r"\b(job [0-9a-f-]{36}): .*", re.DOTALL)
_NOTHING: Final = Markup('<span class="none">–</span>')
_ICONS: Final = {
    "scheduled": "◷",
    "held": "‖",
    "queued": "○",
    "processing": "▶",
    "completed": "✓",
    "failed": "✕",
    "cancelled": "⊘",
}


def duration(seconds: float | timedelta | None) -> str | Markup:
    """Return a duration in its two largest units: ``3.2 s``, ``4 m 10 s``, ``2 h 5 m``, ``3 d 4 h``."""
    if seconds is None:
        return _NOTHING
    left = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    if not math.isfinite(left):  # a row may hold anything
        return f"{left} s"
    if left < 1:
        return f"{max(left, 0.0) * 1000:.3g} ms"
    if left < 60:
        return f"{left:.1f} s" if left < 10 else f"{left:.0f} s"
    (size, unit), (small, name) = next(units for units in pairwise(_UNITS) if left >= units[0][0])
    rest = int(left % size // small)
    return f"{int(left // size)} {unit}" + (f" {rest} {name}" if rest else "")


@pass_context
def ago(context: Context, time: datetime | None) -> str | Markup:
    """Return how long ago a time was, or in how long it will be; exact on hover."""
    if time is None or isinstance(time, FarTime):
        return exact(time)
    seconds = (context["now"] - time).total_seconds()
    distance = _coarse(abs(seconds))
    words = "now" if abs(seconds) < 1 else f"{distance} ago" if seconds > 0 else f"in {distance}"
    return _time(time, words)


@pass_context
def since(context: Context, time: datetime | None) -> str | Markup:
    """Return how long something has lasted since a time; exact on hover."""
    if time is None or isinstance(time, FarTime):
        return exact(time)
    return _time(time, str(duration(max((context["now"] - time).total_seconds(), 0.0))))


def exact(time: datetime | None) -> str | Markup:
    """Return a time to the millisecond, in UTC."""
    if time is None:
        return _NOTHING
    return str(time) if isinstance(time, FarTime) else _time(time, moment(time))


def _time(time: datetime, words: str) -> Markup:
    stored = time.astimezone(UTC)
    form = Markup('<time datetime="{}" title="{}">{}</time>')
    return form.format(stored.isoformat(), f"{moment(stored)} UTC", words)


def moment(time: datetime) -> str:
    """Return a time to the millisecond, in UTC, as text."""
    stored = time.astimezone(UTC)
    return f"{stored:%Y-%m-%d %H:%M:%S}.{stored.microsecond // 1000:03d}"


def _coarse(seconds: float) -> str:
    size, unit = next((units for units in _UNITS if seconds >= units[0]), _UNITS[-1])
    return f"{int(seconds // size)} {unit}"


def number(value: float | None) -> str | Markup:
    """Return a number with separated thousands; below 10, a fraction has one digit."""
    if value is None:
        return _NOTHING
    is_small = isinstance(value, float) and 0 < abs(value) < 10 and value != int(value)
    return f"{value:.1f}" if is_small else f"{value:,.0f}".replace(",", "\u202f")


def mebibytes(value: int | None) -> str | Markup:
    """Return a number of bytes in MiB."""
    return _NOTHING if value is None else f"{number(value // 2**20)} MiB"


def plural(count: int, what: str) -> str:
    """Return how many there are: ``1 job``, ``2 jobs``."""
    return f"{number(count)} {what}" + ("" if count == 1 else "s")


def sparkline(values: Sequence[int], sample: int | None = None) -> Markup:
    """Return a row of small bars, the last value at the right; the numbers are its title.

    ``sample``: the values count at most so many of the latest items; None: all items.
    """
    most = max(values, default=0) or 1
    height, width = 20, 4
    bars = "".join(
        f"M{place * width} {height}v-{tall}h{width - 1}v{tall}z"
        for place, value in enumerate(values)
        if (tall := max(round(value / most * height), 1 if value else 0))
    )
    form = Markup(
        '<svg class="sparkline" viewBox="0 0 {} {}" width="{}" height="{}"><title>{}</title>'
        '<path d="{}"/></svg>'
    )
    # A count that fills the sample is shown with +: there may be more.
    every, last = (
        number(each) if sample is None else at_most(each, sample)
        for each in (sum(values), values[-1] if values else 0)
    )
    total = f"{every} in {len(values)} hours, {last} in the last"
    if sample is not None:
        total += f", of the last {number(sample)}"
    return form.format(len(values) * width, height, len(values) * width, height, total, bars)


def at_most(value: int, bound: int) -> str:
    """Return a number, with + if counting ended at the bound."""
    return f"{number(value)}+" if value >= bound else str(number(value))


def state(status: str) -> Markup:
    """Return a status with its sign and its colour."""
    known = status if status in _ICONS else "unknown"
    form = Markup('<span class="state state-{}"><span aria-hidden="true">{}</span> {}</span>')
    return form.format(known, _ICONS.get(status, "?"), "running" if status == "processing" else status)


def line(text: object) -> str | Markup:
    """Return text for one line."""
    return _NOTHING if text is None or text == "" else printable(str(text).strip(), _LONGEST_LINE)


def lines(text: str) -> str:
    """Return text of several lines as it is, but for characters that would hide or reorder others."""
    return "\n".join(each if each.isprintable() else _escaped(each) for each in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def headline(text: str | None) -> str | Markup:
    """Return the first line of an error; see ``line``."""
    return line((text or "").strip().partition("\n")[0])


def error_shown(text: str | None, *, payloads: bool) -> str | None:
    """Return an error; unless the viewer may see payloads, only its type: a message may hold parts of them.

    The text with which a job gave up has no type: the first word counts as one only if a traceback follows,
    or if it ends as names of exceptions do.
    """
    if payloads or text is None:
        return text
    found = _TYPE.match(text.strip())
    is_type = found is not None and (_TRACEBACK in text or _EXCEPTION.search(found[0]) is not None)
    return found[0] if found and is_type else "an error"


def pause_reason(text: str, payloads: bool) -> str:  # noqa: FBT001 -- a filter of templates
    """Return why something is paused; unless the viewer may see payloads, a job's pause shows only its id.

    The text after the id, which is left out, is the job's error. ``text`` may begin with other words.
    """
    return text if payloads else _JOB_PAUSED.sub(r"\1", text)


def as_json(value: Any, indent: int | None = 2, *, most: int) -> tuple[str, bool]:
    """Return a value as JSON, and whether it was cut to ``most`` characters; ``indent`` None: on one line.

    The rest is not encoded: a row may hold any number of megabytes, and all viewers would wait for it.
    """
    encoder = json.JSONEncoder(indent=indent, ensure_ascii=False, default=lambda other: str(plain(other)))
    parts, size = list[str](), 0
    for part in encoder.iterencode(value):
        parts.append(part)
        size += len(part)
        if size > most:
            return "".join(parts)[:most], True
    return "".join(parts), False


def priority(value: int | str) -> str:
    """Return the name of a priority."""
    return PRIORITIES[value] if isinstance(value, int) else value


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    each.__name__: each
    for each in (
        *(ago, at_most, duration, exact, headline, line, lines, mebibytes, number),
        *(plural, pause_reason, sparkline, priority, short_id, since, state),
    )
}
"""By the names that templates use."""
