"""Whether PostgreSQL answers. While it does not, nothing is pulled and finished outcomes wait."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from jsworker.errors import JsworkerError
from jsworker.events import Events
from jsworker.runtime.clock import boottime


class DatabaseHealth:
    """The last known state of the database, told by whoever uses it."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._up = asyncio.Event()
        self._up.set()
        self._changed: list[Callable[[bool], None]] = []
        self._failed_at = -math.inf

    @property
    def up(self) -> bool:
        """Whether the last statement was answered."""
        return self._up.is_set()

    def failed_within(self, seconds: float) -> bool:
        """Tell whether a statement went unanswered within the last ``seconds``."""
        return boottime() - self._failed_at < seconds

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback`` with True when the database answers again, with False when it stops answering."""
        self._changed.append(callback)

    def failed(self, error: JsworkerError) -> None:
        """Note that a statement was not answered."""
        self._failed_at = boottime()
        if self._up.is_set():
            self._up.clear()
            self._events.emit("worker.degraded", what="postgresql", reason=str(error))
            self._tell(up=False)

    def answered(self) -> None:
        """Note that a statement was answered."""
        if not self._up.is_set():
            self._up.set()
            self._events.emit("worker.restored", what="postgresql")
            self._tell(up=True)

    async def wait_until_up(self) -> None:
        """Wait until the database answers again."""
        await self._up.wait()

    async def probe(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask the database for anything, if it was last known to be silent."""
        if self._up.is_set():
            return
        try:
            await ask()
        except JsworkerError:
            return
        self.answered()

    def _tell(self, *, up: bool) -> None:
        for callback in self._changed:
            callback(up)
