"""Enqueueing: checks kinds, payloads, keys and delays, then inserts the rows, many in few statements."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, overload
from uuid import UUID

from pydantic import BaseModel
from typing_extensions import Unpack

from jsworker.client.terms import WAITING_SCOPES, Terms, for_jobs, is_due
from jsworker.core import strict_json, tracing
from jsworker.core.batching import Batcher
from jsworker.core.codec import Codec
from jsworker.core.contents import PLAIN, Contents, owner_of_payload
from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.errors import InvalidJson, InvalidName, InvalidPayload, JsworkerError
from jsworker.core.garbage import no_collection
from jsworker.core.limits import common_key, key_of
from jsworker.core.names import check_kind, check_limit_key, check_unique_key, shown
from jsworker.core.priorities import NORMAL, Priority, priority_number
from jsworker.core.processor import (
    JobProcessor,
    Payload,
    ProcessorOf,
    Seconds,
    read_payload_text,
    write_payload,
)
from jsworker.core.settings.model import payload_limit
from jsworker.core.tracing import TraceContext
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.transitions import enqueue, enqueue_terms
from jsworker.ownership.transitions.enqueue import Enqueued, JobTerms, NewJob, new_job_id

if TYPE_CHECKING:
    from sqlalchemy import TextClause

Kind = str | type[JobProcessor[Any]]
"""A kind's name, or its processor; the processor's payload type then checks the payload."""

MOST_ATTEMPTS: Final = 1_000_000
MOST_STALLS: Final = 100  # the table, too, refuses more for a job that was never claimed
_NO_SPAN: Final = TraceContext()
_BATCH: Final = 5000
_BATCH_CHARACTERS: Final = 1_000_000  # of payloads in one statement; a larger payload has its own
_AT_ONCE: Final = 2
_SHARED_BATCH: Final = 500
_Answer = Enqueued | JsworkerError


class JobOptions(NamedTuple):
    """The options that are given once for all jobs of a call."""

    max_payload_bytes: int
    delay: Seconds = 0.0
    max_attempts: int | None = None
    max_stalls: int | None = None
    limit_key: str | None = None
    priority: Priority | None = None
    terms: Terms = Terms()
    contents: Contents = PLAIN

    @classmethod
    def of(cls, max_payload_bytes: int, options: EnqueueOptions, contents: Contents = PLAIN) -> Self:
        """Return the options of a call, or raise TypeError for an unknown argument."""
        said: dict[str, Any] = {**options}
        for name, value in said.items():
            if name not in EnqueueOptions.__annotations__:
                raise TypeError(f"{name}={shown(value)}: there is no such argument")
        terms = {name: said.pop(name) for name in Terms._fields if name in said}
        return cls(max_payload_bytes, terms=Terms(**terms), contents=contents, **said)

    def check(self, kind: Kind, keys: Sequence[str | None]) -> tuple[float, JobTerms]:
        """Return the delay, and the terms of the jobs that have a key.

        Raises ``TypeError`` or ``ValueError`` if an option, or a combination of options, is not allowed.
        """
        if self.max_attempts is not None:
            check_count("max_attempts", self.max_attempts, MOST_ATTEMPTS)
        if self.max_stalls is not None:
            check_count("max_stalls", self.max_stalls, MOST_STALLS)
        self.terms.check_keys(keys)
        keyed = any(key is not None for key in keys)
        terms = self.terms if keyed else Terms(self.terms.run_at, self.terms.expires_in)
        if not isinstance(kind, str):
            terms = terms.of(kind, keyed=keyed)
        return terms.check(self.delay)


def check_count(name: str, value: int, most: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={shown(value)} must be a whole number, not {type(value).__name__}")
    if not 1 <= value <= most:
        raise ValueError(f"{name}={shown(value)} must be from 1 to {most}")


@overload
def enqueue_statement(
    kind: type[ProcessorOf[Payload, Any]],
    payload: Payload,
    *,
    unique_key: str | None = None,
    max_payload_bytes: int | None = None,
    codec: Codec | None = None,
    **options: Unpack[EnqueueOptions],
) -> "TextClause": ...


@overload
def enqueue_statement(
    kind: str,
    payload: Any,
    *,
    unique_key: str | None = None,
    max_payload_bytes: int | None = None,
    codec: Codec | None = None,
    **options: Unpack[EnqueueOptions],
) -> "TextClause": ...


def enqueue_statement(
    kind: str | type[Any],
    payload: Any,
    *,
    unique_key: str | None = None,
    max_payload_bytes: int | None = None,
    codec: Codec | None = None,
    **options: Unpack[EnqueueOptions],
) -> "TextClause":
    """Return a statement that enqueues a job in your own transaction, in a sync or an async session.

    Execute it and read its one row ``(id, created, dispatch)``. ``created`` is False if a live job already
    holds the unique key. If there is no row, another transaction is just committing a job with the same key:
    execute the statement again; or an expired job still holds the key: a worker cancels it soon; or this very
    job has been committed before: the statement creates no second one. After your commit, the relay of any
    worker publishes the job; ``JobClient.publish_pending`` publishes it at once.

    Args:
        kind: the kind, or its processor, which checks the payload.
        payload: what the processor gets.
        unique_key: at most one live job of the kind has it; 1 to 255 printable characters.
        max_payload_bytes: the most bytes of the payload's JSON text as it is stored; None:
            ``JSWORKER_MAX_PAYLOAD_BYTES``, 1 MiB if that is not set.
        codec: encodes the payload; None: it is stored as it is.
        options: see ``EnqueueOptions``.

    Raises:
        InvalidName: the kind, the unique key or the limit key is not allowed.
        InvalidPayload, InvalidJson: the payload does not fit the processor, is too large, or is not JSON.
        ValueError, TypeError: an argument is unknown, of a wrong type or value, or contradicts another.
        SettingsError: ``JSWORKER_MAX_PAYLOAD_BYTES`` is wrong.
    """
    most = payload_limit() if max_payload_bytes is None else max_payload_bytes
    said = JobOptions.of(most, options, Contents(codec))
    [job] = new_jobs(kind, [payload], [unique_key], said, tracing.current())
    return enqueue_terms.statement_for(kind_name(kind), job)


def kind_name(kind: Kind) -> str:
    """Return the name of a kind."""
    if isinstance(kind, type) and issubclass(kind, JobProcessor):
        return check_kind(kind.kind)
    if not isinstance(kind, str):
        raise InvalidName(f"kind {shown(kind)} must be a kind's name, or the class of its processor")
    return check_kind(kind)


def priority_of(kind: Kind, priority: Priority | None) -> int:
    """Return the number of the given priority, else the processor's; raise ValueError for an unknown one."""
    if priority is not None:
        return priority_number(priority)
    return NORMAL if isinstance(kind, str) else priority_number(kind.priority)


