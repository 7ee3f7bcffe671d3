"""Scans of the table that may take long: they rest in between, get more time, and are not taken for outages.

A transaction that is left open keeps PostgreSQL from removing dead rows: a scan for what is there for a short
time only then passes all of them, and no time-out of one statement suffices.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.refusals import RowRefused
from jsworker.worker.context import WorkerContext

T = TypeVar("T")

RECENT_SECONDS: Final = 10.0
"""How far back a scan looks that may not look at everything now: what turns up late stands within it."""
_REST: Final = 50
_LONGEST_REST_SECONDS: Final = 30.0
_QUICK_SECONDS: Final = 0.02
_MOST_TIMEOUTS: Final = 10


class ScanPace:
    """Lets a slow scan rest ``rest`` times its own duration, for ``longest_rest`` seconds at most.

    Of two in a row the quicker one counts: a single slow one may be due to a busy machine.
    """

    def __init__(self, rest: int = _REST, longest_rest: float = _LONGEST_REST_SECONDS) -> None:
        self._rest = rest
        self._longest_rest = longest_rest
        self._rested_at = -math.inf
        self._took = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a scan of everything may start now."""
        return boottime() >= self._rested_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a scan of everything; a failed scan rests even if the one before was quick."""
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
        """Let the next scan follow at once, because the last one found a full batch."""
        self._rested_at = -math.inf


def longest_rest(context: WorkerContext) -> float:
    """Return the longest rest of a search: with a longer one, rows that it should find could turn stale."""
    thresholds = [kind.limits.stale_after for kind in context.kinds.values()]
    stale_after = [context.settings.stale_threshold, *(each for each in thresholds if each)]
    return min(_LONGEST_REST_SECONDS, min(stale_after) / 4)


class ThrottledScan(ScanPace):
    """One scan of everything, made again and again; ``what`` it looks for is said when it becomes slow.

    Slow is one that went unanswered, until it is quick again. It gets twice the time for the next one, up to
    ``most_timeouts`` times the statement time-out.
    """

    def __init__(
        self, context: WorkerContext, what: str, *, rest: int = _REST, most_timeouts: int = _MOST_TIMEOUTS
    ) -> None:
        super().__init__(rest, longest_rest(context))
        self._context = context
        self._what = f"looking for {what}"
        self._least = self._seconds = context.settings.statement_timeout
        self._most = most_timeouts * self._least
        self.is_slow = False
        self.is_reported = False
        """Whether it was slow or refused, and was not answered quickly since, which alone ends the report."""

    @property
    def must_rest(self) -> bool:
        """Whether it was slow and has not rested for long enough."""
        return self.is_slow and not self.is_due

    async def make(self, ask: Callable[[float], Awaitable[T]]) -> T | None:
        """Call ``ask`` with a time limit in seconds; None if it took too long while the database answers."""
        began = boottime()
        try:
            with self.timed():
                found = await ask(self._seconds)
        except DatabaseUnavailable as error:
            # Sooner than its time was over, or with a database that answers nothing: no slow scan.
            if boottime() - began < self._seconds or not await self._answers():
                self.hurry()
                raise
            self._grow(error)
            return None
        except RowRefused as error:  # it says of no row, and of no search, which one it was
            self.is_reported = True
            self._context.complaints.report(self._what, str(error))
            raise
        if boottime() - began < self._least:
            self._seconds = self._least
            self.is_slow = self.is_reported = False
            self._context.complaints.end(self._what)
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
            self.is_slow = self.is_reported = True
            why = "is the line busy, or a transaction open for long? See pg_stat_activity"
            self._context.complaints.report(self._what, f"{error}, but answers at once otherwise; {why}")
