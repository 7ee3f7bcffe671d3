"""The idle poll: queued jobs whose message does not come are claimed straight from the table.

Messages that were delivered to a process which died before its claim, or to one that does not answer them,
wait out ``ack_wait``. Without NATS no message comes at all, and while JetStream stores nothing no new one.
The row alone says that a job is to be done.

Rows that are found go before messages: as job slots fall free they take them first. Where messages of their
kind keep coming they get half of the slots, and only rows that no message will bring are looked for: one that
is claimed out of its turn makes its message a copy, which costs a claim that is refused. A consumer delivers
in the order of numbers, so a row that is still queued though a later message was delivered a scan ago was
passed over.
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

_CHOICE: Final = 4  # candidates for each chosen row: workers should not all try the same
_MOST: Final = 200
_NEARLY: Final = 0.9  # of a time that two clocks measure


class _Line:
    """Rows of one kind and priority that were found and wait for room, the oldest first."""

    def __init__(self, consumer: Consumer, search: ThrottledScan) -> None:
        self.consumer = consumer
        self.search = search
        self.rows: deque[UUID] = deque()
        self.in_flight: set[UUID] = set()  # rows of this line, at the last look
        self.most = math.inf  # of them at once
        self.is_longer = False  # the last search says that there may be more
        self.passed = 0  # up to this number messages have been delivered, at least a scan ago
        self._delivered = 0
        self._room_since: float | None = None

    def note_deliveries(self) -> None:
        """Note, once a scan, how far messages have been delivered."""
        delivered = self.consumer.delivered_seq
        self.passed = min(self._delivered, delivered)  # another stream begins with lower numbers
        self._delivered = delivered
        self.consumer.put_off.clear()

    def is_first(self, look_again: Callable[[], None]) -> bool:
        """Return whether messages of higher priority have had time to take the room that there is."""
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
        """Claim rows while there is room for them."""
        self._room_since = None
        while self.rows and self.consumer.room() > 0:
            if len(self.in_flight) >= self.most:
                self.in_flight = {job_id for job_id in self.in_flight if job_id in in_flight}
                if len(self.in_flight) >= self.most:
                    return
            job_id = self.rows.popleft()
            self.consumer.take(job_id)
            if job_id in in_flight.claiming:
                self.in_flight.add(job_id)


class IdlePoll:
    """Claims queued rows that no message brings; ``on_more`` is called for ``go_on`` to be called at once."""

    def __init__(
        self, context: WorkerContext, consumers: Sequence[Consumer], *, on_more: Callable[[], None]
    ) -> None:
        self._context = context
        self._lines: list[_Line] = []
        self._active: dict[str, _Line] = {}  # those that have rows, or may find more at once
        self._scan_interval = context.settings.scan_interval
        self._on_more = on_more
        self._pace = ScanPace(longest_rest=longest_rest(context))
        self._searching = asyncio.Lock()
        for consumer in consumers:
            self.add(consumer)

    def add(self, consumer: Consumer) -> None:
        """Look for rows of this consumer, too."""
        search = ThrottledScan(self._context, f"waiting jobs of {consumer.name}")
        self._lines.append(_Line(consumer, search))
        self._lines.sort(key=lambda line: line.consumer.priority)  # what is found first is claimed first

    async def step(self) -> None:
        """Once a scan: look for old rows."""
        async with self._searching:
            for line in list(self._lines):
                line.note_deliveries()
                line.rows.clear()  # others may have taken them, and older ones may be there
                line.consumer.has_rows = False
            if self._is_without_messages or not self._pace.is_due:
                return
            with self._pace.timed():  # the searches of all kinds together
                for line in list(self._lines):
                    await self._look(line)

    async def go_on(self) -> None:
        """Look for more where all that was found is taken; without messages, for whatever is queued."""
        if not self._context.health.up:
            return
        async with self._searching:
            without_messages = self._is_without_messages
            for line in list(self._lines):
                if not line.rows and (without_messages or line.is_longer):
                    await self._look(line)

    def on_room(self) -> None:
        """Give room to rows that were found; called whenever there may be more of it."""
        if not self._active:  # as a rule
            return
        for name, line in list(self._active.items()):
            if line.is_first(self.on_room):
                line.take(self._context.in_flight)
            line.consumer.has_rows = bool(line.rows)
            if not line.rows and not line.is_longer:
                del self._active[name]
            else:  # the next kind comes first the next time
                self._active[name] = self._active.pop(name)
        if any(not line.rows for line in self._active.values()):
            self._on_more()

    @property
    def _is_without_messages(self) -> bool:
        return self._context.publishing.refused or not self._context.stream.connected

    async def _look(self, line: _Line) -> None:
        line.is_longer = False
        without_messages = self._is_without_messages
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
        # While no message can come a search that finds little shows all there is, until the next tick.
        enough = len(found) > wanted if without_messages else bool(found)
        line.is_longer = enough and len(line.consumer.put_off) < _MOST
        if line.rows:
            line.consumer.has_rows = True
            self._active[line.consumer.name] = line
            self.on_room()
