"""Live pages: one poller per process renders each open page, once for all viewers who see the same.

Without viewers the poller is idle. However many different pages are open, it takes at most a tenth of one
connection's time. Waiting for a PostgreSQL that is away takes none.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

INTERVAL_SECONDS: Final = 2.0
_SHARE: Final = 0.1
"""All pages together take at most this part of the time, each an equal share."""
STREAM_SECONDS: Final = 30.0
"""Then a stream ends, so that the browser asks again, maybe with another access, and a server that ends need
not wait longer."""
SEND_SECONDS: Final = 10.0
"""A viewer that takes longer to receive a message is disconnected."""
MOST_VIEWERS: Final = 2_000
MOST_PAGES: Final = 200
"""Different pages that may be open at once; any number of viewers may see the same."""
_MOST_BYTES: Final = 32 * 2**20
"""The memory for the newest messages of all pages; the streams of one that does not fit in end."""

Render = Callable[[], Awaitable[Mapping[str, str]]]
"""Returns the parts of a page by the names of their events."""


class Away(Exception):
    """Raised by a ``Render`` whose server was away; ``parts`` are shown meanwhile."""

    def __init__(self, parts: Mapping[str, str]) -> None:
        super().__init__()
        self.parts = parts


class _Topic:
    """A page that viewers have open; of each part only the newest message is kept."""

    def __init__(self, render: Render) -> None:
        self.render = render
        self.viewers = 0
        self.looks = 0
        self.rests_until = 0.0
        self.fits = True
        self.changed = asyncio.Event()
        self._events: dict[str, tuple[int, str]] = {}

    @property
    def size(self) -> int:
        return sum(sys.getsizeof(event) for _, event in self._events.values())

    def tell(self, events: Mapping[str, str]) -> None:
        self.fits = True
        known = {name: event for name, (_, event) in self._events.items()}
        changed = {name: event for name, event in events.items() if event != known.get(name)}
        if changed:
            self.looks += 1
            self._events |= {name: (self.looks, event) for name, event in changed.items()}
            self.wake()

    def end(self) -> None:
        """End the streams: the messages do not fit in."""
        self.fits = False
        self._events.clear()
        self.wake()

    def wake(self) -> None:
        """Let the streams look for what has changed."""
        self.changed.set()
        self.changed = asyncio.Event()

    def since(self, look: int) -> str:
        """Return the newest events of the parts that have changed after the change with this number."""
        return "".join(event for at, event in self._events.values() if at > look)


class Poller:
    """Renders each open page at intervals, and sends what has changed to its viewers.

    Attributes:
        viewers: open streams.
    """

    def __init__(self, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        self._topics: dict[Hashable, _Topic] = {}
        # Of pages that have no viewer now: opening one again and again must not make it read more often.
        self._rests: dict[Hashable, float] = {}
        # Of pages that did not fit in, their size: opening one would tell its viewers that it is updated.
        self._unfit: dict[Hashable, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def viewers(self) -> int:
        """The number of open streams."""
        return sum(topic.viewers for topic in self._topics.values())

    def close(self) -> None:
        """End all streams, and feed no more viewers: the server ends."""
        self._is_closed = True
        for topic in self._topics.values():
            topic.wake()

    def is_full(self, what: Hashable) -> bool:
        """Return whether no more viewers of ``what`` can be fed."""
        is_one_too_many = what not in self._topics and len(self._topics) >= MOST_PAGES
        return (
            self._is_closed
            or self.viewers >= MOST_VIEWERS
            or is_one_too_many
            or not self._has_room(what, self._unfit.get(what, 0))
        )

    def _has_room(self, what: Hashable, size: int) -> bool:
        others = sum(topic.size for page, topic in self._topics.items() if page != what)
        return others + size <= _MOST_BYTES

    async def follow(self, what: Hashable, render: Render) -> AsyncGenerator[str, None]:
        """Yield server-sent events for 30 s: the newest rendering of ``what``, then parts that change.

        They end before if what is rendered does not fit into the memory for all pages.
        The first viewer's ``render`` is used for all viewers of ``what``: it must render the same for each.
        """
        if self.is_full(what):  # by others who came at the same moment
            return
        clock = asyncio.get_running_loop().time
        topic = self._topics.setdefault(what, _Topic(render))
        topic.viewers += 1
        topic.rests_until = max(topic.rests_until, self._rests.pop(what, 0.0))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        ends_at = clock() + STREAM_SECONDS
        try:
            yield "retry: 1000\n\n"
            seen = 0  # what was rendered already may be newer than the page that the viewer has loaded
            while (left := ends_at - clock()) > 0:
                if seen == topic.looks:
                    try:
                        await asyncio.wait_for(topic.changed.wait(), left)
                    except TimeoutError:
                        return
                if self._is_closed or not topic.fits:
                    return
                events, seen = topic.since(seen), topic.looks
                yield events
        finally:
            topic.viewers -= 1
            if not topic.viewers:
                self._topics.pop(what, None)
                self._rests = {page: until for page, until in self._rests.items() if until > clock()}
                self._rests[what] = topic.rests_until

    async def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._topics:
            for what, topic in list(self._topics.items()):
                if (began := clock()) < topic.rests_until:
                    continue
                try:
                    self._tell(what, topic, await topic.render())
                    # By its own work: a page that takes long must not keep the others old.
                    rest = (clock() - began) * (max(len(self._topics), 1) / _SHARE - 1)
                    topic.rests_until = clock() + rest
                except Away as away:
                    self._tell(what, topic, away.parts)
            await asyncio.sleep(self._interval)

    def _tell(self, what: Hashable, topic: _Topic, parts: Mapping[str, str]) -> None:
        events = {name: as_event(name, html) for name, html in parts.items()}  # once for all viewers
        size = sum(map(sys.getsizeof, events.values()))
        self._unfit.pop(what, None)
        if self._has_room(what, size):
            topic.tell(events)
            return
        self._unfit[what] = size
        if len(self._unfit) > MOST_PAGES:
            del self._unfit[next(iter(self._unfit))]
        topic.end()


def as_event(name: str, html: str) -> str:
    """Return HTML as a server-sent event."""
    lines = html.replace("\r", "\n").split("\n")
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"


class EventStream(StreamingResponse):
    """Sends events; a viewer that does not receive them is disconnected."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._events = events
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, or the viewer is gone."""
        with suppress(OSError, ClientDisconnect):  # a missed deadline raises TimeoutError, an OSError too
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the events, each within a deadline."""

        async def send_soon(message: Any) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_soon)
        finally:
            await self._events.aclose()
