"""The engine's two figures: no-op jobs per second of one worker process, and how soon a lone job starts.

    python benchmarks/engine.py [--json]

Starts a nats-server and a PostgreSQL of its own with default durability (fsync on) and one worker process
with default settings, all on this machine. Times of jobs are the database's; start latency is taken on the
machine's monotonic clock, which all processes share.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from jsworker import Job, JobClient, JobProcessor
from jsworker.embedded import EmbeddedNats, EmbeddedPostgres
from jsworker.ownership.upgrading import upgrade_database

BACKLOG = 20_000
LONE_JOBS = 200
LONE_JOBS_GAP_SECONDS = 0.05  # 20 jobs/s, an otherwise idle worker


class Noop(JobProcessor):
    """Does nothing."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Return at once."""


class Stamp(JobProcessor):
    """Tells when it was started."""

    async def process(self, job: Job[dict[str, Any]]) -> float:  # noqa: ARG002 -- the base class's signature
        """Return the monotonic time."""
        return time.monotonic()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    with servers() as environment:
        os.environ.update(environment)
        figures = asyncio.run(measure(environment["JSWORKER_DATABASE_URL"]))
    figures |= {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
    }
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)


async def measure(dsn: str) -> dict[str, Any]:
    """Return the figures by name."""
    async with JobClient.from_env() as client:
        async with worker():
            latencies = await start_latencies(client)
        began = time.perf_counter()
        await client.enqueue_many(Noop, [{"n": n} for n in range(BACKLOG)])
        accepted = BACKLOG / (time.perf_counter() - began)
        await client.publish_pending()
        await wait_for(dsn, "SELECT count(*) = 0 FROM jsworker.jobs WHERE needs_publish")
        async with worker():
            await wait_for(dsn, "SELECT count(*) = 0 FROM jsworker.jobs WHERE status <> 'completed'")
    return {
        "jobs per second": jobs_per_second(dsn),
        "start latency p50 ms": statistics.median(latencies) * 1000,
        "start latency p99 ms": statistics.quantiles(latencies, n=100)[98] * 1000,
        "enqueue_many per second": accepted,
    }


async def start_latencies(client: JobClient) -> list[float]:
    """Return seconds from the call of enqueue to the start of process, one job at a time."""
    called: dict[str, float] = {}
    for n in range(LONE_JOBS):
        before = time.monotonic()
        called[str((await client.enqueue(Stamp, {"n": n})).id)] = before
        await asyncio.sleep(LONE_JOBS_GAP_SECONDS)
    rows = {job_id: await client.get(job_id) for job_id in called}
    return [rows[job_id]["result"] - before for job_id, before in called.items()]


def jobs_per_second(dsn: str) -> float:
    """Return the rate from the first claim to the last completion, by the database's clock."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT count(*) / extract(epoch FROM max(finished_at) - min(claimed_at)) FROM jsworker.jobs"
            " WHERE kind = 'noop'"
        ).fetchone()
    if row is None:
        raise AssertionError
    return float(row[0])


async def wait_for(dsn: str, condition: str) -> None:
    """Ask the database until the condition holds."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            row = await (await connection.execute(condition.encode())).fetchone()
            if row and row[0]:
                return
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[None]:
    """Run one worker under its supervisor and wait until it is registered."""
    name = f"bench-{secrets.token_hex(4)}"
    targets = ["engine:Noop", "engine:Stamp"]
    process = subprocess.Popen(  # noqa: ASYNC220, S603 -- this program's own command
        [sys.executable, "-m", "jsworker", "run", "--worker-id", name, *targets],
        cwd=Path(__file__).parent,
        stderr=subprocess.DEVNULL,
    )
    try:
        await wait_for(
            os.environ["JSWORKER_DATABASE_URL"],
            f"SELECT count(*) > 0 FROM jsworker.workers WHERE starts_with(id, '{name}-')",  # noqa: S608 -- our own name
        )
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait)


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Run both servers in a folder that is deleted afterwards and yield the variables that lead to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # PostgreSQL started by root runs as another user
        with (
            EmbeddedPostgres(Path(folder) / "postgres") as postgres,
            EmbeddedNats(Path(folder) / "nats") as nats,
        ):
            upgrade_database(postgres.url)
            yield {"JSWORKER_DATABASE_URL": postgres.url, "JSWORKER_NATS_URL": nats.url}
            postgres.stop()
            nats.stop()


if __name__ == "__main__":
    main()
