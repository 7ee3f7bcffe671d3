"""procrastinate over psycopg, with many jobs at a time instead of one."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from procrastinate import App, PsycopgConnector
from procrastinate.types import JSONDict

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import database, stamps

NOTE = "concurrency 20 instead of 1, a pool of 20"

_CONCURRENCY = 20


def _app(url: str) -> App:
    app = App(connector=PsycopgConnector(conninfo=url, max_size=_CONCURRENCY))
    places = stamps.places() if stamps.VARIABLE in os.environ else None

    @app.task(name="noop")
    async def noop(number: int) -> None:
        if places is not None:
            places[number] = stamps.now()

    return app


def prepare(servers: Servers) -> dict[str, str]:
    """Install its tables."""
    url = servers.new_database()
    asyncio.run(_install(url))
    return {"PROCRASTINATE_URL": url}


async def _install(url: str) -> None:
    async with _app(url).open_async() as app:
        await app.schema_manager.apply_schema_async()


def workers(processes: int) -> list[list[str]]:
    """Return one command for each process."""
    return [module(__name__) for _ in range(processes)]


class _Producer:
    def __init__(self, app: App) -> None:
        self._task = app.tasks["noop"]

    async def enqueue(self, number: int) -> str:
        return str(await self._task.defer_async(number=number))

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        arguments: list[JSONDict] = [{"number": number} for number in numbers]
        await self._task.batch_defer_async(*arguments)


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Open the application."""
    async with _app(os.environ["PROCRASTINATE_URL"]).open_async() as app:
        yield _Producer(app)


async def finished(variables: Mapping[str, str]) -> int:
    """Count final states."""
    return await database.count(
        variables["PROCRASTINATE_URL"],
        "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'",
    )


async def finish_times(variables: Mapping[str, str]) -> dict[str, float]:
    """Return the times of its events by the job's id."""
    return await database.times(
        variables["PROCRASTINATE_URL"],
        "SELECT job_id, extract(epoch FROM at) FROM procrastinate_events WHERE type = 'succeeded'",
    )


def main() -> None:
    """Run until SIGTERM, which procrastinate handles itself."""
    asyncio.run(_run())


async def _run() -> None:
    async with _app(os.environ["PROCRASTINATE_URL"]).open_async() as app:
        await app.run_worker_async(concurrency=_CONCURRENCY)


if __name__ == "__main__":
    main()
