"""Lost messages: a queued job whose message is proven to be gone is published again, and no other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import republish
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.republish import Posted
from jsworker.stream.api import StreamState
from jsworker.stream.jetstream import Stream
from jsworker.worker.health import DatabaseHealth
from jsworker.worker.maintenance.throttled_scan import Search

_PAGE = 300
_PAGES = 20
"""In one scan at most: silent owners are looked for by the same scan."""
_LOOKED_UP = 100
"""Messages that are looked up one by one in a scan: enough to find every loss in time, few enough to cost
the server nothing beside a deep backlog."""
_AT_ONCE = 20


class Repair:
    """Compares the queue in the table with the stream, a page a scan."""

    def __init__(
        self,
        *,
        worker_id: str,
        scan_interval: float,
        database: Database,
        health: DatabaseHealth,
        refused_rows: RefusedRows,
        stream: Stream,
        events: Events,
        on_requeued: Callable[[], None],
        search: Search,
    ) -> None:
        """Wire the repair.

        Args:
            worker_id: who repairs, for the timeline.
            scan_interval: seconds; jobs that were queued within the last two are left alone.
            database, health, refused_rows, stream, events: the worker's own.
            on_requeued: called when jobs wait to be published again.
            search: for pages of the queue.
        """
        self._worker_id = worker_id
        self._scan_interval = scan_interval
        self._database = database
        self._health = health
        self._refused_rows = refused_rows
        self._stream = stream
        self._events = events
        self._on_requeued = on_requeued
        self._after: tuple[datetime, UUID] | None = None
        self._refusal: str | None = None
        self._search = search

    async def step(self) -> None:
        """Look at the next page of published jobs; go on at once while pages hold losses."""
        if not self._search.is_due:
            return
        try:
            for _ in range(_PAGES):
                if not (self._stream.connected and await self._repair_page()) or self._search.is_slow:
                    return
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)
        except StreamUnavailable:
            return  # nothing is proven; the next scan asks again
        except StreamRefused as error:
            self._tell(str(error))

    async def _repair_page(self) -> bool:
        rows = await self._search.make(self._next_page)
        if rows is None:
            return False
        if not rows:
            self._after = None
            return False
        # The stream is asked after the rows were read: what is marked in them is in it, or was.
        state = await self._stream.state()
        gone = _gone(rows, state, await self._ack_floors(rows))
        lost = {row.id for row in gone}
        there = [row for row in rows if row.id not in lost]
        missing = await self._look_up(there[:_LOOKED_UP])
        last = rows[-1] if gone or len(there) <= _LOOKED_UP else there[_LOOKED_UP - 1]
        self._after = (last.queued_at, last.id)
        await self._republish([*gone, *missing])
        return bool(gone)

    async def _next_page(self, seconds: float) -> list[Posted]:
        return await republish.posted(
            self._database,
            kinds=None,
            after=self._after,
            older_than=2 * self._scan_interval,
            limit=_PAGE,
            seconds=seconds,
        )

    async def _ack_floors(self, rows: Sequence[Posted]) -> Mapping[str, int]:
        """Return up to which number every message of a kind was answered; 0 where nobody can tell."""
        return {kind: await self._ack_floor(kind) for kind in {row.kind for row in rows}}

    async def _ack_floor(self, kind: str) -> int:
        try:
            return (await self._stream.consumer_state(kind)).ack_floor_stream_seq
        except (StreamUnavailable, StreamRefused):
            return 0  # no consumer yet, or somebody else's: the messages themselves are looked up

    async def _look_up(self, rows: Sequence[Posted]) -> list[Posted]:
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def missing(row: Posted) -> bool:
            async with at_once:
                message = await self._stream.get(row.stream_seq or 0)
            return message is None or message.message_id != f"{row.id}:{row.dispatch}"

        found = await asyncio.gather(*(missing(row) for row in rows))
        return [row for row, is_missing in zip(rows, found, strict=True) if is_missing]

    async def _republish(self, gone: Sequence[Posted]) -> None:
        if not gone:
            return
        seen = [(row.id, row.dispatch) for row in gone]
        again = await republish.republish(
            self._database, worker_id=self._worker_id, gone=seen, refused_rows=self._refused_rows
        )
        if again:
            self._events.emit("message.republished", jobs=len(again), reason="their messages are gone")
            self._on_requeued()

    def _tell(self, refusal: str) -> None:
        if refusal != self._refusal:
            self._refusal = refusal
            self._events.emit("worker.degraded", what="repair of lost messages", reason=refusal)


def _gone(rows: Sequence[Posted], state: StreamState, ack_floors: Mapping[str, int]) -> list[Posted]:
    """Return rows whose message cannot be in the stream, by its numbers alone."""

    def is_gone(row: Posted) -> bool:
        return (
            row.stream_seq is None
            or row.stream_created != state.created
            or not state.first_seq <= row.stream_seq <= state.last_seq
            or row.stream_seq <= ack_floors[row.kind]
        )

    return [row for row in rows if is_gone(row)]
