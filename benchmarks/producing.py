"""A producer as a process of its own: ``python -m benchmarks.producing SYSTEM WAY COUNT [ARGUMENT]``.

Prints one JSON value on stdout. Ways: ``load`` fills a backlog, ``single`` awaits one job at a time,
``many`` enqueues in calls of ARGUMENT jobs, ``paced`` enqueues ARGUMENT jobs a second by the clock.
Two systems have more ways: ``transaction`` commits a row of the caller's with each job, ``published`` and
``relayed`` measure how fast messages follow.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

from benchmarks.systems import Producer, PublishingProducer, SeparatePublisher, TransactionalProducer, load

FIRST = "BENCHMARK_FIRST"
"""The environment variable with the number of the first paced job."""

_LOAD_CALL = 5000
_WARM_UP = 20

Paced = list[tuple[int, float, str]]
"""For each job: its number, when its enqueue was called by the monotonic clock, and its id."""


def main() -> None:
    """Run the producer and the way that the arguments name."""
    system, way, count, *rest = sys.argv[1:]
    sys.stdout.write(json.dumps(asyncio.run(_produce(system, way, int(count), *rest))) + "\n")
    sys.stdout.flush()


async def _produce(system: str, way: str, count: int, argument: str = "0") -> Any:
    async with load(system).producer() as producer:
        match way:
            case "load":
                return await load_backlog(producer, count)
            case "single":
                return await single(producer, count)
            case "many":
                return await many(producer, count, int(argument))
            case "transaction":
                return await in_own_transaction(producer, count)
            case "published" | "relayed":
                return await publishing(producer, way, count)
            case "paced":
                first = int(os.environ[FIRST])
                return await paced(producer, count, float(argument), first)
    raise SystemExit(f"no way to produce is called {way!r}")


async def load_backlog(producer: Producer, count: int) -> int:
    """Enqueue jobs while no worker runs."""
    for start in range(0, count, _LOAD_CALL):
        numbers = range(start, min(start + _LOAD_CALL, count))
        await producer.enqueue_many(numbers)
        if isinstance(producer, SeparatePublisher):
            await producer.publish_many(numbers)
    if isinstance(producer, PublishingProducer):
        await producer.all_published()
    return count


async def single(producer: Producer, count: int) -> float:
    """Return jobs per second, each awaited before the next."""
    for number in range(_WARM_UP):
        await producer.enqueue(number)
    began = time.perf_counter()
    for number in range(_WARM_UP, _WARM_UP + count):
        await producer.enqueue(number)
    return count / (time.perf_counter() - began)


async def many(producer: Producer, count: int, size: int) -> float:
    """Return jobs per second, in calls of ``size``."""
    await producer.enqueue_many(range(_WARM_UP))
    began = time.perf_counter()
    for start in range(0, count, size):
        await producer.enqueue_many(range(_WARM_UP + start, _WARM_UP + min(start + size, count)))
    return count / (time.perf_counter() - began)


async def in_own_transaction(producer: Producer, count: int) -> float:
    """Return commits per second; each commits a row of the caller's and a job."""
    if not isinstance(producer, TransactionalProducer):
        raise SystemExit("this system's producer has no transaction measured")
    async with producer.own_transactions() as commit_with_job:
        for number in range(_WARM_UP):
            await commit_with_job(number)
        began = time.perf_counter()
        for number in range(_WARM_UP, _WARM_UP + count):
            await commit_with_job(number)
        return count / (time.perf_counter() - began)


async def publishing(producer: Producer, way: str, count: int) -> float:
    """Return messages per second, published while jobs are enqueued or all afterwards."""
    if not isinstance(producer, PublishingProducer):
        raise SystemExit("this system's producer has no outbox")
    if way == "published":
        began = time.perf_counter()
        await producer.enqueue_many(range(count))
        await producer.all_published()
        return count / (time.perf_counter() - began)
    await producer.enqueue_without_nats(range(count))
    began = time.perf_counter()
    await producer.all_published()
    return count / (time.perf_counter() - began)


async def paced(producer: Producer, count: int, rate: float, first: int) -> Paced:
    """Enqueue jobs when they are due, whether or not the previous call has returned."""
    calls: Paced = []

    async def call(number: int) -> None:
        called = time.monotonic()
        calls.append((number, called, await producer.enqueue(number)))

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for place in range(count):
            await asyncio.sleep(began + place / rate - time.monotonic())
            group.create_task(call(first + place))
    return sorted(calls)


if __name__ == "__main__":
    main()
