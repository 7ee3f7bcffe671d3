"""Log lines, as JSON or for people: from events, from processors, and from other libraries alike."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Literal, TextIO, cast

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from jsworker.core.events import EVENT_NAMES, Event, Events
from jsworker.core.tracebacks import raised_at
from jsworker.telemetry.line_writer import FLUSH_SECONDS, LineWriter
from jsworker.telemetry.log_lines import CLEAR_LINE, console_line, json_fields

_PER_JOB: Final = (
    *("job.claimed", "job.started", "job.skipped", "job.progress", "job.completed"),
    *("job.snoozed", "job.step"),
)
_WARNINGS: Final = (
    *("job.error", "job.failed", "job.stalled", "job.fenced", "job.lost", "row.refused"),
    *("stale.detected", "stale.recovered", "recovery.off", "heartbeat.failed", "database.changed"),
    *("message.dead", "message.refused", "message.republished", "prune.failed", "setup.slow"),
    *("schedule.refused", "worker.degraded", "loop.blocked"),
)
_LEVELS: Final = {
    **dict.fromkeys((*_PER_JOB, "job.held", "jobs.woken", "schedule.fired", "batch.finished"), logging.DEBUG),
    "isolated.ended": logging.DEBUG,
    **dict.fromkeys(_WARNINGS, logging.WARNING),
    "job.stop_ignored": logging.ERROR,
}
"""All other events are logged at info."""
_REPORTED_TOGETHER: Final = frozenset({"job.stalled", "job.cleared"})
"""Events of jobs; if several jobs are taken back together, one line reports all: there may be hundreds."""
_HEAD: Final = ("timestamp", "level", "event")
_FIRST: Final = (*_HEAD, "job_id", "kind", "fencing_token", "worker_id", "attempt")
_TAKEN: Final = frozenset({*_HEAD, "exc_info", "stack_info", "exception", "at"})
"""Keys with a meaning of their own for structlog."""
_NO_EXTRAS: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""Attributes that ``logging`` itself, or another handler, has added to a record."""

Facts = Callable[[], Mapping[str, Any]]

bound_facts: Final[ContextVar[Facts | None]] = ContextVar("jsworker_bound_facts", default=None)
"""Returns the fields of the job that the running code works on; all log lines of that code show them."""

speaking_worker: Final[ContextVar[str | None]] = ContextVar("jsworker_speaking_worker", default=None)
"""Id of the worker whose code is running."""

_own: FilteringBoundLogger = structlog.get_logger()

_writers: Final[dict[int, LineWriter]] = {}
"""The writers by the file descriptor that they write to."""

_QUIET_LIBRARIES: Final = {
    **dict.fromkeys(("alembic", "asyncio", "concurrent", "nats", "opentelemetry"), logging.WARNING),
    **dict.fromkeys(("prometheus_client", "sqlalchemy"), logging.WARNING),
    # It warns twice of each statement that was given up, and names no server; ``worker.degraded`` does.
    "psycopg": logging.ERROR,
}
"""The levels of a worker's own dependencies, unless their logger has been given another one."""


