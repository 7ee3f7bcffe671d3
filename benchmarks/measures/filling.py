"""Tables that are full already: rows as jsworker's own statements would have left them, by SQL."""

from collections.abc import Callable

import psycopg

_CHUNK = 500_000
"""Rows of one transaction."""

# A week's worth of jobs that were enqueued, published, claimed and completed at the first attempt.
_FINISHED = """
INSERT INTO jsworker.jobs (
  id, kind, payload, status, fencing_token, claimed_at, stale_after, crash_after, attempts, max_attempts,
  max_stalls, dispatch, publish_after, published_at, stream_seq, stream_created, queued_at, result,
  created_at, started_at, finished_at)
SELECT uuidv7(at - clock_timestamp()), %(kind)s,
  jsonb_build_object(
    'path', 'customers/' || n %% 1000 || '/documents/' || n, 'pages', n %% 40, 'language', 'en'),
  'completed', 1, at + interval '20 ms', '300 s', '15 s', 1, 5, 3, 1, at, at + interval '10 ms', n, now(), at,
  jsonb_build_object('words', n %% 5000, 'seconds', 0.25), at, at + interval '20 ms', at + interval '300 ms'
FROM (
  SELECT n, clock_timestamp() - interval '7 days' * (1 - n::double precision / %(total)s) AS at
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
) AS ended
"""

# What enqueue_many leaves, its messages still to be published.
_QUEUED = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at)
SELECT uuidv7(), %(kind)s,
  jsonb_build_object(
    'path', 'customers/' || n %% 1000 || '/documents/' || n, 'pages', n %% 40, 'language', 'en'),
  'queued', 1, true, clock_timestamp(), clock_timestamp()
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""


def fill_finished(url: str, rows: int, *, kind: str, show: Callable[[str], None]) -> None:
    """Put finished jobs into the table and leave it as autovacuum would."""
    _fill(url, _FINISHED, rows, kind, show)


def fill_queued(url: str, rows: int, *, kind: str, show: Callable[[str], None]) -> None:
    """Put queued jobs into the table; the outbox holds all of them."""
    _fill(url, _QUEUED, rows, kind, show)


def vacuum(url: str) -> None:
    """Do what autovacuum would, now."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE) jsworker.jobs")


def _fill(url: str, statement: str, rows: int, kind: str, show: Callable[[str], None]) -> None:
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        for first in range(1, rows + 1, _CHUNK):
            show(f"filling the table: {first - 1:,} of {rows:,} rows")
            values = {"kind": kind, "total": rows, "first": first, "last": min(first + _CHUNK - 1, rows)}
            connection.execute(statement.encode(), values)
    vacuum(url)
