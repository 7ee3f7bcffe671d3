"""The relay: promotes due jobs to the queue and publishes queued jobs. Every worker has one."""

from collections.abc import Awaitable, Callable, Sequence, Sized
from functools import partial
from typing import Final, TypeVar

from jsworker.client.publishing import MARK_SECONDS, OutboxPublisher, Tally
from jsworker.core.batching import Batcher
from jsworker.core.errors import DatabaseTimeout, StreamRefused, StreamUnavailable
from jsworker.ownership.transitions import publish
from jsworker.ownership.transitions.publish import Sent
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import RECENT_SECONDS, ScanPace

TakenT = TypeVar("TakenT", bound=Sized)

_BATCH: Final = 1000
_MARKED_TOGETHER: Final = 500
_LAST_SECONDS: Final = 5.0
_TRIAL: Final = 10
"""The number of messages published as a trial, to learn whether the stream stores any again."""
_TRIAL_SECONDS: Final = 1.0


class Relay:
    """Promotes and publishes until a batch is not full; while the stream refuses, it makes rare trials."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._health = context.health
        self._publishing_health = context.publishing
        self._stream = context.stream
        self._refused_rows = context.refused_rows
        self._promoting = ScanPace()
        self._publishing = ScanPace()
        self._most_promoted = _BATCH
        self._last_seq: int | None = None
        self._was_silent = False
        self._has_reconnected = False
        self._late_before = 0
        self._stream.connection.restored_callbacks.append(self._note_connection)
        self._ending = False
        self._take = partial(publish.take_outgoing, context.database, refused_rows=context.refused_rows)
        self._marks: Batcher[Sent, None] = Batcher(
            "marks", self._mark, limit=_MARKED_TOGETHER, died=context.died, linger=MARK_SECONDS
        )
        self._publisher = OutboxPublisher(
            context.database,
            context.stream,
            limit=_BATCH,
            take=lambda: self._at_pace(self._publishing, self._take, _BATCH),
            refused_rows=context.refused_rows,
            mark_later=self._marks.post,
        )

    @property
    def _is_connected(self) -> bool:
        return self._health.up and self._stream.is_own

    async def step(self) -> None:
        """Promote due jobs and publish the outbox, in turn: very many due jobs keep no message waiting."""
        if not self._health.up:
            return
        more = True
        with self._health.noting():
            while more and not self._ending:
                more = await self._promote()
                if self._is_connected and not self._publishing_health.refused and not self._ending:
                    self._judge(await self._publisher.publish())

    def end(self) -> None:
        """Begin no further batch; batches under way are still published."""
        self._ending = True
        self._publisher.end()

    async def publish_latest(self) -> None:
        """Publish one batch of jobs that became due lately, such as those just handed back; mark all."""
        # Not ``is_own``: after a reconnect the pullers find it out, which have ended. Publishing asks itself.
        if self._health.up and self._stream.connected and not self._publishing_health.refused:
            with self._health.noting():
                latest = await self._take(within=RECENT_SECONDS, limit=_BATCH)
                await self._publisher.try_out(latest, seconds=_LAST_SECONDS)
        await self._marks.flush()

    async def close(self) -> None:
        """Give up marks that were not written in time; their messages will be published once more."""
        await self._marks.close()

    async def try_again(self) -> None:
        """While the stream refuses messages, find out now and then whether it stores them again.

        Call it before jobs are claimed from the table, because that leaves nothing to publish.
        """
        publishing = self._publishing_health
        if not (publishing.refused and publishing.is_trial_due and self._is_connected):
            return
        within = None if self._publishing.is_due else RECENT_SECONDS
        with self._health.noting():
            outgoing = await self._take(within=within, limit=_TRIAL)
            if outgoing:
                self._judge(await self._publisher.try_out(outgoing, seconds=_TRIAL_SECONDS))
            elif await self._stores_again():
                publishing.stored()
            else:
                publishing.put_off()

    async def _mark(self, sent: Sequence[Sent]) -> None:
        with self._health.noting():  # without a mark it is published again; the stream drops duplicates
            await publish.mark(self._context.database, sent, self._refused_rows)

    def _judge(self, tally: Tally) -> None:
        if tally.refused is None and tally.stored:
            self._publishing_health.stored()
        elif tally.refused is not None and self._stream.connected:  # a lost connection is no refusal
            self._last_seq = None
            self._was_silent = tally.silent
            self._has_reconnected = False
            self._late_before = self._stream.publisher.late
            self._publishing_health.failed(tally.refused)

    def _note_connection(self) -> None:
        self._has_reconnected = True

    async def _stores_again(self) -> bool:
        """Return whether messages can be stored, as far as can be known without one to publish.

        They can if any, for example of producers, were stored since the last call. If a server was silent, a
        late acknowledgement tells it, too; and if the stream answers on a later connection, nothing speaks
        against it.
        """
        before = self._last_seq
        try:
            self._last_seq = (await self._stream.state()).last_seq
        except (StreamUnavailable, StreamRefused):
            return False
        has_grown = before is not None and self._last_seq > before
        is_late = self._stream.publisher.late > self._late_before
        return has_grown or (self._was_silent and (self._has_reconnected or is_late))

    async def _promote(self) -> bool:
        """Promote a batch and return whether there may be more; half as many after one that took too long."""
        most = self._most_promoted
        try:
            promoted = await self._at_pace(self._promoting, self._promote_some, most)
        except DatabaseTimeout:  # a trigger, or a slow disk: the oldest due jobs would never be promoted
            self._most_promoted = max(1, most // 2)
            raise
        self._most_promoted = min(_BATCH, most + 1 + most // 8)
        return len(promoted) == most

    async def _promote_some(self, *, within: float | None, limit: int) -> range:
        database = self._context.database
        return range(
            await publish.promote(database, limit=limit, within=within, refused_rows=self._refused_rows)
        )

    async def _at_pace(self, pace: ScanPace, take: Callable[..., Awaitable[TakenT]], most: int) -> TakenT:
        """Take a batch of all due jobs or, during the rest after a slow scan, of recently due ones."""
        if not pace.is_due:
            return await take(within=RECENT_SECONDS, limit=most)
        refused = self._refused_rows.noted
        with pace.timed():
            taken = await take(within=None, limit=most)
        # There may be others behind the refused ones.
        if len(taken) == most or self._refused_rows.noted > refused:
            pace.hurry()
        return taken
