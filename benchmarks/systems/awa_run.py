"""awa: a runtime in Rust on PostgreSQL, workers in Python, its queue-storage engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import awa

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import database, stamps

NOTE = "queue storage, 200 workers on the queue"

_QUEUE = "bench"
_WORKERS = 200


@dataclass
class Noop:
    """A job's arguments."""

    number: int


def prepare(servers: Servers) -> dict[str, str]:
    """Migrate and choose the engine that its documentation tells new installations to use."""
    url = servers.new_database()
    asyncio.run(_install(url))
    return {"AWA_URL": url}


async def _install(url: str) -> None:
    await awa.migrate(url)
    async with awa.AsyncClient(url) as client:
        await client.install_queue_storage()


def workers(processes: int) -> list[list[str]]:
    """Return one command for each process."""
    return [module(__name__) for _ in range(processes)]


class _Producer:
    def __init__(self, client: awa.AsyncClient) -> None:
        self._client = client

    async def enqueue(self, number: int) -> str:
        return str((await self._client.insert(Noop(number), queue=_QUEUE)).id)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self._client.enqueue_many_copy([Noop(number) for number in numbers], queue=_QUEUE)


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Open a client."""
    async with awa.AsyncClient(os.environ["AWA_URL"]) as client:
        yield _Producer(client)


async def finished(variables: Mapping[str, str]) -> int:
    """Count final states."""
    return await database.count(
        variables["AWA_URL"], "SELECT count(*) FROM awa.jobs WHERE state = 'completed'"
    )


async def finish_times(variables: Mapping[str, str]) -> dict[str, float]:
    """Return ``finalized_at`` by id."""
    return await database.times(
        variables["AWA_URL"],
        "SELECT id, extract(epoch FROM finalized_at) FROM awa.jobs WHERE state = 'completed'",
    )


def main() -> None:
    """Run until SIGTERM."""
    asyncio.run(_run())


async def _run() -> None:
    places = stamps.places()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with awa.AsyncClient(os.environ["AWA_URL"]) as client:

        @client.task(Noop, queue=_QUEUE)
        async def noop(job: "awa.Job[Noop]") -> None:
            places[job.args.number] = stamps.now()

        await client.start([(_QUEUE, _WORKERS)])
        await stopped.wait()
        await client.shutdown()


if __name__ == "__main__":
    main()
