"""Workflows: graphs of batches, enqueued in one transaction; and the actions of operators on them."""

import asyncio
import builtins  # Python 3.14 reads annotations late: there, list is the method
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from graphlib import CycleError, TopologicalSorter
from itertools import count
from typing import Any, Final, Literal, Self, TypedDict, get_args, overload
from uuid import UUID

from typing_extensions import Unpack

from jsworker.client.client_publisher import ClientPublisher
from jsworker.client.enqueueing import JobOptions, check_count, kind_name, new_jobs, one_for_each
from jsworker.client.results import PAUSE_OF_OUTAGE_SECONDS, seconds_to_wait
from jsworker.core import fault_points, tracing
from jsworker.core.contents import Contents
from jsworker.core.errors import (
    DatabaseUnavailable,
    JsworkerError,
    UsageError,
    WorkflowFailed,
    WorkflowNotFound,
    may_answer_later,
)
from jsworker.core.job import MemberResult, kinds_of_slot
from jsworker.core.names import check_text, shown
from jsworker.core.processor import KindOf, Payload, ProcessorOf
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing, workflow_listing
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions import workflow_control
from jsworker.ownership.transitions.audit import AuditEntry
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.workflow_control import CancelledWorkflow
from jsworker.ownership.transitions.workflow_enqueue import NewBatch, enqueue_workflow
from jsworker.stream.message import subject_of

