"""The relay tick: what is due enters the queue, what is queued is published. Every worker has one."""

from collections.abc import Awaitable, Callable, Sized
from typing import TypeVar

from jsworker.client.publishing import OutboxPublisher
from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership import outbox
from jsworker.ownership.database import Database
from jsworker.ownership.outbox import Outgoing
from jsworker.ownership.refused_rows import RefusedRows
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.pace import RECENT_SECONDS, Pace
from jsworker.stream.jetstream import Stream

TakenT = TypeVar("TakenT", bound=Sized)

_BATCH = 1000


class Relay:
    """Promotes and publishes until a batch is short."""

    def __init__(
        self, *, database: Database, health: DatabaseHealth, stream: Stream, refused_rows: RefusedRows
    ) -> None:
        self._database = database
        self._health = health
        self._stream = stream
        self._refused_rows = refused_rows
        self._promoting = Pace()
        self._publishing = Pace()
        self._publisher = OutboxPublisher(
            database, stream, limit=_BATCH, take=self._take, refused_rows=refused_rows
        )
        self._ending = False

    async def step(self) -> None:
        """Promote what is due, then publish what the outbox holds."""
        if not self._health.up:
            return
        try:
            while len(await self._at_pace(self._promoting, self._promote)) == _BATCH and not self._ending:
                continue
            if self._stream.connected and not self._ending:
                await self._publisher.publish()
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)

    def end(self) -> None:
        """Begin no other batch; those under way are still published and marked."""
        self._ending = True
        self._publisher.end()

    async def publish_latest(self) -> None:
        """Publish one batch of what has become due lately: jobs that were just handed back."""
        if not self._health.up:
            return
        latest = OutboxPublisher(
            self._database,
            self._stream,
            limit=_BATCH,
            take=self._take_latest,
            refused_rows=self._refused_rows,
        )
        try:
            await latest.publish_once()
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)

    async def _take_latest(self) -> list[Outgoing]:
        return await self._take_within(RECENT_SECONDS)

    async def _take(self) -> list[Outgoing]:
        return await self._at_pace(self._publishing, self._take_within)

    async def _take_within(self, within: float | None) -> list[Outgoing]:
        return await outbox.take_outgoing(
            self._database, limit=_BATCH, within=within, refused_rows=self._refused_rows
        )

    async def _promote(self, within: float | None) -> range:
        return range(
            await outbox.promote(self._database, limit=_BATCH, within=within, refused_rows=self._refused_rows)
        )

    async def _at_pace(self, pace: Pace, take: Callable[[float | None], Awaitable[TakenT]]) -> TakenT:
        """Take a batch of everything that is due or, while such a search rests, of what became due lately."""
        if not pace.is_due:
            return await take(RECENT_SECONDS)
        refused = self._refused_rows.noted
        with pace.timed():
            taken = await take(None)
        if len(taken) == _BATCH or self._refused_rows.noted > refused:  # others may stand behind the refused
            pace.hurry()
        return taken
