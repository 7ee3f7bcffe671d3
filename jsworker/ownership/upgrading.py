"""Migrating a database: what the command line, tests and alembic itself call."""

import os
from collections.abc import Callable
from typing import TypeVar

import psycopg
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError

from jsworker.errors import DatabaseRefused, SettingsError
from jsworker.ownership import migrations
from jsworker.ownership.database import connect_arguments, driver_url, map_error, place_of

T = TypeVar("T")


def upgrade_database(dsn: str, revision: str = "head") -> str | None:
    """Migrate a database and return the revision reached.

    Raises:
        DatabaseUnavailable: no answer, or the login was refused.
        DatabaseRefused: the role may not do this, or the database is at a revision that this version does
            not know.
    """
    return _migrating(dsn, lambda connection: migrations.upgrade(connection, revision))


def downgrade_database(dsn: str, revision: str) -> str | None:
    """Migrate a database down to ``revision`` (``base``: to nothing)."""
    return _migrating(dsn, lambda connection: migrations.downgrade(connection, revision))


def current_revision(dsn: str) -> str | None:
    """Return the revision at which a database is; None when it was never migrated."""
    return _migrating(dsn, migrations.current)


def migration_engine() -> Engine:
    """Return an engine for the alembic command, on the database of JSWORKER_DATABASE_URL.

    Raises:
        SettingsError: the variable is not set.
    """
    dsn = os.environ.get("JSWORKER_DATABASE_URL")
    if not dsn:
        raise SettingsError("JSWORKER_DATABASE_URL must be set")
    return create_engine(driver_url(dsn), hide_parameters=True, connect_args=connect_arguments())


def _migrating(dsn: str, call: Callable[[Connection], T]) -> T:
    url = driver_url(dsn)
    engine = create_engine(url, hide_parameters=True, connect_args=connect_arguments())
    place = place_of(url)
    try:
        with engine.begin() as connection:
            return call(connection)
    except CommandError as error:
        raise DatabaseRefused(f"PostgreSQL at {place} cannot be migrated: {error}") from None
    except (DBAPIError, psycopg.Error) as error:
        raise map_error(error, place) from None
    finally:
        engine.dispose()
