"""The job as a processor sees it: its payload, what an earlier run saved, and calls to report progress."""

import inspect
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)
from uuid import UUID

from typing_extensions import Unpack

if TYPE_CHECKING:
    from sqlalchemy import Executable
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from jsworker.core.enqueue_options import EnqueueOptions
    from jsworker.core.processor import KindOf, ProcessorOf

T = TypeVar("T")
P = TypeVar("P")
Payload = TypeVar("Payload")
A = ParamSpec("A")
kinds_of_slot: Final[ContextVar[frozenset[str]]] = ContextVar("kinds_of_slot", default=frozenset())
"""Within a run: the kinds that use its process's job slots; it must not wait for jobs of these kinds."""
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


class _Steps(Protocol):
    async def step(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any: ...
    def step_in_thread(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any: ...
    async def sleep(self, after: timedelta | float, name: str) -> None: ...


class MemberResult(NamedTuple):
    """The outcome of a member of a batch.

    Attributes:
        job_id: the member's job id.
        status: completed, failed or cancelled.
        result: what it returned; None if it did not complete.
        error: its last error; None if there was none.
    """

    job_id: UUID
    status: str
    result: Any
    error: str | None


class _Ownership(Protocol):
    """What a job needs of the worker that owns it. Every write is guarded by the job's fencing token."""

    @property
    def should_stop(self) -> bool: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def conceals(self) -> bool: ...
    @property
    def passed_limit(self) -> str: ...
    async def update_progress(
        self, stage: str | None, progress: float | None, message: str | None
    ) -> None: ...
    async def save_checkpoint(self, value: Any) -> Any: ...
    async def quiet(self, seconds: float) -> None: ...
    def transaction(self, result: Any) -> AbstractAsyncContextManager["AsyncSession"]: ...
    def transactions(self, result: Any) -> AsyncIterator[AbstractAsyncContextManager["AsyncSession"]]: ...
    def sync_transaction(self, result: Any) -> AbstractContextManager["Session"]: ...
    def sync_transactions(self, result: Any) -> Iterator[AbstractContextManager["Session"]]: ...
    def complete_statement(self, result: Any) -> "Executable": ...
    def enqueue(
        self,
        kind: Any,
        payloads: Iterable[Any],
        unique_keys: Sequence[str | None] | None,
        options: "EnqueueOptions",
    ) -> list[UUID]: ...
    def add_to_batch(
        self, kind: Any, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> Coroutine[Any, Any, list[UUID]]: ...
    def add_to_batch_statement(
        self, kind: Any, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> "Executable": ...
    async def results_page(self, node: str, after: MemberResult | None) -> list[MemberResult]: ...
    def wait_for(self, call: Coroutine[Any, Any, T]) -> T: ...
    def note_never_awaited(self, call: str) -> None: ...
    @property
    def steps(self) -> _Steps: ...


class JobCall(Coroutine[Any, Any, Any]):
    """A call of a job's method that tells its run when it is deleted without having been awaited.

    A call that was closed, or whose task was cancelled before the call began, is not reported. A coroutine of
    ``async def`` could not report it: until the coroutine begins, none of its code runs.
    """

    __slots__ = ("_coroutine", "_is_untouched", "_ownership")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], ownership: _Ownership) -> None:
        self._coroutine, self._ownership, self._is_untouched = coroutine, ownership, True

    def __await__(self) -> Generator[Any, Any, Any]:
        self._is_untouched = False
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resume the coroutine."""
        self._is_untouched = False
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the coroutine."""
        self._is_untouched = False
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End the coroutine."""
        self._is_untouched = False
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # its name and its frame, for asyncio and debuggers

    def __del__(self) -> None:
        if self._is_untouched:
            self._ownership.note_never_awaited(self.__name__)


def _awaited(method: Method) -> Method:
    """Decorate a method so that its run learns of calls that are never awaited."""

    @wraps(method)
    def made(job: "Job[Any]", *args: Any, **named: Any) -> Any:
        return JobCall(method(job, *args, **named), job._ownership)  # noqa: SLF001 -- of this module

    # Before Python 3.12 a plain function cannot be marked as returning a coroutine.
    mark: Callable[[Any], Any] = getattr(inspect, "markcoroutinefunction", lambda function: function)
    return cast("Method", mark(made))


async def _enqueued(value: T) -> T:
    return value


class _Statements:
    """Statements for the user's own session, which ``Job`` and ``SyncJob`` have in common."""

    __slots__ = ()
    _ownership: _Ownership

    def complete_statement(self, result: Any = None) -> "Executable":
        """Return the guarded statement that completes the job, for your own session.

        Execute it last and demand its row, so that a lost job rolls your transaction back:
        ``(await session.execute(job.complete_statement(result))).one()``.
        """
        return self._ownership.complete_statement(result)

    def add_to_batch_statement(
        self,
        kind: "KindOf[Payload]",
        payloads: Iterable[Payload],
        *,
        max_attempts: int | None = None,
        max_stalls: int | None = None,
    ) -> "Executable":
        """Return the statement that adds jobs to this one's batch, for ``job.transaction()``.

        Execute it and check its rows, one for each job, up to 5,000: no rows mean that the job has no batch,
        or is lost. The added jobs exist once this job is completed, in the same commit.
        """
        return self._ownership.add_to_batch_statement(kind, payloads, _options(max_attempts, max_stalls))


@dataclass(slots=True)
class Job(_Statements, Generic[P]):
    """One run of a job.

    Attributes:
        id: the job's id, the same in every attempt: the idempotency key for other systems.
        kind: the kind, which names the processor.
        payload: what was enqueued, as the processor's payload model.
        attempt: 1 for the first attempt; retries and counted stalls raise it.
        fencing_token: rises with every claim. Hand it to systems that can refuse a lower one.
        cleared: True when this run follows a reset or a release of an earlier one.
        clear_reason: why the earlier run was reset or released, or None.
        deadline: when this run times out, in database time, or None.
        scheduled_for: the instant for which a schedule has enqueued it, or None.
    """

    id: UUID
    kind: str
    payload: P
    attempt: int
    fencing_token: int
    cleared: bool
    clear_reason: str | None
    deadline: datetime | None
    _checkpoint: Any = field(repr=False)
    _ownership: _Ownership = field(repr=False)
    scheduled_for: datetime | None = None

    @property
    def checkpoint(self) -> Any:
        """The value that this run or an earlier one saved last by ``save_checkpoint``, or None.

        It is what was stored, in the run that saved it too: a tuple comes back as a list.
        """
        return self._checkpoint

    @property
    def should_stop(self) -> bool:
        """True once the worker drains, or the job is cancelled, timed out or lost: return or raise soon.

        Returning means that the job is done. To go on in another run, save a checkpoint and raise
        ``Retry()``: while the worker drains, that hands the job to another worker and counts no error.
        """
        return self._ownership.should_stop

    @property
    def cancelled(self) -> bool:
        """True once the cancellation of this job was requested."""
        return self._ownership.cancelled

    @property
    def sync(self) -> "SyncJob":
        """The same job for plain functions: the calls wait instead of being awaited."""
        return SyncJob(self, self._ownership)

    @_awaited
    async def update_progress(
        self, stage: str | None = None, progress: float | None = None, message: str | None = None
    ) -> None:
        """Store how far the job is; this also counts as a sign of life.

        While the database does not answer, the call stores nothing and raises nothing; the next call stores
        its own progress.

        Args:
            stage: what is being done, up to 200 characters; None keeps the last one.
            progress: 0.0 to 1.0; None keeps the last one.
            message: for people, up to 2,000 characters; None keeps the last one.

        Raises:
            OwnershipLost: another run owns the job by now; nothing was stored.
            ValueError: ``progress`` is not a number between 0 and 1.
        """
        await self._ownership.update_progress(stage, progress, message)

    @_awaited
    async def save_checkpoint(self, value: Any) -> None:
        """Store a JSON value that the next run finds as ``checkpoint``, if this run does not finish.

        Returns once the value is stored: during an outage of the database, at its end, unless the run is
        stopped before.

        Raises:
            OwnershipLost: another run owns the job by now; nothing was stored.
            InvalidJson: the value cannot be stored, or is larger than ``JSWORKER_MAX_CHECKPOINT_BYTES``.
        """
        self._checkpoint = await self._ownership.save_checkpoint(value)

    @overload
    def transaction(
        self, result: Any | Callable[[], Any] = None, *, retry: Literal[False] = False
    ) -> AbstractAsyncContextManager["AsyncSession"]: ...

    @overload
    def transaction(
        self, result: Any | Callable[[], Any] = None, *, retry: Literal[True]
    ) -> AsyncIterator[AbstractAsyncContextManager["AsyncSession"]]: ...

    def transaction(
        self, result: Any | Callable[[], Any] = None, *, retry: bool = False
    ) -> (
        AbstractAsyncContextManager["AsyncSession"]
        | AsyncIterator[AbstractAsyncContextManager["AsyncSession"]]
    ):
        """Open a session whose last statement completes the job, in one commit with your rows.

        When PostgreSQL, the connection or a slot of it is lost, or a deadlock or a serialisation failure ends
        the block, all is rolled back and the job is put back for a while; that counts as no error of the job.
        With ``retry`` the block runs again instead, in the same run and for up to a minute::

            async for attempt in job.transaction(retry=True):
                async with attempt as session:
                    ...

        Args:
            result: the job's JSON result, or a callable that gives it at the end of the block.
            retry: whether to run the block again; it must be able to run more than once.

        Raises:
            OwnershipLost: at the end of the block, when another run owns the job; all is rolled back.
            UsageError: the run has another such block, which is open or has completed the job.
        """
        return self._ownership.transactions(result) if retry else self._ownership.transaction(result)

    @overload
    async def step(
        self, name: str, function: Callable[A, Awaitable[T]], /, *args: A.args, **kwargs: A.kwargs
    ) -> T: ...

    @overload
    async def step(self, name: str, function: Callable[A, T], /, *args: A.args, **kwargs: A.kwargs) -> T: ...

    @_awaited
    async def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function once for the job and return what it returned; later runs get that without a call.

        A step that raised, or whose run ended before its result was stored, is called again: at least once,
        but never after its result is stored. The call returns the stored result, read as the function's
        return type, in the first run too. A plain function runs in a thread.

        Args:
            name: 1 to 255 printable characters, different for each step of the job.
            function: a coroutine function, or a plain one; called with the other arguments.

        Raises:
            OwnershipLost: another run owns the job by now; nothing was stored.
            InvalidJson: the result cannot be stored, is larger than ``JSWORKER_MAX_RESULT_BYTES`` or does not
                fit the return type. If the function has just returned it, this fails the job for good, unless
                the error is caught.
            InvalidStep: the name is used twice in this run, or the job has 1,000 steps already.
            InvalidName: the name is not allowed.
        """
        return await self._ownership.steps.step(name, function, args, kwargs)

    @_awaited
    async def sleep(self, after: timedelta | float, *, name: str) -> None:
        """Return if the sleep of this name is over; else end this run, and go on in a later one.

        A sleep is a step: it begins when a run first reaches it. It ends the run by an exception that must
        not be caught. This works like a ``Snooze``, but does not count towards ``max_snoozes``.

        Args:
            after: how long, as a timedelta or in seconds; later runs keep the length that the first run gave.
            name: as the name of a step.

        Raises:
            ValueError: ``after`` is not a wait from 0 seconds to ten years.
            OwnershipLost, InvalidStep, InvalidName: as ``step``.
        """
        await self._ownership.steps.sleep(after, name)

    @overload
    async def enqueue(
        self,
        kind: "type[ProcessorOf[Payload, Any]]",
        payload: Payload,
        *,
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> UUID: ...

    @overload
    async def enqueue(
        self,
        kind: str,
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> UUID: ...

    def enqueue(
        self,
        kind: str | type[Any],
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> Coroutine[Any, Any, UUID]:
        """Enqueue another job in the transaction that completes this one, and return its id.

        The call notes the child at once, awaited or not; the child is written with the completion. A run that
        does not complete the job, because it fails, is retried, snoozed, cancelled or lost, enqueues no
        children; the run that completes it enqueues its children once. Children that are enqueued within a
        block of ``job.transaction()`` belong to it: if it is rolled back, they are not enqueued.
        If a live job holds the unique key at the completion, no child is created; this job's own key is free.

        Args:
            kind: a kind's name, or its processor, which checks the payload.
            payload: what the processor gets.
            unique_key: as for ``JobClient.enqueue``.
            options: see ``EnqueueOptions``; a delay counts from the completion.

        Raises:
            UsageError: the run has ended, its job was completed before by ``job.transaction()``,
                ``complete_statement`` was called, which cannot enqueue anything, or a step of the job calls
                this, except in a thread that inherits no context: a later run, which does not call the step
                again, would enqueue nothing.
            ValueError: more than 5,000 children of a run, or payloads of more than eight times
                JSWORKER_MAX_PAYLOAD_BYTES in all.
            InvalidName, InvalidPayload, InvalidJson, TypeError: as ``JobClient.enqueue``.
        """
        # Noted now, not when it is awaited: a child is not lost if the await was forgotten.
        return _enqueued(self._ownership.enqueue(kind, [payload], [unique_key], options)[0])

    @overload
    async def enqueue_many(
        self,
        kind: "type[ProcessorOf[Payload, Any]]",
        payloads: Iterable[Payload],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> list[UUID]: ...

    @overload
    async def enqueue_many(
        self,
        kind: str,
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> list[UUID]: ...

    def enqueue_many(
        self,
        kind: str | type[Any],
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> Coroutine[Any, Any, list[UUID]]:
        """Enqueue a job for each payload as ``enqueue`` does, and return their ids in order."""
        return _enqueued(self._ownership.enqueue(kind, payloads, unique_keys, options))

    @_awaited
    async def add_to_batch(
        self,
        kind: "KindOf[Payload]",
        payloads: Iterable[Payload],
        *,
        max_attempts: int | None = None,
        max_stalls: int | None = None,
    ) -> list[UUID]:
        """Add jobs to the batch of a workflow to which this one belongs, and return their ids.

        Whatever waits for the batch waits for these jobs too. They are added in transactions of at most 5,000
        jobs: after an error, those of earlier transactions stay, and also those of the last one if only its
        answer was lost. If another run of this job calls it again, it adds all of them again. Make these jobs
        idempotent, or use ``add_to_batch_statement`` in ``job.transaction()``: it adds all or none, once.

        Raises:
            OwnershipLost: another run owns the job by now.
            TransitionRefused: the job has no batch, or the batch has finished.
            UsageError: an open block of ``transaction()`` has made an ``add_to_batch_statement``, for whose
                commit this would wait.
            DatabaseRefused: PostgreSQL refused a row.
            InvalidName, InvalidPayload, InvalidJson: the kind or a payload cannot be used; nothing was added.
        """
        return await self._ownership.add_to_batch(kind, payloads, _options(max_attempts, max_stalls))

    async def results_of(self, node: str) -> AsyncIterator[MemberResult]:
        """Yield the outcomes of the members of a node; this job's own node must name it in ``after``.

        They are read page by page: first the cancelled members, then the completed ones in the order of their
        payloads, then the failed ones. If a member is retried meanwhile, the run ends, and the job runs
        again, from the beginning, once the node has finished again.

        Raises:
            ValueError: this job's node names no such node in ``after``.
            Snooze: a member was retried; neither a snooze nor an attempt is counted.
        """
        after: MemberResult | None = None
        while page := await self._ownership.results_page(node, after):
            for member in page:
                yield member
            after = page[-1]

    @_awaited
    async def quiet(self, seconds: float) -> None:
        """Announce that the process may give no sign of life for ``seconds`` (a long call into C, a GPU).

        Raises:
            OwnershipLost: another run owns the job by now.
        """
        await self._ownership.quiet(seconds)


@dataclass(frozen=True, slots=True)
class SyncJob(_Statements):
    """A job's calls for processors that are plain functions and run in a thread."""

    _job: Job[Any]
    _ownership: _Ownership = field(repr=False)

    def update_progress(
        self, stage: str | None = None, progress: float | None = None, message: str | None = None
    ) -> None:
        """See ``Job.update_progress``."""
        self._ownership.wait_for(self._job.update_progress(stage, progress, message))

    def save_checkpoint(self, value: Any) -> None:
        """See ``Job.save_checkpoint``."""
        self._ownership.wait_for(self._job.save_checkpoint(value))

    @overload
    def transaction(
        self, result: Any | Callable[[], Any] = None, *, retry: Literal[False] = False
    ) -> AbstractContextManager["Session"]: ...

    @overload
    def transaction(
        self, result: Any | Callable[[], Any] = None, *, retry: Literal[True]
    ) -> Iterator[AbstractContextManager["Session"]]: ...

    def transaction(
        self, result: Any | Callable[[], Any] = None, *, retry: bool = False
    ) -> AbstractContextManager["Session"] | Iterator[AbstractContextManager["Session"]]:
        """See ``Job.transaction``; yields a plain Session."""
        if retry:
            return self._ownership.sync_transactions(result)
        return self._ownership.sync_transaction(result)

    @overload
    def step(
        self, name: str, function: Callable[A, Awaitable[T]], /, *args: A.args, **kwargs: A.kwargs
    ) -> T: ...

    @overload
    def step(self, name: str, function: Callable[A, T], /, *args: A.args, **kwargs: A.kwargs) -> T: ...

    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See ``Job.step``; a plain function runs in the thread of the processor."""
        return self._ownership.steps.step_in_thread(name, function, args, kwargs)

    def sleep(self, after: timedelta | float, *, name: str) -> None:
        """See ``Job.sleep``."""
        self._ownership.wait_for(self._job.sleep(after, name=name))

    @overload
    def enqueue(
        self,
        kind: "type[ProcessorOf[Payload, Any]]",
        payload: Payload,
        *,
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> UUID: ...

    @overload
    def enqueue(
        self,
        kind: str,
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> UUID: ...

    def enqueue(
        self,
        kind: str | type[Any],
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> UUID:
        """See ``Job.enqueue``."""
        return self._ownership.enqueue(kind, [payload], [unique_key], options)[0]

    @overload
    def enqueue_many(
        self,
        kind: "type[ProcessorOf[Payload, Any]]",
        payloads: Iterable[Payload],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> list[UUID]: ...

    @overload
    def enqueue_many(
        self,
        kind: str,
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> list[UUID]: ...

    def enqueue_many(
        self,
        kind: str | type[Any],
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> list[UUID]:
        """See ``Job.enqueue_many``."""
        return self._ownership.enqueue(kind, payloads, unique_keys, options)

    def add_to_batch(
        self,
        kind: "KindOf[Payload]",
        payloads: Iterable[Payload],
        *,
        max_attempts: int | None = None,
        max_stalls: int | None = None,
    ) -> list[UUID]:
        """See ``Job.add_to_batch``."""
        options = _options(max_attempts, max_stalls)
        return self._ownership.wait_for(self._ownership.add_to_batch(kind, payloads, options))

    def results_of(self, node: str) -> Iterator[MemberResult]:
        """See ``Job.results_of``."""
        after: MemberResult | None = None
        while page := self._ownership.wait_for(self._ownership.results_page(node, after)):
            yield from page
            after = page[-1]

    def quiet(self, seconds: float) -> None:
        """See ``Job.quiet``."""
        self._ownership.wait_for(self._job.quiet(seconds))


def _options(max_attempts: int | None, max_stalls: int | None) -> dict[str, Any]:
    return {"max_attempts": max_attempts, "max_stalls": max_stalls}
