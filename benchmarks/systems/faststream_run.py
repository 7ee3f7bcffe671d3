"""FastStream's pull subscriber on JetStream: delivers messages; nobody owns a job, no state is stored."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import nats
import uvloop
from faststream import FastStream
from faststream.nats import JStream, NatsBroker, PullSub

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import NO_OWNERSHIP, delivered, stamps

NOTE = f"{NO_OWNERSHIP}; pulls of 100 (of 1, its default, for latency), no log lines, uvloop"

_IN_FLIGHT = 500


def prepare(servers: Servers) -> dict[str, str]:
    """Create the stream as its broker would, which does so only when a subscriber starts."""
    name = f"faststream-{secrets.token_hex(4)}"
    asyncio.run(_create_stream(servers.nats.url, name))
    return {delivered.SERVER: servers.nats.url, delivered.STREAM: name}


async def _create_stream(url: str, name: str) -> None:
    connection = await nats.connect(url)
    await connection.jetstream().add_stream(name=name, subjects=[name])
    await connection.close()


def workers(processes: int) -> list[list[str]]:
    """Return one command for each process."""
    return [module(__name__) for _ in range(processes)]


class _Producer:
    def __init__(self, broker: NatsBroker, name: str) -> None:
        self._broker = broker
        self._name = name

    async def enqueue(self, number: int) -> str:
        await self._broker.publish(number, self._name, stream=self._name)
        return str(number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), _IN_FLIGHT):
            await asyncio.gather(*map(self.enqueue, numbers[start : start + _IN_FLIGHT]))


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Connect."""
    name = os.environ[delivered.STREAM]
    async with NatsBroker(os.environ[delivered.SERVER], logger=None) as broker:
        yield _Producer(broker, name)


async def finished(variables: Mapping[str, str]) -> int:
    """Count acknowledged messages."""
    return await delivered.acknowledged(variables)


async def finish_times(variables: Mapping[str, str]) -> None:
    """Return nothing: no such times are stored."""


def main() -> None:
    """Run until SIGTERM, on the event loop that its own command uses."""
    name = os.environ[delivered.STREAM]
    places = stamps.places()
    broker = NatsBroker(os.environ[delivered.SERVER], logger=None)

    @broker.subscriber(
        name,
        stream=JStream(name),
        durable=delivered.DURABLE,
        pull_sub=PullSub(batch_size=int(os.environ.get(delivered.BATCH, "100"))),
    )
    async def noop(number: int) -> None:
        places[number] = stamps.now()

    uvloop.run(FastStream(broker, logger=None).run())


if __name__ == "__main__":
    main()
