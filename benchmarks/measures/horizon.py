"""Jobs at a steady pace while an idle transaction keeps dead rows from removal: part of measure f."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import backlog_rate, latencies, new_client, p50_and_p99
from benchmarks.measures.sample_processors import STAMP, Stamp
from benchmarks.measures.statements import StatementLog, logged_statements
from benchmarks.servers import Servers
from jsworker.ownership.transitions.enqueue import new_job_id

_LETTER: Final = "f"
_TICKS_PER_SECOND = 20
_LOGGED_SECONDS = 12.0
"""Two scans and many relay ticks."""
_TICKS = "DUE", "LEFT_TO_DO", "PUBLISH", "PROMOTE", "LATE", "ORPHANED", "WAITING", "POSTED"
"""Statements that look for work: those that an old horizon can slow down."""


@dataclass(frozen=True, slots=True)
class _Window:
    """What happened within a part of the run.

    Attributes:
        completed: jobs/s.
        p50, p99: start latency in milliseconds.
        log: the statements in it.
    """

    completed: float
    p50: float
    p99: float
    log: StatementLog


class PinnedHorizon:
    """Jobs at a steady pace while a transaction is left idle."""

    def __init__(
        self, servers: Servers, seconds: float, per_second: int, jobs: int, show: Callable[[str], None]
    ) -> None:
        """Prepare a database.

        Args:
            servers: to use.
            seconds: for how long the transaction is idle.
            per_second: jobs a second meanwhile.
            jobs: of the preloaded backlog that measures the rate before and at the end.
            show: called with what is going on.
        """
        self._servers = servers
        self._seconds = seconds
        self._window_seconds = min(60.0, seconds / 3)
        self._per_second = per_second
        self._jobs = jobs
        self._show = show
        self._variables = servers.new_jsworker()
        self._url = self._variables["JSWORKER_DATABASE_URL"]

    def measure(self) -> list[Figure]:
        """Return speed and sweep times before the transaction, and in its first and last minute."""
        self._show("before the horizon is pinned: no-op rate")
        free_rate = backlog_rate(self._variables, self._jobs)
        with ExitStack() as held:
            windows = self._at_pace(held)
            self._show("horizon pinned: no-op rate")
            pinned_rate = backlog_rate(self._variables, self._jobs)
        return self._figures(free_rate, pinned_rate, windows)

    def _at_pace(self, held: ExitStack) -> dict[str, _Window]:
        """Run a worker at a steady pace, first without and then with a transaction that ``held`` ends."""
        producer = _Producer(self._variables, self._per_second)
        with workers(1, [STAMP], self._variables), ThreadPoolExecutor(1) as thread:
            running = thread.submit(producer.run)
            try:
                windows = {"before": self._watch(running, "before the horizon is pinned")}
                held.enter_context(_idle_transaction(self._url))
                windows["first minute"] = self._watch(running, "horizon pinned, first minute")
                self._wait(running, self._seconds - 2 * self._window_seconds)
                windows["last minute"] = self._watch(running, "horizon pinned, last minute")
            finally:
                producer.stop()
            running.result()
        return windows

    def _wait(self, running: Future[None], seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            _check(running)
            self._show(f"horizon pinned, {left + self._window_seconds:.0f} s left")
            time.sleep(min(left, 5.0))

    def _watch(self, running: Future[None], what: str) -> _Window:
        """Measure the speed first, then the statements, because their log slows the server down."""
        self._show(what)
        logged = min(_LOGGED_SECONDS, self._window_seconds / 2)
        began, first = time.time(), new_job_id()
        time.sleep(self._window_seconds - logged)
        _check(running)
        ended, last = time.time(), new_job_id()
        with logged_statements(self._servers.postgres) as log:
            time.sleep(logged)
        p50, p99 = p50_and_p99(latencies(self._url, first, last))
        return _Window(self._completed(began, ended), p50, p99, log)

    def _completed(self, began: float, ended: float) -> float:
        query = (
            "SELECT count(*) FROM jsworker.jobs"
            " WHERE finished_at >= to_timestamp(%s) AND finished_at < to_timestamp(%s)"
        )
        with psycopg.connect(self._url, autocommit=True) as connection:
            row = connection.execute(query, [began, ended]).fetchone()
        return 0.0 if row is None else float(row[0]) / (ended - began)

    def _figures(self, free_rate: float, pinned_rate: float, windows: Mapping[str, _Window]) -> list[Figure]:
        pinned = f"horizon pinned for {self._seconds:.0f} s at {self._per_second:,} jobs/s"
        figures = [
            Figure(_LETTER, "no-op jobs, horizon not pinned", JSWORKER, "jobs/s", (free_rate,)),
            Figure(_LETTER, f"no-op jobs, {pinned}", JSWORKER, "jobs/s", (pinned_rate,)),
            Figure(_LETTER, f"no-op jobs, {pinned} ÷ not pinned", JSWORKER, "×", (pinned_rate / free_rate,)),
        ]
        for name, window in windows.items():
            label = f"{pinned}, {name}"
            figures += [
                Figure(_LETTER, f"{label}: completed", JSWORKER, "jobs/s", (window.completed,)),
                _milliseconds(f"{label}: start p50", window.p50),
                _milliseconds(f"{label}: start p99", window.p99),
                *_ticks(label, window.log),
            ]
        return figures


def _ticks(label: str, log: StatementLog) -> Iterator[Figure]:
    """Yield the mean time of each statement that looks for work, and the time of all together."""
    found = {name: log.by_name[name] for name in _TICKS if name in log.by_name}
    for name, executed in found.items():
        yield _milliseconds(f"{label}: {name}, mean", executed.mean_milliseconds)
    busy = sum(executed.milliseconds for executed in found.values()) / (10 * log.seconds)
    yield Figure(
        _LETTER,
        f"{label}: looking for work, of one core",
        JSWORKER,
        "%",
        (busy,),
        more_is_better=False,
        note=log.told(),
    )


@contextmanager
def _idle_transaction(url: str) -> Iterator[None]:
    """Leave a transaction idle that has read, has written, and keeps its snapshot."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM jsworker.workers")
        connection.execute("SELECT pg_current_xact_id()")
        yield
        connection.rollback()


class _Producer:
    """Enqueues at a steady pace from a thread of its own, in small batches."""

    def __init__(self, variables: Mapping[str, str], per_second: int) -> None:
        self._variables = variables
        self._batch = max(1, per_second // _TICKS_PER_SECOND)
        self._gap = self._batch / per_second
        self._stopped = False

    def stop(self) -> None:
        """End after the present batch."""
        self._stopped = True

    def run(self) -> None:
        """Enqueue until stopped; if it falls behind, it catches up."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with new_client(self._variables) as client:
            due = time.monotonic()
            while not self._stopped:
                await client.enqueue_many(Stamp, [{"at": time.monotonic()}] * self._batch)
                due += self._gap
                await asyncio.sleep(max(0.0, due - time.monotonic()))


def _check(running: Future[None]) -> None:
    """Raise the error with which the producer has ended, if it has."""
    if running.done():
        running.result()


def _milliseconds(name: str, value: float) -> Figure:
    return Figure(_LETTER, name, JSWORKER, "ms", (value,), more_is_better=False)
