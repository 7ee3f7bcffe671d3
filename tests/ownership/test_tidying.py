"""What is over is deleted soon also from a large table in which the last ANALYZE found no row.

A join of the table with the rows to delete is a nested loop there: more than 20 s at 50,000 rows.
"""

from typing import Any

import psycopg
import pytest
from sqlalchemy import TextClause, text

from jsworker.ownership.transitions import audit, enqueue_terms, limits, statistics

from .conftest import TestDatabases
from .test_plans import connected

ROWS = 20_000
FILL = {
    "limits": """INSERT INTO jsworker.limits (kind, key, used_at)
        SELECT 'kind', 'key-' || n, now() - interval '1 day' FROM generate_series(1, %(rows)s) AS n""",
    "statistics": """INSERT INTO jsworker.statistics (minute, kind, waits, runs)
        SELECT date_trunc('minute', now()) - interval '30 days' - n * interval '1 minute', 'kind',
          array_fill(0, ARRAY[16]), array_fill(0, ARRAY[16])
        FROM generate_series(1, %(rows)s) AS n""",
    "audit": """INSERT INTO jsworker.audit (action_id, part, at, actor, action, target, matched, changed)
        SELECT uuidv7(), 0, now() - interval '900 days', 'ada', 'retry', '{}', 1, 1
        FROM generate_series(1, %(rows)s) AS n""",
    "unique_windows": """INSERT INTO jsworker.unique_windows (kind, key, job_id, until)
        SELECT 'kind', 'key-' || n, uuidv7(), now() - interval '1 day'
        FROM generate_series(1, %(rows)s) AS n""",
}
WINDOWS = {"kinds": ["kind"] * 1000, "keys": [f"key-{n}" for n in range(ROWS - 999, ROWS + 1)]}
TIDY: dict[str, tuple[TextClause, dict[str, Any], int]] = {
    "limits": (limits.TIDY, {}, 1000),
    "statistics": (statistics.FORGET_STATISTICS, {"kept": 60.0}, 5000),
    "audit": (audit.PRUNE_ACTIONS, {"kept": 60.0, "limit": 1000}, 1000),
    "unique_windows": (enqueue_terms.FORGET_WINDOWS, WINDOWS, 1000),
}


@pytest.fixture(scope="module")
def refilled(databases: TestDatabases, migrated: str) -> str:
    url = databases.create(migrated)
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        for table, fill in FILL.items():
            connection.execute(fill.encode(), {"rows": 100})
            connection.execute(f"DELETE FROM jsworker.{table}; ANALYZE jsworker.{table}".encode())  # noqa: S608
            connection.execute(fill.encode(), {"rows": ROWS})
    return url


@pytest.mark.parametrize("table", TIDY)
def test_a_table_that_was_empty(refilled: str, table: str) -> None:
    statement, values, deleted = TIDY[table]
    with connected(refilled) as connection:
        connection.execute(text("SET statement_timeout = '5 s'"))
        assert len(connection.execute(statement, values).all()) == deleted
