"""The raw loop: pull, one claim statement, one completion statement, ack, and nothing else.

No heartbeat, no fencing, no retry, no recovery: a comparison with it shows what ownership costs. It is as
fast as we can write it: up to 500 jobs a batch, two batches in flight on two connections, messages requested
ahead, ids in the form that is fastest for the drivers.
"""

import asyncio
import json
import os
import secrets
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import UUID

import nats
import psycopg
from nats.aio.client import Client as NatsClient
from nats.js.api import AckPolicy, ConsumerConfig

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import database, stamps
from jsworker.stream.nats_client import Client

NOTE = "no heartbeat, no fencing, no recovery"

_TABLE = """
CREATE TABLE jobs (id uuid PRIMARY KEY, status text NOT NULL, payload jsonb NOT NULL, finished_at timestamptz)
"""
_INSERT = "INSERT INTO jobs (id, status, payload) VALUES (%s, 'queued', %s)"
_COPY = "COPY jobs (id, status, payload) FROM STDIN"
_OWN_TABLE = "CREATE TABLE orders (number integer PRIMARY KEY)"
_OWN_ROW = "INSERT INTO orders (number) VALUES (%s)"
_CLAIM = """
UPDATE jobs SET status = 'processing' WHERE id = ANY(%s::uuid[]) AND status = 'queued' RETURNING uuid_send(id)
"""
_COMPLETE = """
UPDATE jobs SET status = 'completed', finished_at = clock_timestamp()
WHERE id = ANY(%s::uuid[]) AND status = 'processing'
"""

_BATCH = 500
_IN_FLIGHT = 2
"""Batches that are in flight, each on a connection of its own."""
_DURABLE = "worker"
_PULL_SECONDS = 5
_PRODUCER_CONNECTIONS = 4


def prepare(servers: Servers) -> dict[str, str]:
    """Create the table, the stream and its consumer."""
    name = f"raw-{secrets.token_hex(4)}"
    url = servers.new_database()
    with psycopg.connect(url) as connection:
        connection.execute(_TABLE)
    asyncio.run(_create_stream(servers.nats.url, name))
    return {"RAW_DATABASE_URL": url, "RAW_NATS_URL": servers.nats.url, "RAW_STREAM": name}


async def _create_stream(url: str, name: str) -> None:
    connection = await nats.connect(url)
    stream = connection.jetstream()
    await stream.add_stream(name=name, subjects=[name])
    await stream.add_consumer(
        name,
        ConsumerConfig(
            durable_name=_DURABLE, ack_policy=AckPolicy.EXPLICIT, ack_wait=600, max_ack_pending=100_000
        ),
    )
    await connection.close()


def workers(processes: int) -> list[list[str]]:
    """Return one command for each process."""
    return [module(__name__) for _ in range(processes)]


class _Producer:
    def __init__(self, databases: asyncio.Queue[psycopg.AsyncConnection], messages: NatsClient) -> None:
        self._databases = databases
        self._stream = messages.jetstream()
        self._subject = os.environ["RAW_STREAM"]

    async def enqueue(self, number: int) -> str:
        """Commit a bare INSERT, then publish and wait for the answer."""
        job_id = _id_of(number)
        connection = await self._databases.get()
        try:
            await connection.execute(_INSERT, [job_id, _payload(number)])
        finally:
            self._databases.put_nowait(connection)
        await self._stream.publish(self._subject, job_id.bytes)
        return str(job_id)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """COPY in one transaction; its messages are published by ``publish_many``."""
        connection = await self._databases.get()
        try:
            async with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
                for number in numbers:
                    await copy.write_row((_id_of(number), "queued", _payload(number)))
        finally:
            self._databases.put_nowait(connection)

    @asynccontextmanager
    async def own_transactions(self) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        """Yield a function that commits two bare INSERTs."""
        async with await _connect() as connection:
            await connection.execute(_OWN_TABLE)

            async def commit(number: int) -> None:
                async with connection.transaction():
                    await connection.execute(_OWN_ROW, [number])
                    await connection.execute(_INSERT, [_id_of(number), _payload(number)])

            yield commit

    async def publish_many(self, numbers: Sequence[int]) -> None:
        """Publish what was copied, 500 messages at a time in flight."""
        for start in range(0, len(numbers), 500):
            await asyncio.gather(
                *(
                    self._stream.publish(self._subject, _id_of(number).bytes)
                    for number in numbers[start : start + 500]
                )
            )


