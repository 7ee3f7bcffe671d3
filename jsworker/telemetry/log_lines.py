"""The two forms of a log line: JSON with every field, and words for people."""

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from structlog.typing import EventDict, WrappedLogger

from jsworker.core.names import printable, short_id
from jsworker.core.tracebacks import from_users_code, unshown

LONGEST_VALUE: Final = 2_000
"""Characters that a line shows of one value."""
LONGEST_TRACEBACK: Final = 8_000
MOST_LEVELS: Final = 10
"""How deep a line shows values within values, some of which hold themselves."""
LONGEST_INTEGER: Final = 2_000
"""Bits; Python refuses to write the digits of one that is much longer."""

CLEAR_LINE: Final = "\x1b[K"
"""Clears the rest of the terminal's line, which a temporary line may have left."""

_WORDS: Final = {
    "job.error": "attempt failed",
    "job.failed": "failed for good",
    "job.released": "handed back",
    "job.cleared": "taken back",
    "job.lost": "lost: it is another run's by now",
    "job.fenced": "stopped itself: its heartbeats were not answered",
    "job.skipped": "message skipped",
    "job.stop_ignored": "goes on although it was told to stop",
    "supervisor.stopping": "stopping",
}
"""Words for events whose name alone does not say what happened."""
_EVENT: Final = re.compile(r"[a-z]+\.[a-z_]+")
_BARE: Final = re.compile(r"[\w.:/@%+,~-]+")
_COLOURS: Final = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}
_APART: Final = frozenset({"timestamp", "level", "event", "job_id", "kind", "exception", "at"})
_OF_JOBS: Final = frozenset({"fencing_token", "worker_id"})
"""Fields that are left out of lines about a job; `jsworker job` shows them."""
_MESSAGES: Final = ("error", "reason")
"""Fields that hold whole sentences; the first of them that is present ends the line."""


def json_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Make every value a JSON value, printable and of bounded length; a traceback keeps its lines."""
    fields = {printable(_text(name), 200): _plain(value) for name, value in event.items()}
    if (trace := _trace(event)) is not None:
        fields["exception"] = "\n".join(_traceback_lines(trace))
    return fields


def console_line(_: WrappedLogger, __: str, event: EventDict, *, colours: bool, clears: bool) -> str:
    """Return a line for people: local time, the event in words, short ids, and below it the traceback if any.

    With ``clears`` it first clears the line that the cursor is in.
    """
    level = str(event["level"])
    mark = f"{level:<8}"
    if colours:
        mark = f"\x1b[{_COLOURS.get(level, '0')}m{mark}\x1b[0m"
    time = datetime.fromisoformat(event["timestamp"]).astimezone().strftime("%H:%M:%S")
    kind, job_id = event.get("kind"), event.get("job_id")
    subject = [] if kind is None else [_text(kind)]
    subject += [] if job_id is None else [short_id(_text(job_id))]
    words = [printable(part, LONGEST_VALUE) for part in (*subject, _in_words(event))]
    left_out = _APART if job_id is None else _APART | _OF_JOBS
    message = next((name for name in _MESSAGES if event.get(name) is not None), None)
    pairs = [
        f"{printable(_text(name), 200)}={_value(value)}"
        for name, value in event.items()
        if value is not None and name != message and name not in left_out
    ]
    line = " ".join([time, mark, *words]) + (f" ({', '.join(pairs)})" if pairs else "")
    if message is not None:
        line += f": {printable(_text(event[message]), LONGEST_VALUE)}"
    if event.get("at") is not None:
        line += f" at {printable(_text(event['at']), LONGEST_VALUE)}"
    if (trace := _trace(event)) is not None:
        line += "".join(f"\n  {part}" for part in _traceback_lines(from_users_code(trace)))
    return CLEAR_LINE + line if clears else line


def _in_words(event: EventDict) -> str:
    name = _text(event["event"])
    # With the reason of PostgreSQL's refusal: the worker still owns the job.
    if name == "job.lost" and event.get("reason") is not None:
        return "not settled"
    if name in _WORDS or not _EVENT.fullmatch(name):
        return _WORDS.get(name, name)
    return re.sub(r"[._]", " ", name.removeprefix("job."))  # the line names the job itself


def _value(value: Any) -> str:
    """Return a value for people: quoted where it could be taken for the next field."""
    try:
        match value:
            case float():
                return f"{value:.3g}" if abs(value) < 1_000 else f"{value:.0f}"
            case list() | tuple() if value and all(
                isinstance(part, str) and _BARE.fullmatch(part) for part in value
            ):
                return printable(",".join(value), LONGEST_VALUE)
            case Mapping() | list() | tuple() | set() | frozenset():
                return str(_plain(value))
    except Exception as fault:  # noqa: BLE001 -- as in ``_plain``
        return repr(unshown(fault))
    text = _text(value)
    cut = text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
    return cut if _BARE.fullmatch(cut) else printable(repr(cut), LONGEST_VALUE)


def _trace(event: EventDict) -> str | None:
    trace = event.get("exception")
    return trace if type(trace) is str else None  # isinstance() may call code of the user's


def _traceback_lines(trace: str) -> Iterator[str]:
    """Yield the lines of a traceback; of a long one only the end, which holds the error itself."""
    cut = trace if len(trace) <= LONGEST_TRACEBACK else f"…{trace[1 - LONGEST_TRACEBACK :]}"
    for line in cut.splitlines():
        yield printable(line, LONGEST_VALUE)


def _plain(value: Any, level: int = 0) -> Any:
    try:
        match value:
            case None | bool():
                return value
            case int() if value.bit_length() <= LONGEST_INTEGER:
                return value
            case float() if math.isfinite(value):
                return value
            case Mapping() | list() | tuple() | set() | frozenset() if level == MOST_LEVELS:
                plain: Any = "…"
            case Mapping():
                items = value.items()
                plain = {printable(_text(name), 200): _plain(item, level + 1) for name, item in items}
            case list() | tuple() | set() | frozenset():
                plain = [_plain(item, level + 1) for item in value]
            case _:
                return printable(_text(value), LONGEST_VALUE)
        return plain if len(str(plain)) <= LONGEST_VALUE else printable(str(plain), LONGEST_VALUE)
    except Exception as fault:  # noqa: BLE001 -- of a class that is the user's
        return unshown(fault)


def _text(value: Any) -> str:
    try:
        match value:
            case datetime():
                return value.isoformat()
            case BaseException():
                return f"{type(value).__name__}: {value}"
            case int() if value.bit_length() > LONGEST_INTEGER:
                return f"an integer of {value.bit_length()} bits"
            case _:
                return str(value)
    except Exception as fault:  # noqa: BLE001 -- as in ``_plain``; the code that logs must not pay for it
        return unshown(fault)