def one_for_each(name: str, given: Any) -> list[Any]:
    """Return the values for many jobs as a list; raise TypeError for one value or values without order."""
    if isinstance(given, str | bytes | Mapping | BaseModel | set | frozenset) or not isinstance(
        given, Iterable
    ):
        raise TypeError(f"{name} must be a list with one for each job, not {type(given).__name__}")
    return list(given)


def keys_of(payloads: Sequence[Any], unique_keys: Sequence[str | None] | None) -> Sequence[str | None]:
    """Return a unique key or None for each payload; raise ValueError if there are more or fewer keys."""
    keys = [None] * len(payloads) if unique_keys is None else one_for_each("unique_keys", unique_keys)
    if len(keys) != len(payloads):
        raise ValueError(f"{len(keys)} unique_keys for {len(payloads)} payloads: one for each is needed")
    return keys


def new_jobs(
    kind: Kind,
    payloads: Sequence[Any],
    unique_keys: Sequence[str | None],
    options: JobOptions,
    context: TraceContext = _NO_SPAN,
) -> list[NewJob]:
    """Return a job with a fresh id for each payload."""
    return list(chain.from_iterable(chunks_of_new_jobs(kind, payloads, unique_keys, options, context)))


def chunks_of_new_jobs(
    kind: Kind,
    payloads: Sequence[Any],
    unique_keys: Sequence[str | None],
    options: JobOptions,
    context: TraceContext,
) -> Iterator[list[NewJob]]:
    """Yield the jobs of ``new_jobs``, about a statement's at a time: other tasks may run in between."""
    name = kind_name(kind)
    delay, terms = options.check(kind, unique_keys)
    priority = priority_of(kind, options.priority)
    keys = [check_unique_key(key) if key is not None else None for key in unique_keys]
    limit_key = _limit_key(kind, options.limit_key)
    keyed, unkeyed = for_jobs(terms, keys, delay=delay)
    waits = keyed is not None and keyed.scope in WAITING_SCOPES
    # Exactly int: COPY takes a number as text, and of a member of an enum that is its name.
    attempts = None if options.max_attempts is None else int(options.max_attempts)
    stalls = None if options.max_stalls is None else int(options.max_stalls)
    rest = (delay, attempts, stalls, *context)
    start = 0
    while start < len(payloads):
        some = slice(start, start + _BATCH)
        jobs: list[NewJob] = []
        size = 0
        with no_collection():
            for payload, key in zip(payloads[some], keys[some], strict=True):
                job_id = new_job_id()
                try:
                    text = payload_text(kind, payload)
                    limited_by = limit_key(text)
                    owner = owner_of_payload(job_id, key if waits else None, is_scheduled=False)
                    stored = stored_payload(text, name, owner, options.contents, options.max_payload_bytes)
                except (InvalidJson, InvalidPayload, InvalidName) as error:
                    if len(payloads) == 1:
                        raise
                    raise type(error)(f"payloads[{start + len(jobs)}]: {error}") from None
                terms_of_job = unkeyed if key is None else keyed
                jobs.append(NewJob(job_id, stored, key, *rest, limited_by, priority, terms_of_job))
                size += len(stored)
                if size >= _BATCH_CHARACTERS:
                    break
        yield jobs
        start += len(jobs)


