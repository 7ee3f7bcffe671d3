"""The time by PostgreSQL's clock, by which the rows have their times: ages by another clock may be wrong by hours."""

from datetime import UTC, datetime, timedelta
from typing import Final

from jsworker.core.clock import boottime
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.schedules import database_now

_KEPT_SECONDS: Final = 60.0


class DatabaseClock:
    """Tells the time of a database without asking it each time; before it was asked, that of this machine."""

    def __init__(self) -> None:
        self._answer: tuple[datetime, float] | None = None
        self._asked_at: float | None = None

    def now(self) -> datetime:
        """Return the time, counted on from the database's last answer: this machine's clock may be set meanwhile."""
        if self._answer is None:
            return datetime.now(UTC)
        time, read_at = self._answer
        return time + timedelta(seconds=boottime() - read_at)

    async def ask(self, database: Database) -> None:
        """Ask the database; with the errors of ``Database.run``."""
        self._asked_at = asked_at = boottime()
        time = await database_now(database)
        self._answer = time, (asked_at + boottime()) / 2

    async def ask_if_old(self, database: Database) -> None:
        """Ask the database, if it was not asked within a minute; see ``ask``."""
        if self._asked_at is None or boottime() - self._asked_at > _KEPT_SECONDS:
            await self.ask(database)
