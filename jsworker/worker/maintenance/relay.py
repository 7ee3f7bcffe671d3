"""The relay tick: what is due enters the queue, what is queued is published. Every worker has one."""

from collections.abc import Awaitable, Callable, Sized
from functools import partial
from typing import TypeVar

from jsworker.client.publishing import OutboxPublisher, Tally
from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.ownership.transitions import publish
from jsworker.ownership.transitions.publish import Outgoing
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import RECENT_SECONDS, ScanPace

TakenT = TypeVar("TakenT", bound=Sized)

_BATCH = 1000
_TRIAL = 10
"""Messages that are published to learn whether the stream stores any again."""
_TRIAL_SECONDS = 1.0


class Relay:
    """Promotes and publishes until a batch is short; while the stream refuses, it only tries now and then."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._promoting = ScanPace()
        self._publishing = ScanPace()
        self._last_seq: int | None = None
        self._publisher = OutboxPublisher(
            context.database,
            context.stream,
            limit=_BATCH,
            take=partial(self._at_pace, self._publishing, self._take_within),
            refused_rows=context.refused_rows,
        )
        self._ending = False

    async def step(self) -> None:
        """Promote what is due, then publish what the outbox holds."""
        if not self._context.health.up:
            return
        with self._context.health.noting():
            while len(await self._at_pace(self._promoting, self._promote)) == _BATCH and not self._ending:
                continue
            if self._context.stream.connected and not self._context.publishing.refused and not self._ending:
                self._judge(await self._publisher.publish())

    def end(self) -> None:
        """Begin no other batch; those under way are still published and marked."""
        self._ending = True
        self._publisher.end()

    async def publish_latest(self) -> None:
        """Publish one batch of what has become due lately: jobs that were just handed back."""
        if not self._context.health.up or self._context.publishing.refused:
            return
        latest = OutboxPublisher(
            self._context.database,
            self._context.stream,
            limit=_BATCH,
            take=partial(self._take_within, RECENT_SECONDS),
            refused_rows=self._context.refused_rows,
        )
        with self._context.health.noting():
            await latest.publish_once()

    async def try_again(self) -> None:
        """While the stream refuses: learn now and then whether it stores messages again.

        To be called before jobs are claimed from the table, which leaves nothing to publish.
        """
        due = self._context.publishing.refused and self._context.publishing.is_trial_due
        if not due or not self._context.health.up or not self._context.stream.connected:
            return
        within = None if self._publishing.is_due else RECENT_SECONDS
        with self._context.health.noting():
            outgoing = await self._take_within(within, limit=_TRIAL)
            if outgoing:
                self._judge(await self._publisher.try_out(outgoing, seconds=_TRIAL_SECONDS))
            elif await self._has_grown():
                self._context.publishing.stored()
            else:
                self._context.publishing.put_off()

    def _judge(self, tally: Tally) -> None:
        if tally.refused is not None:
            if self._context.stream.connected:  # else that is why
                self._last_seq = None
                self._context.publishing.failed(tally.refused)
        elif tally.stored:
            self._context.publishing.stored()

    async def _has_grown(self) -> bool:
        """Return whether any messages, those of producers for example, were stored since the last look."""
        before = self._last_seq
        try:
            self._last_seq = (await self._context.stream.state()).last_seq
        except (StreamUnavailable, StreamRefused):
            return False
        return before is not None and self._last_seq > before

    async def _take_within(self, within: float | None, *, limit: int | None = None) -> list[Outgoing]:
        return await publish.take_outgoing(
            self._context.database,
            limit=limit or _BATCH,
            within=within,
            refused_rows=self._context.refused_rows,
        )

    async def _promote(self, within: float | None) -> range:
        return range(
            await publish.promote(
                self._context.database, limit=_BATCH, within=within, refused_rows=self._context.refused_rows
            )
        )

    async def _at_pace(self, pace: ScanPace, take: Callable[[float | None], Awaitable[TakenT]]) -> TakenT:
        """Take a batch of everything that is due or, while such a scan rests, of what became due lately."""
        if not pace.is_due:
            return await take(RECENT_SECONDS)
        refused = self._context.refused_rows.noted
        with pace.timed():
            taken = await take(None)
        # Others may stand behind those that were refused.
        if len(taken) == _BATCH or self._context.refused_rows.noted > refused:
            pace.hurry()
        return taken
