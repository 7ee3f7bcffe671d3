"""The raw loop: pull, one claim statement, one completion statement, ack; sequential, nothing else.

No heartbeat, no fencing, no retry, no recovery: the measure for what ownership costs on top.
"""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import UUID

import nats
import psycopg
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from benchmarks.processes import module
from benchmarks.servers import Servers
from benchmarks.systems import database, delivered, stamps

NOTE = "no heartbeat, no fencing, no recovery"

_TABLE = """
CREATE TABLE jobs (id uuid PRIMARY KEY, status text NOT NULL, payload jsonb NOT NULL, finished_at timestamptz)
"""
_INSERT = "INSERT INTO jobs (id, status, payload) VALUES (%s, 'queued', %s)"
_COPY = "COPY jobs (id, status, payload) FROM STDIN"
_OWN_TABLE = "CREATE TABLE orders (number integer PRIMARY KEY)"
_OWN_ROW = "INSERT INTO orders (number) VALUES (%s)"
_CLAIM = "UPDATE jobs SET status = 'processing' WHERE id = ANY(%s) AND status = 'queued' RETURNING id"
_COMPLETE = """
UPDATE jobs SET status = 'completed', finished_at = clock_timestamp()
WHERE id = ANY(%s) AND status = 'processing'
"""

_BATCH = 100
_DURABLE = "worker"
_PULL_SECONDS = 5.0
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
    def __init__(self, databases: asyncio.Queue[psycopg.AsyncConnection], messages: Client) -> None:
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
        """Yield what commits two bare INSERTs."""
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


async def _run() -> None:
    work = asyncio.current_task()
    if work is None:
        raise AssertionError
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    messages = await nats.connect(os.environ["RAW_NATS_URL"])
    name = os.environ["RAW_STREAM"]
    pull = await (_pulls_as_they_come if delivered.BATCH in os.environ else _pulls)(messages, name)
    places = stamps.places()
    try:
        async with await _connect() as connection:
            while True:
                pulled = await pull()
                await _work_off(connection, pulled, places)
    finally:
        await messages.close()


Pull = Callable[[], Awaitable[list[Msg]]]


async def _pulls(messages: Client, name: str) -> Pull:
    """Return nats-py's own fetch, for a backlog."""
    subscription = await messages.jetstream().pull_subscribe_bind(consumer=_DURABLE, stream=name)

    async def pull() -> list[Msg]:
        while True:
            with suppress(nats.errors.TimeoutError):
                return await subscription.fetch(_BATCH, timeout=_PULL_SECONDS)

    return pull


async def _pulls_as_they_come(messages: Client, name: str) -> Pull:
    """Return a pull that waits at the server and gives what has come; a fetch waits for a whole batch."""
    inbox = messages.new_inbox()
    subscription = await messages.subscribe(inbox)
    request = json.dumps({"batch": _BATCH, "expires": int(_PULL_SECONDS * 1e9)}).encode()
    left = 0

    async def pull() -> list[Msg]:
        nonlocal left
        pulled: list[Msg] = []
        while not pulled or (subscription.pending_msgs and len(pulled) < _BATCH):
            if left == 0:
                await messages.publish(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{_DURABLE}", request, inbox)
                left = _BATCH
            message = await subscription.next_msg(timeout=2 * _PULL_SECONDS)
            if message.headers and "Status" in message.headers:  # the request has expired
                left = 0
            else:
                left -= 1
                pulled.append(message)
        return pulled

    return pull


async def _work_off(connection: psycopg.AsyncConnection, pulled: list[Msg], places: stamps.Places) -> None:
    ids = [UUID(bytes=message.data) for message in pulled]
    claimed = [row[0] for row in await (await connection.execute(_CLAIM, [ids])).fetchall()]
    for job_id in claimed:
        places[job_id.int - 1] = stamps.now()
    await connection.execute(_COMPLETE, [claimed])
    for message in pulled:
        await message.ack()


if __name__ == "__main__":
    main()
