"""Fills tables by SQL, with rows as jsworker's own statements would have left them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg

from jsworker.core.clock import DURATION_BUCKETS

_CHUNK = 250_000
"""The rows of one transaction."""
_AT_ONCE = 2

# A week's worth of jobs that were enqueued, published, claimed, and completed at the first attempt; one in
# ``each`` failed at its last attempt, with one of two sorts of errors in each kind.
_FINISHED = """
INSERT INTO jsworker.jobs (
  id, kind, payload, status, fencing_token, claimed_at, stale_after, crash_after, attempts, errors,
  max_attempts, max_stalls, dispatch, publish_after, published_at, stream_seq, stream_created, queued_at,
  result, last_error, failure_reason, created_at, started_at, finished_at)
SELECT uuidv7(at - clock_timestamp()), (%(kinds)s::text[])[1 + (n + n / %(each)s) %% %(of)s],
  jsonb_build_object(
    'path', 'customers/' || n %% 1000 || '/documents/' || n, 'pages', n %% 40, 'language', 'en'),
  CASE WHEN failed THEN 'failed' ELSE 'completed' END, tries, at + interval '20 ms', '300 s', '15 s', tries,
  CASE WHEN failed THEN tries ELSE 0 END, 5, 3, tries, at, at + interval '10 ms', n, now(), at,
  CASE WHEN NOT failed THEN jsonb_build_object('words', n %% 5000, 'seconds', 0.25) END,
  CASE WHEN failed THEN
    CASE WHEN n / %(each)s / %(of)s %% 2 = 0 THEN 'TimeoutError: customer ' || n || ' did not answer in 30 s'
      ELSE 'ValueError: "documents/' || n || '" has no pages' END
    || E'\\nTraceback (most recent call last):\\n'
    || repeat(E'  File "work.py", line 7, in process\\n', 20) END,
  CASE WHEN failed THEN 'attempts' END, at, at + interval '20 ms', at + interval '300 ms'
FROM (
  SELECT n, n %% %(each)s = 0 AS failed, CASE WHEN n %% %(each)s = 0 THEN 5 ELSE 1 END AS tries,
    clock_timestamp() - interval '7 days' * (1 - n::double precision / %(total)s) AS at
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
) AS ended
"""

# The statistics that workers write in two days in which every minute is busy.
_STATISTICS = """
INSERT INTO jsworker.statistics (
  minute, kind, started, completed, errors, failed, wait_seconds, run_seconds, waits, runs)
SELECT date_trunc('minute', now()) - make_interval(mins => ago), kind, 50, 49, 1, 1, 0.5, 14,
  array_fill(3::bigint, ARRAY[%(buckets)s]), array_fill(3::bigint, ARRAY[%(buckets)s])
FROM generate_series(1, 2880) AS ago CROSS JOIN unnest(%(kinds)s::text[]) AS kind
"""

# The rows that enqueue_many leaves before their messages are published.
_QUEUED = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at)
SELECT uuidv7(), %(kind)s,
  jsonb_build_object(
    'path', 'customers/' || n %% 1000 || '/documents/' || n, 'pages', n %% 40, 'language', 'en'),
  'queued', 1, true, clock_timestamp(), clock_timestamp()
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""

# The rows that admission leaves of jobs whose key is paused.
_HELD_BY_KEY = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at, limit_key, held_by, held_at)
SELECT uuidv7(), %(kind)s, jsonb_build_object('tenant', 'acme', 'n', n),
  'scheduled', 1, clock_timestamp(), 'acme', 'paused', clock_timestamp()
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""
_PAUSED = """
INSERT INTO jsworker.limits (kind, key, paused_at, paused_by, reason)
VALUES (%(kind)s, 'acme', clock_timestamp(), 'bench', 'measured beside others')
"""

# Workflows as a client enqueues them: a first job, here due in a year, and ten batches that need it.
_WORKFLOW = """
WITH workflow AS (
  INSERT INTO jsworker.workflows (id, name) VALUES (uuidv7(), 'bench') RETURNING id
), node AS (
  INSERT INTO jsworker.batches (id, workflow, name, kind, place)
  SELECT uuidv7(), workflow.id, 'node-' || place, %(kind)s, place
  FROM workflow CROSS JOIN generate_series(0, 10) AS place RETURNING id, place
), first AS (
  INSERT INTO jsworker.jobs (id, kind, payload, status, run_at, batch_id)
  SELECT uuidv7(), %(kind)s, '{}', 'scheduled', clock_timestamp() + interval '1 year', id
  FROM node WHERE place = 0
)
INSERT INTO jsworker.batch_needs (batch, needs)
SELECT later.id, first.id FROM node AS later JOIN node AS first ON first.place = 0 AND later.place > 0
"""
_HELD_BY_NEEDS = """
INSERT INTO jsworker.jobs (id, kind, payload, status, held_by, held_at, batch_id)
SELECT uuidv7(), %(kind)s, jsonb_build_object('n', n), 'scheduled', 'needs', clock_timestamp(), b.id
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
JOIN jsworker.batches AS b ON b.kind = %(kind)s AND b.place = 1 + (n - 1) * 10 / %(total)s
"""


def fill_finished(
    url: str, rows: int, *, kinds: Sequence[str], failed: int = 0, show: Callable[[str], None]
) -> None:
    """Put finished jobs into the table, of these kinds in turn, and vacuum it as autovacuum would.

    ``failed`` of them have failed, in two groups for each kind.
    """
    _fill(url, _FINISHED, rows, kinds, show, each=rows // failed if failed else rows + 1)


def fill_statistics(url: str, *, kinds: Sequence[str]) -> None:
    """Put figures of each minute of the last two days into their table."""
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        values = {"kinds": list(kinds), "buckets": len(DURATION_BUCKETS) + 1}
        connection.execute(_STATISTICS.encode(), values)
        connection.execute("VACUUM (ANALYZE) jsworker.statistics")


def fill_queued(url: str, rows: int, *, kind: str, show: Callable[[str], None]) -> None:
    """Put queued jobs into the table; the outbox holds all of them."""
    _fill(url, _QUEUED, rows, [kind], show)


def fill_held_by_key(url: str, rows: int, *, kind: str, show: Callable[[str], None]) -> None:
    """Put jobs into the table that are held by one key, which is paused."""
    _fill(url, _HELD_BY_KEY, rows, [kind], show, first=_PAUSED)


def fill_held_by_needs(url: str, rows: int, *, kind: str, show: Callable[[str], None]) -> None:
    """Put jobs into the table that are held in ten batches of a workflow, whose first job is not due."""
    _fill(url, _HELD_BY_NEEDS, rows, [kind], show, first=_WORKFLOW)


def vacuum(url: str) -> None:
    """Vacuum and analyze the table of jobs now, as autovacuum would later."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE) jsworker.jobs")


def _fill(
    url: str,
    statement: str,
    rows: int,
    kinds: Sequence[str],
    show: Callable[[str], None],
    *,
    first: str = "",
    each: int = 1,
) -> None:
    given = {"kind": kinds[0], "kinds": list(kinds), "of": len(kinds), "total": rows, "each": each}

    def execute(words: str, begin: int = 1) -> None:
        values = {**given, "first": begin, "last": min(begin + _CHUNK - 1, rows)}
        with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
            connection.execute(words.encode(), values)
        show(f"filling the table: {values['last']:,} of {rows:,} rows")

    if first:
        execute(first)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for filled in [threads.submit(execute, statement, begin) for begin in range(1, rows + 1, _CHUNK)]:
            filled.result()
    vacuum(url)
