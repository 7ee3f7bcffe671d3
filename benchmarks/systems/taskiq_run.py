"""taskiq-nats with its pull broker on JetStream: delivers messages; nobody owns a job, no state is stored."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import uvloop
from taskiq import AsyncTaskiqDecoratedTask
from taskiq.receiver import Receiver
from taskiq_nats import PullBasedJetStreamBroker

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import NO_OWNERSHIP, delivered, stamps

NOTE = f"{NO_OWNERSHIP}; 100 tasks at a time, pulls of 100 (of 1, its default, for latency), uvloop"

Noop: TypeAlias = "AsyncTaskiqDecoratedTask[[int], Coroutine[Any, Any, None]]"

_TASKS = 100
_IN_FLIGHT = 500


def _broker() -> tuple[PullBasedJetStreamBroker, Noop]:
    name = os.environ[delivered.STREAM]
    broker = PullBasedJetStreamBroker(
        os.environ[delivered.SERVER],
        subject=name,
        stream_name=name,
        durable=delivered.DURABLE,
        pull_consume_batch=int(os.environ.get(delivered.BATCH, "100")),
    )
    places = stamps.places() if stamps.VARIABLE in os.environ else None

    @broker.task(task_name="noop")
    async def noop(number: int) -> None:
        if places is not None:
            places[number] = stamps.now()

    return broker, noop


def prepare(servers: Servers) -> dict[str, str]:
    """Choose a name; the broker makes the stream."""
    return {delivered.SERVER: servers.nats.url, delivered.STREAM: f"taskiq-{secrets.token_hex(4)}"}


def workers(processes: int) -> list[list[str]]:
    """Return one command for each process."""
    return [module(__name__) for _ in range(processes)]


class _Producer:
    def __init__(self, task: Noop) -> None:
        self._task = task

    async def enqueue(self, number: int) -> str:
        return (await self._task.kiq(number)).task_id

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), _IN_FLIGHT):
            await asyncio.gather(*map(self._task.kiq, numbers[start : start + _IN_FLIGHT]))


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Start the broker."""
    broker, noop = _broker()
    await broker.startup()
    try:
        yield _Producer(noop)
    finally:
        await broker.shutdown()


async def finished(variables: Mapping[str, str]) -> int:
    """Count acknowledged messages."""
    return await delivered.acknowledged(variables)


async def finish_times(variables: Mapping[str, str]) -> None:
    """Return nothing: no such times are stored."""


def main() -> None:
    """Run until SIGTERM, on the event loop that its own command uses."""
    uvloop.run(_run())


async def _run() -> None:
    broker, _ = _broker()
    broker.is_worker_process = True
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await broker.startup()
    try:
        await Receiver(broker, max_async_tasks=_TASKS, run_startup=False).listen(stopped)
    finally:
        await broker.shutdown()


if __name__ == "__main__":
    main()