def limit_key_of(kind: Kind, text: str, given: str | None = None) -> str | None:
    """Return the limit key for a payload's JSON text: the given one, else that of the class, if any."""
    return _limit_key(kind, given)(text)


def _limit_key(kind: Kind, given: str | None) -> Callable[[str], str | None]:
    """Return the function that gives a payload's JSON text its limit key; see ``limit_key_of``."""
    key = None if isinstance(kind, str) else common_key(kind.limit, kind.rate)
    if given is not None:
        if not isinstance(kind, str) and key is None and (kind.limit or kind.rate) is not None:
            raise ValueError(f"limit_key={shown(given)}: the limit of kind {kind.kind} has no key")
        checked = check_limit_key(given)
        return lambda _: checked
    if isinstance(kind, str) or key is None:
        return lambda _: None
    return lambda text: key_of(kind.kind, key, read_payload_text(kind, text))


def payload_text(kind: Kind, payload: Any) -> str:
    """Return a payload as JSON text, checked by the processor if one is given."""
    if isinstance(kind, str):
        return strict_json.dumps_model(payload, what="payload")
    return write_payload(kind, payload)


def stored_payload(text: str, kind: str, owner: UUID | str, contents: Contents, most: int) -> str:
    """Return a payload's JSON text as it is stored; raise InvalidPayload if that has over ``most`` bytes."""
    text = contents.encode(text, "payload", kind, owner)
    size = len(text) if text.isascii() else len(text.encode())
    if size > most:
        raise InvalidPayload(f"payload of {size} bytes exceeds JSWORKER_MAX_PAYLOAD_BYTES={most}")
    return text


class Inserted(NamedTuple):
    """The jobs of one statement, and its answers.

    Relays leave the messages to this client until ``reserved_until``, by the loop's clock; 0: not at all.
    """

    jobs: list[NewJob]
    answers: list[Enqueued]
    reserved_until: float


