"""Jobs in any state, put into the table and read from it without the code under test."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection
from psycopg.rows import DictRow
from psycopg.sql import SQL, Composable, Composed, Identifier, Placeholder

from jsworker.ownership.schema import metadata
from jsworker.ownership.transitions.claim import RunLimits
from jsworker.ownership.transitions.enqueue import new_job_id

Sql = Connection[DictRow]

WORKER = "alpha-1-aaaa"
OTHER_WORKER = "beta-2-bbbb"
KIND = "count-lines"
LIMITS = RunLimits(stale_after=30.0, crash_after=15.0, timeout=None, max_attempts=3, max_stalls=3)

NOW = SQL("clock_timestamp()")


def ago(seconds: float) -> Composed:
    """Return the SQL of an instant ``seconds`` back by the database's clock; below zero: ahead."""
    return SQL("clock_timestamp() - make_interval(secs => {})").format(seconds)


def set_clock_ahead(sql: Sql, seconds: float) -> None:
    """Let the database's clock be ahead of this machine's, for this session and those that begin later."""
    sql.execute("CREATE SCHEMA ahead")
    function = SQL(
        "CREATE FUNCTION ahead.{0}() RETURNS timestamptz LANGUAGE sql"
        " RETURN pg_catalog.{0}() + make_interval(secs => {1})"
    )
    for name in ("clock_timestamp", "statement_timestamp", "now"):
        sql.execute(function.format(Identifier(name), seconds))
    sql.execute(
        SQL("ALTER DATABASE {} SET search_path = ahead, pg_catalog").format(Identifier(sql.info.dbname))
    )
    sql.execute("SET search_path = ahead, pg_catalog")


def seconds(value: float) -> Composed:
    """Return the SQL of an interval."""
    return SQL("make_interval(secs => {})").format(value)


STATES: dict[str, dict[str, Any]] = {
    "scheduled": {"run_at": ago(-3600)},
    "queued": {"dispatch": 1, "publish_after": NOW, "queued_at": NOW},
    "processing": {
        "worker_id": WORKER,
        "fencing_token": 1,
        "attempts": 1,
        "max_attempts": 3,
        "max_stalls": 3,
        "claimed_at": NOW,
        "last_activity_at": NOW,
        "started_at": NOW,
        "stale_after": seconds(30),
        "crash_after": seconds(15),
        "dispatch": 1,
        "queued_at": NOW,
    },
    "completed": {"fencing_token": 1, "attempts": 1, "dispatch": 1, "finished_at": NOW},
    "failed": {
        "fencing_token": 1,
        "attempts": 1,
        "errors": 1,
        "dispatch": 1,
        "failure_reason": "attempts",
        "finished_at": NOW,
    },
    "cancelled": {"dispatch": 1, "finished_at": NOW},
}
"""What a row of each state holds besides its defaults."""
HELD: dict[str, Any] = {"run_at": None, "held_by": "limit", "held_at": NOW}
"""What a scheduled row holds that waits for an event."""


def insert_job(sql: Sql, state: str = "queued", /, **columns: Any) -> UUID:
    """Insert a job in a state, with some columns other than usual, and return its id."""
    job_id: UUID = columns.setdefault("id", new_job_id())
    row = {"kind": KIND, "payload": "{}", "status": state} | STATES[state] | columns
    statement = SQL("INSERT INTO jsworker.jobs ({}) VALUES ({})").format(
        SQL(", ").join(map(Identifier, row)), SQL(", ").join(_value(name, row[name]) for name in row)
    )
    sql.execute(statement, row)
    return job_id


def change_job(sql: Sql, job_id: UUID, **columns: Any) -> None:
    """Set columns of a job, whatever the protocol says."""
    assignments = SQL(", ").join(
        SQL("{} = {}").format(Identifier(name), _value(name, columns[name])) for name in columns
    )
    sql.execute(
        SQL("UPDATE jsworker.jobs SET {} WHERE id = %(id)s").format(assignments), columns | {"id": job_id}
    )


def read_job(sql: Sql, job_id: UUID) -> dict[str, Any]:
    """Return a job's row by column name."""
    row = sql.execute("SELECT * FROM jsworker.jobs WHERE id = %s", [job_id]).fetchone()
    assert row is not None
    return row


