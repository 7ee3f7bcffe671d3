"""Lanes: opens the consumer of another priority than normal when there is a first job of it."""

from collections.abc import Callable

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.priorities import HIGH, LOW
from jsworker.ownership.transitions.priorities import lanes_with_jobs
from jsworker.stream.api import NotThere
from jsworker.stream.message import consumer_of
from jsworker.worker.context import WorkerContext

Place = tuple[str, int]
"""A kind and a priority."""


class Lanes:
    """Calls ``open_lane`` once for each kind and priority of which there are, or were, jobs.

    A consumer in the stream shows that there were some; rows of the table show it even if no message does. A
    job waits for at most one scan because its lane is not open.
    """

    def __init__(self, context: WorkerContext, open_lane: Callable[[str, int], None]) -> None:
        self._context = context
        self._open_lane = open_lane
        self._closed: set[Place] = {(kind, priority) for kind in context.kinds for priority in (HIGH, LOW)}
        self._looked_for_consumers = False
        for name, kind in context.kinds.items():
            if kind.priority in (HIGH, LOW):  # the class declares this priority
                self._open((name, kind.priority))

    async def look(self, *, has_jobs: bool) -> None:
        """Open the lanes that have jobs; the first time also those that had some. Called once a scan."""
        if not self._closed:
            return
        if not self._looked_for_consumers and self._context.stream.connected:
            await self._look_for_consumers()
        if not has_jobs:
            return
        with self._context.noting("search for jobs of other priorities"):
            for place in await lanes_with_jobs(self._context.database, sorted(self._closed)):
                self._open(place)

    async def _look_for_consumers(self) -> None:
        for place in sorted(self._closed):
            try:
                await self._context.stream.consumer_state(consumer_of(*place))
            except NotThere:
                continue
            except (StreamUnavailable, StreamRefused):
                return  # the next look asks again; until then the rows show lanes with jobs
            self._open(place)
        self._looked_for_consumers = True

    def _open(self, place: Place) -> None:
        if place in self._closed:
            self._closed.remove(place)
            self._open_lane(*place)