async def insert(
    database: Database,
    kind: str,
    jobs: Sequence[NewJob],
    *,
    keyed: bool,
    reserved_seconds: Callable[[int], float],
) -> AsyncGenerator[Inserted]:
    """Insert jobs of a kind and yield the answers of the statements, in order, as they come.

    Two statements are under way at once, but only one if jobs are ``keyed``: of two jobs with the same key
    the first must win. After an error the answered jobs are stored; for those under way it is unclear.
    ``reserved_seconds`` is called with the number of jobs of a statement if all are due and have no terms.
    """
    under_way: deque[asyncio.Task[Inserted]] = deque()
    at_once = 1 if keyed else _AT_ONCE

    async def write(batch: list[NewJob]) -> Inserted:
        are_due = all(job.terms is None and is_due(job) for job in batch)
        seconds = reserved_seconds(len(batch)) if are_due else 0.0
        until = asyncio.get_running_loop().time() + seconds if seconds else 0.0
        answers = await enqueue_terms.enqueue_many(database, kind, batch, publish_after=seconds)
        return Inserted(batch, answers, until)

    try:
        for batch in for_statements(jobs):
            under_way.append(asyncio.create_task(write(batch)))
            await asyncio.sleep(0)  # send it before the answers of an earlier one keep the CPU busy
            if len(under_way) == at_once:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for statement in under_way:
            statement.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def for_statements(jobs: Sequence[NewJob]) -> Iterator[list[NewJob]]:
    """Yield the jobs of each statement: up to 5,000 with a million characters of payload, or a larger one."""
    batch: list[NewJob] = []
    size = 0
    for job in jobs:
        if batch and (len(batch) == _BATCH or size + len(job.payload) > _BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.payload)
    if batch:
        yield batch


class SharedInserts:
    """Inserts single jobs of a client: a lone job at once, concurrent jobs of a kind in natural batches.

    A job with a unique key is always inserted alone, because it may have to wait for a job with the same key
    that is not committed yet; so is a job with terms, because it needs another statement.
    ``publish_after`` returns the seconds for which relays leave messages to this client now.
    """

    def __init__(
        self,
        database: Database,
        *,
        publish_after: Callable[[], float],
        died: Callable[[str, BaseException], None],
    ) -> None:
        self._database = database
        self._publish_after = publish_after
        self._died = died
        self._under_way = 0
        self._context = copy_context()
        self._kinds: dict[str, Batcher[NewJob, _Answer]] = {}

    async def insert(self, kind: str, job: NewJob) -> Enqueued:
        """Insert a job; after DatabaseUnavailable it is unclear whether it was stored."""
        if job.unique_key is None and job.terms is None and self._under_way:
            if kind not in self._kinds:
                name, write = f"inserts of {kind}", partial(self._write, kind)
                idle = partial(self._kinds.pop, kind)  # producers may invent any number of kinds
                # Not in the context of the first request, in which all would be written.
                self._kinds[kind] = self._context.run(
                    Batcher, name, write, limit=_SHARED_BATCH, died=self._died, idle=idle
                )
            answer = await self._kinds[kind].submit(job)
            if isinstance(answer, JsworkerError):
                raise answer.with_traceback(None)
            return answer
        self._under_way += 1
        try:
            return await self._alone(kind, job)
        finally:
            self._under_way -= 1

    async def flush(self) -> None:
        """Wait until all inserts in batches have been answered."""
        for batches in list(self._kinds.values()):
            await batches.flush()

    async def _alone(self, kind: str, job: NewJob) -> Enqueued:
        after = self._publish_after() if is_due(job) else 0.0
        return await enqueue_terms.enqueue_one(self._database, kind, job, publish_after=after)

    async def _write(self, kind: str, jobs: Sequence[NewJob]) -> Sequence[_Answer]:
        answers: dict[UUID, _Answer] = {}
        for batch in for_statements(jobs):
            answers |= await self._written(kind, batch)
        return [answers[job.id] for job in jobs]

    async def _written(self, kind: str, jobs: list[NewJob]) -> dict[UUID, _Answer]:
        answers: dict[UUID, _Answer] = {}
        alone = jobs
        if len(jobs) > 1:
            write = partial(enqueue.enqueue_many, self._database, kind, publish_after=self._publish_after())
            try:
                inserted, refused = await in_halves(jobs, write)
            except JsworkerError as error:
                return dict.fromkeys((job.id for job in jobs), error)
            answers = {answer.id: answer for answer in inserted}
            alone = [job for job, _ in refused]  # inserted once more, each for its own error
        for job in alone:
            try:
                answers[job.id] = await self._alone(kind, job)
            except JsworkerError as error:
                answers[job.id] = error
        return answers