def configure_logs(
    *,
    format: Literal["json", "console"],  # noqa: A002 -- the setting's name
    level: str,
    stream: TextIO | None = None,
) -> None:
    """Send every log line of this process, of events, structlog and ``logging``, to one stream.

    The root logger gets the level, debug, info, warning, error or critical; the libraries that a worker
    depends on log only warnings and errors, and psycopg only errors. Without a stream the lines go to stderr.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    out = stderr_lines() if stream is None else stream
    on_terminal = is_terminal(stream or sys.stderr)
    colours = on_terminal and "NO_COLOR" not in os.environ
    write: list[Processor] = [json_fields, structlog.processors.JSONRenderer()]
    if format == "console":
        write = [partial(console_line, colours=colours, clears=on_terminal)]
    write = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _in_order,
        *write,
    ]
    of_users = [_with_bound_facts, structlog.contextvars.merge_contextvars, *write]
    loggers = structlog.WriteLoggerFactory(cast("TextIO", out))
    wrapper = structlog.make_filtering_bound_logger(least)
    structlog.configure(processors=of_users, wrapper_class=wrapper, logger_factory=loggers)
    own = [_with_bound_facts, *write]
    global _own  # noqa: PLW0603 -- one for the process
    _own = structlog.wrap_logger(loggers(), own, wrapper, context_class=dict).bind()
    formatter = ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, _with_extras],
        processors=[ProcessorFormatter.remove_processors_meta, *of_users],
    )
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if handler.get_name() == "jsworker"]:
        root.removeHandler(earlier)
    handler: logging.Handler = logging.StreamHandler(out)
    handler.set_name("jsworker")
    handler.setLevel(least)
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(least)
    for name, quiet in _QUIET_LIBRARIES.items():
        library = logging.getLogger(name)
        if library.level in (logging.NOTSET, logging.WARNING):  # the latter psycopg gives itself
            library.setLevel(quiet)


def own_logger() -> FilteringBoundLogger:
    """Return the logger of jsworker's own lines; a user's ``structlog.configure`` does not change it."""
    return _own


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which lines can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write_line(text: str) -> None:
    """Write text of another format, of one line or more, after the log lines; returns at once."""
    stderr_lines().write(f"{text}\n")


def show_line(text: str) -> None:
    """Show a line on the terminal until the next one is written or shown; returns at once."""
    stderr_lines().write(f"{text}{CLEAR_LINE}\r")


def lines_dropped() -> int:
    """Return how many lines were dropped because stderr was not read."""
    return sum(writer.dropped for writer in _writers.values())


def drain_logs(seconds: float = FLUSH_SECONDS) -> None:
    """Wait up to ``seconds`` until all lines are written, for a process that ends without ``atexit``."""
    for writer in _writers.values():
        writer.drain(seconds)


def log_events(events: Events, *, worker_id: str | None = None) -> None:
    """Write a line for every event from now on; call ``configure_logs`` first.

    It listens only to events that the configured level lets through, so that hot paths need not build the
    others. ``worker_id`` is added to every line whose event has no other one.
    """
    speaking_worker.set(worker_id)
    logger = own_logger().bind(worker_id=worker_id) if worker_id else own_logger()

    def write(event: Event) -> None:
        level = logging.DEBUG if _is_reported_already(event) else level_of(event.name)
        place = {} if event.exception is None else {"at": raised_at(event.exception) or None}
        logger.log(level, event.name, **_field_names(event.fields), **place)

    for name in EVENT_NAMES:
        if logger.is_enabled_for(level_of(name)):
            events.on(name, write)


def level_of(name: str) -> int:
    """Return the level at which an event is logged; events that every job has are logged at debug."""
    return _LEVELS.get(name, logging.INFO)


def _is_reported_already(event: Event) -> bool:
    """Return whether another line reports the event: of jobs taken back, the only one, or the outage."""
    if event.name == "stale.recovered":
        return event.fields.get("jobs") == 1
    if event.name == "heartbeat.failed":
        return bool(event.fields.get("in_a_row", 1) > 1)
    return event.name in _REPORTED_TOGETHER and event.fields.get("together", 1) > 1


def _field_names(fields: dict[str, Any]) -> dict[str, Any]:
    if _TAKEN.isdisjoint(fields):
        return fields
    return {f"{name}_" if name in _TAKEN else name: value for name, value in fields.items()}


def stderr_lines() -> "TextIO | LineWriter":
    """Return the writer for the present stderr, one per file descriptor; stderr itself if it is no file."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):  # stderr is not a file, or is closed
        return sys.stderr
    if descriptor not in _writers:
        _writers[descriptor] = LineWriter(sys.stderr, on_dropped=_report_dropped)
    return _writers[descriptor]


def _report_dropped(lines: int) -> None:
    reason = "stderr is not read, or a stopped process holds it; up to 10,000 lines wait"
    own_logger().warning("log.dropped", lines=lines, reason=reason)


def _with_bound_facts(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Add the bound fields of the running job, unless the line names a job itself."""
    facts = bound_facts.get()
    if facts is None or "job_id" in event:
        return event
    return {"worker_id": speaking_worker.get(), **facts(), **event}


def _with_extras(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    record = vars(event["_record"])
    extras = {name: value for name, value in record.items() if name not in _NO_EXTRAS}
    return {**_field_names(extras), **event}


def _in_order(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {**{name: event[name] for name in _FIRST if name in event}, **event}