@asynccontextmanager
async def producer() -> AsyncIterator[_Producer]:
    """Connect to both servers."""
    messages = await nats.connect(os.environ["RAW_NATS_URL"])
    databases: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()
    for _ in range(_PRODUCER_CONNECTIONS):
        databases.put_nowait(await _connect())
    try:
        yield _Producer(databases, messages)
    finally:
        while not databases.empty():
            await databases.get_nowait().close()
        await messages.close()


def _id_of(number: int) -> UUID:
    return UUID(int=number + 1)


def _payload(number: int) -> str:
    return json.dumps({"n": number})


async def _connect() -> psycopg.AsyncConnection:
    return await psycopg.AsyncConnection.connect(os.environ["RAW_DATABASE_URL"], autocommit=True)


async def finished(variables: Mapping[str, str]) -> int:
    """Count final states."""
    return await database.count(
        variables["RAW_DATABASE_URL"], "SELECT count(*) FROM jobs WHERE status = 'completed'"
    )


async def finish_times(variables: Mapping[str, str]) -> dict[str, float]:
    """Return ``finished_at`` by id."""
    return await database.times(
        variables["RAW_DATABASE_URL"],
        "SELECT id, extract(epoch FROM finished_at) FROM jobs WHERE status = 'completed'",
    )


def main() -> None:
    """Run until SIGTERM."""
    with suppress(asyncio.CancelledError):
        asyncio.run(_run())


class _Pull:
    """Messages of the consumer, requested ahead; they wait here until a batch is taken."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._request = f"$JS.API.CONSUMER.MSG.NEXT.{name}.{_DURABLE}"
        self._inbox = client.new_inbox()
        self._come: deque[tuple[bytes, bytes]] = deque()
        self._asked = 0
        self._arrived = asyncio.Event()

    async def open(self) -> None:
        self._client.open_inbox(self._inbox, self._take)
        self._ask()

    async def batch(self) -> list[tuple[bytes, bytes]]:
        """Wait for messages and return up to 500: the reply subject of each, and its job's id."""
        while not self._come:
            self._arrived.clear()
            await self._arrived.wait()
        taken = [self._come.popleft() for _ in range(min(_BATCH, len(self._come)))]
        self._ask()
        return taken

    def _take(self, _: str, reply: bytes, data: bytes, headers: dict[str, str] | None) -> None:
        if reply:
            self._asked -= 1
            self._come.append((reply, data))
            self._arrived.set()
        else:  # the request has expired
            self._asked -= int((headers or {}).get("Nats-Pending-Messages", "0"))
            self._ask()

    def _ask(self) -> None:
        room = _IN_FLIGHT * _BATCH - self._asked - len(self._come)
        if room >= _BATCH:
            self._asked += room
            limits = b'{"batch":%d,"expires":%d}' % (room, _PULL_SECONDS * 1e9)
            self._client.post(self._request, limits, self._inbox)


async def _run() -> None:
    work = asyncio.current_task()
    if work is None:
        raise AssertionError
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    client = Client(require_tls=False)
    await client.connect(os.environ["RAW_NATS_URL"])
    pull = _Pull(client, os.environ["RAW_STREAM"])
    await pull.open()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_IN_FLIGHT):
                group.create_task(_work_off(client, pull, stamps.places()))
    finally:
        await client.close()


async def _work_off(client: Client, pull: _Pull, places: stamps.Places) -> None:
    async with await _connect() as connection:
        cursor = connection.cursor(binary=True)
        while True:
            pulled = await pull.batch()
            await cursor.execute(_CLAIM, [_array(job_id for _, job_id in pulled)])
            claimed = [row[0] for row in await cursor.fetchall()]
            for job_id in claimed:
                places[int.from_bytes(job_id) - 1] = stamps.now()
            await cursor.execute(_COMPLETE, [_array(claimed)])
            for reply, _ in pulled:
                client.answer(reply, b"+ACK")


def _array(ids: Iterable[bytes]) -> str:
    """Return ids as the text of an array; if given a list, the driver takes five times as long."""
    return f"{{{','.join([job_id.hex() for job_id in ids])}}}"


if __name__ == "__main__":
    main()
