"""jsworker's own processes, started as a user starts them: ``jsworker run``."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import nats
import psycopg
from nats.js.api import ConsumerInfo

from benchmarks.processes import Process, SystemFailed, module, running

_READY_SECONDS = 60.0
_ASK_EVERY = 0.05

_REGISTERED = """
SELECT pid FROM jsworker.workers WHERE starts_with(id, %s) AND state = 'running' ORDER BY started_at
"""


@dataclass(frozen=True, slots=True)
class Workers:
    """Running workers.

    Attributes:
        parent: process id of their supervisor.
        children: process ids of the workers.
        process: the supervisor; ``process.check()`` tells whether it lives.
    """

    parent: int
    children: tuple[int, ...]
    process: Process


@contextmanager
def workers(count: int, targets: Sequence[str], variables: Mapping[str, str]) -> Iterator[Workers]:
    """Run workers under one supervisor; stop them by SIGTERM afterwards.

    Yields when all are registered and pull: a pull waits at every consumer, or messages were delivered.

    Args:
        count: the number of worker processes.
        targets: processors, ``module:Class``; importable from the project's folder.
        variables: the addresses of the servers, and settings.

    Raises:
        SystemFailed: they ended, or were not ready within a minute.
    """
    name = f"bench-{secrets.token_hex(4)}"
    with running([worker_command(count, targets, name)], variables) as (supervisor,):
        children = asyncio.run(_ready(count, name, supervisor, variables))
        yield Workers(supervisor.pid, children, supervisor)


def worker_command(count: int, targets: Sequence[str], name: str) -> list[str]:
    """Return the command that runs workers whose ids start with a name."""
    return module("jsworker", "run", "--worker-id", name, "--processes", str(count), *targets)


async def _ready(count: int, name: str, supervisor: Process, variables: Mapping[str, str]) -> tuple[int, ...]:
    deadline = time.monotonic() + _READY_SECONDS
    stream = variables["JSWORKER_STREAM"]
    connection = await nats.connect(variables["JSWORKER_NATS_URL"])
    try:
        async with await psycopg.AsyncConnection.connect(
            variables["JSWORKER_DATABASE_URL"], autocommit=True, prepare_threshold=None
        ) as database:
            while True:
                supervisor.check()
                rows = await (await database.execute(_REGISTERED, [f"{name}-"])).fetchall()
                if len(rows) == count:
                    consumers = await connection.jetstream().consumers_info(stream)
                    if consumers and all(map(_is_pulled, consumers)):
                        return tuple(row[0] for row in rows)
                if time.monotonic() > deadline:
                    raise SystemFailed(f"{len(rows)} of {count} workers registered in {_READY_SECONDS:g} s")
                await asyncio.sleep(_ASK_EVERY)
    finally:
        await connection.close()


def _is_pulled(consumer: ConsumerInfo) -> bool:
    delivered = consumer.delivered is not None and consumer.delivered.consumer_seq > 0
    return delivered or bool(consumer.num_waiting)
