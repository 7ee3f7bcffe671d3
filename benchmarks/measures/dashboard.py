"""(o) The dashboard: its pages beside millions of jobs, and what viewers cost PostgreSQL and the workers."""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.cpu_time import cpu_seconds
from benchmarks.measures.filling import (
    fill_finished,
    fill_held_by_key,
    fill_held_by_needs,
    fill_statistics,
)
from benchmarks.measures.load import backlog_rate, p50_and_p99
from benchmarks.measures.statements import logged_statements
from benchmarks.processes import SystemFailed, module, running, wait_until
from benchmarks.runs import Rounds, order
from benchmarks.servers import Servers, running_servers
from benchmarks.systems.database import tidy

LETTER: Final = "o"
TITLE: Final = "the dashboard"

_KINDS: Final = [f"kind-{number:02}" for number in range(20)]
_HELD: Final = 50_000
_KEEP: Final = {"JSWORKER_RETENTION": "none"}
"""Otherwise workers would prune the rows that were filled in."""
_START_SECONDS: Final = 60.0
_REQUEST_SECONDS: Final = 30.0

_LIVE: Final = (
    *("/", "/jobs", "/failures", "/kinds", "/keys"),
    *("/schedules", "/workflows", "/workers"),
)
_OTHERS: Final = ("/dead-messages", "/doctor", "/audit")

_LAST_FAILED = """
SELECT id FROM jsworker.jobs WHERE status || '' IN ('failed', 'cancelled') AND status = 'failed'
ORDER BY id DESC LIMIT 1
"""


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    rows: int = 10_000_000,
    failed: int = 50_000,
    requests: int = 30,
    viewers: int = 200,
    seconds: float = 10.0,
    jobs: int = 60_000,
) -> list[Figure]:
    """Ask for pages, look at live ones, and let a worker do no-op jobs beside them, in interleaved rounds.

    Args:
        rounds: each has every page, every number of viewers, and the worker with and without viewers.
        show: called with what is going on.
        rows: jobs in the table, of 20 kinds.
        failed: how many of them have failed, in 40 groups.
        requests: requests for each page in a round.
        viewers: the number of viewers of live pages.
        seconds: for how long they look while PostgreSQL's work is counted.
        jobs: of the preloaded backlog that measures the rate.
    """
    with running_servers() as servers:
        variables = servers.new_jsworker() | _KEEP
        url = variables["JSWORKER_DATABASE_URL"]
        took = _fill(url, rows, failed, show)
        with _dashboard(servers, variables, rows) as site:
            found = Rounds(LETTER, [JSWORKER], rounds, show)
            for turn in range(rounds):
                words = f"round {turn + 1} of {rounds}"
                tidy(url)  # ``work`` measures the page "/" with the dead index entries of a flood
                show(f"{words}: pages")
                site.ask_pages(found, requests)
                show(f"{words}: viewers")
                site.look(found, viewers, seconds, turn)
                show(f"{words}: no-op rate")
                site.work(found, viewers, jobs, turn)
    filled = Figure(LETTER, f"to fill the table with {rows:,} jobs", JSWORKER, "s", (took,), False)
    return [*found.figures(), filled]


