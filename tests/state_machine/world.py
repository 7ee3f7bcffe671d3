"""What a machine acts on: one real database, one event loop, and the clock that only it moves."""

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine
from types import TracebackType
from typing import Any, LiteralString, Self, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from tests.ownership.rows import Sql, empty_tables

from .outcomes import FLOW_OUTCOMES, OUTCOMES

T = TypeVar("T")
Row = dict[str, Any]
Rows = dict[UUID, Row]

_PATIENT = 30.0
"""Seconds for a statement: no machine under load may change what a test sees."""


_TABLES: tuple[LiteralString, ...] = (
    *("jobs", "job_events", "job_steps", "workers"),
    *("batch_needs", "batches", "workflows", "limits", "schedules"),
)
_ROWS = """
SELECT j.*, clock_timestamp() AS now, s.result AS step
FROM jsworker.jobs AS j LEFT JOIN jsworker.job_steps AS s ON s.job_id = j.id
"""


class World:
    """A database for many examples, one after the other, and what was seen in all of them.

    Nothing in the protocol happens by itself: a row becomes due, late or old only when a rule says so.
    """

    def __init__(self, database_url: str, nats_url: str) -> None:
        settings = Settings(database_url=database_url, nats_url=nats_url, statement_timeout=_PATIENT / 10)
        self.seen: Counter[str] = Counter()
        self._url = database_url
        self.database = Database(database_url, statement_timeout=_PATIENT)
        # Never opened, only said to be: without its stream a client leaves every message to the outbox.
        self.client = JobClient(settings)
        self.client._unusable_because = None

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._sql: Sql = psycopg.connect(self._url, autocommit=True, row_factory=dict_row)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sql.close()
        self.run(self.client.close())
        self.run(self.database.close())
        self._runner.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run one call of the code under test to its end."""
        return self._runner.run(call)

    def saw(self, outcome: str, times: int = 1) -> None:
        """Note what a rule met."""
        assert outcome in OUTCOMES | FLOW_OUTCOMES, f"outcomes.py does not name {outcome!r}"
        self.seen[outcome] += times

    def empty(self) -> None:
        """Delete what the last example left."""
        empty_tables(self._sql, _TABLES)

    def rows(self) -> Rows:
        """Return every job's row."""
        found = self._sql.execute(_ROWS).fetchall()
        return {row["id"]: row for row in found}

    def batches(self) -> Rows:
        """Return every batch's row."""
        found = self._sql.execute("SELECT * FROM jsworker.batches").fetchall()
        return {row["id"]: row for row in found}

    def return_tokens(self) -> None:
        """Let so much time pass that every rate has all its tokens again."""
        self._sql.execute("UPDATE jsworker.limits SET full_at = NULL")

    def stop_clock(self) -> None:
        """Put whatever would be due within seconds an hour off, so that no real time changes what is due."""
        self._sql.execute(
            "UPDATE jsworker.jobs SET publish_after = publish_after + interval '1 hour'"
            " WHERE status = 'queued' AND publish_after BETWEEN clock_timestamp()"
            " AND clock_timestamp() + interval '1 minute'"
        )
        self._sql.execute(
            "UPDATE jsworker.jobs SET run_at = run_at + interval '1 hour'"
            " WHERE status = 'scheduled' AND run_at BETWEEN clock_timestamp()"
            " AND clock_timestamp() + interval '1 minute'"
        )

    def make_due(self) -> None:
        """Let the time of every scheduled job come."""
        self._age("run_at", 1.0, "status = 'scheduled' AND held_by IS NULL")

    def end_publishers_turn(self) -> None:
        """Let the five seconds pass that a publisher has for itself."""
        self._age("publish_after", 1.0, "needs_publish")

    def silence(self, ids: Collection[UUID], seconds: float) -> None:
        """Let the owners of running jobs be silent for so long."""
        self._age("last_activity_at", seconds, "status = 'processing' AND id = ANY(%(ids)s)", ids)

    def age_claims(self, worker_id: str, seconds: float) -> None:
        """Let a worker's claims be so long ago."""
        self._age("claimed_at", seconds, "worker_id = %(ids)s", worker_id)

    def age_queue(self, seconds: float) -> None:
        """Let every queued job have waited for so long."""
        self._age("queued_at", seconds, "status = 'queued'")

    def _age(
        self, column: str, seconds: float, rows: LiteralString, ids: Collection[UUID] | str = ()
    ) -> None:
        statement = SQL(
            "UPDATE jsworker.jobs SET {} = clock_timestamp() - make_interval(secs => %(seconds)s) WHERE "
        ).format(Identifier(column)) + SQL(rows)
        values = {"seconds": seconds, "ids": ids if isinstance(ids, str) else list(ids)}
        self._sql.execute(statement, values)
