"""A search that may take long: it rests in between, gets more time, and is not taken for a silent database.

It passes every dead row that somebody's open transaction keeps. Weeks of them, and no time-out made for one
statement suffices; what looks for the jobs of the dead must find them all the same.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.scan_pace import LONGEST_REST_SECONDS, REST, Pace

T = TypeVar("T")

MOST_PATIENCE: Final = 10
"""Times the statement time-out that a search gets in the end."""


class Search:
    """One search of everything, made again and again."""

    def __init__(
        self,
        context: WorkerContext,
        what: str,
        *,
        rest: int = REST,
        longest_rest: float = LONGEST_REST_SECONDS,
        most_patience: int = MOST_PATIENCE,
    ) -> None:
        """Prepare a search.

        Args:
            context: the worker's.
            what: what is looked for, for ``worker.degraded``.
            rest: times its own duration that a slow one rests.
            longest_rest: seconds that it rests at most.
            most_patience: times the statement time-out that it gets at most.
        """
        self._context = context
        self._what = f"looking for {what}"
        self._least = context.settings.statement_timeout
        self._most = most_patience * self._least
        self._seconds = self._least
        self._pace = Pace(rest, longest_rest)
        self._told = False

    @property
    def is_due(self) -> bool:
        """Whether it has rested enough; while it is quick it always has."""
        return self._pace.is_due

    @property
    def is_slow(self) -> bool:
        """Whether it went unanswered, and has not been quick again since."""
        return self._told

    @property
    def must_rest(self) -> bool:
        """Whether it went unanswered and has not rested enough since."""
        return self._told and not self._pace.is_due

    async def make(self, ask: Callable[[float], Awaitable[T]]) -> T | None:
        """Search.

        Args:
            ask: searches within so many seconds.

        Returns:
            What was found; None when the search takes too long, while the database answers other questions.

        Raises:
            DatabaseUnavailable: the database answers nothing at all.
            DatabaseRefused: the search was refused.
        """
        began = boottime()
        try:
            with self._pace.timed():
                found = await ask(self._seconds)
        except DatabaseUnavailable as error:
            # Sooner than its time was over, or with a database that answers nothing: no slow search.
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
        if not self._told:
            self._told = True
            reason = (
                f"{error}, but answers at once otherwise; is a transaction open for long? See jsworker doctor"
            )
            self._context.events.emit("worker.degraded", what=self._what, reason=reason)

    def _recover(self) -> None:
        self._seconds = self._least
        if self._told:
            self._told = False
            self._context.events.emit("worker.restored", what=self._what)
