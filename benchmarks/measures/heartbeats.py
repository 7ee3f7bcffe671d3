"""(e) What ten thousand running jobs cost while they do nothing: heartbeats."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.cpu_time import cpu_seconds
from benchmarks.measures.jsworker_processes import Workers, workers
from benchmarks.measures.load import new_client, publish_all, until
from benchmarks.measures.sample_processors import HOLD, Hold
from benchmarks.measures.statements import (
    JobsTable,
    StatementLog,
    logged_statements,
    read_jobs_table,
    read_server,
)
from benchmarks.servers import Servers, running_servers
from jsworker.core.settings import Settings

LETTER: Final = "e"
TITLE: Final = "heartbeats of running jobs"

_BEATS = "HEARTBEAT", "STILL_MINE", "HEARTBEAT_ALONE", "SEEN", "ORPHANED"
"""The statements of the heartbeat loop."""
_INTERVAL: Final[float] = Settings.model_fields["heartbeat_interval"].default
_COUNTED_AFTER_SECONDS: Final = 11.0
"""An idle connection reports its writes after ten seconds: also the claims, which are no HOT updates."""
_HELD = "SELECT count(*) FROM jsworker.jobs WHERE status || '' = 'processing'"


@dataclass(frozen=True, slots=True)
class _Quiet:
    """What was used while nothing but heartbeats happened."""

    seconds: float
    worker_cpu_seconds: float
    postgres_cpu_seconds: float
    commits: int
    before: JobsTable
    after: JobsTable


def measure(
    rounds: int,  # noqa: ARG001 -- one round of five minutes is enough
    show: Callable[[str], None],
    *,
    jobs: int = 10_000,
    seconds: float = 300.0,
    settle_seconds: float = _COUNTED_AFTER_SECONDS,
    logged_intervals: int = 3,
) -> list[Figure]:
    """Hold jobs in flight in one worker process with default heartbeat settings, in one round.

    Args:
        rounds: not used.
        show: called with what is going on.
        jobs: how many are in flight, at most 10,000.
        seconds: for how long they are watched.
        settle_seconds: between the last claim and the watch.
        logged_intervals: heartbeat intervals after that, in which statements are counted by name.
    """
    with running_servers() as servers:
        variables = servers.new_jsworker() | {"JSWORKER_CONCURRENCY": str(jobs)}
        show(f"starting {jobs:,} jobs")
        asyncio.run(_enqueue(variables, jobs))
        # Ended by force: a drain of 25 seconds would only wait for jobs that never end.
        with workers(1, [HOLD], variables | {"JSWORKER_SHUTDOWN_TIMEOUT": "0.1"}) as running:
            asyncio.run(_wait_until_held(variables["JSWORKER_DATABASE_URL"], jobs))
            time.sleep(settle_seconds)
            quiet = _watch(servers, variables, running, seconds, show)
            show("reading the log of statements")
            with logged_statements(servers.postgres) as log:
                time.sleep(logged_intervals * _INTERVAL)
    return _figures(jobs, quiet, log)


async def _enqueue(variables: Mapping[str, str], jobs: int) -> None:
    async with new_client(variables) as client:
        await client.enqueue_many(Hold, [{"n": n} for n in range(jobs)])
    await publish_all(variables)


async def _wait_until_held(url: str, jobs: int) -> None:
    async def all_held() -> bool:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            return await (await connection.execute(_HELD)).fetchone() == (jobs,)

    await until(all_held)


def _watch(
    servers: Servers,
    variables: Mapping[str, str],
    running: Workers,
    seconds: float,
    show: Callable[[str], None],
) -> _Quiet:
    url = variables["JSWORKER_DATABASE_URL"]
    postgres = servers.postgres.pid
    table, server = read_jobs_table(url), read_server(servers.postgres, url)
    worker_cpu, postgres_cpu, started = (
        cpu_seconds(*running.children),
        cpu_seconds(postgres),
        time.monotonic(),
    )
    while (left := started + seconds - time.monotonic()) > 0:
        show(f"watching heartbeats, {left:.0f} s left")
        time.sleep(min(left, 10.0))
    return _Quiet(
        seconds=time.monotonic() - started,
        worker_cpu_seconds=cpu_seconds(*running.children) - worker_cpu,
        postgres_cpu_seconds=cpu_seconds(postgres) - postgres_cpu,
        commits=read_server(servers.postgres, url).commits - server.commits,
        before=table,
        after=read_jobs_table(url),
    )


def _figures(jobs: int, quiet: _Quiet, log: StatementLog) -> list[Figure]:
    held = f"{jobs:,} jobs in flight"
    intervals = log.seconds / _INTERVAL
    updates = quiet.after.updates - quiet.before.updates
    hot = quiet.after.hot_updates - quiet.before.hot_updates
    watched = f"over {quiet.seconds:.0f} s, heartbeat every {_INTERVAL:g} s"

    def cost(name: str, unit: str, value: float, note: str = watched) -> Figure:
        return Figure(LETTER, f"{held}: {name}", JSWORKER, unit, (value,), more_is_better=False, note=note)

    return [
        cost(
            "heartbeat statements per interval",
            "statements",
            log.times(*_BEATS) / intervals,
            note=f"in {log.seconds:.0f} s: {log.told()}",
        ),
        cost("statements of any kind per second", "statements/s", quiet.commits / quiet.seconds),
        cost("worker, of one core", "%", 100 * quiet.worker_cpu_seconds / quiet.seconds),
        cost("PostgreSQL, of one core", "%", 100 * quiet.postgres_cpu_seconds / quiet.seconds),
        Figure(LETTER, f"{held}: HOT share", JSWORKER, "%", (100 * hot / max(updates, 1),), note=watched),
        cost("growth of the table", "MB", quiet.after.table_megabytes - quiet.before.table_megabytes),
        cost("growth of its indexes", "MB", quiet.after.index_megabytes - quiet.before.index_megabytes),
    ]