OnFailure = Literal["cancel", "run"]
MOST_MEMBERS: Final = 100_000
MOST_NODES: Final = 1_000
_MOST_LISTED: Final = 2**31 - 1
_FIRST_LOOK_SECONDS: Final = 0.05
_LONGEST_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A batch of a workflow that is being made; ``after=`` of other nodes takes this object or its name."""

    id: UUID
    name: str
    kind: str
    after: tuple["Node | str", ...]
    on_failure: OnFailure
    new: Sequence[Any] = field(repr=False)
    is_batch: bool = field(repr=False)


class NodeOptions(TypedDict, total=False):
    """Options of a node; each may be left out.

    Attributes:
        after: the nodes, or their names, that must have finished before its jobs begin.
        on_failure: what happens to its jobs if a job of ``after`` fails or is cancelled: ``cancel``, the
            default, cancels them too, ``run`` runs them all the same.
        name: its name within the workflow; left out: the kind, with a number if that is taken.
        max_attempts: overrides the processor's.
        max_stalls: overrides the processor's.
    """

    after: Node | str | Iterable[Node | str]
    on_failure: OnFailure
    name: str | None
    max_attempts: int | None
    max_stalls: int | None


class Nodes:
    """Takes the nodes of a workflow; subclasses enqueue it with or without ``await``."""

    _add: Callable[..., Node]

    @overload
    def job(
        self, kind: type[ProcessorOf[Payload, Any]], payload: Payload, **options: Unpack[NodeOptions]
    ) -> Node: ...

    @overload
    def job(self, kind: str, payload: Any, **options: Unpack[NodeOptions]) -> Node: ...

    def job(self, kind: str | type[Any], payload: Any, **options: Unpack[NodeOptions]) -> Node:
        """Add one job; see ``batch``."""
        return self._add(kind, [payload], is_batch=False, **options)

    def batch(
        self, kind: KindOf[Payload], payloads: Iterable[Payload], **options: Unpack[NodeOptions]
    ) -> Node:
        """Add a batch of jobs of one kind, up to 100,000.

        All payloads are checked before this returns, and nothing else runs in the event loop meanwhile.

        Args:
            kind: a kind's name, or its processor, which checks the payloads.
            payloads: one for each job.
            options: see ``NodeOptions``.

        Limits, rates and the priority of the processor apply to the jobs; they have no unique keys and do
        not expire.

        Raises:
            InvalidName, InvalidPayload, InvalidJson: as ``JobClient.enqueue``.
            ValueError: no payload, too many payloads or nodes, a taken name, or an unknown ``on_failure``.
            RuntimeError: outside of the ``async with`` block.
        """
        return self._add(kind, payloads, is_batch=True, **options)


class Flow(Nodes):
    """A workflow: the nodes added in the ``async with`` block are enqueued at its end, all or none.

    If that raises DatabaseUnavailable, it is unclear whether they were: ``JobClient.workflows.get`` finds the
    workflow by its ``id`` if so, perhaps only seconds later.
    """

    def __init__(
        self,
        name: str,
        *,
        database: Database,
        settings: Settings,
        publisher: ClientPublisher,
        contents: Contents,
    ) -> None:
        self.id = new_job_id()
        self.name = check_text(name, "workflow name")
        self._database = database
        self._contents = contents
        self._settings = settings
        self._publisher = publisher
        self._nodes: dict[str, Node] = {}
        self._is_open = False
        self._is_enqueued: bool | None = False  # None: it is unclear

    async def __aenter__(self) -> Self:
        if self._is_enqueued is None:
            raise RuntimeError(self._unclear())
        if self._is_enqueued or self._is_open:
            raise RuntimeError(f"workflow {shown(self.name)} was begun before: each is enqueued once")
        self._is_open = True
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        self._is_open = False
        if kind is None:
            await self._enqueue()

    def _add(
        self,
        kind: Any,
        payloads: Iterable[Any],
        *,
        is_batch: bool,
        after: Node | str | Iterable[Node | str] = (),
        on_failure: OnFailure = "cancel",
        name: str | None = None,
        max_attempts: int | None = None,
        max_stalls: int | None = None,
    ) -> Node:
        if not self._is_open:
            raise RuntimeError(
                f"workflow {shown(self.name)} is not open: add nodes inside its `async with` block"
            )
        name = self._free_name(kind_name(kind)) if name is None else check_text(name, "node name")
        if name in self._nodes:
            raise ValueError(f"workflow {shown(self.name)}: there is a node {shown(name)} already")
        if on_failure not in get_args(OnFailure):
            raise ValueError(f"node {shown(name)}: on_failure={shown(on_failure)} must be 'cancel' or 'run'")
        if len(self._nodes) == MOST_NODES:
            raise ValueError(f"workflow {shown(self.name)}: more than {MOST_NODES:,} nodes")
        given = one_for_each("payloads", payloads)
        if not 1 <= len(given) <= MOST_MEMBERS:
            raise ValueError(
                f"node {shown(name)}: a batch of {len(given):,} jobs; it takes 1 to {MOST_MEMBERS:,}"
            )
        needs = tuple(after) if isinstance(after, Iterable) and not isinstance(after, str) else (after,)
        for need in needs:
            if not isinstance(need, Node | str):
                raise TypeError(f"node {shown(name)}: after={shown(need)} must be a node or a node's name")
        options = JobOptions(
            self._settings.max_payload_bytes,
            max_attempts=max_attempts,
            max_stalls=max_stalls,
            contents=self._contents,
        )
        jobs = new_jobs(kind, given, [None] * len(given), options)
        node = Node(new_job_id(), name, kind_name(kind), needs, on_failure, jobs, is_batch)
        self._nodes[name] = node
        return node

    async def result(self, timeout: float | timedelta | None = None) -> Any:  # noqa: ASYNC109 -- as wait_for's
        """Wait until the node that was added last has finished, and return the result of its job.

        For a batch, return a list of results in the order of its payloads.

        Raises:
            WorkflowFailed: a job of the node failed, was cancelled or was pruned.
            TimeoutError: the node has not finished within ``timeout``; its jobs go on.
            UsageError: the node has not finished, and this is called inside a job whose worker serves the
                kind of the node, or of a node that it comes after.
            RuntimeError: the workflow was not enqueued, or it is unclear whether it was.
        """
        limit = seconds_to_wait(timeout)
        if self._is_enqueued is None:
            raise RuntimeError(self._unclear())
        if not self._is_enqueued:
            raise RuntimeError(
                f"workflow {shown(self.name)} was not enqueued: leave its `async with` block first"
            )
        last = list(self._nodes.values())[-1]
        served = sorted(kinds_of_slot.get() & {node.kind for node in self._up_to(last)})
        trouble: JsworkerError | None = None
        try:
            async with asyncio.timeout(limit) as waiting:
                for tries in count():
                    try:
                        return await _result_of(self._database, self._contents, last, served, tries)
                    except JsworkerError as error:
                        if not may_answer_later(error):
                            raise
                        trouble = error
                    await asyncio.sleep(PAUSE_OF_OUTAGE_SECONDS)
        except TimeoutError:
            if not waiting.expired():
                raise
            because = "" if trouble is None else f": {trouble}"
            raise TimeoutError(
                f"node {shown(last.name)} of workflow {self.id} has not finished within {limit:g} s{because}"
            ) from None

    def _up_to(self, last: Node) -> list[Node]:
        """Return a node and all nodes that it comes after, also indirectly."""
        found = {last.name: last}
        ways = [last]
        while ways:
            for name in self._needs_of(ways.pop()):
                if name not in found:
                    found[name] = self._nodes[name]
                    ways.append(found[name])
        return list(found.values())

    async def _enqueue(self) -> None:
        if not self._nodes:
            raise ValueError(f"workflow {shown(self.name)} has no nodes")
        needs = {node.name: self._needs_of(node) for node in self._nodes.values()}
        _refuse_cycles(self.name, needs)
        subject = subject_of(self._settings.subject_prefix, next(iter(self._nodes.values())).kind)
        with tracing.creating(subject, jobs=sum(len(node.new) for node in self._nodes.values())) as context:
            span = context._asdict()
            batches = [
                NewBatch(
                    node.id,
                    node.name,
                    node.kind,
                    node.on_failure,
                    [self._nodes[name].id for name in needs[node.name]],
                    [job._replace(**span) for job in node.new] if context.traceparent else node.new,
                )
                for node in self._nodes.values()
            ]
            self._is_enqueued = None
            try:
                await enqueue_workflow(self._database, workflow=self.id, name=self.name, batches=batches)
            except DatabaseUnavailable as error:
                raise type(error)(f"{self._unclear()}: {error}") from None
            except Exception:
                self._is_enqueued = False
                raise
        self._is_enqueued = True
        await fault_points.reach("after_commit_before_publish")
        self._publisher.publish_in_background()

    def _unclear(self) -> str:
        how = f"client.workflows.get({str(self.id)!r}) finds it if it was"
        return f"it is unclear whether workflow {shown(self.name)} was enqueued: {how}"

    def _needs_of(self, node: Node) -> list[str]:
        names: dict[str, None] = {}
        for need in node.after:
            name = need if isinstance(need, str) else need.name
            found = self._nodes.get(name)
            if found is None or (isinstance(need, Node) and found is not need):
                raise ValueError(
                    f"workflow {shown(self.name)}: node {shown(node.name)} comes after {shown(name)}, "
                    "which is no node of it"
                )
            names[found.name] = None
        return list(names)

    def _free_name(self, kind: str) -> str:
        names = (kind if number == 1 else f"{kind}-{number}" for number in range(1, MOST_NODES + 2))
        return next(name for name in names if name not in self._nodes)


async def _result_of(
    database: Database, contents: Contents, node: Node, served: Sequence[str], tries: int
) -> Any:
    """Read a node again and again until it has finished, and return its result; ``tries`` failed before.

    If ``served`` has kinds, which the waiting job's own worker serves, raise UsageError instead of waiting.
    """
    what = f"node {shown(node.name)} has no result"
    for looks in count():
        try:
            outcome = await workflow_listing.outcome_of(database, node.id)
        except LookupError:
            raise WorkflowFailed(f"{what}: its workflow was pruned") from None
        if outcome is not None:
            found = await _ended(database, contents, node, what, tries)
            missing = next((job.id for job in node.new if job.id not in found), None)
            if missing is None:
                break
            if not await listing.look_up(database, [missing]):
                raise WorkflowFailed(f"{what}: job {missing} was pruned")
            # It was retried since the node had finished.
        elif served:
            raise UsageError(
                f"node {shown(node.name)} cannot be waited for inside a job of this worker, which serves kind"
                f" {served[0]} itself: jobs that wait could take all of its slots; let another worker serve"
                " that kind, or enqueue the workflow and return"
            )
        await asyncio.sleep(min(_LONGEST_LOOK_SECONDS, _FIRST_LOOK_SECONDS * 1.5 ** min(looks, 20)))
    results = [found[job.id].result for job in node.new]
    return results if node.is_batch else results[0]


async def _ended(
    database: Database, contents: Contents, node: Node, what: str, tries: int
) -> dict[UUID, MemberResult]:
    """Return the ended jobs of a node by id; raise WorkflowFailed if one of them has not completed."""
    found: dict[UUID, MemberResult] = {}
    after: MemberResult | None = None
    while page := await workflow_listing.results(database, contents, node.id, after, tries=tries):
        after = page[-1]
        found |= {each.job_id: each for each in page}
    for each in found.values():
        if each.status != "completed":
            said, error = f"{what}: job {each.job_id} is {each.status}", each.error
            if failed := await workflow_listing.failed_before(database, each.job_id):
                said += f": job {failed.id} of node {shown(failed.node)} failed"
                error = failed.last_error
            why = (error or "").split("\n", 1)[0]
            raise WorkflowFailed(said + (f": {why}" if why else ""))
    return found


class Workflows:
    """The workflows of an installation: list, get, cancel, retry."""

    def __init__(self, database: Database, publisher: ClientPublisher) -> None:
        self._database = database
        self._publisher = publisher

    async def list(
        self, *, limit: int = 50, after: UUID | str | None = None
    ) -> builtins.list[dict[str, Any]]:
        """Return workflows by column name, the newest first; with ``after``, those that follow that workflow.

        ``status`` is running, cancelling, completed, failed or cancelled.
        """
        check_count("limit", limit, _MOST_LISTED)
        behind = None if after is None else workflow_uuid(after)
        return await workflow_listing.list_workflows(self._database, limit=limit, after=behind)

    async def get(self, workflow: UUID | str) -> dict[str, Any]:
        """Return a workflow by column name, with its ``nodes``, and ``errors`` of the first failed jobs.

        Each node has ``needs``, the names of the nodes that it comes after, and ``jobs``, the number of its
        jobs by status; ``held`` counts those that wait for its needs.

        Raises WorkflowNotFound: no workflow has this id.
        """
        return await workflow_listing.get_workflow(self._database, workflow_uuid(workflow))

    async def cancel(self, workflow: UUID | str, *, actor: str | None = None) -> CancelledWorkflow:
        """Cancel the live jobs of a workflow; running jobs are asked to stop within one heartbeat.

        ``actor`` is named in the entry of ``JobClient.audit``; left out: there is no entry.

        Raises TransitionRefused: there is no such workflow, or it has ended; or PostgreSQL refused the rows
        of some jobs, and the others were cancelled. WorkflowNotFound: it is no UUID.
        """
        with operators_rights("workflows", "UPDATE on jsworker.workflows"):
            wanted = workflow_uuid(workflow)
            entry = _entry("workflow.cancel", wanted, actor)
            return await workflow_control.cancel_workflow(self._database, wanted, entry=entry)

    async def retry(self, workflow: UUID | str, *, actor: str | None = None) -> int:
        """Put all failed jobs of a workflow back into the queue, and return how many; ``actor`` as above.

        Jobs that were cancelled because of these failures wait for the retried jobs again.

        Raises TransitionRefused: there is no such workflow, it was cancelled, or none of its jobs has failed;
        or some jobs cannot be retried, and the others were. WorkflowNotFound: it is no UUID.
        """
        with operators_rights("workflows", "UPDATE on jsworker.workflows"):
            wanted = workflow_uuid(workflow)
            entry = _entry("workflow.retry", wanted, actor)
            retried = await workflow_control.retry_workflow(self._database, wanted, entry=entry)
        self._publisher.publish_in_background()
        return retried


def workflow_uuid(workflow: UUID | str) -> UUID:
    """Return the id of a workflow as a UUID; raise WorkflowNotFound if it is not one."""
    if isinstance(workflow, UUID):
        return workflow
    try:
        return UUID(workflow)
    except (ValueError, AttributeError, TypeError):
        raise WorkflowNotFound(f"no workflow has id {shown(workflow)}") from None


def _refuse_cycles(workflow: str, needs: dict[str, list[str]]) -> None:
    """Raise ValueError if nodes form a circle: it names them, each of which comes after the next one."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        circle = " after ".join(map(shown, reversed(error.args[1])))
        raise ValueError(f"workflow {shown(workflow)} goes in a circle: {circle}") from None


def _entry(action: str, workflow: UUID, actor: str | None) -> AuditEntry | None:
    return None if actor is None else AuditEntry(action, {"workflow": str(workflow)}, actor=actor)
