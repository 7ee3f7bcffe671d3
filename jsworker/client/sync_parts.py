"""What SyncJobClient returns: handles, limits, schedules, selected jobs and workflows, whose calls wait."""

from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial, wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Self

from typing_extensions import TypeVar

from jsworker.client.client_thread import ClientThread
from jsworker.client.job_client import JobClient
from jsworker.client.limits import Limits
from jsworker.client.results import Handle
from jsworker.client.schedules import Schedules
from jsworker.client.selected_jobs import SelectedJobs
from jsworker.client.workflows import Flow, Node, Nodes, Workflows
from jsworker.core.names import shown

A = ParamSpec("A")
R = TypeVar("R", default=Any)
T = TypeVar("T")


class SyncJobHandle(Handle[R]):
    """What an enqueue did, the tuple ``(id, created)``, and the way to the job's result, as ``JobHandle``."""

    def result(self, timeout: float | timedelta | None = None) -> R:
        """Return the job's result once it has completed; see ``JobHandle.result``."""
        return self._returned(self._wait(timeout))


def _waits(
    method: Callable[Concatenate[Any, A], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, A], T]:
    """Return the method of a part of the client that calls this one in the client's thread, and waits."""

    @wraps(method)
    def call(self: Any, /, *args: A.args, **named: A.kwargs) -> T:
        thread: ClientThread = self._thread
        return thread.call(lambda client: method(self._part(client), *args, **named))

    return call


class _Part:
    _part: Callable[[JobClient], Any]
    """Returns the part of a client on which the methods are called."""

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread


class SyncLimits(_Part):
    """The limits of an installation, as ``Limits``; the calls wait."""

    _part = staticmethod(attrgetter("limits"))
    list = _waits(Limits.list)
    set = _waits(Limits.set)
    numbers = _waits(Limits.numbers)
    reset = _waits(Limits.reset)
    pause = _waits(Limits.pause)
    resume = _waits(Limits.resume)


class SyncSchedules(_Part):
    """The schedules of an installation, as ``Schedules``; the calls wait."""

    _part = staticmethod(attrgetter("schedules"))
    list = _waits(Schedules.list)
    add = _waits(Schedules.add)
    pause = _waits(Schedules.pause)
    resume = _waits(Schedules.resume)
    remove = _waits(Schedules.remove)

    def run_now(self, name: str, *, actor: str | None = None) -> SyncJobHandle:
        """See ``Schedules.run_now``."""
        job = self._thread.call(lambda client: client.schedules.run_now(name, actor=actor))
        return SyncJobHandle.of(job, self._thread.result, "")


class SyncSelectedJobs(_Part):
    """Jobs that match what ``SyncJobClient.select`` was given, as ``SelectedJobs``; the calls wait."""

    def __init__(self, thread: ClientThread, select: Callable[[JobClient], SelectedJobs]) -> None:
        super().__init__(thread)
        self._part = select

    count = _waits(SelectedJobs.count)
    retry = _waits(SelectedJobs.retry)
    cancel = _waits(SelectedJobs.cancel)
    clear = _waits(SelectedJobs.clear)
    set_priority = _waits(SelectedJobs.set_priority)
    reschedule = _waits(SelectedJobs.reschedule)


class SyncWorkflows(_Part):
    """The workflows of an installation, as ``Workflows``; the calls wait."""

    _part = staticmethod(attrgetter("workflows"))
    list = _waits(Workflows.list)
    get = _waits(Workflows.get)
    cancel = _waits(Workflows.cancel)
    retry = _waits(Workflows.retry)


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

    def __exit__(self, kind: object, *error: object) -> None:
        self._call(lambda flow: flow.__aexit__(kind, *error))

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
