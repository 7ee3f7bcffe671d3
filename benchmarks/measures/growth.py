"""(f) Speed as the table grows: finished rows, a long backlog, an old transaction that pins the horizon."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.figures import JSWORKER, Figure, ratio
from benchmarks.measures.filling import fill_finished, fill_queued
from benchmarks.measures.horizon import PinnedHorizon
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import (
    backlog_rate,
    finished_per_second,
    p50_and_p99,
    paced_latencies,
    publish_all,
)
from benchmarks.measures.sample_processors import NOOP
from benchmarks.servers import Servers, running_servers

LETTER: Final = "f"
TITLE: Final = "growth of the table"

_EMPTY = "empty table"
_KEEP: Final = {"JSWORKER_RETENTION": "none"}
"""Otherwise workers would prune the rows that were filled in."""

_LATENCY_PER_SECOND = 200.0


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    finished: Sequence[int] = (10_000, 1_000_000, 10_000_000),
    backlog: int = 1_000_000,
    backlog_seconds: float = 10.0,
    jobs: int = 20_000,
    latency_seconds: float = 10.0,
    pinned_seconds: float = 600.0,
    pinned_per_second: int = 1000,
) -> list[Figure]:
    """Compare full tables with an empty one on the same server, in interleaved rounds.

    Args:
        rounds: rounds with finished rows and with the backlog; the pinned horizon has one round.
        show: called with what is going on.
        finished: finished rows in the table, one database each.
        backlog: queued jobs whose messages are in the stream; 0: not measured.
        backlog_seconds: for how long a worker drains them.
        jobs: of the preloaded backlog that measures the rate everywhere else.
        latency_seconds: how long the latency is measured at 200 jobs/s.
        pinned_seconds: for how long a transaction is left idle; 0: not measured.
        pinned_per_second: jobs a second meanwhile.
    """
    figures: list[Figure] = []
    with running_servers() as servers:
        speed = _Speed(jobs, latency_seconds, show)
        figures += _with_finished_rows(servers, rounds, finished, speed)
        if backlog:
            figures += _with_backlog(servers, rounds, backlog, backlog_seconds, speed)
    if pinned_seconds:
        with running_servers() as servers:
            figures += PinnedHorizon(servers, pinned_seconds, pinned_per_second, jobs, show).measure()
    return figures


@dataclass(slots=True)
class _Measured:
    """Values of one table, one for each round."""

    rates: list[float]
    medians: list[float]
    p99s: list[float]


@dataclass(frozen=True, slots=True)
class _Speed:
    """How a table is measured."""

    jobs: int
    latency_seconds: float
    show: Callable[[str], None]

    def rate(self, variables: Mapping[str, str], table: str) -> float:
        self.show(f"{table}: no-op rate")
        return backlog_rate(variables, self.jobs)

    def latency(self, variables: Mapping[str, str], table: str) -> tuple[float, float]:
        self.show(f"{table}: latency at {_LATENCY_PER_SECOND:g} jobs/s")
        per_second = _LATENCY_PER_SECOND
        return p50_and_p99(paced_latencies(variables, per_second=per_second, seconds=self.latency_seconds))


def _with_finished_rows(
    servers: Servers, rounds: int, finished: Sequence[int], speed: _Speed
) -> list[Figure]:
    tables = {_EMPTY: servers.new_jsworker() | _KEEP}
    for rows in finished:
        table = f"{rows:,} finished rows"
        tables[table] = servers.new_jsworker() | _KEEP
        fill_finished(tables[table]["JSWORKER_DATABASE_URL"], rows, kinds=["noop"], show=speed.show)
    measured = {table: _Measured([], [], []) for table in tables}
    for _ in range(rounds):
        for table, variables in tables.items():
            measured[table].rates.append(speed.rate(variables, table))
            p50, p99 = speed.latency(variables, table)
            measured[table].medians.append(p50)
            measured[table].p99s.append(p99)
    return _compared(measured)


def _with_backlog(servers: Servers, rounds: int, backlog: int, seconds: float, speed: _Speed) -> list[Figure]:
    """Measure with a long queue of rows and messages, which jsworker's own outbox has published."""
    full = f"{backlog:,} queued jobs"
    tables = {"short queue": servers.new_jsworker(), full: servers.new_jsworker()}
    url = tables[full]["JSWORKER_DATABASE_URL"]
    fill_queued(url, backlog, kind="noop", show=speed.show)
    speed.show(f"publishing {backlog:,} messages")
    began = time.monotonic()
    asyncio.run(publish_all(tables[full]))
    published = Figure(
        LETTER,
        f"outbox of {backlog:,} jobs, by one client",
        JSWORKER,
        "jobs/s",
        (backlog / (time.monotonic() - began),),
        note="published and marked",
    )
    measured = {table: _Measured([], [], []) for table in tables}
    for _ in range(rounds):
        for table, variables in tables.items():
            # Jobs of another kind: otherwise each would wait for a million others.
            p50, p99 = speed.latency(variables, table)
            measured[table].medians.append(p50)
            measured[table].p99s.append(p99)
        measured["short queue"].rates.append(speed.rate(tables["short queue"], "short queue"))
        speed.show(f"{full}: no-op rate")
        measured[full].rates.append(_rate_of_the_front(tables[full], seconds))
    return [published, *_compared(measured)]


def _rate_of_the_front(variables: Mapping[str, str], seconds: float) -> float:
    """Return the rate at which a worker takes jobs from the front of a queue for ``seconds``."""
    since = time.time()
    with workers(1, [NOOP], variables):
        time.sleep(seconds)
    return finished_per_second(variables["JSWORKER_DATABASE_URL"], since=since)


def _compared(measured: Mapping[str, _Measured]) -> list[Figure]:
    """Return every table's figures, and their ratios to those of the first table."""
    figures: list[Figure] = []
    reference: list[Figure] = []
    for table, values in measured.items():
        own = [
            Figure(LETTER, f"no-op jobs, {table}", JSWORKER, "jobs/s", tuple(values.rates)),
            _time(f"start p50 at 200/s, {table}", values.medians),
            _time(f"start p99 at 200/s, {table}", values.p99s),
        ]
        figures += own
        reference = reference or own
        if own is not reference:
            figures += [_ratio(mine, base) for mine, base in zip(own, reference, strict=True)]
    return figures


def _time(name: str, milliseconds: Sequence[float]) -> Figure:
    return Figure(LETTER, name, JSWORKER, "ms", tuple(milliseconds), more_is_better=False)


def _ratio(figure: Figure, to: Figure) -> Figure:
    note = f"median of the rounds; 1 is {to.name}"
    name = f"{figure.name} ÷ {to.name.rpartition(', ')[2]}"
    more = figure.more_is_better
    return Figure(LETTER, name, JSWORKER, "×", (ratio(figure, to),), more_is_better=more, note=note)
