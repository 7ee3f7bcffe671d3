"""(n) Jobs that compute in isolated processes: compared with a bare process pool; how late the worker is."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from uuid import UUID

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import new_client, p50_and_p99, wait_until_finished
from benchmarks.measures.sample_processors import COMPUTE, LATENESS, Compute, Lateness, compute
from benchmarks.servers import running_servers
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.enqueue import new_job_id

LETTER: Final = "n"
TITLE: Final = "jobs that compute, in isolated processes"

_PROCESSES: Final[int] = Settings.model_fields["isolated_processes"].get_default(call_default_factory=True)
_POOL: Final = "ProcessPoolExecutor"
_BEAT_SECONDS: Final = 1.0
_SETTINGS: Final = {
    # More heartbeats than by default, so that there are enough to measure.
    "JSWORKER_HEARTBEAT_INTERVAL": f"{_BEAT_SECONDS:g}",
    "JSWORKER_STATEMENT_TIMEOUT": "0.9",
}
_LOOK_SECONDS: Final = 0.1
_WARM_SECONDS: Final = 60.0
_WATCHED_SHARE: Final = 0.8
"""The event loop is watched for this share of the pool's time, so that it is under load throughout."""
_BEATEN_AT = """
SELECT status, extract(epoch FROM last_activity_at)::double precision FROM jsworker.jobs WHERE id = %s
"""
_LAST_END = """
SELECT extract(epoch FROM max(finished_at))::double precision FROM jsworker.jobs
WHERE id >= %s AND kind = 'compute'
"""


@dataclass(frozen=True, slots=True)
class Pooled:
    """One turn of the pool: how long it took, and how long one call took on average."""

    seconds: float
    call_milliseconds: float


@dataclass(frozen=True, slots=True)
class Computed:
    """One round of a worker.

    Attributes:
        per_second: jobs a second.
        loop_milliseconds: by how much timers of the worker's event loop were late.
        beat_milliseconds: by how much heartbeats were later than their interval, by the database's clock.
    """

    per_second: float
    loop_milliseconds: list[float]
    beat_milliseconds: list[float]


def measure(
    rounds: int, show: Callable[[str], None], *, jobs: int = 400, processes: int = _PROCESSES
) -> list[Figure]:
    """Call the same function equally often in a pool and in a worker's jobs, in turns.

    Args:
        rounds: rounds of both; all processes are warm before, and idle in the other's turn.
        show: called with what is going on.
        jobs: calls in each round; the pool's are half before and half after the worker's.
        processes: the number of the pool's processes, and of the worker's isolated ones.
    """
    pooled, found, means = [], [], []
    clean = multiprocessing.get_context("spawn")
    with running_servers() as servers, ProcessPoolExecutor(processes, mp_context=clean) as pool:
        variables = servers.new_jsworker() | _SETTINGS | {"JSWORKER_ISOLATED_PROCESSES": str(processes)}
        with workers(1, [COMPUTE, LATENESS], variables):
            list(pool.map(compute, range(2 * processes)))
            asyncio.run(_warm(variables, 2 * processes))
            for turn in range(rounds):
                show(f"round {turn + 1} of {rounds}: {jobs:,} calls by a pool, as many by a worker")
                before = _by_pool(pool, jobs // 2)
                watched_seconds = 2 * before.seconds * _WATCHED_SHARE
                found.append(asyncio.run(_by_worker(variables, jobs, watched_seconds)))
                after = _by_pool(pool, jobs - jobs // 2)
                pooled.append(jobs / (before.seconds + after.seconds))
                means += [before.call_milliseconds, after.call_milliseconds]
    return _figures(
        pooled, found, f"{processes} processes; a call takes {min(means):.0f} to {max(means):.0f} ms"
    )


def _by_pool(pool: ProcessPoolExecutor, calls: int) -> Pooled:
    began = time.monotonic()
    milliseconds = list(pool.map(compute, range(calls)))
    return Pooled(time.monotonic() - began, sum(milliseconds) / calls)


async def _warm(variables: Mapping[str, str], jobs: int) -> None:
    async with new_client(variables) as client:
        for handle in await client.enqueue_many(Compute, range(jobs)):
            await handle.result(timeout=_WARM_SECONDS)


async def _by_worker(variables: Mapping[str, str], jobs: int, watched_seconds: float) -> Computed:
    url = variables["JSWORKER_DATABASE_URL"]
    async with (
        new_client(variables) as client,
        await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
    ):
        first = new_job_id()
        began = time.time()
        await client.enqueue_many(Compute, range(jobs))
        watching = await client.enqueue(Lateness, watched_seconds)
        beats = await _beats(connection, watching.id)
        late: list[float] = await watching.result()
        await wait_until_finished(url, first)
        [[ended]] = await (await connection.execute(_LAST_END, [first])).fetchall()
    gaps = (later - earlier for earlier, later in pairwise(beats))
    return Computed(jobs / (ended - began), late, [1000 * max(0.0, gap - _BEAT_SECONDS) for gap in gaps])


async def _beats(connection: psycopg.AsyncConnection, job_id: UUID) -> list[float]:
    """Return when a job was claimed and each heartbeat that its row got, until it ends."""
    found: list[float] = []
    while True:
        [[status, beaten_at]] = await (await connection.execute(_BEATEN_AT, [job_id])).fetchall()
        if status == "completed":
            return found
        if beaten_at is not None and beaten_at not in found:
            found.append(beaten_at)
        await asyncio.sleep(_LOOK_SECONDS)


def _figures(pooled: Sequence[float], found: Sequence[Computed], note: str) -> list[Figure]:
    rates = tuple(each.per_second for each in found)
    shares = tuple(ours / theirs for ours, theirs in zip(rates, pooled, strict=True))
    loops = [p50_and_p99(each.loop_milliseconds) for each in found]
    beats = tuple(max(each.beat_milliseconds) for each in found)
    counted = sum(len(each.beat_milliseconds) for each in found)

    def late(name: str, values: tuple[float, ...], note: str = "") -> Figure:
        return Figure(LETTER, name, JSWORKER, "ms", values, more_is_better=False, note=note)

    return [
        Figure(LETTER, "calls", JSWORKER, "jobs/s", rates, note=note),
        Figure(LETTER, "calls", _POOL, "jobs/s", tuple(pooled), note=note),
        Figure(LETTER, "share of the pool's calls", JSWORKER, "×", shares),
        late("timers of the worker's event loop, late by: p50", tuple(p50 for p50, _ in loops)),
        late("timers of the worker's event loop, late by: p99", tuple(p99 for _, p99 in loops)),
        late("heartbeats in the database, late by: most", beats, f"{counted} heartbeats in all rounds"),
    ]
