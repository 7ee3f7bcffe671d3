"""Log lines, each in one line, as JSON or for people: from events, and from other libraries alike."""

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, Literal, TextIO, cast

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from jsworker.errors import SettingsError
from jsworker.events import EVENT_NAMES, Event, Events
from jsworker.names import printable, shown
from jsworker.observe.line_writer import FLUSH_SECONDS, LineWriter, writer_to

LONGEST_VALUE: Final = 2_000
"""Characters that a line shows of one value."""

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_PER_JOB: Final = frozenset({"job.claimed", "job.started", "job.skipped", "job.progress", "job.completed"})
_WARNINGS: Final = frozenset(
    {
        "job.error",
        "job.failed",
        "job.stalled",
        "job.fenced",
        "job.lost",
        "stale.detected",
        "stale.recovered",
        "recovery.off",
        "heartbeat.failed",
        "database.changed",
        "prune.failed",
        "message.dead",
        "message.refused",
        "message.republished",
        "row.refused",
        "setup.slow",
        "worker.degraded",
    }
)
_ERRORS: Final = frozenset({"job.stop_ignored"})
_TOLD_TOGETHER: Final = frozenset({"job.stalled", "job.cleared"})
"""Of jobs that were taken back together one line tells: a dead pod may have had hundreds."""
_TOGETHER: Final = "stale.recovered"
_HEAD: Final = ("timestamp", "level", "event")
_FIRST: Final = (*_HEAD, "job_id", "kind", "fencing_token", "worker_id", "attempt")
_TAKEN: Final = frozenset({*_HEAD, "exc_info", "stack_info", "exception"})
"""Keys with a meaning of their own for structlog."""

Facts = Callable[[], Mapping[str, Any]]

bound_facts: Final[ContextVar[Facts | None]] = ContextVar("jsworker_bound_facts", default=None)
"""What every line of the code that runs here tells besides its own: the job it works on."""

speaking_worker: Final[ContextVar[str | None]] = ContextVar("jsworker_speaking_worker", default=None)
"""The worker whose code runs here."""

_writers: Final[dict[int, LineWriter]] = {}
"""By the file descriptor they write to, of which a process has one for stderr."""

_COLOURS: Final = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}
_BARE: Final = re.compile(r"[\w.:/@%+,~-]+")


def configure_logs(
    *,
    format: Literal["json", "console"],  # noqa: A002 -- the setting's name
    level: str,
    stream: TextIO | None = None,
) -> None:
    """Send every log line of this process to one stream, one line each.

    What other libraries log at warning and above comes in the same form.

    Args:
        format: ``json``, or ``console`` for people.
        level: the least level: debug, info, warning, error or critical.
        stream: where the lines go; default: stderr.

    Raises:
        SettingsError: there is no such format or level.
    """
    if format not in ("json", "console"):
        raise SettingsError(f"JSWORKER_LOG_FORMAT={shown(format)} must be json or console")
    if level not in _LEVELS:
        raise SettingsError(f"JSWORKER_LOG_LEVEL={shown(level)} must be one of {', '.join(_LEVELS)}")
    out = _stderr() if stream is None else stream
    prepare: list[Processor] = [
        _with_bound_facts,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _traceback_by_its_end,
    ]
    write: list[Processor] = (
        [_json_values, structlog.processors.JSONRenderer()]
        if format == "json"
        else [_console_line(colours=(stream or sys.stderr).isatty() and "NO_COLOR" not in os.environ)]
    )
    structlog.configure(
        processors=[*prepare, _in_order, *write],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
    )
    formatter = ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *prepare],
        processors=[ProcessorFormatter.remove_processors_meta, _in_order, *write],
    )
    _take_foreign_lines(out, max(_LEVELS[level], logging.WARNING), formatter)


def write_line(text: str) -> None:
    """Write a line, or several, of another form behind the log lines; returns at once."""
    _stderr().write(f"{text}\n")


def lines_dropped() -> int:
    """Return how many lines were not written because nobody read stderr."""
    return sum(writer.dropped for writer in _writers.values())


def drain_logs(seconds: float = FLUSH_SECONDS) -> None:
    """Wait until all lines have been read, at most for so long: for ends of a process without ``atexit``."""
    for writer in _writers.values():
        writer.drain(seconds)


