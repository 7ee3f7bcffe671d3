"""What ``jsworker db upgrade`` keeps waiting in a large table.

Run by hand: ``python -m benchmarks.upgrade [--rows N] [--queued N]``. The table is filled at the oldest
migration and brought to the newest, one after the other, while one connection inserts jobs and another claims
and completes them.
``docs/operate/upgrades.md`` shows what it prints.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

import psycopg
from rich.console import Console

from benchmarks.measures.filling import fill_finished, fill_queued
from benchmarks.servers import running_servers
from jsworker.ownership.database import REVISIONS
from jsworker.ownership.upgrading import upgrade_database

_PAUSE_SECONDS: Final = 0.02
_BEFORE_SECONDS: Final = 30.0
"""How long the same statements are first measured without an upgrade."""

# What workers and producers write, with only the columns that every migration has.
_INSERT: Final = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at)
VALUES (uuidv7(), 'noop', '{}', 'queued', 1, true, clock_timestamp(), clock_timestamp()) RETURNING id
"""
_CLAIM: Final = """
UPDATE jsworker.jobs SET status = 'processing', worker_id = 'bench', fencing_token = fencing_token + 1,
  attempts = attempts + 1, claimed_at = clock_timestamp(), last_activity_at = clock_timestamp(),
  needs_publish = false
WHERE id = %s AND status = 'queued' RETURNING id
"""
_COMPLETE: Final = """
UPDATE jsworker.jobs SET status = 'completed', worker_id = NULL, last_activity_at = NULL,
  finished_at = clock_timestamp()
WHERE id = %s AND status = 'processing' AND fencing_token = 1 RETURNING id
"""
_SIZE: Final = "SELECT pg_size_pretty(pg_total_relation_size('jsworker.jobs'))"


@dataclass(slots=True)
class Traffic:
    """Jobs that come and go in a database, each statement a transaction of its own.

    Attributes:
        inserts, updates: when each statement began, and for how many seconds it lasted.
    """

    url: str
    inserts: list[tuple[float, float]] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    _ids: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    _ends: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Insert jobs in one thread, and claim and complete them in another."""
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(each) for each in (self._insert, self._claim_and_complete)]
            try:
                yield
            finally:
                self._ends = True
        for each in both:
            each.result()

    def longest(self, since: float) -> tuple[float, float]:
        """Return the milliseconds of the longest INSERT and UPDATE that ended after ``since``."""
        inserts, updates = (
            max((lasted for began, lasted in list(timed) if began + lasted > since), default=0.0) * 1000
            for timed in (self.inserts, self.updates)
        )
        return inserts, updates

    def _insert(self) -> None:
        try:
            with psycopg.connect(self.url, autocommit=True) as connection:
                while not self._ends:
                    self._ids.put(_timed(connection, self.inserts, _INSERT))
                    time.sleep(_PAUSE_SECONDS)
        finally:
            self._ids.put(None)

    def _claim_and_complete(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            while job := self._ids.get():
                _timed(connection, self.updates, _CLAIM, job)
                _timed(connection, self.updates, _COMPLETE, job)


def _timed(
    connection: psycopg.Connection, times: list[tuple[float, float]], statement: str, *values: object
) -> object:
    """Execute a statement, note when and for how long, and return the id of the one row that it wrote."""
    began = time.monotonic()
    [(job,)] = connection.execute(statement.encode(), values)
    times.append((began, time.monotonic() - began))
    return job


def measure(
    finished: int, queued: int, show: Callable[[str], None]
) -> Iterator[tuple[str, float, float, float]]:
    """Yield each migration, its seconds, and the longest INSERT and UPDATE meanwhile in milliseconds.

    The first item is of a time without an upgrade.
    """
    with running_servers() as servers:
        url = servers.new_database()
        upgrade_database(url, REVISIONS[0])
        fill_finished(url, finished, kinds=["noop"], failed=finished // 100, show=show)
        fill_queued(url, queued, kind="noop", show=show)
        with psycopg.connect(url) as connection:
            [(size,)] = connection.execute(_SIZE).fetchall()
        show(f"the table and its indexes have {size}")
        traffic = Traffic(url)
        with traffic.running():
            for revision in ["none", *REVISIONS[1:]]:
                began = time.monotonic()
                if revision == "none":
                    time.sleep(_BEFORE_SECONDS)
                else:
                    upgrade_database(url, revision)
                took = time.monotonic() - began
                time.sleep(2 * _PAUSE_SECONDS)  # statements that waited until its end are noted by then
                yield revision, took, *traffic.longest(began)
        show(f"{len(traffic.inserts):,} jobs were inserted and completed meanwhile")


def main() -> None:
    """Print a table in Markdown."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=10_000_000, help="jobs in the table")
    options.add_argument("--queued", type=int, default=100_000, help="of these, jobs that wait")
    given = options.parse_args()
    out = Console().out
    out("| migration | seconds | longest `INSERT`, ms | longest claim or completion, ms |")
    out("|---|---|---|---|")
    show = Console(stderr=True).out
    for revision, took, insert, update in measure(given.rows - given.queued, given.queued, show):
        out(f"| {revision} | {took:.1f} | {insert:.0f} | {update:.0f} |")


if __name__ == "__main__":
    main()
