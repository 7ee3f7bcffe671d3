"""The idle poll: queued jobs whose message does not come are claimed straight from the table.

Messages that were delivered to a process which died before its claim wait out ``ack_wait``, and without NATS
no message comes at all. The row alone says that a job is to be done.
"""

import random
from collections.abc import Callable, Sequence

from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership import repair
from jsworker.ownership.database import Database
from jsworker.runtime.clock import boottime
from jsworker.runtime.consumer import Consumer
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.pace import Pace
from jsworker.runtime.run import Hand
from jsworker.runtime.search import Search

_CHOICE = 4
"""Candidates for each free slot: workers that poll at the same time should not all try the same rows."""
_MOST = 200


class IdlePoll:
    """Claims old queued rows for job slots that are free."""

    def __init__(
        self,
        consumers: Sequence[Consumer],
        *,
        scan_interval: float,
        database: Database,
        health: DatabaseHealth,
        hand: Hand,
        nats_connected: Callable[[], bool],
        new_search: Callable[[str], Search],
        pace: Pace,
    ) -> None:
        """Wire the poll.

        Args:
            consumers: claim what was found.
            scan_interval: seconds; a job is old after two of them, a consumer idle after one.
            database, health, hand: the worker's own.
            nats_connected: whether messages can come.
            new_search: makes the search for waiting rows of a kind, given its name.
            pace: of the searches of all kinds together.
        """
        self._consumers = consumers
        self._scan_interval = scan_interval
        self._database = database
        self._health = health
        self._hand = hand
        self._nats_connected = nats_connected
        self._searches = {each.kind.name: new_search(each.kind.name) for each in consumers}
        self._pace = pace

    async def step(self) -> None:
        """Once a scan: take old rows into free slots, a single one where messages keep coming."""
        if not self._nats_connected() or not self._pace.is_due:
            return
        now = boottime()
        with self._pace.timed():  # the searches of all kinds together
            for consumer in self._consumers:
                idle = now - consumer.delivered_at >= self._scan_interval
                most = consumer.room() if idle else min(consumer.room(), 1)
                await self._claim(consumer, most, older_than=2 * self._scan_interval)

    async def step_without_nats(self) -> None:
        """While no message can come: take whatever is queued."""
        if not self._nats_connected():
            for consumer in self._consumers:
                await self._claim(consumer, consumer.room(), older_than=0.0)

    async def _claim(self, consumer: Consumer, most: int, *, older_than: float) -> None:
        wanted, search = min(most, _MOST), self._searches[consumer.kind.name]
        if wanted <= 0 or search.must_rest:
            return
        try:
            aside = await consumer.set_aside()
            found = await search.make(
                lambda seconds: repair.waiting(
                    self._database,
                    kinds=[consumer.kind.name],
                    older_than=older_than,
                    limit=wanted if wanted == 1 else _CHOICE * wanted,
                    besides=[*self._hand.claiming, *self._hand.runs, *aside],
                    seconds=seconds,
                )
            )
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)
            return
        if not found:
            return
        chosen = random.sample(found, min(wanted, len(found)))
        for row in chosen:
            consumer.take(row.id)
