"""pgqueuer over asyncpg, durable tables, with the settings that its documentation advises for throughput."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import asyncpg  # type: ignore[import-untyped]  # it carries no types
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, PgQueuer, Queries
from pgqueuer.models import Job

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import database, stamps

NOTE = "asyncpg, batch_size 500, uvloop, its autovacuum settings, durable tables"

_ENTRYPOINT = "noop"
# Its documentation advises to raise this from 10 if jobs are short.
_BATCH = 500


def prepare(servers: Servers) -> dict[str, str]:
    """Install its tables."""
    url = servers.new_database()
    asyncio.run(_install(url))
    return {"PGQUEUER_URL": url}


async def _install(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
    finally:
        await connection.close()


def workers(processes: int) -> list[list[str]]:
    """Return one command for each process."""
    return [module(__name__) for _ in range(processes)]


class _Producer:
    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def enqueue(self, number: int) -> str:
        (job_id,) = await self._queries.enqueue(_ENTRYPOINT, str(number).encode())
        return str(job_id)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        count = len(numbers)
        await self._queries.enqueue(
            [_ENTRYPOINT] * count, [str(number).encode() for number in numbers], [0] * count
        )


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Open a pool, as its documentation advises for producers."""
    async with asyncpg.create_pool(os.environ["PGQUEUER_URL"]) as pool:
        yield _Producer(Queries(AsyncpgPoolDriver(pool)))


async def finished(variables: Mapping[str, str]) -> int:
    """Count final states in its log; the queue's rows are deleted."""
    return await database.count(
        variables["PGQUEUER_URL"], "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"
    )


async def finish_times(variables: Mapping[str, str]) -> dict[str, float]:
    """Return the times of its log by the job's id."""
    return await database.times(
        variables["PGQUEUER_URL"],
        "SELECT job_id, extract(epoch FROM created) FROM pgqueuer_log WHERE status = 'successful'",
    )


def main() -> None:
    """Run until SIGTERM, on the event loop that its own command uses."""
    uvloop.run(_run())


async def _run() -> None:
    places = stamps.places()
    connection = await asyncpg.connect(os.environ["PGQUEUER_URL"])
    queuer = PgQueuer(AsyncpgDriver(connection))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queuer.shutdown.set)

    @queuer.entrypoint(_ENTRYPOINT)
    async def noop(job: Job) -> None:
        places[int(job.payload or b"0")] = stamps.now()

    await queuer.run(batch_size=_BATCH)


if __name__ == "__main__":
    main()
