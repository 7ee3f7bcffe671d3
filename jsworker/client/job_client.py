"""The client: enqueue in one call, and everything an application or operator may ask of jobs."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from jsworker.client.batching import SharedInserts
from jsworker.client.enqueueing import Kind, kind_name, new_job, new_jobs, one_for_each
from jsworker.client.inserting import insert
from jsworker.client.publishing import OutboxPublisher, Tally, publish_traced
from jsworker.client.stream_link import StreamLink
from jsworker.core import fault_points, tracing
from jsworker.core.batching import Batcher
from jsworker.core.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    JobNotFound,
    PublishFailed,
    TransitionRefused,
)
from jsworker.core.events import Events
from jsworker.core.names import printable, shown
from jsworker.core.settings import Settings, load_settings
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.run_age import RunAge
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.schema import STATUSES
from jsworker.ownership.transitions import control, publish, reset
from jsworker.ownership.transitions.control import Cancelled
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob
from jsworker.ownership.transitions.publish import Outgoing, Sent
from jsworker.ownership.transitions.reset import Reset
from jsworker.ownership.transitions.workers import installation_id
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import subject_of

_OWN_PUBLISHING_SECONDS = 5.0
"""For so long the relay leaves a new job's message to the client that enqueued it."""

_MARK_SECONDS = 0.5
"""Far less than the relay's patience. Most jobs have been claimed by then and need no mark; one that came at
once would make the CLAIM of the very same row wait for its commit."""

_PUBLISH_SECONDS = 2.0
_CONNECT_SECONDS = 3.0
_PUBLISH_EVERY_SECONDS = 1.0
"""Publishing competes with a long ``enqueue_many`` for this process; workers publish meanwhile."""
_PUBLISH_BATCH = 1000
_AT_ONCE_BESIDE_ENQUEUES = 2
_REASON_CHARACTERS = 1000
_MOST_LISTED = 2**31 - 1
_NOT_OPEN = "not open: use `async with`, or call open()"
_MAY_NOT_MARK = "the login may not note what was published (role jsworker_publisher): workers publish it"


