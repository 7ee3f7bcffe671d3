"""Schedules for code that waits."""

from datetime import datetime
from typing import Any

from jsworker.client.client_thread import ClientThread
from jsworker.client.enqueueing import Kind
from jsworker.client.sync_results import SyncJobHandle
from jsworker.core.priorities import Priority
from jsworker.core.schedule_rules import Schedule


class SyncSchedules:
    """The schedules of an installation, as ``Schedules``; the calls wait."""

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread

    def list(self) -> list[dict[str, Any]]:
        """See ``Schedules.list``."""
        return self._thread.call(lambda client: client.schedules.list())

    def add(
        self,
        name: str,
        kind: Kind,
        schedule: Schedule,
        *,
        replace: bool = False,
        priority: Priority | None = None,
        limit_key: str | None = None,
        actor: str | None = None,
    ) -> datetime:
        """See ``Schedules.add``."""
        return self._thread.call(
            lambda client: client.schedules.add(
                name, kind, schedule, replace=replace, priority=priority, limit_key=limit_key, actor=actor
            )
        )

    def pause(self, name: str, *, actor: str | None = None) -> None:
        """See ``Schedules.pause``."""
        self._thread.call(lambda client: client.schedules.pause(name, actor=actor))

    def resume(self, name: str, *, actor: str | None = None) -> datetime:
        """See ``Schedules.resume``."""
        return self._thread.call(lambda client: client.schedules.resume(name, actor=actor))

    def run_now(self, name: str, *, actor: str | None = None) -> SyncJobHandle:
        """See ``Schedules.run_now``."""
        job = self._thread.call(lambda client: client.schedules.run_now(name, actor=actor))
        return SyncJobHandle.of(job, self._thread, "")

    def remove(self, name: str, *, actor: str | None = None) -> None:
        """See ``Schedules.remove``."""
        self._thread.call(lambda client: client.schedules.remove(name, actor=actor))
