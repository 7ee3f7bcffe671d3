"""What an enqueue of a SyncJobClient returns."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from jsworker.client.client_thread import ClientThread
from jsworker.ownership.transitions.enqueue import Enqueued


class SyncJobHandle(Enqueued):
    """What an enqueue did, the tuple ``(id, created)``, and the way to the job's result, as ``JobHandle``."""

    _thread: ClientThread | None = None

    @classmethod
    def of(cls, enqueued: Enqueued, thread: ClientThread) -> "SyncJobHandle":
        """Return the handle of a job; ``thread`` waits for its result."""
        handle = cls(*enqueued)
        handle._thread = thread
        return handle

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Return the job's result once it has completed; see ``JobClient.result``."""
        if self._thread is None:
            raise RuntimeError(f"this handle belongs to no client: use client.result({str(self.id)!r})")
        return self._thread.call(lambda client: client.result(self.id, timeout))

    def __reduce__(self) -> tuple[type[Enqueued], tuple[UUID, bool]]:
        return Enqueued, (self.id, self.created)
