"""The client: enqueue in one call, and everything an application or operator may ask of jobs."""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from jsworker import fault_points
from jsworker.batcher import Batcher
from jsworker.client.enqueueing import Kind, kind_name, new_job
from jsworker.client.publishing import publish_due
from jsworker.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    JobNotFound,
    PublishFailed,
    StreamUnavailable,
    TransitionRefused,
)
from jsworker.events import Events
from jsworker.names import printable
from jsworker.ownership import control, enqueue, listing, outbox, reset
from jsworker.ownership.control import Cancelled
from jsworker.ownership.database import Database
from jsworker.ownership.enqueue import Enqueued
from jsworker.ownership.outbox import Sent
from jsworker.ownership.registry import installation_id
from jsworker.ownership.reset import Reset
from jsworker.settings import Settings, load_settings
from jsworker.stream.jetstream import Stream
from jsworker.stream.wire import WireMessage

_OWN_PUBLISHING_SECONDS = 5.0
"""For so long the relay leaves a new job's message to the client that enqueued it."""

_PUBLISH_SECONDS = 2.0
_CONNECT_SECONDS = 3.0
_INSERT_BATCH = 5000
_PUBLISH_BATCH = 1000
_REASON_CHARACTERS = 1000


class JobClient:
    """Enqueues jobs and acts on them. Open one per process: ``async with JobClient.from_env() as client``.

    A job is accepted once it is committed. NATS may be away: workers publish what the client could not.
    """

    def __init__(self, settings: Settings) -> None:
        """Prepare a client; nothing connects yet."""
        self._settings = settings
        self.events = Events()
        self._database = Database(settings.database_dsn(), statement_timeout=settings.statement_timeout)
        self._stream: Stream | None = None
        self._marks: Batcher[Sent, None] = Batcher("marks", self._mark, limit=500, died=self._died)
        self._background: set[asyncio.Task[None]] = set()
        self.unpublished_because: str | None = None

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
            await self._connect_stream()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish publishing what was enqueued, within seconds, and disconnect."""
        if self._background:
            await asyncio.wait(self._background, timeout=_OWN_PUBLISHING_SECONDS)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._marks.flush()
        if self._stream is not None:
            await self._stream.close()
            self._stream = None
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
        publish_after = _OWN_PUBLISHING_SECONDS if self._reachable_stream() else 0.0
        enqueued = await enqueue.enqueue(self._database, name, job, publish_after=publish_after)
        if enqueued.created and not delay:
            await fault_points.reach("after_commit_before_publish")
            await self._publish(WireMessage(job_id=enqueued.id, kind=name, dispatch=1))
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
        """Enqueue many jobs of a kind, in statements of 5,000, and publish them in the background.

        Args:
            kind: the kind, or its processor.
            payloads: one for each job.
            unique_keys: one for each payload, or None.
            delay: seconds until the jobs are due.
            max_attempts: overrides the processor's.
            max_stalls: overrides the processor's.

        Returns:
            One answer for each payload, in order.
        """
        given = list(payloads)
        keys = list(unique_keys) if unique_keys is not None else [None] * len(given)
        if len(keys) != len(given):
            raise ValueError(f"{len(keys)} unique_keys for {len(given)} payloads: one for each is needed")
        limits = {"max_attempts": max_attempts, "max_stalls": max_stalls}
        size = self._settings.max_payload_bytes
        jobs = [
            new_job(kind, payload, unique_key=key, delay=delay, max_payload_bytes=size, **limits)
            for payload, key in zip(given, keys, strict=True)
        ]
        enqueued: list[Enqueued] = []
        for start in range(0, len(jobs), _INSERT_BATCH):
            batch = jobs[start : start + _INSERT_BATCH]
            enqueued += await enqueue.enqueue_many(self._database, kind_name(kind), batch)
            self._publish_in_background()
        return enqueued

    async def publish_pending(self) -> int:
        """Publish what the outbox holds, for example after your own transaction, and return how much.

        Raises:
            StreamUnavailable: NATS does not answer; workers publish it later.
        """
        stream = self._reachable_stream()
        if stream is None:
            raise StreamUnavailable(self.unpublished_because)
        published = 0
        while answers := await publish_due(self._database, stream, limit=_PUBLISH_BATCH):
            failures = [answer for answer in answers if isinstance(answer, PublishFailed)]
            published += len(answers) - len(failures)
            if failures:
                self.unpublished_because = str(failures[0])
            if len(answers) < _PUBLISH_BATCH:
                break
        return published

    async def get(self, job_id: UUID | str) -> dict[str, Any]:
        """Return a job by column name, payload and result included.

        Raises:
            JobNotFound: no job has this id.
        """
        row = await listing.get_job(self._database, job_uuid(job_id))
        if row is None:
            raise JobNotFound(f"no job has id {job_id}")
        return row

    async def timeline(self, job_id: UUID | str) -> list[dict[str, Any]]:
        """Return what happened to a job, oldest first: claims after the first, errors, resets, refusals."""
        return await listing.timeline(self._database, job_uuid(job_id))

    async def list(
        self, *, status: str | None = None, kind: str | None = None, limit: int = 50
    ) -> list[dict[str, Any]]:
        """Return jobs by column name, the newest first, without payload and result."""
        return await listing.list_jobs(self._database, status=status, kind=kind, limit=limit)

    async def cancel(self, *job_ids: UUID | str) -> Cancelled:
        """Cancel waiting jobs at once; running ones are asked to stop within one heartbeat."""
        return await control.cancel(self._database, [job_uuid(job_id) for job_id in job_ids])

    async def retry(self, job_id: UUID | str) -> None:
        """Put a failed job back into the queue with its counters at zero.

        Raises:
            TransitionRefused: it is not failed, or a live job holds its unique key.
        """
        await control.retry(self._database, job_uuid(job_id))
        self._publish_in_background()

    async def clear_and_reenqueue(self, job_id: UUID | str, reason: str) -> Reset:
        """Take a running job from its owner and put it back into the queue, uncounted.

        Args:
            job_id: the job.
            reason: told to its next run as ``job.clear_reason``, in one line of at most 1,000 characters.

        Raises:
            JobNotFound: no job has this id.
            TransitionRefused: it is not running, or its owner has just settled it.
        """
        wanted = job_uuid(job_id)
        seen = (await listing.look_up(self._database, [wanted])).get(wanted)
        if seen is None:
            raise JobNotFound(f"no job has id {job_id}")
        if seen.status != "processing":
            raise TransitionRefused(f"job {job_id} is {seen.status}; only a running job can be cleared")
        taken = await reset.reset_by_operator(
            self._database, seen=[(wanted, seen.fencing_token)], reason=printable(reason, _REASON_CHARACTERS)
        )
        if not taken.resets:
            raise TransitionRefused(f"job {job_id}: its owner has just settled it, or writes it right now")
        self._publish_in_background()
        return taken.resets[0]

    async def _connect_stream(self) -> None:
        stream = Stream(
            self._settings,
            installation_id=await installation_id(self._database),
            events=self.events,
            client_name="jsworker client",
        )
        try:
            await stream.connect(timeout=_CONNECT_SECONDS)
            await stream.ensure([], {})
        except StreamUnavailable as error:
            self.unpublished_because = str(error)
            await stream.close()
        except BaseException:
            await stream.close()
            raise
        else:
            self._stream = stream

    def _reachable_stream(self) -> Stream | None:
        """Return the stream when it can be reached; else note why nothing is published."""
        if self._stream is None or self._stream.connected:
            return self._stream
        self.unpublished_because = "NATS is not connected"
        return None

    async def _publish(self, message: WireMessage) -> None:
        stream = self._reachable_stream()
        if stream is None:
            return
        try:
            published = await stream.publish(message, timeout=_PUBLISH_SECONDS)
        except (PublishFailed, StreamUnavailable) as error:
            # The job is committed; the relay of any worker publishes it in five seconds.
            self.unpublished_because = str(error)
            return
        self._marks.post(
            Sent(message.job_id, message.dispatch, published.stream_seq, published.stream_created)
        )

    def _publish_in_background(self) -> None:
        if self._reachable_stream() is None or self._background:
            return
        task = asyncio.create_task(self._publish_all(), name="jsworker publish")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _publish_all(self) -> None:
        try:
            await self.publish_pending()
        except (DatabaseUnavailable, DatabaseRefused, StreamUnavailable) as error:
            self.unpublished_because = str(error)

    async def _mark(self, sent: Sequence[Sent]) -> Sequence[None]:
        try:
            await outbox.mark(self._database, sent)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            # Unmarked jobs are published once more by a relay; the stream knows their messages already.
            self.unpublished_because = str(error)
        return [None] * len(sent)

    def _died(self, name: str, error: BaseException) -> None:
        self.events.emit("worker.degraded", what=name, reason=f"{type(error).__name__}: {error}")


def job_uuid(job_id: UUID | str) -> UUID:
    """Return a job id as a UUID.

    Raises:
        JobNotFound: it is none, so no job can have it.
    """
    if isinstance(job_id, UUID):
        return job_id
    try:
        return UUID(job_id)
    except ValueError:
        raise JobNotFound(f"no job has id {job_id!r}: a job id is a UUID") from None
