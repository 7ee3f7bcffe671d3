"""How soon a high job starts behind a backlog of normal and low ones, and how low ones go on.

By hand: ``python -m benchmarks.measures.priorities [--normal N] [--low N] [--high N] [--per-second N]``.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import new_client, p50_and_p99, publish_all, until
from benchmarks.servers import running_servers
from benchmarks.systems.database import tidy
from jsworker import Job, JobProcessor
from jsworker.core.priorities import PRIORITIES
from jsworker.ownership.transitions.enqueue import new_job_id

TARGET: Final = "benchmarks.measures.priorities:InTurn"

_STARTED = """
SELECT priority, result::double precision * 1000 FROM jsworker.jobs
WHERE status = 'completed' AND finished_at BETWEEN to_timestamp(%s) AND to_timestamp(%s) AND id >= %s
"""
_ENDED = """
SELECT priority, count(*) FROM jsworker.jobs
WHERE status = 'completed' AND finished_at BETWEEN to_timestamp(%s) AND to_timestamp(%s) GROUP BY priority
"""
_NOW = "SELECT extract(epoch FROM clock_timestamp())::double precision"
_LEFT = "SELECT count(*) FROM jsworker.jobs WHERE status = 'queued' AND priority = %s"


class InTurn(JobProcessor):
    """Takes as long as its payload says, and tells how long ago its producer called ``enqueue``."""

    async def process(self, job: Job[dict[str, Any]]) -> float:
        """Return the seconds since ``at`` of the payload, on the machine's monotonic clock."""
        waited = time.monotonic() - float(job.payload["at"])
        await asyncio.sleep(float(job.payload["seconds"]))
        return waited


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured while there were jobs of all priorities.

    Attributes:
        started: milliseconds from the call of ``enqueue`` to the start of each high job.
        ended: jobs that ended in that time, by priority: high, normal, low.
        seconds: how long that was.
        left: normal and low jobs that still waited at its end.
    """

    started: list[float]
    ended: tuple[int, int, int]
    seconds: float
    left: tuple[int, int]


def measure(
    *,
    normal: int = 100_000,
    low: int = 10_000,
    high: int = 200,
    per_second: float = 20.0,
    seconds: float = 0.0,
) -> Measured:
    """Preload a backlog, start a worker process, and enqueue high jobs one by one at fixed times.

    Args:
        normal, low: jobs of the backlog.
        high: how many high jobs.
        per_second: how many of them a second.
        seconds: how long each job of the backlog takes; high ones take no time.
    """
    with running_servers() as servers:
        variables = servers.new_jsworker()
        asyncio.run(_preload(variables, {"low": low, "normal": normal}, seconds))
        tidy(variables["JSWORKER_DATABASE_URL"])
        with workers(1, [TARGET], variables):
            return asyncio.run(_measure(variables, high, per_second))


async def _preload(variables: dict[str, str], backlog: dict[str, int], seconds: float) -> None:
    async with new_client(variables) as client:
        for priority, count in backlog.items():
            payload = {"at": time.monotonic(), "seconds": seconds}
            await client.enqueue_many(InTurn, [payload] * count, priority=priority)  # type: ignore[call-overload] # one of them
    await publish_all(variables)


async def _measure(variables: dict[str, str], high: int, per_second: float) -> Measured:
    url = variables["JSWORKER_DATABASE_URL"]
    async with new_client(variables) as client:

        async def enqueue() -> None:
            await client.enqueue(InTurn, {"at": time.monotonic(), "seconds": 0.0}, priority="high")

        for _ in range(3):  # opens the connections and the lane
            await enqueue()
        await until(lambda: _ended_some(url), seconds=60.0)
        first, [[began]] = new_job_id(), await _ask(url, _NOW)
        clock = time.monotonic
        started = clock()
        async with asyncio.TaskGroup() as calls:
            for n in range(high):
                await asyncio.sleep(max(0.0, started + n / per_second - clock()))
                calls.create_task(enqueue())
        [[ended]] = await _ask(url, _NOW)
        left = [(await _ask(url, _LEFT, priority))[0][0] for priority in (1, 2)]
        await until(lambda: _all_ended(url, first, high), seconds=120.0)
    rows = await _ask(url, _STARTED, began, ended + 120.0, first)
    counts = dict(await _ask(url, _ENDED, began, ended))
    return Measured(
        started=[milliseconds for priority, milliseconds in rows if priority == 0],
        ended=(counts.get(0, 0), counts.get(1, 0), counts.get(2, 0)),
        seconds=ended - began,
        left=(left[0], left[1]),
    )


async def _ended_some(url: str) -> bool:
    rows = await _ask(url, "SELECT DISTINCT priority FROM jsworker.jobs WHERE status = 'completed'")
    return len(rows) == len(PRIORITIES)


async def _all_ended(url: str, first: Any, high: int) -> bool:
    query = "SELECT count(*) FROM jsworker.jobs WHERE id >= %s AND priority = 0 AND status = 'completed'"
    return bool((await _ask(url, query, first))[0][0] >= high)


async def _ask(url: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        return await (await connection.execute(query.encode(), values)).fetchall()


def main() -> None:
    """Measure once and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--normal", type=int, default=100_000)
    parser.add_argument("--low", type=int, default=10_000)
    parser.add_argument("--high", type=int, default=200)
    parser.add_argument("--per-second", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=0.005, help="how long each job of the backlog takes")
    found = measure(**vars(parser.parse_args()))
    p50, p99 = p50_and_p99(found.started)
    share = sum(found.ended) / max(1, found.ended[2])
    ended = ", ".join(f"{count:,} {name}" for name, count in zip(PRIORITIES, found.ended, strict=True))
    lines = [
        f"high jobs started after p50 {p50:.1f} ms, p99 {p99:.1f} ms ({len(found.started)} jobs)",
        f"meanwhile, in {found.seconds:.1f} s, there ended {ended}; one of {share:.1f} was low",
        f"still waiting at the end: {found.left[0]:,} normal, {found.left[1]:,} low",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
