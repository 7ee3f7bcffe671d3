"""Enqueues that are called while others are on their way ride together in one statement."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from uuid import UUID

from jsworker.core.batching import Batcher
from jsworker.core.errors import JsworkerError
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob

_BATCH: Final = 500


class SharedInserts:
    """Inserts single jobs of a client: a lone one at once, a flood in natural batches, kind by kind.

    A job with a unique key always goes alone: it may have to wait for a twin that somebody has not committed.
    """

    def __init__(
        self,
        database: Database,
        *,
        publish_after: Callable[[], float],
        died: Callable[[str, BaseException], None],
    ) -> None:
        """Insert into ``database``.

        Args:
            database: where to.
            publish_after: returns the seconds for which relays leave messages to this client now.
            died: told of an error that is nobody's answer.
        """
        self._database = database
        self._publish_after = publish_after
        self._died = died
        self._under_way = 0
        self._kinds: dict[str, Batcher[NewJob, Enqueued | JsworkerError]] = {}

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

    def _batches_of(self, kind: str) -> Batcher[NewJob, Enqueued | JsworkerError]:
        if kind not in self._kinds:
            self._kinds[kind] = Batcher(
                f"inserts of {kind}", partial(self._write, kind), limit=_BATCH, died=self._died
            )
        return self._kinds[kind]

    async def _alone(self, kind: str, job: NewJob) -> Enqueued:
        return await enqueue.enqueue(self._database, kind, job, publish_after=self._publish_after())

    async def _write(self, kind: str, jobs: Sequence[NewJob]) -> Sequence[Enqueued | JsworkerError]:
        if len(jobs) == 1:
            return [await self._alone_or_refused(kind, jobs[0])]
        try:
            inserted, refused = await in_halves(jobs, partial(self._together, kind))
        except JsworkerError as error:
            return [error] * len(jobs)
        answers: dict[UUID, Enqueued | JsworkerError] = {answer.id: answer for answer in inserted}
        for job, _ in refused:  # once more, for its own error
            answers[job.id] = await self._alone_or_refused(kind, job)
        return [answers[job.id] for job in jobs]

    async def _together(self, kind: str, jobs: Sequence[NewJob]) -> list[Enqueued]:
        return await enqueue.enqueue_many(self._database, kind, jobs, publish_after=self._publish_after())

    async def _alone_or_refused(self, kind: str, job: NewJob) -> Enqueued | JsworkerError:
        try:
            return await self._alone(kind, job)
        except JsworkerError as error:
            return error