def log_events(events: Events, *, worker_id: str | None = None) -> None:
    """Write a line for every event from now on; call ``configure_logs`` first.

    Only events that the configured level lets through are listened to, so that hot paths need not build
    the others.

    Args:
        events: where to listen.
        worker_id: who speaks, in every line whose event names no other worker.
    """
    speaking_worker.set(worker_id)
    logger: FilteringBoundLogger = structlog.get_logger()
    logger = logger.bind(worker_id=worker_id) if worker_id else logger.bind()

    def write(event: Event) -> None:
        level = logging.DEBUG if _is_told_already(event) else level_of(event.name)
        logger.log(level, event.name, **_field_names(event.fields))

    for name in EVENT_NAMES:
        if logger.is_enabled_for(level_of(name)):
            events.on(name, write)


def level_of(name: str) -> int:
    """Return the level at which an event is logged: what happens to every job at debug."""
    if name in _PER_JOB:
        return logging.DEBUG
    if name in _ERRORS:
        return logging.ERROR
    return logging.WARNING if name in _WARNINGS else logging.INFO


def _is_told_already(event: Event) -> bool:
    """Tell whether another line says it: that of all jobs taken back together, or the only job's own."""
    if event.name == _TOGETHER:
        return event.fields.get("jobs") == 1
    return event.name in _TOLD_TOGETHER and event.fields.get("together", 1) > 1


def _field_names(fields: dict[str, Any]) -> dict[str, Any]:
    if _TAKEN.isdisjoint(fields):
        return fields
    return {f"{name}_" if name in _TAKEN else name: value for name, value in fields.items()}


def _stderr() -> "TextIO | LineWriter":
    writer = writer_to(sys.stderr, on_dropped=_tell_dropped)
    return _writers.setdefault(writer.descriptor, writer) if isinstance(writer, LineWriter) else writer


def _tell_dropped(lines: int) -> None:
    structlog.get_logger().warning(
        "log.dropped", lines=lines, reason="nobody read stderr; up to 10,000 lines wait"
    )


def _take_foreign_lines(out: "TextIO | LineWriter", level: int, formatter: logging.Formatter) -> None:
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if handler.get_name() == "jsworker"]:
        root.removeHandler(earlier)
    handler: logging.Handler = logging.StreamHandler(out)
    handler.set_name("jsworker")
    handler.setLevel(level)
    handler.setFormatter(formatter)
    root.addHandler(handler)


def _with_bound_facts(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Add what is bound; a line that names a job itself is about that one."""
    facts = bound_facts.get()
    if facts is None or "job_id" in event:
        return event
    return {"worker_id": speaking_worker.get(), **facts(), **event}


def _traceback_by_its_end(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Cut a long traceback at its beginning: the error itself stands at the end."""
    text = event.get("exception")
    if isinstance(text, str) and len(repr(text)) > LONGEST_VALUE:
        end = text[-LONGEST_VALUE:]
        too_long = len(repr(end)) + 1 - LONGEST_VALUE  # as it will be written, line breaks as two characters
        event["exception"] = f"…{end[too_long:]}"
    return event


def _in_order(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {**{name: event[name] for name in _FIRST if name in event}, **event}


def _json_values(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {printable(name, 200): _plain(value) for name, value in event.items()}


def _console_line(*, colours: bool) -> Processor:
    def line(_: WrappedLogger, __: str, event: EventDict) -> str:
        time, level, name = (str(event[key]) for key in _HEAD)
        mark = f"{level:<8}"
        if colours:
            mark = f"\x1b[{_COLOURS.get(level, '0')}m{mark}\x1b[0m"
        pairs = [
            f"{printable(key, 200)}={_console_value(value)}"
            for key, value in event.items()
            if key not in _HEAD and value is not None
        ]
        return " ".join([time, mark, printable(name, LONGEST_VALUE), *pairs])

    return line


def _console_value(value: Any) -> str:
    """Return a value for people: quoted where it could be taken for the next field."""
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return str(_plain(value))
    text = _text(value)
    cut = text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
    return cut if _BARE.fullmatch(cut) else printable(repr(cut), LONGEST_VALUE)


def _plain(value: Any) -> Any:
    """Return a value as JSON knows it: printable and bounded."""
    match value:
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case Mapping():
            return _bounded({printable(str(name), 200): _plain(item) for name, item in value.items()})
        case list() | tuple() | set() | frozenset():
            return _bounded([_plain(item) for item in value])
        case _:
            return printable(_text(value), LONGEST_VALUE)


def _text(value: Any) -> str:
    match value:
        case datetime():
            return value.isoformat()
        case BaseException():
            return f"{type(value).__name__}: {value}"
        case _:
            return str(value)


def _bounded(value: Any) -> Any:
    text = str(value)
    return value if len(text) <= LONGEST_VALUE else printable(text, LONGEST_VALUE)
