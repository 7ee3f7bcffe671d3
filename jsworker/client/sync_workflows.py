"""Workflows for code that waits."""

from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from jsworker.client.client_thread import ClientThread
from jsworker.client.job_client import JobClient
from jsworker.client.workflows import Flow, Node, Nodes
from jsworker.core.names import shown
from jsworker.ownership.transitions.workflow_control import CancelledWorkflow

T = TypeVar("T")


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

    def result(self, timeout: float | None = None) -> Any:
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

    def list(self, *, limit: int = 50, after: UUID | str | None = None) -> list[dict[str, Any]]:
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
