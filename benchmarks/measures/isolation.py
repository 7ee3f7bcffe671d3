"""(n) Jobs that compute, in isolated processes: beside a bare process pool, and what the worker feels of it."""

import asyncio
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import new_client, p50_and_p99
from benchmarks.measures.sample_processors import COMPUTE, LATENESS, Compute, Lateness, compute
from benchmarks.servers import running_servers
from jsworker.client import JobHandle
from jsworker.core.settings import Settings

LETTER: Final = "n"
TITLE: Final = "jobs that compute, in isolated processes"

_PROCESSES: Final[int] = Settings.model_fields["isolated_processes"].get_default(call_default_factory=True)
_POOL: Final = "ProcessPoolExecutor"
_BEAT_SECONDS: Final = 1.0
_SETTINGS: Final = {
    # More heartbeats than by default, so that there are some to look at.
    "JSWORKER_HEARTBEAT_INTERVAL": f"{_BEAT_SECONDS:g}",
    "JSWORKER_STATEMENT_TIMEOUT": "0.9",
}
_LOOK_SECONDS: Final = 0.1
_WATCHED_SHARE: Final = 0.8
"""Of the time that the pool needs: so long the event loop is watched, all of it under load."""
_BEATEN_AT = "SELECT extract(epoch FROM last_activity_at)::double precision FROM jsworker.jobs WHERE id = %s"
_LAST_END = "SELECT extract(epoch FROM max(finished_at))::double precision FROM jsworker.jobs WHERE kind = %s"


@dataclass(frozen=True, slots=True)
class Computed:
    """One round of a worker.

    Attributes:
        per_second: jobs.
        loop_milliseconds: by which timers of the worker's event loop were late.
        beat_milliseconds: by which heartbeats were later than their interval, by the database's clock.
    """

    per_second: float
    loop_milliseconds: list[float]
    beat_milliseconds: list[float]


def measure(
    rounds: int, show: Callable[[str], None], *, jobs: int = 1_000, processes: int = _PROCESSES
) -> list[Figure]:
    """Have the same function called as often by a pool and by a worker's jobs, in turns.

    Args:
        rounds: of both; what each starts is warm before its clock begins.
        show: told what is going on.
        jobs: of each round.
        processes: of the pool, and isolated ones of the worker.
    """
    pooled, found, means = [], [], []
    clean = multiprocessing.get_context("spawn")
    with running_servers() as servers, ProcessPoolExecutor(processes, mp_context=clean) as pool:
        variables = servers.new_jsworker() | _SETTINGS | {"JSWORKER_ISOLATED_PROCESSES": str(processes)}
        list(pool.map(compute, range(2 * processes)))
        for turn in range(rounds):
            show(f"round {turn + 1} of {rounds}: {jobs:,} calls by a pool")
            began = time.monotonic()
            own_seconds = list(pool.map(compute, range(jobs)))
            seconds = time.monotonic() - began
            pooled.append(jobs / seconds)
            means.append(1000 * sum(own_seconds) / jobs)
            show(f"round {turn + 1} of {rounds}: {jobs:,} jobs by a worker")
            with workers(1, [COMPUTE, LATENESS], variables):
                found.append(asyncio.run(_compute(variables, jobs, processes, _WATCHED_SHARE * seconds)))
    note = f"{processes} processes; a call takes {min(means):.0f} to {max(means):.0f} ms"
    return _figures(pooled, found, note)


async def _compute(
    variables: Mapping[str, str], jobs: int, processes: int, watched_seconds: float
) -> Computed:
    url = variables["JSWORKER_DATABASE_URL"]
    async with (
        new_client(variables) as client,
        await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
    ):
        warming = await client.enqueue_many(Compute, [{"n": n} for n in range(2 * processes)])
        for handle in warming:
            await handle.result(timeout=60.0)
        watching = await client.enqueue(Lateness, {"seconds": watched_seconds})
        began = time.time()
        await client.enqueue_many(Compute, [{"n": n} for n in range(jobs)])
        beats = await _beats(connection, watching)
        late: list[float] = await watching.result(timeout=60.0)
        await client.wait_empty() if False else None
        [[ended]] = await (await connection.execute(_LAST_END, [Compute.kind])).fetchall()
    between = (second - first for first, second in pairwise(beats))
    return Computed(jobs / (ended - began), late, [1000 * max(0.0, gap - _BEAT_SECONDS) for gap in between])
