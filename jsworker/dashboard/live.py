"""Live pages: one poller a process renders what is looked at; all who look at the same get the same.

Without viewers it does nothing. However many different pages are open, it takes at most a fifth of one
connection's time.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

INTERVAL_SECONDS: Final = 2.0
_RESTING: Final = 4.0
"""Seconds that it rests for each second of work, if that is more than the interval."""
STREAM_SECONDS: Final = 30.0
"""After which the browser asks again: with another access, maybe; and a server that ends waits no longer."""
SEND_SECONDS: Final = 10.0
"""A viewer who takes longer for a message is left."""
MOST_VIEWERS: Final = 2_000

Render = Callable[[], Awaitable[str]]


class _Topic:
    """What several viewers look at; only the newest message counts."""

    def __init__(self, render: Render) -> None:
        self.render = render
        self.viewers = 0
        self.newest = ""
        self.event = ""
        self.changed = asyncio.Event()

    def tell(self, text: str) -> None:
        if text != self.newest:
            self.newest = text
            self.event = as_event(text)  # once for all of them
            self.changed.set()
            self.changed = asyncio.Event()


class Poller:
    """Renders each page that is looked at once in a while, and tells its viewers.

    Attributes:
        viewers: open streams.
    """

    def __init__(self, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        self._topics: dict[Hashable, _Topic] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def viewers(self) -> int:
        """How many look."""
        return sum(topic.viewers for topic in self._topics.values())

    async def follow(self, what: Hashable, render: Render) -> AsyncGenerator[str, None]:
        """Yield server-sent events with the newest rendering of ``what``, for a while.

        ``render`` is that of the first who asks for it; what it renders must be the same for all others.
        """
        topic = self._topics.setdefault(what, _Topic(render))
        topic.viewers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        clock = asyncio.get_running_loop().time
        ends_at = clock() + STREAM_SECONDS
        try:
            yield "retry: 1000\n\n"
            if topic.newest:  # it may be newer than the page that the viewer has loaded
                yield as_event(topic.newest)
            while (left := ends_at - clock()) > 0:
                changed = topic.changed
                try:
                    await asyncio.wait_for(changed.wait(), left)
                except TimeoutError:
                    return
                yield topic.event
        finally:
            topic.viewers -= 1
            if not topic.viewers:
                self._topics.pop(what, None)

    async def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._topics:
            began = clock()
            for topic in list(self._topics.values()):
                topic.tell(await topic.render())
            await asyncio.sleep(max(self._interval, (clock() - began) * _RESTING))


def as_event(html: str) -> str:
    """Return HTML as a server-sent event."""
    lines = html.replace("\r", "\n").split("\n")
    return "".join(f"data: {line}\n" for line in lines) + "\n"


class EventStream(StreamingResponse):
    """Sends events; a viewer who does not take them is left."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._events = events
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them until they end, or the viewer is gone."""
        with suppress(OSError, ClientDisconnect):  # a deadline that was missed is an OSError, too
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send them, each within a deadline."""

        async def send_soon(message: Any) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_soon)
        finally:
            await self._events.aclose()
