"""Lost messages: publishes queued jobs again whose messages are proven to be gone, and only those."""

import math
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.priorities import NORMAL
from jsworker.ownership.transitions import republish
from jsworker.ownership.transitions.republish import Posted
from jsworker.stream.api import ConsumerInfo, StreamState, ask_each, filters_of
from jsworker.stream.message import consumer_of, message_id
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ThrottledScan

_PAGE = 300
_PAGES = 20  # in one scan at most
_LOOKED_UP = 100
"""The most messages that a scan looks up one by one: enough to find every loss in time, few enough not to
load the server when the backlog is deep."""
_SAME = "all processes that use this database need the same JSWORKER_NATS_URL and JSWORKER_STREAM"


class LostMessages:
    """Compares the queued rows with the stream, one page at each scan."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._search = ThrottledScan(context, "lost messages")
        self._after: tuple[datetime, UUID] | None = None

    async def step(self) -> None:
        """Check the next page of published jobs; continue at once while pages contain losses."""
        if not self._search.is_due:
            return
        try:
            with self._context.health.noting():
                for _ in range(_PAGES):
                    if not self._context.stream.is_own or not await self._repair_page():
                        return
        except StreamUnavailable:
            return  # nothing is proven; the next scan asks again
        except StreamRefused as error:
            self._context.complaints.report("repair of lost messages", str(error))

    async def _repair_page(self) -> bool:
        """Repair the next page, and return whether the page after it should be checked at once."""
        page = partial(
            republish.posted,
            self._context.database,
            after=self._after,
            older_than=2 * self._context.settings.scan_interval,
            limit=_PAGE,
        )
        rows = await self._search.make(lambda seconds: page(seconds=seconds))
        if rows is None:
            return False
        if not rows:
            self._after = None
            return False
        # Ask the stream after the rows were read: each message that they name is in the stream, or was.
        state = await self._context.stream.state()
        lanes = {(row.kind, row.priority) for row in rows}
        ack_floors = {lane: await self._ack_floor(*lane) for lane in lanes}
        gone = [row for row in rows if _is_gone(row, state, ack_floors[row.kind, row.priority])]
        lost = {row.id for row in gone}
        there = [row for row in rows if row.id not in lost]
        missing = await self._look_up(there[:_LOOKED_UP])
        last = rows[-1] if gone or len(there) <= _LOOKED_UP else there[_LOOKED_UP - 1]
        self._after = (last.queued_at, last.id)
        if due := [row for row in (*gone, *missing) if row.is_due or _was_in_earlier_stream(row, state)]:
            await self._republish(due, state)
        return bool(gone) and not self._search.is_slow

    async def _ack_floor(self, kind: str, priority: int) -> float:
        """Return the number up to which each message of a kind and priority was acknowledged or terminated.

        Messages of other priorities may be among the normal ones, for example from an older version.
        """
        own = await self._answered(kind, priority)
        if own is None:
            return 0  # no usable consumer: the messages themselves are looked up
        if priority == NORMAL:
            return own.ack_floor.stream_seq if own.ack_floor else 0
        return min(_answered_to(own), _answered_to(await self._answered(kind, NORMAL)))

    async def _answered(self, kind: str, priority: int) -> ConsumerInfo | None:
        """Return the consumer of a kind and priority; None if there is none, or it takes other messages."""
        stream = self._context.stream
        try:
            consumer = await stream.consumer_state(consumer_of(kind, priority))
        except (StreamUnavailable, StreamRefused):
            return None
        return consumer if stream.subject_of(kind, priority) in filters_of(consumer) else None

    async def _look_up(self, rows: Sequence[Posted]) -> list[Posted]:
        async def missing(row: Posted) -> bool:
            message = await self._context.stream.get(row.stream_seq or 0)
            headers = message.headers if message is not None else None
            return (headers or {}).get("Nats-Msg-Id") != message_id(row.id, row.dispatch)

        found = await ask_each(missing, rows)
        return [row for row, is_missing in found.items() if is_missing]

    async def _republish(self, gone: Sequence[Posted], state: StreamState) -> None:
        again = await republish.republish(
            self._context.database,
            worker_id=self._context.worker_id,
            gone=[(row.id, row.dispatch) for row in gone],
            refused_rows=self._context.refused_rows,
        )
        if again:
            other = next((row.stream_created for row in gone if row.is_beside(state.created)), None)
            reason = "their messages are gone"
            if other is not None:
                reason = f"they went to another stream, made at {other:%Y-%m-%d %H:%M:%S} UTC: {_SAME}"
            self._context.events.emit("message.republished", jobs=len(again), reason=reason)
            self._context.requeued.notify()


def _answered_to(consumer: ConsumerInfo | None) -> float:
    """Return up to which number a consumer's messages were all answered; infinity if none is left."""
    if consumer is None:
        return 0
    if not consumer.num_pending and not consumer.num_ack_pending:
        return math.inf
    return consumer.ack_floor.stream_seq if consumer.ack_floor else 0


def _was_in_earlier_stream(row: Posted, state: StreamState) -> bool:
    """Return whether the stream was made after the job was queued, which explains the loss once."""
    return row.stream_created is not None and max(row.stream_created, row.queued_at) < state.created


def _is_gone(row: Posted, state: StreamState, ack_floor: float) -> bool:
    """Return whether the numbers alone prove that a row's message is not in the stream."""
    return (
        row.stream_seq is None
        or row.stream_created != state.created
        or not state.first_seq <= row.stream_seq <= state.last_seq
        or row.stream_seq <= ack_floor
    )
