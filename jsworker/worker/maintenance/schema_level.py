"""The schema's revision as it is now: others may migrate it, or take it back, while this worker runs."""

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, MigrationMissing
from jsworker.ownership.database import Database
from jsworker.ownership.revision import check_level


class SchemaLevel:
    """Remembers the revision that was found last.

    Attributes:
        revision: None: there is no schema.
    """

    def __init__(self, revision: str | None, *, database: Database) -> None:
        """Begin with what was found at the start.

        Args:
            revision: found by whoever let this worker start.
            database: the worker's own.
        """
        self.revision = revision
        self._database = database

    @property
    def misfit(self) -> str | None:
        """Why this version cannot work with the schema, and what to do; None: it can."""
        try:
            check_level(self.revision)
        except MigrationMissing as missing:
            return str(missing)
        return None

    async def step(self) -> None:
        """Look once; what does not answer leaves what is known.

        Also while the database counts as silent: so does one that refuses statements for want of tables.
        """
        try:
            self.revision = await self._database.migrated_to()
        except (DatabaseUnavailable, DatabaseRefused):  # a heartbeat meets the same, and tells
            return
