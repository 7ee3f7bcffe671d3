"""What an enqueue of a SyncJobClient returns."""

from datetime import timedelta
from typing import Any, Generic
from uuid import UUID

from typing_extensions import TypeVar

from jsworker.client.client_thread import ClientThread
from jsworker.client.results import as_returned
from jsworker.core.processor import JobProcessor
from jsworker.ownership.transitions.enqueue import Enqueued

R = TypeVar("R", default=Any)


class SyncJobHandle(Enqueued, Generic[R]):
    """What an enqueue did, the tuple ``(id, created)``, and the way to the job's result, as ``JobHandle``."""

    _thread: ClientThread | None = None
    _kind: str | type[JobProcessor[Any]] = ""

    @classmethod
    def of(
        cls, enqueued: Enqueued, thread: ClientThread, kind: str | type[JobProcessor[Any]]
    ) -> "SyncJobHandle[R]":
        """Return the handle of a job of a kind or a processor; ``thread`` waits for its result."""
        handle = cls(*enqueued)
        handle._thread = thread
        handle._kind = kind
        return handle

    def result(self, timeout: float | timedelta | None = None) -> R:
        """Return the job's result once it has completed; see ``JobHandle.result``."""
        if self._thread is None:
            raise RuntimeError(f"this handle belongs to no client: use client.result({str(self.id)!r})")
        found = self._thread.call(lambda client: client.result(self.id, timeout))
        returned: R = as_returned(self._kind, self.id, found)
        return returned

    def __reduce__(self) -> tuple[type[Enqueued], tuple[UUID, bool]]:
        return Enqueued, (self.id, self.created)
