"""Migrating a database: what the command line, tests and alembic itself call."""

import os
from collections.abc import Callable
from typing import Final, TypeVar

import psycopg
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from jsworker.core.errors import DatabaseRefused, SettingsError
from jsworker.ownership import migrations
from jsworker.ownership.database import place_of
from jsworker.ownership.pool import connect_arguments, driver_url
from jsworker.ownership.refusals import map_error

T = TypeVar("T")

_PATIENCE_SECONDS: Final = 60.0
_LOCK_NOT_AVAILABLE: Final = "55P03"
_DEADLOCK: Final = "40P01"
_HOLDERS: Final = text("""
SELECT DISTINCT a.pid, a.usename, CAST(extract(epoch FROM clock_timestamp() - a.xact_start) AS integer) AS seconds
FROM pg_locks AS l
JOIN pg_class AS c ON c.oid = l.relation
JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'jsworker'
JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.granted AND c.relkind = 'r' AND a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - interval '1 s'
ORDER BY seconds DESC LIMIT 3
""")


def _tell_nobody(_line: str) -> None:
    """Say nothing."""


def upgrade_database(
    dsn: str, revision: str = "head", *, tell: Callable[[str], None] = _tell_nobody
) -> str | None:
    """Migrate a database and return the revision reached.

    Workers go on meanwhile: each migration is a transaction of its own, and a table that somebody's open
    transaction holds is waited for in short turns. What was migrated before an error stays so.

    Args:
        dsn: where the database is.
        revision: where to.
        tell: called with a line for people when another upgrade is waited for, for as long as that takes.

    Raises:
        DatabaseUnavailable: no answer, or the login was refused.
        DatabaseRefused: the role may not do this, the database is at a revision that this version does
            not know, or a transaction held a table for a minute.
    """
    turns = Retrying(
        retry=retry_if_exception(_is_locked),
        stop=stop_after_delay(_PATIENCE_SECONDS),
        wait=wait_fixed(1.0),
        reraise=True,
    )
    reached: str | None = None
    done = False
    while not done:
        turns(
            _migrating,
            dsn,
            lambda connection: migrations.build_indexes(connection, revision, tell=tell),
            in_transaction=False,
        )
        reached, done = turns(
            _migrating, dsn, lambda connection: migrations.upgrade_by_one(connection, revision)
        )
    return reached


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


def _is_locked(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) in (_LOCK_NOT_AVAILABLE, _DEADLOCK)


def _holders(engine: Engine) -> str:
    """Return which transactions hold jsworker's tables, the oldest first, in words."""
    with engine.connect() as connection:
        rows = connection.execute(_HOLDERS).all()
    named = ", ".join(f"pid {row.pid} of role {row.usename} for {row.seconds} s" for row in rows)
    return f"held by {named}: end it, or try again later" if named else "held by somebody: try again"


def _migrating(dsn: str, call: Callable[[Connection], T], *, in_transaction: bool = True) -> T:
    """Return what a call returns, in one transaction or in autocommit mode."""
    url = driver_url(dsn)
    engine = create_engine(url, hide_parameters=True, connect_args=connect_arguments())
    if not in_transaction:
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    place = place_of(url)
    try:
        with engine.begin() as connection:
            return call(connection)
    except CommandError as error:
        raise DatabaseRefused(f"PostgreSQL at {place} cannot be migrated: {error}") from None
    except (DBAPIError, psycopg.Error) as error:
        mapped = map_error(error, place)
        if not _is_locked(mapped):
            raise mapped from None
        refused = DatabaseRefused(f"PostgreSQL at {place} cannot be migrated: a table is {_holders(engine)}")
        refused.sqlstate = _LOCK_NOT_AVAILABLE
        raise refused from None
    finally:
        engine.dispose()
