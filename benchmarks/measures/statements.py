"""Reads PostgreSQL's counters and its log, in which statements are counted by their names in jsworker.

The wheel's PostgreSQL has no ``pg_stat_statements``. Every statement of jsworker is a transaction by itself,
so ``xact_commit`` counts them. Which statements they were, and how long they took, is read in the server's
log, into which ``logged_statements`` has them written.
"""

import importlib
import pkgutil
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import TextClause

import jsworker.ownership
from jsworker.embedded import EmbeddedPostgres

_MEGABYTE = 1024 * 1024
_READING = """
SELECT xact_commit AS commits, pg_current_wal_insert_lsn() - '0/0'::pg_lsn AS wal_bytes
FROM pg_stat_database WHERE datname = %s
"""
_TABLES = """
SELECT sum(n_tup_upd)::bigint AS updates, sum(n_tup_hot_upd)::bigint AS hot_updates,
  sum(n_dead_tup)::bigint AS dead_rows, sum(autovacuum_count)::bigint AS autovacuums,
  pg_table_size('jsworker.jobs') AS table_bytes, pg_indexes_size('jsworker.jobs') AS index_bytes
FROM pg_stat_user_tables WHERE schemaname = 'jsworker' AND relname = 'jobs'
"""


@dataclass(frozen=True, slots=True)
class ServerReading:
    """A database's counters since its beginning.

    Attributes:
        commits: transactions; each statement of jsworker is one.
        wal_bytes: WAL that the whole server has written.
    """

    commits: int
    wal_bytes: int


@dataclass(frozen=True, slots=True)
class JobsTable:
    """The table of jobs.

    Attributes:
        updates: rows updated since its beginning.
        hot_updates: those of them that touched no index.
        table_bytes: heap, free space map and TOAST.
    """

    updates: int
    hot_updates: int
    dead_rows: int
    autovacuums: int
    table_bytes: int
    index_bytes: int

    @property
    def table_megabytes(self) -> float:
        """Size of the table without its indexes."""
        return self.table_bytes / _MEGABYTE

    @property
    def index_megabytes(self) -> float:
        """Size of all its indexes."""
        return self.index_bytes / _MEGABYTE


def read_server(postgres: EmbeddedPostgres, url: str) -> ServerReading:
    """Read a database's counters from outside of it, so that the reading does not count."""
    with psycopg.connect(postgres.url, autocommit=True, row_factory=dict_row) as connection:
        row = connection.execute(_READING, [url.rpartition("/")[2]]).fetchone()
    if row is None:
        raise LookupError(f"there is no database {url}")
    return ServerReading(int(row["commits"]), int(row["wal_bytes"]))


def read_jobs_table(url: str) -> JobsTable:
    """Read the counters and sizes of ``jsworker.jobs``."""
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        row = connection.execute(_TABLES).fetchone()
    return JobsTable(**(row or {}))


@dataclass(slots=True)
class Executed:
    """One statement within a window of the log.

    Attributes:
        times: how often it was executed.
        milliseconds: parsing, planning and executing it, on the server, in all.
    """

    times: int = 0
    milliseconds: float = 0.0

    @property
    def mean_milliseconds(self) -> float:
        """The mean time of one execution."""
        return self.milliseconds / self.times if self.times else 0.0


@dataclass(slots=True)
class StatementLog:
    """What was executed in a window; complete when the window has ended.

    Attributes:
        by_name: by the name of jsworker's constant, for example ``CLAIM``; ``other`` holds the rest.
        seconds: how long the window was.
    """

    by_name: dict[str, Executed] = field(default_factory=dict)
    seconds: float = 0.0

    def times(self, *names: str) -> int:
        """Return how often these statements were executed; all of them when no name is given."""
        chosen = names or tuple(self.by_name)
        return sum(self.by_name[name].times for name in chosen if name in self.by_name)

    def told(self) -> str:
        """Return counts and mean times, the most frequent first, for people."""
        ranked = sorted(self.by_name.items(), key=lambda item: -item[1].times)
        return ", ".join(f"{name} {done.times} × {done.mean_milliseconds:.2f} ms" for name, done in ranked)


@contextmanager
def logged_statements(postgres: EmbeddedPostgres) -> Iterator[StatementLog]:
    """Log every statement while the block runs. This slows the server down: measure nothing else then."""
    log = StatementLog()
    _set(postgres, log_min_duration_statement="0", log_parameter_max_length="0")
    began, started = postgres.log.stat().st_size, time.monotonic()
    try:
        yield log
    finally:
        log.seconds = time.monotonic() - started
        _set(postgres, log_min_duration_statement=None, log_parameter_max_length=None)
    log.by_name = _executed(_text_from(postgres.log, began))


def _set(postgres: EmbeddedPostgres, **settings: str | None) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for name, value in settings.items():
            change = f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = {value}"
            connection.execute(change.encode())
        connection.execute("SELECT pg_reload_conf()")
    time.sleep(0.2)  # backends notice it before their next statement; nothing shows when all have


_ENTRY = re.compile(
    r"^\d{4}-\d\d-\d\d \S+ \S+ \[\d+\] LOG:  duration: (?P<ms>[\d.]+) ms"
    r"(?:  (?P<step>parse|bind|execute|statement)[^:]*: (?P<sql>.*?))?(?=^\d{4}-\d\d-\d\d \S+ \S+ \[|\Z)",
    re.MULTILINE | re.DOTALL,
)
_OURS = "ALTER SYSTEM", "SELECT pg_reload_conf", "SELECT xact_commit"


def _text_from(log: Path, began: int) -> str:
    with log.open("rb") as stream:
        stream.seek(began)
        return stream.read().decode(errors="replace")


def _executed(text: str) -> dict[str, Executed]:
    found: defaultdict[str, Executed] = defaultdict(Executed)
    names = _names()
    for entry in _ENTRY.finditer(text):
        sql = entry["sql"]
        if sql is None or sql.startswith(_OURS):
            continue
        executed = found[names.get(_signature(sql), "other")]
        executed.milliseconds += float(entry["ms"])
        executed.times += entry["step"] in ("execute", "statement")
    return dict(found)


@cache
def _names() -> dict[str, str]:
    """Return the names of jsworker's statements by their signature."""
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(jsworker.ownership.__path__, "jsworker.ownership."):
        namespace = vars(importlib.import_module(module.name))
        for name, value in namespace.items():
            if isinstance(value, TextClause):
                found.setdefault(_signature(value.text), name)
            elif isinstance(alone := getattr(value, "alone", None), TextClause):
                found.setdefault(_signature(alone.text), f"{name.strip('_')} alone")
    return found


_PLACEHOLDER = re.compile(
    r"(?<!:):[a-z_]+|\$\d+(?:::(?:DOUBLE PRECISION|TIMESTAMP WITH TIME ZONE|[A-Z]+)(?:\[\])*)?"
)


def _signature(sql: str) -> str:
    """Return a statement without its placeholders and white space: equal in the text and in the log."""
    return re.sub(r"\s+|\\", "", _PLACEHOLDER.sub("", sql))
