"""jsworker as a user starts it: ``jsworker run``, default settings."""

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from benchmarks.measures.jsworker_processes import worker_command
from benchmarks.servers import Servers
from benchmarks.systems import database, stamps
from jsworker import Job, JobClient, JobProcessor, enqueue_statement

NOTE = "default settings, uvloop"
TARGET = f"{__name__}:Noop"

_PLACES = stamps.places() if stamps.VARIABLE in os.environ else memoryview(bytearray(8)).cast("d")

_OWN_ROW = text("INSERT INTO orders (number) VALUES (:number)")
_UNPUBLISHED = "SELECT count(*) FROM jsworker.jobs WHERE needs_publish"
_NOBODY = "nats://127.0.0.1:1"


class Noop(JobProcessor[dict[str, Any]]):
    """Marks that it started."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Mark it."""
        _PLACES[job.payload["n"]] = stamps.now()


def prepare(servers: Servers) -> dict[str, str]:
    """Create a migrated database; the first worker or client makes the stream."""
    return servers.new_jsworker()


def workers(processes: int) -> list[list[str]]:
    """Return the command of one supervisor with so many workers."""
    return [worker_command(processes, [TARGET], f"bench-{secrets.token_hex(4)}")]


class _Producer:
    def __init__(self, client: JobClient) -> None:
        self._client = client

    async def enqueue(self, number: int) -> str:
        return str((await self._client.enqueue(Noop, {"n": number})).id)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self._client.enqueue_many(Noop, [{"n": number} for number in numbers])

    @asynccontextmanager
    async def own_transactions(self) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        """Yield a function that commits a row and ``enqueue_statement`` in the caller's AsyncSession."""
        url = os.environ["JSWORKER_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE orders (number integer PRIMARY KEY)"))

        async def commit(number: int) -> None:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(_OWN_ROW, {"number": number})
                await session.execute(enqueue_statement(Noop, {"n": number}))

        yield commit
        await engine.dispose()

    async def enqueue_without_nats(self, numbers: Sequence[int]) -> None:
        """Enqueue through a client that cannot reach NATS: the messages stay in the outbox."""
        async with JobClient.from_env(nats_url=_NOBODY) as client:
            await client.enqueue_many(Noop, [{"n": number} for number in numbers])

    async def all_published(self) -> None:
        """Publish until no row waits to be published."""
        url = os.environ["JSWORKER_DATABASE_URL"]
        while await database.count(url, _UNPUBLISHED):
            await self._client.publish_pending()


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Open a client."""
    async with JobClient.from_env() as client:
        yield _Producer(client)


async def finished(variables: Mapping[str, str]) -> int:
    """Count final states."""
    return await database.count(
        variables["JSWORKER_DATABASE_URL"],
        "SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'",
    )


async def finish_times(variables: Mapping[str, str]) -> dict[str, float]:
    """Return ``finished_at`` by id."""
    return await database.times(
        variables["JSWORKER_DATABASE_URL"],
        "SELECT id, extract(epoch FROM finished_at) FROM jsworker.jobs WHERE status = 'completed'",
    )
