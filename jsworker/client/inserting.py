"""Inserting jobs: many of one call in few statements, and those of concurrent calls in shared ones."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final
from uuid import UUID

from jsworker.core.batching import Batcher
from jsworker.core.errors import JsworkerError
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob

_BATCH: Final = 5000
_BATCH_BYTES: Final = 8_000_000
"""Of payloads in one statement; more only where a single payload is larger."""
_AT_ONCE: Final = 2
_SHARED_BATCH: Final = 500
_Answer = Enqueued | JsworkerError


async def insert(
    database: Database, kind: str, jobs: Iterable[NewJob], *, keyed: bool
) -> AsyncGenerator[list[Enqueued]]:
    """Insert jobs and yield the answers, in order, as they come; two statements at once.

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


class SharedInserts:
    """Inserts single jobs of a client: a lone one at once, a flood in natural batches, kind by kind.

    A job with a unique key always goes alone: it may have to wait for a twin that is not committed yet.

    Args:
        database: where to.
        publish_after: returns the seconds for which relays leave messages to this client now.
        died: called with the name and the error when a batch raises what no caller is waiting for.
    """

    def __init__(
        self,
        database: Database,
        *,
        publish_after: Callable[[], float],
        died: Callable[[str, BaseException], None],
    ) -> None:
        self._database = database
        self._publish_after = publish_after
        self._died = died
        self._under_way = 0
        self._kinds: dict[str, Batcher[NewJob, _Answer]] = {}

    async def insert(self, kind: str, job: NewJob) -> Enqueued:
        """Insert a job.

        Raises:
            DatabaseUnavailable: unclear whether it was stored.
            RowRefused, DatabaseRefused: it was not.
        """
        if job.unique_key is None and self._under_way:
            answer = await self._batches_of(kind).submit(job)
            if isinstance(answer, JsworkerError):
                raise answer.with_traceback(None)
            return answer
        self._under_way += 1
        try:
            return await self._alone(kind, job)
        finally:
            self._under_way -= 1

    async def flush(self) -> None:
        """Wait until everything that was called for has been answered."""
        for batches in self._kinds.values():
            await batches.flush()

    def _batches_of(self, kind: str) -> Batcher[NewJob, _Answer]:
        if kind not in self._kinds:
            self._kinds[kind] = Batcher(
                f"inserts of {kind}", partial(self._write, kind), limit=_SHARED_BATCH, died=self._died
            )
        return self._kinds[kind]

    async def _alone(self, kind: str, job: NewJob) -> Enqueued:
        return await enqueue.enqueue(self._database, kind, job, publish_after=self._publish_after())

    async def _write(self, kind: str, jobs: Sequence[NewJob]) -> Sequence[_Answer]:
        if len(jobs) == 1:
            return [await self._alone_or_refused(kind, jobs[0])]
        try:
            inserted, refused = await in_halves(jobs, partial(self._together, kind))
        except JsworkerError as error:
            return [error] * len(jobs)
        answers: dict[UUID, _Answer] = {answer.id: answer for answer in inserted}
        for job, _ in refused:  # once more, for its own error
            answers[job.id] = await self._alone_or_refused(kind, job)
        return [answers[job.id] for job in jobs]

    async def _together(self, kind: str, jobs: Sequence[NewJob]) -> list[Enqueued]:
        return await enqueue.enqueue_many(self._database, kind, jobs, publish_after=self._publish_after())

    async def _alone_or_refused(self, kind: str, job: NewJob) -> _Answer:
        try:
            return await self._alone(kind, job)
        except JsworkerError as error:
            return error