def _fill(url: str, rows: int, failed: int, show: Callable[[str], None]) -> float:
    """Fill the tables, and return how many seconds it took."""
    began = time.monotonic()
    held = min(_HELD, rows // 10)
    fill_statistics(url, kinds=_KINDS)
    fill_held_by_key(url, held, kind=_KINDS[0], show=show)
    fill_held_by_needs(url, held, kind=_KINDS[1], show=show)
    fill_finished(url, rows - 2 * held, kinds=_KINDS, failed=failed, show=show)
    return time.monotonic() - began


@dataclass(frozen=True, slots=True)
class _Site:
    """A dashboard that is being served."""

    servers: Servers
    variables: Mapping[str, str]
    rows: int
    port: int

    def ask_pages(self, found: Rounds, requests: int) -> None:
        """Request each page ``requests`` times, one after another."""
        what = f"page beside {self.rows:,} jobs"
        for name, path in self._pages().items():
            p50, p99 = p50_and_p99([self._milliseconds(path) for _ in range(requests)])
            found.add(f"{what}: p50", name, "ms", p50, more_is_better=False)
            found.add(f"{what}: p99", name, "ms", p99, more_is_better=False)

    def look(self, found: Rounds, viewers: int, seconds: float, turn: int) -> None:
        """Count PostgreSQL's work with one viewer, with many of the same page, and with many of all."""
        watched = {
            "one viewer": (1, _LIVE[:1]),
            f"{viewers} viewers of the same page": (viewers, _LIVE[:1]),
            f"{viewers} viewers of {len(_LIVE)} pages": (viewers, _LIVE),
        }
        done: dict[str, tuple[float, float]] = {}
        for name in order(list(watched), turn):
            count, paths = watched[name]
            with self._viewers(count, paths), logged_statements(self.servers.postgres) as log:
                before = cpu_seconds(self.servers.postgres.pid)
                time.sleep(seconds)
                cpu = cpu_seconds(self.servers.postgres.pid) - before
            statements, busy = log.times(), sum(each.milliseconds for each in log.by_name.values())
            done[name] = statements / log.seconds, busy / log.seconds
            for what, unit, value in zip(
                ("statements", "executing them", "CPU"),
                ("/s", "ms/s", "ms/s"),
                (*done[name], cpu * 1000 / seconds),
                strict=True,
            ):
                found.add(f"PostgreSQL: {what}", name, unit, value, more_is_better=False)
        one, many, _ = watched
        for what, ours, theirs in zip(("statements", "executing them"), done[many], done[one], strict=True):
            name = f"PostgreSQL: {what}, {many} ÷ {one}"
            found.add(name, JSWORKER, "×", ours / theirs, more_is_better=False)

    def work(self, found: Rounds, viewers: int, jobs: int, turn: int) -> None:
        """Measure the no-op rate of one worker without viewers and beside many."""
        none, many = "no viewer", f"{viewers} viewers"
        rates: dict[str, float] = {}
        for name in order([none, many], turn):
            with self._viewers(viewers if name == many else 0, _LIVE[:1]):
                rates[name] = backlog_rate(self.variables, jobs)
            found.add("no-op jobs beside viewers", name, "jobs/s", rates[name])
            if name == none:
                what = f"page right after {jobs:,} jobs, which leave dead entries in the indexes"
                found.add(what, "/", "ms", self._milliseconds("/"), more_is_better=False)
        found.add(f"no-op jobs, {many} ÷ {none}", JSWORKER, "×", rates[many] / rates[none])

    def _pages(self) -> dict[str, str]:
        with psycopg.connect(self.variables["JSWORKER_DATABASE_URL"]) as connection:
            job, workflow = (
                row[0]
                for query in (_LAST_FAILED, "SELECT id FROM jsworker.workflows LIMIT 1")
                for row in connection.execute(query.encode())
            )
        return {
            **{path: path for path in (*_LIVE, *_OTHERS)},
            "/jobs of a status": "/jobs?status=failed",
            "/jobs of a kind": f"/jobs?kind={_KINDS[7]}",
            "/jobs with a text": "/jobs?status=failed&error=did+not+answer",
            "/jobs/{id}": f"/jobs/{job}",
            "/workflows/{id}": f"/workflows/{workflow}",
        }

    def _milliseconds(self, path: str) -> float:
        """Return how long a page took, to its last byte."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_REQUEST_SECONDS)
        began = time.perf_counter()
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        took = (time.perf_counter() - began) * 1000
        connection.close()
        if response.status != 200:
            raise SystemFailed(f"{path}: {response.status}")
        return took

    @contextmanager
    def _viewers(self, count: int, paths: tuple[str, ...]) -> Iterator[None]:
        """Run viewers during the block, each of which has received a live event."""
        if not count:
            yield
            return
        ready = self.servers.folder / f"viewers-{secrets.token_hex(4)}"
        urls = [f"http://127.0.0.1:{self.port}{path}" for path in paths]
        command = module("benchmarks.measures.viewers", str(ready), str(count), *urls)
        with running([command], {}) as (process,):

            async def all_look() -> bool:
                return ready.exists()

            asyncio.run(wait_until(all_look, [process], what=f"{count} viewers", seconds=_START_SECONDS))
            yield
            process.check()


@contextmanager
def _dashboard(servers: Servers, variables: Mapping[str, str], rows: int) -> Iterator[_Site]:
    """Serve the dashboard from a process of its own, as ``jsworker dashboard`` does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running([module("jsworker", "dashboard", "--port", str(port))], variables) as (process,):

        async def answers() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", port)):
                    return True
            except OSError:
                return False

        asyncio.run(wait_until(answers, [process], what="the dashboard answers", seconds=_START_SECONDS))
        yield _Site(servers, variables, rows, port)
        process.check()
