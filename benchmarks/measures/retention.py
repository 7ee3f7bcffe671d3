"""(j) Ended jobs are deleted while others run: how fast, and how this affects the others."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.filling import fill_finished
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import (
    latencies,
    new_client,
    p50_and_p99,
    wait_until_finished,
)
from benchmarks.measures.sample_processors import STAMP, Stamp
from benchmarks.processes import answer_of, module
from benchmarks.servers import Servers, running_servers
from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.enqueue import new_job_id

LETTER: Final = "j"
TITLE: Final = "retention"

_RETENTION: Final = 2 * Settings.model_fields["ack_wait"].default + 1
"""The shortest retention that is allowed, in seconds; the filled table has jobs of a week."""
_MARGIN_SECONDS: Final = 60.0
"""The few jobs that become too old after a pass has begun are left to the next pass, a minute later."""
_KEEP: Final = {"JSWORKER_RETENTION": "none"}
_KIND: Final = "ended-long-ago"
_WARM_UP_SECONDS: Final = 2.0
_LONGEST_SECONDS: Final = 1800.0
_LOOK_EVERY_SECONDS: Final = 1.0
_CALL_EVERY_SECONDS: Final = 0.01

_NONE, _LOOP, _COMMAND = "nothing is pruned", "workers prune", "jsworker prune"

_CUTOFF = "SELECT clock_timestamp() - make_interval(secs => %s)"
_OLD = "SELECT count(*) FROM jsworker.jobs WHERE kind = %s AND finished_at < %s"
_ANY_OLD = """
SELECT EXISTS (
  SELECT FROM jsworker.jobs
  WHERE status || '' NOT IN ('scheduled', 'queued', 'processing') AND finished_at < %s)
"""
_COMPLETED = """
SELECT count(*) FROM jsworker.jobs
WHERE kind = 'stamp' AND finished_at >= %s AND finished_at < clock_timestamp()
"""

Sql = psycopg.AsyncConnection[Any]
During = Callable[[Sql, datetime], Awaitable[None]]
"""An action for whose length a phase lasts; it gets the time before which jobs are old."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """The figures of a phase in which jobs ran, and ended ones were deleted or not."""

    pruned_per_second: float
    completed_per_second: float
    start_p50_ms: float
    start_p99_ms: float


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    rows: int = 1_000_000,
    rate: float = 1_000.0,
    seconds: float = 30.0,
) -> list[Figure]:
    """Run jobs at a pace in one worker process: beside nothing, beside its own pruning, beside the command.

    Args:
        rounds: the number of rounds of all three, each round on a database of its own.
        show: called with what is going on.
        rows: ended jobs in the table at the beginning of each pruning.
        rate: jobs enqueued a second, in a call of ``enqueue_many`` every ten milliseconds.
        seconds: how long jobs run while nothing is pruned.
    """
    phases: dict[str, list[_Phase]] = {_NONE: [], _LOOP: [], _COMMAND: []}
    with running_servers() as servers:
        for number in range(1, rounds + 1):
            for name, phase in _round(servers, rows, rate, seconds, partial(_show, show, number)):
                phases[name].append(phase)
    return [figure for name, found in phases.items() for figure in _figures(name, found, rate)]


def _round(
    servers: Servers, rows: int, rate: float, seconds: float, show: Callable[[str], None]
) -> Iterator[tuple[str, _Phase]]:
    variables = servers.new_jsworker()
    url = variables["JSWORKER_DATABASE_URL"]

    async def pass_time(_sql: Sql, _before: datetime) -> None:
        await asyncio.sleep(seconds)

    async def be_pruned(sql: Sql, before: datetime) -> None:
        async with asyncio.timeout(_LONGEST_SECONDS):
            while True:
                await asyncio.sleep(_LOOK_EVERY_SECONDS)
                if not await _value(sql, _ANY_OLD, before):
                    return

    async def prune(_sql: Sql, _before: datetime) -> None:
        command = module("jsworker", "prune", "--json", "--older-than", f"{_RETENTION:g}")
        await asyncio.to_thread(answer_of, command, variables | _KEEP, seconds=_LONGEST_SECONDS)

    fill_finished(url, rows, kinds=[_KIND], show=show)
    show("jobs run, nothing is pruned")
    yield _NONE, _run(variables | _KEEP, rate, pass_time)
    show("jobs run, workers prune")
    yield _LOOP, _run(variables | {"JSWORKER_RETENTION": f"{_RETENTION:g}"}, rate, be_pruned)
    fill_finished(url, rows, kinds=[_KIND], show=show)
    show("jobs run, jsworker prune")
    yield _COMMAND, _run(variables | _KEEP, rate, prune)


def _run(variables: Mapping[str, str], rate: float, during: During) -> _Phase:
    with workers(1, [STAMP], variables):
        return asyncio.run(_watch(variables, rate, during))


async def _watch(variables: Mapping[str, str], rate: float, during: During) -> _Phase:
    url = variables["JSWORKER_DATABASE_URL"]
    async with new_client(variables) as client, await Sql.connect(url, autocommit=True) as sql:
        await _enqueue_meanwhile(client, rate, asyncio.sleep(_WARM_UP_SECONDS))
        before = await _value(sql, _CUTOFF, _RETENTION + _MARGIN_SECONDS)
        old = await _value(sql, _OLD, _KIND, before)
        first, began, since = new_job_id(), time.monotonic(), await _value(sql, "SELECT clock_timestamp()")
        await _enqueue_meanwhile(client, rate, during(sql, before))
        took = time.monotonic() - began
        completed = await _value(sql, _COMPLETED, since)
        pruned = old - await _value(sql, _OLD, _KIND, before)
    await wait_until_finished(url, first)
    return _Phase(pruned / took, completed / took, *p50_and_p99(latencies(url, first)))


async def _enqueue_meanwhile(client: JobClient, rate: float, during: Awaitable[None]) -> None:
    """Enqueue jobs until ``during`` has ended, each time all that are due in one call.

    Calls follow each other: a producer that has to wait for the database makes larger calls, not more.
    """
    waiting = asyncio.ensure_future(during)
    started, called = time.monotonic(), 0
    try:
        while not waiting.done():
            await asyncio.sleep(_CALL_EVERY_SECONDS)
            now = time.monotonic()
            due = int((now - started) * rate) - called
            await client.enqueue_many(Stamp, [{"at": now}] * due)
            called += due
    finally:
        waiting.cancel()  # of no effect if it has ended
        await asyncio.gather(waiting, return_exceptions=True)
    await waiting


async def _value(sql: Sql, query: str, *values: Any) -> Any:
    row = await (await sql.execute(query.encode(), values)).fetchone()
    return None if row is None else row[0]


def _show(show: Callable[[str], None], number: int, said: str) -> None:
    show(f"round {number}: {said}")


def _figures(name: str, phases: list[_Phase], rate: float) -> Iterator[Figure]:
    load = f"{rate:,.0f} jobs/s run"
    if name != _NONE:
        pruned = tuple(phase.pruned_per_second for phase in phases)
        yield Figure(LETTER, f"rows pruned, {load}, {name}", JSWORKER, "rows/s", pruned)
    completed = tuple(phase.completed_per_second for phase in phases)
    yield Figure(LETTER, f"completed, {name}", JSWORKER, "jobs/s", completed)
    for percentile, values in (
        ("p50", tuple(phase.start_p50_ms for phase in phases)),
        ("p99", tuple(phase.start_p99_ms for phase in phases)),
    ):
        yield Figure(
            LETTER,
            f"start latency {percentile}, {load}, {name}",
            JSWORKER,
            "ms",
            values,
            more_is_better=False,
        )
