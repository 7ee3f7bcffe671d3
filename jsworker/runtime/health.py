"""Whether PostgreSQL answers. While it does not, nothing is pulled and finished outcomes wait."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from jsworker.errors import JsworkerError
from jsworker.events import Events
from jsworker.ownership.refusals import RowRefused
from jsworker.runtime.clock import boottime


class DatabaseHealth:
    """The last known state of the database, told by whoever uses it."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._up = asyncio.Event()
        self._up.set()
        self._changed: list[Callable[[bool], None]] = []
        self._failed_at = -math.inf
        self._refusals: set[str] = set()

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
        """Note that a statement was not answered. A refused row is an answer: told once for each reason."""
        if isinstance(error, RowRefused):
            self._tell_refused(error)
            return
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
        except RowRefused as error:
            self._tell_refused(error)
        except JsworkerError:
            return
        self.answered()

    def _tell_refused(self, error: RowRefused) -> None:
        if str(error) not in self._refusals:
            self._refusals.add(str(error))
            self._events.emit(
                "row.refused", job_id=None, sqlstate=error.sqlstate, constraint=error.constraint
            )

    def _tell(self, *, up: bool) -> None:
        for callback in self._changed:
            callback(up)
