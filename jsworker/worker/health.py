"""Whether PostgreSQL answers, and whether JetStream stores messages.

While PostgreSQL does not answer, nothing is pulled and finished outcomes wait; while JetStream stores none,
jobs are claimed from the table.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.events import Events
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.refused_rows import RefusedRow

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_CALM_SECONDS: Final = 60.0
"""A stream that refuses again sooner is tried as seldom as before."""


class Notifier:
    """Calls its subscribers when something has happened."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, *subscribers: Callable[[], None]) -> None:
        """Call these from now on, in their order; each returns at once."""
        self._subscribers.extend(subscribers)

    def notify(self) -> None:
        """Call every subscriber."""
        for subscriber in self._subscribers:
            subscriber()


class DatabaseHealth:
    """The last known state of the database, as those find it who use it.

    Attributes:
        changed: notified when the database stops answering, and when it answers again.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._up = asyncio.Event()
        self._up.set()
        self.changed = Notifier()
        self._failed_at = -math.inf
        self._refusals: set[str] = set()

    @property
    def up(self) -> bool:
        """Whether the last statement was answered."""
        return self._up.is_set()

    def failed_within(self, seconds: float) -> bool:
        """Tell whether a statement went unanswered within the last ``seconds``."""
        return boottime() - self._failed_at < seconds

    def failed(self, error: JsworkerError) -> None:
        """Note that a statement was not answered. A refused row is an answer: told once for each reason."""
        if isinstance(error, RowRefused):
            self._tell_refused(error)
            return
        self._failed_at = boottime()
        if self._up.is_set():
            self._up.clear()
            self._events.emit("worker.degraded", what="postgresql", reason=str(error))
            self.changed.notify()

    def answered(self) -> None:
        """Note that a statement was answered."""
        if not self._up.is_set():
            self._up.set()
            self._events.emit("worker.restored", what="postgresql")
            self.changed.notify()

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


def report_refused_row(events: Events, row: RefusedRow) -> None:
    """Report a row that PostgreSQL refuses to write."""
    events.emit(
        "row.refused",
        job_id=str(row.job_id),
        kind=row.kind,
        attempted=row.attempted,
        sqlstate=row.sqlstate,
        constraint=row.constraint,
        jobs=row.jobs,
    )


class PublishingHealth:
    """Whether JetStream stores what is published: a full disk, or a limit reached, lets it answer and refuse.

    A stream that is full stores a message now and then, as others are acknowledged: trials of it become rarer
    the sooner it refuses again.

    Attributes:
        changed: notified when messages are refused, and when they are stored again.
        refused: whether messages are refused.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self.changed = Notifier()
        self._pause = _FIRST_PAUSE_SECONDS
        self._try_at = 0.0
        self._stored_at = -math.inf
        self.refused = False

    @property
    def is_trial_due(self) -> bool:
        """Whether it should be tried whether messages are stored again."""
        return boottime() >= self._try_at

    def failed(self, reason: str) -> None:
        """Note that messages are not stored."""
        now = boottime()
        if self.refused or now - self._stored_at < _CALM_SECONDS:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        else:
            self._pause = _FIRST_PAUSE_SECONDS
        self._try_at = now + self._pause * random.uniform(0.75, 1.25)  # noqa: S311 -- spreads load, hides nothing
        if not self.refused:
            self.refused = True
            self._events.emit("worker.degraded", what="publishing", reason=reason)
            self.changed.notify()

    def put_off(self) -> None:
        """Note that there was nothing to try with."""
        self._try_at = boottime() + _FIRST_PAUSE_SECONDS

    def stored(self) -> None:
        """Note that messages are stored."""
        if self.refused:
            self.refused = False
            self._stored_at = boottime()
            self._events.emit("worker.restored", what="publishing")
            self.changed.notify()
