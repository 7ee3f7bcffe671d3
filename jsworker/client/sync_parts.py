"""What SyncJobClient returns: handles, limits, schedules, selected jobs and workflows, whose calls wait."""

import builtins  # Python 3.14 reads annotations late: there, list is the method
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from typing_extensions import TypeVar

from jsworker.client.client_thread import ClientThread
from jsworker.client.enqueueing import Kind
from jsworker.client.job_client import JobClient
from jsworker.client.results import Handle
from jsworker.client.selected_jobs import (
    COUNT_SECONDS,
    MOST_COUNTED,
    BulkOutcome,
    JobCount,
    SelectedJobs,
)
from jsworker.client.workflows import Flow, Node, Nodes
from jsworker.core.limits import Limit, Rate
from jsworker.core.names import shown
from jsworker.core.priorities import Priority
from jsworker.core.schedule_rules import Schedule
from jsworker.ownership.transitions.limits import MOST_LISTED, Numbers
from jsworker.ownership.transitions.workflow_control import CancelledWorkflow

R = TypeVar("R", default=Any)
T = TypeVar("T")


class SyncJobHandle(Handle[R]):
    """What an enqueue did, the tuple ``(id, created)``, and the way to the job's result, as ``JobHandle``."""

    def result(self, timeout: float | timedelta | None = None) -> R:
        """Return the job's result once it has completed; see ``JobHandle.result``."""
        return self._returned(self._wait(timeout))


class SyncLimits:
    """The limits of an installation, as ``Limits``; the calls wait."""

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread

    def list(
        self, *, all_keys: bool = False, limit: int = MOST_LISTED, after: tuple[str, str] | None = None
    ) -> builtins.list[dict[str, Any]]:
        """See ``Limits.list``."""
        return self._thread.call(
            lambda client: client.limits.list(all_keys=all_keys, limit=limit, after=after)
        )

    def set(
        self, kind: Kind, *numbers: Limit | Rate, key: str | None = None, actor: str | None = None
    ) -> None:
        """See ``Limits.set``."""
        self._thread.call(lambda client: client.limits.set(kind, *numbers, key=key, actor=actor))

    def numbers(self, kind: Kind, *, key: str | None = None) -> Numbers:
        """See ``Limits.numbers``."""
        return self._thread.call(lambda client: client.limits.numbers(kind, key=key))

    def reset(self, kind: Kind, *, key: str | None = None, actor: str | None = None) -> None:
        """See ``Limits.reset``."""
        self._thread.call(lambda client: client.limits.reset(kind, key=key, actor=actor))

    def pause(
        self,
        kind: Kind,
        key: str | None,
        *,
        until: datetime | timedelta | None,
        reason: str | None,
        actor: str | None = None,
    ) -> datetime | None:
        """See ``JobClient.pause``."""
        return self._thread.call(
            lambda client: client.limits.pause(kind, key, until=until, reason=reason, actor=actor)
        )

    def resume(self, kind: Kind, key: str | None, *, actor: str | None = None) -> None:
        """See ``JobClient.resume``."""
        self._thread.call(lambda client: client.limits.resume(kind, key, actor=actor))


class SyncSchedules:
    """The schedules of an installation, as ``Schedules``; the calls wait."""

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread

    def list(self) -> builtins.list[dict[str, Any]]:
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
        return SyncJobHandle.of(job, self._thread.result, "")

    def remove(self, name: str, *, actor: str | None = None) -> None:
        """See ``Schedules.remove``."""
        self._thread.call(lambda client: client.schedules.remove(name, actor=actor))


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


class SyncFlow(Nodes):
    """A workflow, as ``Flow``: what is added in the ``with`` block is enqueued at its end, or nothing is."""

    def __init__(self, name: str, thread: ClientThread) -> None:
        async def begun(client: JobClient) -> tuple[JobClient, Flow]:
            return client, client.workflow(name)

        self._thread = thread
        self._client, self._flow = thread.call(begun)
        self.id = self._flow.id
        self.name = self._flow.name

    def __enter__(self) -> Self:
        self._call(Flow.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(lambda flow: flow.__aexit__(kind, error, trace))

    def _add(self, *args: Any, **named: Any) -> Node:
        return self._flow._add(*args, **named)  # noqa: SLF001 -- its face without await

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """See ``Flow.result``."""
        return self._call(lambda flow: flow.result(timeout))

    def _call(self, call: Callable[[Flow], Coroutine[Any, Any, T]]) -> T:
        return self._thread.call(partial(self._with, call))

    async def _with(self, call: Callable[[Flow], Coroutine[Any, Any, T]], client: JobClient) -> T:
        if client is not self._client:  # its connections are not this process's, or closed
            raise RuntimeError(
                f"workflow {shown(self.name)} was begun before its client was closed, or its process forked"
            )
        return await call(self._flow)


class SyncWorkflows:
    """The workflows of an installation, as ``Workflows``; the calls wait."""

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread

    def list(self, *, limit: int = 50, after: UUID | str | None = None) -> builtins.list[dict[str, Any]]:
        """See ``Workflows.list``."""
        return self._thread.call(lambda client: client.workflows.list(limit=limit, after=after))

    def get(self, workflow: UUID | str) -> dict[str, Any]:
        """See ``Workflows.get``."""
        return self._thread.call(lambda client: client.workflows.get(workflow))

    def cancel(self, workflow: UUID | str, *, actor: str | None = None) -> CancelledWorkflow:
        """See ``Workflows.cancel``."""
        return self._thread.call(lambda client: client.workflows.cancel(workflow, actor=actor))

    def retry(self, workflow: UUID | str, *, actor: str | None = None) -> int:
        """See ``Workflows.retry``."""
        return self._thread.call(lambda client: client.workflows.retry(workflow, actor=actor))
