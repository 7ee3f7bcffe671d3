"""The idle poll: claims queued jobs directly from the table when their messages do not come.

A message that was delivered to a process that died before its claim, or that does not acknowledge it, comes
again only after ``ack_wait``. Without NATS no message comes, and while JetStream stores nothing no new one
does. The row alone decides that a job is to be done.

Rows that are found take free job slots before messages do. While messages of their kind keep coming, the rows
get half of the slots, and only rows that no message will bring are searched: if a row is claimed early, its
message later costs a claim that is refused. A consumer delivers messages in the order of their numbers, so a
row was passed over if it is still queued although a later message was delivered a scan ago.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.ownership.transitions import republish
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ScanPace, ThrottledScan, longest_rest
from jsworker.worker.pipeline.in_flight import InFlight
from jsworker.worker.pipeline.intake import Consumer

_CHOICE: Final = 4  # candidates for each chosen row, so that workers try different rows
_MOST: Final = 200
_NEARLY: Final = 0.9  # this share of a time is enough, because two clocks measure it


class _Line:
    """Rows of one kind and priority that were found and wait for a slot, the oldest first."""

    def __init__(self, consumer: Consumer, search: ThrottledScan) -> None:
        self.consumer = consumer
        self.search = search
        self.rows: deque[UUID] = deque()
        self.in_flight: set[UUID] = set()  # rows of this line that were in flight at the last check
        self.most = math.inf  # the most rows of this line in flight at once
        self.is_longer = False  # whether the last search may have left rows
        self.passed = 0  # messages up to this number were delivered at least a scan ago
        self._delivered = 0
        self._room_since: float | None = None

    def note_deliveries(self) -> None:
        """Note, once a scan, up to which number messages have been delivered."""
        delivered = self.consumer.delivered_seq
        self.passed = min(self._delivered, delivered)  # a new stream begins with lower numbers
        self._delivered = delivered
        self.consumer.put_off.clear()

    def forget_ended(self, in_flight: InFlight) -> None:
        """Forget rows that are no longer in flight."""
        self.in_flight = {job_id for job_id in self.in_flight if job_id in in_flight}

    def is_first(self, look_again: Callable[[], None]) -> bool:
        """Return whether messages of higher priority have had time to take the free slots."""
        if not (seconds := self.consumer.gives_way()):
            return True
        if self.consumer.room() <= 0:
            self._room_since = None
            return False
        now = boottime()
        if self._room_since is None:
            self._room_since = now
            asyncio.get_running_loop().call_later(seconds, look_again)
        return now - self._room_since >= _NEARLY * seconds

    def take(self, in_flight: InFlight) -> None:
        """Claim rows while there is room for more."""
        self._room_since = None
        while self.rows and self.consumer.room() > 0:
            if len(self.in_flight) >= self.most:
                self.forget_ended(in_flight)
                if len(self.in_flight) >= self.most:
                    return
            job_id = self.rows.popleft()
            self.consumer.take(job_id)
            if job_id in in_flight.claiming:
                self.in_flight.add(job_id)


class IdlePoll:
    """Claims queued rows that no message brings; ``on_more`` is called when ``go_on`` should be called."""

    def __init__(
        self, context: WorkerContext, consumers: Sequence[Consumer], *, on_more: Callable[[], None]
    ) -> None:
        self._context = context
        self._lines: list[_Line] = []
        self._active: dict[str, _Line] = {}  # lines that have rows, or may find more at once
        self._scan_interval = context.settings.scan_interval
        self._on_more = on_more
        self._pace = ScanPace(longest_rest=longest_rest(context))
        self._kinds = ThrottledScan(context, "kinds with waiting jobs", most_timeouts=1)
        self._searching = asyncio.Lock()
        for consumer in consumers:
            self.add(consumer)

    def add(self, consumer: Consumer) -> None:
        """Search for rows of this consumer, too."""
        search = ThrottledScan(self._context, f"waiting jobs of {consumer.name}")
        self._lines.append(_Line(consumer, search))
        self._lines.sort(key=lambda line: line.consumer.priority)  # the first line claims first

    async def step(self) -> None:
        """Search for old rows; called once a scan."""
        async with self._searching:
            for line in list(self._lines):
                line.note_deliveries()
                line.forget_ended(self._context.in_flight)
                line.rows.clear()  # others may have claimed them, and there may be older ones
                line.consumer.has_rows = False
            lines = [line for line in self._lines if not self._is_without_messages(line)]
            if not lines or not self._pace.is_due:
                return
            with self._pace.timed():  # measures the searches of all kinds together
                for line in await self._with_rows(lines):
                    await self._look(line)

    async def go_on(self) -> None:
        """Search again for lines without rows: if there may be more, or, without messages, in any case."""
        if not self._context.health.up:
            return
        async with self._searching:
            empty = [line for line in self._lines if not line.rows]
            due = [line for line in empty if line.is_longer or self._is_without_messages(line)]
            for line in await self._with_rows(due):
                await self._look(line)

    def on_room(self) -> None:
        """Claim rows that were found; called whenever there may be more free slots."""
        if not self._active:  # the usual case
            return
        for name, line in list(self._active.items()):
            if line.is_first(self.on_room):
                line.take(self._context.in_flight)
            line.consumer.has_rows = bool(line.rows)
            if not line.rows and not line.is_longer:
                del self._active[name]
            else:  # another kind comes first at the next call
                self._active[name] = self._active.pop(name)
        if any(not line.rows for line in self._active.values()):
            self._on_more()

    def _is_without_messages(self, line: _Line) -> bool:
        return self._context.publishing.refused or not line.consumer.puller.is_pulling

    async def _with_rows(self, lines: list[_Line]) -> list[_Line]:
        """Return the lines of kinds that have queued jobs, which most have not; all, if that is not known."""
        if (len(lines) < 2 and not self._kinds.is_reported) or self._kinds.must_rest:
            return lines
        kinds = sorted({line.consumer.kind.name for line in lines})
        search = partial(republish.queued_kinds, self._context.database, kinds=kinds)
        queued: set[str] | None = None
        with self._context.health.noting():
            queued = await self._kinds.make(lambda seconds: search(seconds=seconds))
        if queued is None:
            return lines
        for line in lines:
            line.is_longer = False
        # A search that is reported, too: it would stay so.
        return [line for line in lines if line.consumer.kind.name in queued or line.search.is_reported]

    async def _look(self, line: _Line) -> None:
        line.is_longer = False
        without_messages = self._is_without_messages(line)
        idle_after = self._context.settings.relay_interval if without_messages else self._scan_interval
        idle = not self._context.stream.connected or boottime() - line.consumer.delivered_at >= idle_after
        most = line.consumer.most()
        line.most = math.inf if idle else max(1, most // 2)
        wanted = min(_MOST, 2 * most)
        found: list[UUID] = []
        if not line.search.must_rest:
            in_flight = self._context.in_flight
            search = partial(
                republish.waiting,
                self._context.database,
                kind=line.consumer.kind.name,
                older_than=0.0 if without_messages else 2 * self._scan_interval,
                limit=_CHOICE * wanted,
                besides=[*in_flight.claiming, *in_flight.runs, *line.consumer.put_off],
                delivered=None if idle else line.passed,
                past_refused=self._context.refused_rows.any_of("claim"),
                priority=line.consumer.priority,
            )
            with self._context.health.noting():
                found = await line.search.make(lambda seconds: search(seconds=seconds)) or []
        chosen = sorted(random.sample(range(len(found)), min(wanted, len(found))))
        line.rows = deque(found[place] for place in chosen)
        # While no message can come, a search that finds few rows has found all, until the next tick.
        enough = len(found) > wanted if without_messages else bool(found)
        line.is_longer = enough and len(line.consumer.put_off) < _MOST
        if line.rows:
            line.consumer.has_rows = True
            self._active[line.consumer.name] = line
            self.on_room()