class JobClient:
    """Enqueues jobs and acts on them. Open one per process: ``async with JobClient.from_env() as client``.

    A job is accepted once it is committed. NATS may be away: workers publish what the client could not, which
    connects in the background.

    Attributes:
        events: told ``worker.degraded`` and ``worker.restored``, with ``what="publishing"`` for a stream that
            this client cannot publish to.
        unpublished_because: why messages were left to workers; None: none was, or the last
            ``publish_pending`` has published everything.
    """

    def __init__(self, settings: Settings) -> None:
        """Prepare a client; nothing connects yet.

        Raises:
            TypeError: these are no ``Settings``.
        """
        if not isinstance(settings, Settings):
            hint = "JobClient.from_env() makes them, JobClient.from_env(database_url=…) with changes"
            raise TypeError(f"JobClient takes Settings, not {type(settings).__name__}: {hint}")
        self._settings = settings
        self.events = Events()
        self._database = Database(settings.database_dsn(), statement_timeout=settings.statement_timeout)
        self._link: StreamLink | None = None
        self._marks: Batcher[Sent, None] = Batcher(
            "marks", self._mark, limit=500, died=self._died, linger=_MARK_SECONDS
        )
        self._inserts = SharedInserts(
            self._database,
            publish_after=lambda: _OWN_PUBLISHING_SECONDS if self._answering_stream() else 0.0,
            died=self._died,
        )
        self._publishing: asyncio.Task[None] | None = None
        self._publish_since: float | None = None
        self._may_mark = True
        self.unpublished_because: str | None = None
        self._unusable_because: str | None = _NOT_OPEN

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Return a client with the settings of the environment.

        Args:
            overrides: settings that take precedence, by their names in lower case.

        Raises:
            SettingsError: a setting is wrong or missing.
        """
        return cls(load_settings(**overrides))

    @property
    def database(self) -> Database:
        """The client's connections to PostgreSQL."""
        return self._database

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. NATS that does not answer is noted in ``unpublished_because`` and otherwise no obstacle.

        Raises:
            DatabaseUnavailable, DatabaseRefused, MigrationMissing: PostgreSQL cannot be used.
            StreamRefused: the login or the stream cannot be used as configured.
        """
        try:
            await self._database.check_migrated()
            self._may_mark = await publish.may_mark(self._database)
            await self._open_link()
        except BaseException:
            await self.close()
            self._unusable_because = _NOT_OPEN
            raise
        self._unusable_because = None

    async def close(self) -> None:
        """Finish publishing what was enqueued, within seconds, and disconnect."""
        self._unusable_because = "closed"
        if (publishing := self._publishing) is not None and not publishing.done():
            seconds = _OWN_PUBLISHING_SECONDS if self._answering_stream() else 0.0
            await asyncio.wait({publishing}, timeout=seconds)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        await self._inserts.flush()
        await self._marks.flush()
        if self._link is not None:
            await self._link.close()
            self._link = None
        await self._database.close()

    async def enqueue(
        self,
        kind: Kind,
        payload: Any,
        *,
        unique_key: str | None = None,
        delay: float = 0.0,
        max_attempts: int | None = None,
        max_stalls: int | None = None,
    ) -> Enqueued:
        """Enqueue a job in a transaction of its own and publish it.

        Args and errors are those of ``enqueue_statement``.

        Returns:
            The job's id, and whether it was created or a live one holds the unique key.

        Raises:
            DatabaseUnavailable: unclear whether the job was stored; a ``unique_key`` makes a second try safe.
            RuntimeError: the client is not open, or closed; as every other call does.
        """
        job = new_job(
            kind,
            payload,
            unique_key=unique_key,
            delay=delay,
            max_attempts=max_attempts,
            max_stalls=max_stalls,
            max_payload_bytes=self._settings.max_payload_bytes,
        )
        name = kind_name(kind)
        if tracing.active() is None:
            return await self._enqueue(name, job)
        with tracing.creating(self._subject_of(name), job_id=job.id) as context:
            return await self._enqueue(name, job._replace(**context._asdict()))

    async def _enqueue(self, kind: str, job: NewJob) -> Enqueued:
        self._opened()
        enqueued = await self._inserts.insert(kind, job)
        if enqueued.created and not job.delay:
            await fault_points.reach("after_commit_before_publish")
            own = Outgoing(enqueued.id, kind, 1, False, None, job.traceparent, job.tracestate)
            await self._publish(own)
        return enqueued

    async def enqueue_many(
        self,
        kind: Kind,
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        delay: float = 0.0,
        max_attempts: int | None = None,
        max_stalls: int | None = None,
    ) -> list[Enqueued]:
        """Enqueue many jobs of a kind, in statements of up to 5,000, and publish them in the background.

        An error leaves the jobs of earlier statements stored.

        Args:
            kind: the kind, or its processor.
            payloads: one for each job.
            unique_keys: one for each payload, or None.
            delay: seconds until the jobs are due.
            max_attempts: overrides the processor's.
            max_stalls: overrides the processor's.

        Returns:
            One answer for each payload, in order.

        Raises:
            TypeError: ``payloads`` or ``unique_keys`` is one value instead of many, or has no order.
        """
        given = one_for_each("payloads", payloads)
        keys = [None] * len(given) if unique_keys is None else one_for_each("unique_keys", unique_keys)
        if len(keys) != len(given):
            raise ValueError(f"{len(keys)} unique_keys for {len(given)} payloads: one for each is needed")
        name = kind_name(kind)
        with tracing.creating(self._subject_of(name), jobs=len(given)) as context:
            jobs = new_jobs(
                kind,
                given,
                keys,
                delay=delay,
                max_attempts=max_attempts,
                max_stalls=max_stalls,
                max_payload_bytes=self._settings.max_payload_bytes,
                context=context,
            )
            return await self._enqueue_many(name, jobs, keyed=any(key is not None for key in keys))

    async def _enqueue_many(self, kind: str, jobs: Iterable[NewJob], *, keyed: bool) -> "list[Enqueued]":
        enqueued: list[Enqueued] = []
        clock = asyncio.get_running_loop().time
        began = clock()
        publish_at = began + _PUBLISH_EVERY_SECONDS
        async with aclosing(insert(self._opened(), kind, jobs, keyed=keyed)) as inserted:
            async for answers in inserted:
                enqueued += answers
                if clock() >= publish_at:
                    self._publish_in_background(since=began)
        self._publish_in_background(since=began)
        return enqueued

    async def publish_pending(self) -> int:
        """Publish what the outbox holds, for example after your own transaction, and return how much.

        Nothing is raised for what workers publish later; ``unpublished_because`` tells why they have to. Once
        NATS has failed to answer, this returns 0 without waiting until it answers again. Where the login may
        INSERT alone (see ``deploy/postgres/roles.sql``) workers publish all of it, within RELAY_INTERVAL.
        """
        self._opened()
        if not self._may_mark:
            self.unpublished_because = _MAY_NOT_MARK
            return 0
        if self._reachable_stream() is None:
            return 0
        stream = self._answering_stream()
        if stream is None:
            self._publish_in_background(since=-math.inf)
            return 0
        tally = Tally()
        self.unpublished_because = None
        await self._publish_all(OutboxPublisher(self._database, stream, limit=_PUBLISH_BATCH), tally)
        self._reachable_stream()  # when the connection was lost meanwhile, not all was published
        return tally.published

    async def _publish_all(self, outbox_publisher: OutboxPublisher, tally: Tally) -> None:
        """Publish and note why anything was not; workers publish the rest."""
        try:
            await outbox_publisher.publish(tally)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self.unpublished_because = str(error)
        self._note_answers(tally)

    def _note_answers(self, tally: Tally) -> None:
        self.unpublished_because = tally.failed or self.unpublished_because
        if self._link is not None and (tally.published or tally.failed):
            self._link.silent_because = None if tally.published else tally.failed

    async def get(self, job_id: UUID | str) -> dict[str, Any]:
        """Return a job by column name, payload and result included.

        Raises:
            JobNotFound: no job has this id.
        """
        row = await listing.get_job(self._opened(), job_uuid(job_id))
        if row is None:
            raise JobNotFound(f"no job has id {job_id}")
        return row

    async def timeline(self, job_id: UUID | str) -> list[dict[str, Any]]:
        """Return what happened to a job, oldest first: claims after the first, errors, resets, refusals."""
        return await listing.timeline(self._opened(), job_uuid(job_id))

    async def list(
        self,
        *,
        status: str | None = None,
        kind: Kind | None = None,
        limit: int = 50,
        after: UUID | str | None = None,
        stale_for: float | None = None,
        running_for: float | None = None,
        no_progress_for: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return jobs by column name, without payload and result.

        The newest come first; of scheduled jobs the next one due, of queued ones the last queued. There is no
        index of completed jobs by their kind: a rare one is searched for from the newest job on, for as
        long as that takes. Running jobs that are chosen by their age come the oldest first: by the time of
        their last progress, of their claim or of their last heartbeat.

        Args:
            status: only jobs of this status: scheduled, queued, processing, completed, failed or cancelled.
            kind: only jobs of this kind, given by its name or its processor.
            limit: how many at most.
            after: begin behind this job, the last one of the list before.
            stale_for: only running jobs whose worker gave no heartbeat for so many seconds.
            running_for: only running jobs whose run began so many seconds ago, or earlier.
            no_progress_for: only running jobs whose run told no progress, saved no checkpoint and announced
                no quiet phase for so many seconds.

        Raises:
            JobNotFound: where that job has stood is not known any more.
            InvalidName: ``kind`` can be no kind's name.
            ValueError: ``limit`` is less than 1, there is no such ``status``, or an age is no number of
                seconds or goes with another status than processing.
            TypeError: ``limit`` is no whole number.
        """
        if not isinstance(limit, Integral):
            raise TypeError(f"limit={shown(limit)} must be a whole number, not {type(limit).__name__}")
        if not 1 <= limit <= _MOST_LISTED:
            raise ValueError(f"limit={shown(limit)} must be from 1 to {_MOST_LISTED}")
        if status is not None and status not in STATUSES:
            raise ValueError(f"status={shown(status)} must be one of {', '.join(STATUSES)}")
        age = RunAge(stale_for, running_for, no_progress_for)
        if age and status not in (None, "processing"):
            raise ValueError(f"status={shown(status)} with an age: only jobs that are processing have one")
        name = None if kind is None else kind_name(kind)
        behind = None if after is None else job_uuid(after)
        page = await listing.list_jobs(
            self._opened(), status=status, kind=name, limit=limit, after=behind, age=age
        )
        return page.jobs

    async def cancel(self, *job_ids: UUID | str) -> Cancelled:
        """Cancel waiting jobs at once; running ones are asked to stop within one heartbeat."""
        with operators_rights("cancel"):
            return await control.cancel(self._opened(), [job_uuid(job_id) for job_id in job_ids])

    async def retry(self, job_id: UUID | str) -> None:
        """Put a failed job back into the queue with its counters at zero.

        Raises:
            TransitionRefused: it is not failed, or a live job holds its unique key.
        """
        with operators_rights("retry"):
            await control.retry(self._opened(), job_uuid(job_id))
        self._publish_in_background()

    async def clear_and_reenqueue(self, job_id: UUID | str, reason: str) -> Reset:
        """Take a running job from its owner and put it back into the queue, uncounted.

        One of the workers tells it as the event ``job.cleared``, with the cause ``operator``.

        Args:
            job_id: the job.
            reason: told to its next run as ``job.clear_reason``, in one line of at most 1,000 characters.

        Raises:
            JobNotFound: no job has this id.
            TransitionRefused: it is not running, or its owner has just settled it.
            TypeError: ``reason`` is no text.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason={shown(reason)} must be text, not {type(reason).__name__}")
        with operators_rights("clear_and_reenqueue"):
            reset_ = await self._clear(job_uuid(job_id), reason)
        self._publish_in_background()
        return reset_

    async def _clear(self, wanted: UUID, reason: str) -> Reset:
        seen = (await listing.look_up(self._opened(), [wanted])).get(wanted)
        if seen is None:
            raise JobNotFound(f"no job has id {wanted}")
        if seen.status != "processing":
            raise TransitionRefused(f"job {wanted} is {seen.status}; only a running job can be cleared")
        taken = await reset.reset_by_operator(
            self._database, seen=[(wanted, seen.fencing_token)], reason=printable(reason, _REASON_CHARACTERS)
        )
        if wanted in taken.refused:
            raise TransitionRefused(f"job {wanted} cannot be cleared: {taken.refused[wanted]}")
        if not taken.resets:
            raise TransitionRefused(f"job {wanted}: its owner has just settled it, or writes it right now")
        return taken.resets[0]

    def _opened(self) -> Database:
        if self._unusable_because is not None:
            raise RuntimeError(f"the client is {self._unusable_because}")
        return self._database

    async def _open_link(self) -> None:
        stream = Stream(
            self._settings,
            installation_id=await installation_id(self._database),
            events=self.events,
            client_name="jsworker client",
        )
        self._link = StreamLink(stream, self.events)
        await self._link.open(_CONNECT_SECONDS)
        self._reachable_stream()

    def _reachable_stream(self) -> Stream | None:
        """Return the stream when it can be reached; else note why nothing is published."""
        if self._link is None:
            return None
        if self._link.stream is None:
            self.unpublished_because = self._link.reason
        return self._link.stream

    def _answering_stream(self) -> Stream | None:
        """Return the stream when it is worth waiting for: it can be reached and stored the last message."""
        if self._link is not None and self._link.silent_because is not None:
            self.unpublished_because = self._link.silent_because
            return None
        return self._reachable_stream()

    def _subject_of(self, kind: str) -> str:
        return subject_of(self._settings.subject_prefix, kind)

    async def _publish(self, job: Outgoing) -> None:
        """Publish a job's message; while nothing is acknowledged, nobody waits for it."""
        stream = self._answering_stream()
        if stream is None:
            self._publish_in_background()
            return
        [published] = await publish_traced(stream, [job], timeout=_PUBLISH_SECONDS)
        if isinstance(published, PublishFailed):
            # The job is committed; the relay of any worker publishes it in five seconds.
            self._note_answers(Tally(failed=str(published)))
            return
        if self._may_mark:
            self._marks.post(Sent(job.id, job.dispatch, published.stream_seq, published.stream_created))

    def _publish_in_background(self, *, since: float | None = None) -> None:
        """Publish what was queued since, or just now; what is older is left to the relays of workers."""
        if self._reachable_stream() is None or not (self._may_mark or self._answering_stream() is None):
            return
        began = asyncio.get_running_loop().time() if since is None else since
        self._publish_since = began if self._publish_since is None else min(self._publish_since, began)
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.create_task(self._publish_queued(), name="jsworker publish")

    async def _publish_queued(self) -> None:
        """Publish until nobody has asked for it since the last time, or nothing is acknowledged."""
        while self._publish_since is not None and (stream := self._reachable_stream()) is not None:
            since, self._publish_since = self._publish_since, None
            if not self._may_mark:
                await self._hear(stream)
                return
            take = partial(_take_since, self._database, since)
            if self._answering_stream() is None and not await self._probe(stream, take):
                return
            own = OutboxPublisher(
                self._database,
                stream,
                limit=_PUBLISH_BATCH,
                take=partial(take, _PUBLISH_BATCH),
                at_once=_AT_ONCE_BESIDE_ENQUEUES,
            )
            await self._publish_all(own, Tally())

    async def _probe(self, stream: Stream, take: Callable[[int], Awaitable[Any]]) -> bool:
        """Tell whether the stream stores messages again, and keep no more than one of them from workers."""
        tally = Tally()
        await self._publish_all(
            OutboxPublisher(self._database, stream, limit=2, take=partial(take, 1)), tally
        )
        if tally.published or tally.failed:
            return tally.published > 0
        return await self._hear(stream)

    async def _hear(self, stream: Stream) -> bool:
        """Tell whether NATS answers again."""
        answers = await stream.flush(_PUBLISH_SECONDS)
        if answers and self._link is not None:
            self._link.silent_because = None
        return answers

    async def _mark(self, sent: Sequence[Sent]) -> Sequence[None]:
        try:
            await publish.mark(self._database, sent)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            # Unmarked jobs are published once more by a relay; the stream knows their messages already.
            self.unpublished_because = str(error)
        return [None] * len(sent)

    def _died(self, name: str, error: BaseException) -> None:
        self.events.emit("worker.degraded", what=name, reason=f"{type(error).__name__}: {error}")


async def _take_since(database: Database, began: float, limit: int) -> list[Outgoing]:
    """Take what has been queued since then, by the event loop's clock, or a little before."""
    elapsed = asyncio.get_running_loop().time() - began
    within = elapsed + _OWN_PUBLISHING_SECONDS if math.isfinite(elapsed) else None
    return await publish.take_outgoing(database, limit=limit, within=within)


def job_uuid(job_id: UUID | str) -> UUID:
    """Return a job id as a UUID.

    Raises:
        JobNotFound: it is none, so no job can have it.
        TypeError: it is neither a UUID nor text.
    """
    if isinstance(job_id, UUID):
        return job_id
    if not isinstance(job_id, str):
        hint = ""
        if isinstance(job_id, Enqueued | Mapping):
            hint = "; give its id"
        elif isinstance(job_id, Iterable):
            hint = "; each is an argument of its own: cancel(*ids)"
        raise TypeError(f"a job id is a UUID or its text, not {type(job_id).__name__}{hint}")
    try:
        return UUID(job_id)
    except ValueError:
        raise JobNotFound(f"no job has id {job_id!r}: a job id is a UUID") from None
