"""The database as commands for people use it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jsworker.core.settings import load_settings
from jsworker.ownership.database import Database

_PATIENCE_SECONDS = 30.0
"""People who look for something wait longer than workers may."""


@asynccontextmanager
async def connected_database() -> AsyncIterator[Database]:
    """Open the database of the environment's settings.

    Raises:
        SettingsError: a setting is wrong or missing.
        DatabaseUnavailable, DatabaseRefused, MigrationMissing: it cannot be used.
    """
    settings = load_settings()
    patience = max(settings.statement_timeout, _PATIENCE_SECONDS)
    database = Database(settings.database_dsn(), statement_timeout=patience)
    try:
        await database.check_migrated()
        yield database
    finally:
        await database.close()
