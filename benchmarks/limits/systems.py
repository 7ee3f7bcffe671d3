"""The systems: how each is prepared, and a worker of each."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import-untyped]  # it carries no types
from pgqueuer import AsyncpgDriver, PgQueuer, Queries
from pgqueuer.models import Job as PeersJob

from benchmarks.limits import counter_queue, journal
from benchmarks.processes import module
from benchmarks.servers import Servers
from jsworker import Job, JobClient, JobProcessor, Limit
from jsworker.core.settings import Settings

LIMIT = 4
"""The most runs of the key at once."""
SLOTS = 4
"""The job slots of each worker."""
SILENCE_SECONDS = 3.0
"""After so long without a heartbeat a worker counts as dead."""
RUN_SECONDS = (0.02, 0.08)

_ENTRYPOINT = "limited"
_URL = "PGQUEUER_URL"


@dataclass(frozen=True, slots=True)
class System:
    """A queue.

    Attributes:
        name: its name in the table.
        prepare: makes tables and the given number of jobs, and returns the variables that workers need.
        command: starts a worker.
    """

    name: str
    prepare: Callable[[Servers, int], Mapping[str, str]]
    command: list[str]


class Limited(JobProcessor[dict[str, Any]]):
    """Sleeps for a moment."""

    limit = Limit(LIMIT)

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Sleep, and write down when."""
        with journal.running(str(job.id)):
            await asyncio.sleep(random.uniform(*RUN_SECONDS))  # noqa: S311 -- no two runs in step


def _prepare_jsworker(servers: Servers, jobs: int) -> Mapping[str, str]:
    variables = servers.new_jsworker() | {
        "JSWORKER_CONCURRENCY": str(SLOTS),
        "JSWORKER_HEARTBEAT_INTERVAL": str(SILENCE_SECONDS / 6),
        "JSWORKER_CRASH_THRESHOLD": str(SILENCE_SECONDS),
        "JSWORKER_STALE_THRESHOLD": str(5 * SILENCE_SECONDS),
        "JSWORKER_WATCHDOG_TIMEOUT": str(2 * SILENCE_SECONDS),
        "JSWORKER_STATEMENT_TIMEOUT": str(SILENCE_SECONDS / 12),
        "JSWORKER_SCAN_INTERVAL": "1",
    }

    async def fill() -> None:
        settings = {name.removeprefix("JSWORKER_").lower(): value for name, value in variables.items()}
        async with JobClient(Settings(**settings)) as client:
            await client.enqueue_many(Limited, [{} for _ in range(jobs)])

    asyncio.run(fill())
    return variables


def _prepare_pgqueuer(servers: Servers, jobs: int) -> Mapping[str, str]:
    url = servers.new_database()

    async def install() -> None:
        connection = await asyncpg.connect(url)
        try:
            queries = Queries(AsyncpgDriver(connection))
            await queries.install()
            await queries.enqueue([_ENTRYPOINT] * jobs, [b""] * jobs, [0] * jobs)
        finally:
            await connection.close()

    asyncio.run(install())
    return {_URL: url}


def _prepare_counter_queue(servers: Servers, jobs: int) -> Mapping[str, str]:
    url = servers.new_database()
    counter_queue.prepare(url, jobs)
    return {counter_queue.VARIABLE: url}


async def _work_for_pgqueuer() -> None:
    connection = await asyncpg.connect(os.environ[_URL])
    queuer = PgQueuer(AsyncpgDriver(connection))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queuer.shutdown.set)

    @queuer.entrypoint(_ENTRYPOINT, concurrency_limit=LIMIT)
    async def limited(job: PeersJob) -> None:
        with journal.running(str(job.id)):
            await asyncio.sleep(random.uniform(*RUN_SECONDS))  # noqa: S311 -- no two runs in step

    await queuer.run(
        batch_size=SLOTS,
        max_concurrent_tasks=2 * SLOTS,  # the fewest that it allows
        heartbeat_timeout=timedelta(seconds=SILENCE_SECONDS),
    )


SYSTEMS = {
    "jsworker": System(
        "jsworker", _prepare_jsworker, [sys.executable, "-m", "jsworker", "run", f"{__name__}:Limited"]
    ),
    "pgqueuer": System("pgqueuer", _prepare_pgqueuer, [*module(__name__), "pgqueuer"]),
    "counter": System(
        "a counter of slots (as in Solid Queue)", _prepare_counter_queue, [*module(__name__), "counter"]
    ),
}


def main() -> None:
    """Run a worker of a peer until SIGTERM."""
    if sys.argv[1] == "pgqueuer":
        asyncio.run(_work_for_pgqueuer())
    else:
        asyncio.run(
            counter_queue.work(limit=LIMIT, silence=SILENCE_SECONDS, slots=SLOTS, run_seconds=RUN_SECONDS)
        )


if __name__ == "__main__":
    main()