def read_events(sql: Sql, job_id: UUID) -> list[dict[str, Any]]:
    """Return a job's timeline, oldest first."""
    columns = SQL("event, worker_id, fencing_token, error, detail")
    query = SQL("SELECT {} FROM jsworker.job_events WHERE job_id = %s ORDER BY id").format(columns)
    return sql.execute(query, [job_id]).fetchall()


def event_names(sql: Sql, job_id: UUID) -> list[str]:
    """Return what happened to a job, oldest first."""
    return [event["event"] for event in read_events(sql, job_id)]


def counters(job: dict[str, Any]) -> tuple[int, int, int]:
    """Return attempts, errors and stalls."""
    return job["attempts"], job["errors"], job["stalls"]


def age(sql: Sql, instant: datetime) -> float:
    """Return how many seconds ago an instant was, by the database's clock."""
    return float(read_value(sql, "SELECT extract(epoch FROM clock_timestamp() - %s)", instant))


def read_value(sql: Sql, query: LiteralString, *parameters: Any) -> Any:
    """Return the only value of a query."""
    row = sql.execute(query, parameters).fetchone()
    assert row is not None
    return next(iter(row.values()))


def _value(name: str, value: Any) -> Composable:
    return value if isinstance(value, Composable) else Placeholder(name)


TABLES = frozenset(table.name for table in metadata.tables.values())


def empty_tables(sql: Sql, tables: Iterable[str] = TABLES) -> None:
    """Delete all rows of tables, in one request: hundreds of tests begin with it.

    A hundred times faster than TRUNCATE, which makes new files for each table and index.
    """
    deletes = SQL("; ").join(SQL("DELETE FROM jsworker.{}").format(Identifier(each)) for each in tables)
    emptying = SQL("BEGIN; SET LOCAL session_replication_role = replica; {}; COMMIT").format(deletes)
    sql.execute(emptying, prepare=False)


def delete_rows(sql: Sql, table: LiteralString, where: LiteralString = "true") -> None:
    """Delete rows past the trigger that keeps live jobs, as no code of the project can."""
    with sql.transaction():
        sql.execute("SET LOCAL session_replication_role = replica")
        sql.execute(SQL("DELETE FROM jsworker.{} WHERE ").format(Identifier(table)) + SQL(where))


def waits(sql: Sql) -> bool:
    """Tell whether a statement of jsworker waits for another transaction's end."""
    found = read_value(
        sql,
        """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'jsworker' AND wait_event_type = 'Lock'
        """,
    )
    return bool(found)


def limit_the_time(sql: Sql) -> None:
    """Give the database long time limits, and refuse changes of its schema under any of them."""
    sql.execute("""
DO $$
DECLARE
  limited text;
BEGIN
  FOR limited IN
    SELECT name FROM pg_settings
    WHERE name IN
      ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')
  LOOP
    EXECUTE format('ALTER DATABASE %I SET %I = ''1h''', current_database(), limited);
  END LOOP;
END
$$;
CREATE FUNCTION public.refuse_under_a_limit() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE
  limits text := concat_ws(', ', current_setting('statement_timeout'),
    current_setting('idle_in_transaction_session_timeout'), current_setting('transaction_timeout', true));
BEGIN
  IF limits NOT IN ('0, 0', '0, 0, 0') OR current_setting('lock_timeout') = '1h' THEN
    RAISE 'the time is limited: %, %', limits, current_setting('lock_timeout');
  END IF;
END
$$;
CREATE EVENT TRIGGER refuse_under_a_limit ON ddl_command_start EXECUTE FUNCTION public.refuse_under_a_limit()
""")


@contextmanager
def slow_rows(sql: Sql, event: str, table: str, seconds: float, *, when: str = "true") -> Iterator[None]:
    """Let each row that a statement writes take so long, if ``when`` holds for it, as a slow trigger does."""
    slow = f"public.slow_{table}()"
    body = f"BEGIN PERFORM pg_sleep({seconds}); RETURN coalesce(new, old); END"
    sql.execute(f"CREATE FUNCTION {slow} RETURNS trigger LANGUAGE plpgsql AS $${body}$$".encode())
    sql.execute(
        f"CREATE TRIGGER slow BEFORE {event} ON jsworker.{table}"
        f" FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION {slow}".encode()
    )
    try:
        yield
    finally:
        sql.execute(f"DROP FUNCTION {slow} CASCADE".encode())
