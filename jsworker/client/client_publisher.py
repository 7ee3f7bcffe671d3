"""Publishes the jobs of a client, at once or in the background; workers publish those that it cannot."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from jsworker.client.enqueueing import Inserted
from jsworker.client.publishing import AT_ONCE, MARK_SECONDS, OutboxPublisher, Take, Tally, publish_traced
from jsworker.core.batching import Batcher
from jsworker.core.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    JsworkerError,
    PublishFailed,
    StreamUnavailable,
)
from jsworker.core.events import Events
from jsworker.core.garbage import collect_every_second, fewer_collections
from jsworker.core.settings import Settings
from jsworker.core.tracing import TraceContext
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import publish
from jsworker.ownership.transitions.publish import Outgoing, Sent
from jsworker.ownership.transitions.workers import installation_id
from jsworker.stream.jetstream import Stream
from jsworker.stream.nats_client import end_tasks

_RESERVED_SECONDS: Final = 5.0  # for so long relays leave a new job's message to the client that enqueued it
_PUBLISH_SECONDS: Final = 2.0
_CONNECT_SECONDS: Final = 3.0
_BATCH: Final = 1000
_MOST_KEPT: Final = 50_000  # jobs published from memory; further ones are taken from the outbox
# ``_MOST_KEPT`` is checked before a statement is sent, so concurrent calls may together keep more. What is
# beyond ``_MOST_OF_CALLS_AT_ONCE`` is left to relays, which take it only seconds later; no single call
# brings as many.
_MOST_OF_CALLS_AT_ONCE: Final = 2 * _MOST_KEPT
_LEAST_A_SECOND: Final = 10_000
"""The least rate of publishing expected, in messages: relays wait the longer, the more is kept."""
_LEAST_SECONDS: Final = 2.5  # a message must be sent so long before relays take it, to be marked in time
_AT_ONCE_BESIDE_ENQUEUES: Final = 2
_MAY_NOT_MARK: Final = (
    "the login may not note what was published (role jsworker_publisher): workers publish it"
)
_NOT_CONNECTED: Final = "NATS is not connected"
_LATE: Final = "messages were not sent within the time that workers leave for it: workers publish them"
_TOO_MANY: Final = "more was enqueued at once than is kept: workers publish the rest"
_NOT_SET: Final = "JSWORKER_NATS_URL is not set"
_AGAIN_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 5.0
_END_SECONDS: Final = 2.0
_LAST_CLAIMS_SECONDS: Final = 0.05
"""The wait for the claims of jobs that were published just now, because a mark would lock their rows."""
# Messages without a mark by then are published once more; the stream knows them already.
_MARK_AT_END_SECONDS: Final = 5.0


class _Kept(NamedTuple):
    """Stored jobs; relays leave the messages to this client until ``reserved_until``, as in ``Inserted``."""

    reserved_until: float
    kind: str
    priority: int
    context: TraceContext
    ids: list[UUID]


class ClientPublisher:
    """Publishes the jobs of one client over its own connection to NATS, which it restores after a loss.

    After every loss the stream is checked anew: if it was made meanwhile, it may belong to another
    installation. ``unpublished_because`` is why messages were left to workers; None: none were, or the last
    ``publish_pending`` has published everything. ``silent_because`` is why the last message was not
    acknowledged; None: it was, or the stream has been checked since.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        events: Events,
        *,
        died: Callable[[str, BaseException], None],
    ) -> None:
        self.unpublished_because: str | None = None
        self.silent_because: str | None = None
        self.stream: Stream | None = None
        self._settings = settings
        self._database = database
        self._events = events
        self._may_mark = True
        self._new_marks = partial(Batcher, "marks", self._mark, limit=500, died=died, linger=MARK_SECONDS)
        self._marks: Batcher[Sent, None] = self._new_marks()
        self._ready = False
        self._unready_because: str | None = None
        self._kept: deque[_Kept] = deque()
        self._jobs_kept = 0
        self._keeping: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._wanted_since: float | None = None

    async def open(self) -> None:
        """Connect; if that fails, go on trying in the background; see ``JobClient.open``."""
        if not self._settings.nats_is_set:
            self.unpublished_because = _NOT_SET
            return
        self._marks = self._new_marks()
        self._may_mark = await publish.may_mark(self._database)
        self.stream = stream = Stream(
            self._settings,
            installation_id=await installation_id(self._database),
            events=self._events,
            client_name="jsworker client",
        )
        self._lost = asyncio.Event()
        stream.connection.lost_callbacks.append(self._on_lost)
        self._connected_once = False
        try:
            await self._prepare(stream, _CONNECT_SECONDS)
        except StreamUnavailable as error:
            self._degrade(str(error))
        self._keeping = asyncio.create_task(self._keep_ready(stream), name="jsworker stream")
        self._reachable_stream()

    async def end_publishing(self) -> None:
        """Let the publishing in the background finish within seconds, then cancel it."""
        if (publishing := self._publishing) is not None and not publishing.done():
            await asyncio.wait({publishing}, timeout=self.reserved_seconds())
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    async def close(self) -> None:
        """Mark what was published, if PostgreSQL answers, and disconnect."""
        try:
            if self._marks.is_busy:
                await asyncio.sleep(_LAST_CLAIMS_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(_MARK_AT_END_SECONDS):
                    await self._marks.flush()
        finally:
            await self._marks.close()
            self._ready = False
            if self._keeping is not None:
                await end_tasks({self._keeping}, _END_SECONDS)
            if self.stream is not None:
                await self.stream.close()
                self.stream = None

    def reserved_seconds(self) -> float:
        """Return the seconds for which relays leave new messages to this client: 0 when it cannot publish."""
        return _RESERVED_SECONDS if self._answering_stream() else 0.0

    def reserved_seconds_for(self, jobs: int) -> float:
        """Return the same for jobs that ``keep`` gets once they are stored; more seconds for many jobs."""
        kept = self._jobs_kept + jobs
        if not self._may_mark or kept > _MOST_KEPT or not (seconds := self.reserved_seconds()):
            return 0.0
        return seconds + kept / _LEAST_A_SECOND

    def keep(self, kind: str, stored: Inserted, *, since: float) -> None:
        """Keep the messages of stored jobs until this client publishes them.

        If relays do not leave them to this client, they are taken from the outbox, with all that was stored
        after ``since``, by the event loop's clock.
        """
        if not stored.reserved_until:
            self._want(since)
            return
        first = stored.jobs[0]  # all are of one call
        context = TraceContext(first.traceparent, first.tracestate)
        created = [answer.id for answer in stored.answers if answer.created]
        ids = created[: _MOST_OF_CALLS_AT_ONCE - self._jobs_kept]
        if len(ids) < len(created):
            self.unpublished_because = _TOO_MANY
        self._jobs_kept += len(ids)
        for start in range(0, len(ids), _BATCH):
            some = ids[start : start + _BATCH]
            self._kept.append(_Kept(stored.reserved_until, kind, first.priority, context, some))

    async def publish(self, job: Outgoing) -> None:
        """Publish a job's message; in the background if the stream is silent, by workers if it is away."""
        stream = self._answering_stream()
        if stream is None:
            self.publish_in_background()
            return
        [published] = await publish_traced(stream, [job], timeout=_PUBLISH_SECONDS)
        if isinstance(published, PublishFailed):
            # The job is committed; the relay of any worker publishes it in five seconds.
            self._note(Tally(failed=str(published)))
        elif self._may_mark:
            self._marks.post(Sent(job.id, job.dispatch, published.stream_seq, published.stream_created))

    def publish_in_background(self, *, since: float | None = None) -> None:
        """Publish all that is kept, and what was queued since ``since`` or just now."""
        self._want(asyncio.get_running_loop().time() if since is None else since)
        self.start_publishing()

    def start_publishing(self) -> None:
        """Publish what is kept, and what is wanted from the outbox, in the background."""
        if self._publishing is not None and not self._publishing.done():
            return
        if self._reachable_stream() is None or not (self._may_mark or self._answering_stream() is None):
            self._wanted_since = None
        elif self._is_wanted:
            self._publishing = asyncio.create_task(self._publish_in_turn(), name="jsworker publish")

    async def publish_pending(self) -> int:
        """Publish the outbox and return how many messages; see ``JobClient.publish_pending``."""
        if not self._may_mark:
            self.unpublished_because = _MAY_NOT_MARK
            return 0
        if self._reachable_stream() is None:
            return 0
        stream = self._answering_stream()
        if stream is None:
            self.publish_in_background(since=-math.inf)
            return 0
        kept, tally = Tally(), Tally()
        self.unpublished_because = None
        with fewer_collections():
            await self._publish_kept(stream, kept)
            await self._publish_all(self._outbox(stream), tally)
        self._reachable_stream()  # notes a loss of the connection meanwhile: not all was published
        return kept.published + tally.published

    def _want(self, since: float) -> None:
        self._wanted_since = since if self._wanted_since is None else min(self._wanted_since, since)

    @property
    def _is_wanted(self) -> bool:
        return bool(self._kept) or self._wanted_since is not None

    async def _keep_ready(self, stream: Stream) -> None:
        while True:
            if self._ready:
                await self._lost.wait()
            # Any error may end: a login is corrected, a stream deleted, a file written.
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Exception),
                wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_SECONDS),
            ):
                with attempt:
                    try:
                        await self._prepare(stream, _AGAIN_SECONDS)
                    except Exception as error:
                        known = isinstance(error, JsworkerError)
                        self._degrade(str(error) if known else f"{type(error).__name__}: {error}")
                        raise

    async def _prepare(self, stream: Stream, seconds: float) -> None:
        self._lost.clear()
        if not self._connected_once:
            await stream.connect(timeout=seconds)
            self._connected_once = True
        elif not await stream.connection.wait_connected(seconds):
            raise StreamUnavailable(_NOT_CONNECTED)
        await stream.ensure([], timeout=seconds)
        if not self._lost.is_set():
            self._ready = True
            self.silent_because = None
            if self._unready_because is not None:
                self._unready_because = None
                self._events.emit("worker.restored", what="publishing")

    def _on_lost(self) -> None:
        self._ready = False
        self._lost.set()

    def _degrade(self, reason: str) -> None:
        if reason != self._unready_because:
            self._unready_because = reason
            self._events.emit("worker.degraded", what="publishing", reason=reason)

    def _reachable_stream(self) -> Stream | None:
        """Return the stream if it can be reached; else note why nothing is published."""
        if self.stream is None or (self._ready and self.stream.connected):
            return self.stream
        self.unpublished_because = self._unready_because or _NOT_CONNECTED
        return None

    def _answering_stream(self) -> Stream | None:
        """Return the stream if it is worth waiting for: it can be reached and stored the last message."""
        if self.silent_because is None:
            return self._reachable_stream()
        self.unpublished_because = self.silent_because
        return None

    async def _publish_in_turn(self) -> None:
        collecting = asyncio.create_task(collect_every_second(), name="jsworker garbage")
        try:
            with fewer_collections():
                await self._publish_queued()
        finally:
            collecting.cancel()  # not awaited: a request made meanwhile would find this task not done

    async def _publish_queued(self) -> None:
        """Publish until no call has asked for more, or the stream acknowledges nothing."""
        while self._is_wanted and (stream := self._reachable_stream()) is not None:
            if self._kept:
                await self._publish_kept(stream, Tally(), _AT_ONCE_BESIDE_ENQUEUES)
                if self._answering_stream() is None:  # the next stored job tries it out
                    self._wanted_since = None
            if self._kept or self._wanted_since is None:
                continue
            since, self._wanted_since = self._wanted_since, None
            take = partial(self._take_since, since)
            if self._answering_stream() is None and not await self._stores_again(stream, take):
                return
            if not self._may_mark:
                return
            own = self._outbox(stream, take=partial(take, _BATCH), at_once=_AT_ONCE_BESIDE_ENQUEUES)
            await self._publish_all(own, Tally())

    async def _publish_kept(self, stream: Stream, tally: Tally, at_once: int = AT_ONCE) -> None:
        """Publish what is kept; if the stream takes nothing, leave the rest to relays."""
        if self._kept and self._answering_stream() is not None:
            kept = self._outbox(stream, take=self._take_kept, limit=1, at_once=at_once)
            await self._publish_all(kept, tally)
        if self._answering_stream() is None or tally.refused is not None:
            self._kept.clear()
            self._jobs_kept = 0

    async def _take_kept(self) -> list[Outgoing]:
        """Take what is kept, of several calls together, and drop what relays are about to take."""
        now = asyncio.get_running_loop().time()
        outgoing: list[Outgoing] = []
        while self._kept and len(outgoing) + len(self._kept[0].ids) <= _BATCH:
            kept = self._kept.popleft()
            self._jobs_kept -= len(kept.ids)
            if now < kept.reserved_until - _LEAST_SECONDS:
                facts = (kept.kind, 1, False, None, *kept.context, kept.priority)
                outgoing += [Outgoing(job_id, *facts) for job_id in kept.ids]
            else:
                self.unpublished_because = _LATE
        return outgoing

    async def _take_since(self, began: float, limit: int) -> list[Outgoing]:
        """Take what became due since ``began``, by the event loop's clock, or up to five seconds before."""
        elapsed = asyncio.get_running_loop().time() - began
        within = elapsed + _RESERVED_SECONDS if math.isfinite(elapsed) else None
        return await publish.take_outgoing(self._database, limit=limit, within=within)

    def _outbox(
        self, stream: Stream, *, take: Take | None = None, limit: int = _BATCH, at_once: int = AT_ONCE
    ) -> OutboxPublisher:
        later = self._marks.post
        return OutboxPublisher(
            self._database, stream, limit=limit, take=take, at_once=at_once, mark_later=later
        )

    async def _publish_all(self, outbox_publisher: OutboxPublisher, tally: Tally) -> None:
        """Publish, and note why messages were not published; workers publish those."""
        try:
            await outbox_publisher.publish(tally)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self.unpublished_because = str(error)
        self._note(tally)

    def _note(self, tally: Tally) -> None:
        self.unpublished_because = tally.failed or self.unpublished_because
        if tally.published or tally.failed:
            self.silent_because = None if tally.published else tally.failed

    async def _stores_again(self, stream: Stream, take: Callable[[int], Awaitable[list[Outgoing]]]) -> bool:
        """Return whether the stream stores messages again; withhold at most one from workers to try."""
        if self._may_mark:
            tally = Tally()
            one = OutboxPublisher(self._database, stream, limit=2, take=partial(take, 1))
            await self._publish_all(one, tally)
            if tally.published or tally.failed:
                return tally.published > 0
        answers = await stream.flush(_PUBLISH_SECONDS)
        if answers:
            self.silent_because = None
        return answers

    async def _mark(self, sent: Sequence[Sent]) -> None:
        try:
            await publish.mark(self._database, sent)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            # Unmarked jobs are published once more by a relay; the stream knows their messages already.
            self.unpublished_because = str(error)
