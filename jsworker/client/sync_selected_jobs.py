"""All jobs that match, for code that waits."""

from collections.abc import Callable
from datetime import datetime

from jsworker.client.client_thread import ClientThread
from jsworker.client.job_client import JobClient
from jsworker.client.selected_jobs import (
    COUNT_SECONDS,
    MOST_COUNTED,
    BulkOutcome,
    JobCount,
    SelectedJobs,
)
from jsworker.core.priorities import Priority


class SyncSelectedJobs:
    """Jobs that match what ``SyncJobClient.select`` was given, as ``SelectedJobs``; the calls wait."""

    def __init__(self, thread: ClientThread, select: Callable[[JobClient], SelectedJobs]) -> None:
        self._thread = thread
        self._select = select

    def count(self, *, most: int = MOST_COUNTED, seconds: float = COUNT_SECONDS) -> JobCount:
        """See ``SelectedJobs.count``."""
        return self._thread.call(lambda client: self._select(client).count(most=most, seconds=seconds))

    def retry(self, *, actor: str | None = None) -> BulkOutcome:
        """See ``SelectedJobs.retry``."""
        return self._thread.call(lambda client: self._select(client).retry(actor=actor))

    def cancel(self, *, actor: str | None = None) -> BulkOutcome:
        """See ``SelectedJobs.cancel``."""
        return self._thread.call(lambda client: self._select(client).cancel(actor=actor))

    def clear(self, reason: str, *, actor: str | None = None) -> BulkOutcome:
        """See ``SelectedJobs.clear``."""
        return self._thread.call(lambda client: self._select(client).clear(reason, actor=actor))

    def set_priority(self, priority: Priority, *, actor: str | None = None) -> BulkOutcome:
        """See ``SelectedJobs.set_priority``."""
        return self._thread.call(lambda client: self._select(client).set_priority(priority, actor=actor))

    def reschedule(self, run_at: datetime, *, actor: str | None = None) -> BulkOutcome:
        """See ``SelectedJobs.reschedule``."""
        return self._thread.call(lambda client: self._select(client).reschedule(run_at, actor=actor))
