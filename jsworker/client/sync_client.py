"""The client for code without ``await``, such as Django, Flask and scripts; it can do what JobClient can."""

import builtins  # Python 3.14 reads annotations late: there, list is the method
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, overload
from uuid import UUID

from typing_extensions import Unpack

from jsworker.client.client_thread import ClientThread
from jsworker.client.enqueueing import Kind, one_for_each
from jsworker.client.job_info import JobDetails, JobEvent, JobInfo, JobStatus, StepInfo
from jsworker.client.selected_jobs import JobConditions
from jsworker.client.sync_parts import (
    SyncFlow,
    SyncJobHandle,
    SyncLimits,
    SyncSchedules,
    SyncSelectedJobs,
    SyncWorkflows,
)
from jsworker.core.codec import Codec
from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.events import Events
from jsworker.core.priorities import Priority
from jsworker.core.processor import AsyncProcessorOf, Payload, ProcessorOf, Returned
from jsworker.core.settings import Settings, load_settings
from jsworker.ownership.transitions.audit import Action
from jsworker.ownership.transitions.control import Cancelled
from jsworker.ownership.transitions.reset import Reset


class SyncJobClient:
    """Enqueues jobs and acts on them like ``JobClient``, without ``await``; one is enough for all threads.

    It connects with the first call, or in ``open``; every call may raise what ``JobClient.open`` does then.
    Its connections live in a thread of its own, which ends with ``close``, with a ``with`` block, or with the
    process. A forked process connects anew with its first call. A signal whose handler raises, such as
    Ctrl-C, cancels the call that waits. In a thread that runs an event loop every call raises RuntimeError.

    ``events`` are those of ``JobClient``; their listeners are called in the client's own thread.
    """

    def __init__(self, settings: Settings, *, codec: Codec | None = None) -> None:
        """See ``JobClient``."""
        if not isinstance(settings, Settings):
            hint = "SyncJobClient.from_env() makes them, SyncJobClient.from_env(database_url=…) with changes"
            raise TypeError(f"SyncJobClient takes Settings, not {type(settings).__name__}: {hint}")
        self.events = Events()
        self._thread = ClientThread(settings, self.events, codec)

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """See ``JobClient.from_env``."""
        return cls(load_settings(**overrides))

    @property
    def schedules(self) -> SyncSchedules:
        """See ``JobClient.schedules``."""
        return SyncSchedules(self._thread)

    @property
    def settings(self) -> Settings:
        """See ``JobClient.settings``."""
        return self._thread.settings

    @property
    def codec(self) -> Codec | None:
        """See ``JobClient.codec``."""
        return self._thread.codec

    @property
    def limits(self) -> SyncLimits:
        """See ``JobClient.limits``."""
        return SyncLimits(self._thread)

    @property
    def workflows(self) -> SyncWorkflows:
        """See ``JobClient.workflows``."""
        return SyncWorkflows(self._thread)

    @property
    def unpublished_because(self) -> str | None:
        """See ``JobClient.unpublished_because``; also None if the client is not open."""
        client = self._thread.client
        return None if client is None else client.unpublished_because

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect now, or again after ``close``; see ``JobClient.open``."""
        self._thread.open()

    def close(self) -> None:
        """Finish publishing the enqueued jobs, within seconds, and disconnect.

        Calls in other threads that are still waiting raise RuntimeError; so does every later call.
        """
        self._thread.close()

    def pause(
        self,
        kind: Kind,
        key: str | None = None,
        *,
        until: datetime | timedelta | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> datetime | None:
        """See ``JobClient.pause``."""
        return self._thread.call(
            lambda client: client.pause(kind, key, until=until, reason=reason, actor=actor)
        )

    def resume(self, kind: Kind, key: str | None = None, *, actor: str | None = None) -> int:
        """See ``JobClient.resume``."""
        return self._thread.call(lambda client: client.resume(kind, key, actor=actor))

    @overload
    def enqueue(
        self,
        kind: type[AsyncProcessorOf[Payload, Returned]],
        payload: Payload,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> SyncJobHandle[Returned]: ...

    @overload
    def enqueue(
        self,
        kind: type[ProcessorOf[Payload, Returned]],
        payload: Payload,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> SyncJobHandle[Returned]: ...

    @overload
    def enqueue(
        self,
        kind: str,
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> SyncJobHandle: ...

    def enqueue(
        self,
        kind: str | type[Any],
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> SyncJobHandle:
        """See ``JobClient.enqueue``."""
        job = self._thread.call(
            lambda client: client.enqueue(kind, payload, unique_key=unique_key, **options)
        )
        return SyncJobHandle.of(job, self._thread.result, kind)

    @overload
    def enqueue_many(
        self,
        kind: type[AsyncProcessorOf[Payload, Returned]],
        payloads: Iterable[Payload],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[SyncJobHandle[Returned]]: ...

    @overload
    def enqueue_many(
        self,
        kind: type[ProcessorOf[Payload, Returned]],
        payloads: Iterable[Payload],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[SyncJobHandle[Returned]]: ...

    @overload
    def enqueue_many(
        self,
        kind: str,
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[SyncJobHandle]: ...

    def enqueue_many(
        self,
        kind: str | type[Any],
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[SyncJobHandle]:
        """See ``JobClient.enqueue_many``."""
        given = one_for_each("payloads", payloads)  # in this thread, to which a queryset's connection belongs
        keys = None if unique_keys is None else one_for_each("unique_keys", unique_keys)
        jobs = self._thread.call(lambda client: client.enqueue_many(kind, given, unique_keys=keys, **options))
        return [SyncJobHandle.of(job, self._thread.result, kind) for job in jobs]

    def result(self, job_id: UUID | str, timeout: float | timedelta | None = None) -> Any:
        """See ``JobClient.result``."""
        return self._thread.result(job_id, timeout)

    def workflow(self, name: str) -> SyncFlow:
        """Return a workflow to be filled in a ``with`` block, at whose end all of it is enqueued."""
        return SyncFlow(name, self._thread)

    def publish_pending(self, *, wait: bool = True) -> int:
        """See ``JobClient.publish_pending``."""
        return self._thread.call(lambda client: client.publish_pending(wait=wait))

    def get(self, job_id: UUID | str) -> JobDetails:
        """See ``JobClient.get``."""
        return self._thread.call(lambda client: client.get(job_id))

    def timeline(self, job_id: UUID | str) -> builtins.list[JobEvent]:
        """See ``JobClient.timeline``."""
        return self._thread.call(lambda client: client.timeline(job_id))

    def steps(self, job_id: UUID | str) -> builtins.list[StepInfo]:
        """See ``JobClient.steps``."""
        return self._thread.call(lambda client: client.steps(job_id))

    def list(
        self,
        *,
        status: JobStatus | None = None,
        kind: Kind | None = None,
        limit: int = 50,
        after: UUID | str | None = None,
        stale_for: float | None = None,
        running_for: float | None = None,
        no_progress_for: float | None = None,
        priority: Priority | None = None,
        **where: Unpack[JobConditions],
    ) -> builtins.list[JobInfo]:
        """See ``JobClient.list``."""
        return self._thread.call(
            lambda client: client.list(
                status=status,
                kind=kind,
                limit=limit,
                after=after,
                stale_for=stale_for,
                running_for=running_for,
                no_progress_for=no_progress_for,
                priority=priority,
                **where,
            )
        )

    def select(
        self,
        *,
        status: JobStatus,
        kind: Kind | None = None,
        stale_for: float | None = None,
        running_for: float | None = None,
        no_progress_for: float | None = None,
        priority: Priority | None = None,
        **where: Unpack[JobConditions],
    ) -> SyncSelectedJobs:
        """See ``JobClient.select``."""
        return SyncSelectedJobs(
            self._thread,
            lambda client: client.select(
                status=status,
                kind=kind,
                stale_for=stale_for,
                running_for=running_for,
                no_progress_for=no_progress_for,
                priority=priority,
                **where,
            ),
        )

    def audit(self, *, limit: int = 50, after: UUID | str | None = None) -> Sequence[Action]:
        """See ``JobClient.audit``."""
        return self._thread.call(lambda client: client.audit(limit=limit, after=after))

    def cancel(self, *job_ids: UUID | str, actor: str | None = None) -> Cancelled:
        """See ``JobClient.cancel``."""
        return self._thread.call(lambda client: client.cancel(*job_ids, actor=actor))

    def drain_worker(self, worker_id: str, *, actor: str | None = None) -> None:
        """See ``JobClient.drain_worker``."""
        self._thread.call(lambda client: client.drain_worker(worker_id, actor=actor))

    def undrain_worker(self, worker_id: str, *, actor: str | None = None) -> None:
        """See ``JobClient.undrain_worker``."""
        self._thread.call(lambda client: client.undrain_worker(worker_id, actor=actor))

    def retry(self, job_id: UUID | str, *, actor: str | None = None) -> None:
        """See ``JobClient.retry``."""
        self._thread.call(lambda client: client.retry(job_id, actor=actor))

    def set_priority(self, job_id: UUID | str, priority: Priority, *, actor: str | None = None) -> None:
        """See ``JobClient.set_priority``."""
        self._thread.call(lambda client: client.set_priority(job_id, priority, actor=actor))

    def reschedule(self, job_id: UUID | str, run_at: datetime, *, actor: str | None = None) -> None:
        """See ``JobClient.reschedule``."""
        self._thread.call(lambda client: client.reschedule(job_id, run_at, actor=actor))

    def clear_and_reenqueue(self, job_id: UUID | str, reason: str, *, actor: str | None = None) -> Reset:
        """See ``JobClient.clear_and_reenqueue``."""
        return self._thread.call(lambda client: client.clear_and_reenqueue(job_id, reason, actor=actor))
