"""Inserting many jobs: two statements at once, each well within the statement time-out."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from typing import Final

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob

_BATCH: Final = 5000
_BATCH_BYTES: Final = 8_000_000
"""Of payloads in one statement; more only where a single payload is larger."""
_AT_ONCE: Final = 2


async def insert(
    database: Database, kind: str, jobs: Iterable[NewJob], *, keyed: bool
) -> AsyncGenerator[list[Enqueued]]:
    """Insert jobs and yield the answers, in order, as they come.

    Without keys, jobs are made while others are inserted.

    Args:
        database: where to.
        kind: of all of them.
        jobs: what to insert.
        keyed: whether any has a unique key: of two with one key the first wins, so batch goes after batch.

    Raises:
        DatabaseUnavailable, RowRefused, DatabaseRefused: unclear for the statements that were under way;
            those that were answered are stored.
        TransitionRefused: a key was taken and freed again three times in a row.
    """
    under_way: deque[asyncio.Task[list[Enqueued]]] = deque()
    at_once = 1 if keyed else _AT_ONCE
    try:
        for batch in _batches(jobs):
            under_way.append(asyncio.create_task(enqueue.enqueue_many(database, kind, batch)))
            await asyncio.sleep(0)  # begin with it before the next batch keeps the processor busy
            if len(under_way) == at_once:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        await _give_up(under_way)


async def _give_up(statements: Collection["asyncio.Task[list[Enqueued]]"]) -> None:
    """Wait no longer for what is under way, after an error or a cancellation; it may still be stored."""
    for statement in statements:
        statement.cancel()
    await asyncio.gather(*statements, return_exceptions=True)


def _batches(jobs: Iterable[NewJob]) -> Iterator[list[NewJob]]:
    batch: list[NewJob] = []
    size = 0
    for job in jobs:
        if batch and (len(batch) == _BATCH or size + len(job.payload) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.payload)
    if batch:
        yield batch
