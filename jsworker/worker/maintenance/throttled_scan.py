"""Scans of the table that may take long: they rest in between, get more time, and are not taken for outages.

A transaction that is left open keeps PostgreSQL from removing dead rows. A scan through an index of what is
there for a short time only (queued, waiting to be published, owned) then passes all of them. After weeks no
time-out made for one statement suffices; what looks for jobs of dead owners must find them all the same.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.worker.context import WorkerContext

T = TypeVar("T")

_REST: Final = 50
"""Times its own duration that a slow scan rests."""
_QUICK_SECONDS: Final = 0.02
"""What no rest is needed after."""
_LONGEST_REST_SECONDS: Final = 30.0

RECENT_SECONDS: Final = 10.0
"""How far back a scan looks that may not look at everything now: what turns up late stands within it."""

_MOST_TIMEOUTS: Final = 10
"""Times the statement time-out that a scan gets in the end."""


class ScanPace:
    """Lets a slow scan rest, as a rule until it takes a fiftieth of the time; a quick one is always due.

    Of two in a row the quicker one counts: a single slow one may be due to a busy machine. It rests ``rest``
    times its own duration, and ``longest_rest`` seconds at most.
    """

    def __init__(self, rest: int = _REST, longest_rest: float = _LONGEST_REST_SECONDS) -> None:
        self._rest = rest
        self._longest_rest = longest_rest
        self._rested_at = -math.inf
        self._took = 0.0

    @property
    def is_due(self) -> bool:
        """Whether everything may be scanned now."""
        return boottime() >= self._rested_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a scan of everything; one that fails rests, whatever the one before took."""
        began = boottime()
        took_before = math.inf
        try:
            yield
            took_before = self._took
        finally:
            ended = boottime()
            self._took = ended - began
            took = min(self._took, took_before)
            rest = min(self._rest * took, self._longest_rest) if took > _QUICK_SECONDS else 0.0
            self._rested_at = max(self._rested_at, ended + rest)

    def hurry(self) -> None:
        """Let the next scan follow at once: the last one found as much as it could take."""
        self._rested_at = -math.inf


def longest_rest(context: WorkerContext) -> float:
    """Return the seconds that a search may rest: what it finds later may have been taken for stale."""
    thresholds = [kind.limits.stale_after for kind in context.kinds.values()]
    stale_after = [context.settings.stale_threshold, *(each for each in thresholds if each)]
    return min(_LONGEST_REST_SECONDS, min(stale_after) / 4)


class ThrottledScan:
    """One scan of everything, made again and again; ``what`` it looks for is said when it becomes slow.

    Attributes:
        is_slow: whether it went unanswered, and has not been quick again since.
    """

    def __init__(
        self, context: WorkerContext, what: str, *, rest: int = _REST, most_timeouts: int = _MOST_TIMEOUTS
    ) -> None:
        self._context = context
        self._what = f"looking for {what}"
        self._least = context.settings.statement_timeout
        self._most = most_timeouts * self._least
        self._seconds = self._least
        self._pace = ScanPace(rest, longest_rest(context))
        self.is_slow = False

    @property
    def is_due(self) -> bool:
        """Whether it has rested enough; while it is quick it always has."""
        return self._pace.is_due

    @property
    def must_rest(self) -> bool:
        """Whether it went unanswered and has not rested enough since."""
        return self.is_slow and not self._pace.is_due

    async def make(self, ask: Callable[[float], Awaitable[T]]) -> T | None:
        """Have ``ask`` scan within so many seconds; None: that takes too long, while others are answered.

        Raises:
            DatabaseUnavailable: the database answers nothing at all.
            DatabaseRefused: the scan was refused.
        """
        began = boottime()
        try:
            with self._pace.timed():
                found = await ask(self._seconds)
        except DatabaseUnavailable as error:
            # Sooner than its time was over, or with a database that answers nothing: no slow scan.
            if boottime() - began < self._seconds or not await self._answers():
                self._pace.hurry()
                raise
            self._grow(error)
            return None
        if boottime() - began < self._least:
            self._recover()
        return found

    async def _answers(self) -> bool:
        try:
            await self._context.database.ping()
        except (DatabaseUnavailable, DatabaseRefused):
            return False
        return True

    def _grow(self, error: DatabaseUnavailable) -> None:
        self._seconds = min(2 * self._seconds, self._most)
        if not self.is_slow:
            self.is_slow = True
            reason = (
                f"{error}, but answers at once otherwise; "
                "is a transaction open for long? See pg_stat_activity"
            )
            self._context.events.emit("worker.degraded", what=self._what, reason=reason)

    def _recover(self) -> None:
        self._seconds = self._least
        if self.is_slow:
            self.is_slow = False
            self._context.events.emit("worker.restored", what=self._what)
