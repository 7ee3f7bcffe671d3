"""Migrations: bring a database to this version's schema, and tell at which one it is."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from alembic.script.revision import RevisionError
from sqlalchemy import Connection, text
from sqlalchemy.schema import CreateSchema

from alembic import command
from jsworker.core.errors import MigrationMissing
from jsworker.ownership.schema import SCHEMA, metadata

if TYPE_CHECKING:
    from alembic.runtime.environment import EnvironmentContext

_ONE_MIGRATION_AT_A_TIME = 0x6A73776F
_ONE_BUILDER_AT_A_TIME = 0x6A737778
_LOOK_AGAIN_SECONDS = 0.5


def upgrade_by_one(connection: Connection, revision: str = "head") -> tuple[str | None, bool]:
    """Migrate one revision up, within the connection's transaction, on the way to ``revision``.

    Nothing but what the last migration has left to be done afterwards, if there is such; and nothing while there are
    indexes to be built first.

    Returns:
        The revision reached, and whether that is all.
    """
    _lock(connection)
    ahead = _ahead(connection, revision)
    if ahead and (_ended_the_last(connection) or _to_build(connection, revision)):
        return current(connection), False
    command.upgrade(_config(connection), ahead[-1].revision if ahead else revision)
    return current(connection), len(ahead) <= 1


def build_indexes(connection: Connection, revision: str = "head", *, tell: Callable[[str], None]) -> None:
    """Build the indexes of the next migration on the way to ``revision`` beside those who write, if jobs are many.

    At the end of the way those that are missing or invalid, if they are, are built anew. One upgrade builds at a
    time, the others wait for it.

    Args:
        connection: in autocommit mode; what fails half-way is built anew the next time.
        revision: where to.
        tell: called with a line for people when another upgrade is waited for.
    """
    lock = {"key": _ONE_BUILDER_AT_A_TIME}
    is_told = False
    while _to_build(connection, revision):
        # Tried again and again: a statement that waits for the lock would hold a snapshot, for whose end the
        # build itself waits.
        if not connection.execute(text("SELECT pg_try_advisory_lock(:key)"), lock).scalar():
            if not is_told:
                tell("waiting for another upgrade, which builds indexes")
            is_told = True
            time.sleep(_LOOK_AGAIN_SECONDS)
            continue
        try:
            # It waits for every transaction that is under way; nobody waits for it.
            connection.execute(text("SET lock_timeout = '60s'"))
            for drop, build in _to_build(connection, revision):
                connection.exec_driver_sql(drop)
                connection.exec_driver_sql(build)
        finally:
            connection.execute(text("RESET lock_timeout"))
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), lock)


def downgrade(connection: Connection, revision: str) -> str | None:
    """Migrate down within the connection's transaction and return the revision reached."""
    _lock(connection)
    command.downgrade(_config(connection), revision)
    return current(connection)


def current(connection: Connection) -> str | None:
    """Return the revision at which the database is; None when it was never migrated."""
    return MigrationContext.configure(
        connection, opts={"version_table_schema": SCHEMA}
    ).get_current_revision()


def head() -> str:
    """Return the newest revision that this version of jsworker knows."""
    revision = ScriptDirectory.from_config(_config(None)).get_current_head()
    if revision is None:
        raise MigrationMissing("this installation of jsworker holds no migrations")
    return revision


def run_migrations(context: "EnvironmentContext") -> None:
    """Run what alembic asks for; called by alembic/env.py."""
    connection: Connection | None = context.config.attributes.get("connection")
    if connection is not None:
        _migrate(context, connection)
        return
    from jsworker.ownership.upgrading import migration_engine  # noqa: PLC0415 -- only the alembic command needs it

    engine = migration_engine()
    try:
        with engine.begin() as opened:
            _lock(opened)
            _migrate(context, opened)
    finally:
        engine.dispose()


def _migrate(context: "EnvironmentContext", connection: Connection) -> None:
    connection.execute(CreateSchema(SCHEMA, if_not_exists=True))
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=_ours,
    )
    with context.begin_transaction():
        context.run_migrations()


def _ahead(connection: Connection, revision: str) -> list[Script]:
    """Return the migrations on the way to ``revision``, the next one last."""
    scripts = ScriptDirectory.from_config(_config(connection))
    try:
        return list(scripts.iterate_revisions(revision, current(connection) or "base"))
    except RevisionError:
        return []  # told by the upgrade itself


def _module(connection: Connection, revision: str | None) -> Any:
    """Return the module of a migration, None for the state before the first."""
    script = ScriptDirectory.from_config(_config(connection)).get_revision(revision or "base")
    return script and script.module


def _to_build(connection: Connection, revision: str) -> list[tuple[str, str]]:
    """Return the statements that drop and build each index that is missing and that no transaction may build."""
    ahead = _ahead(connection, revision)
    statements: list[tuple[str, str]] = []
    for script in [ahead[-1].module] if ahead else _migrated(connection):
        indexes: Mapping[str, str] = getattr(script, "CONCURRENTLY", {})
        missing = [
            name for name in indexes if not connection.exec_driver_sql(script.IS_VALID, (name,)).scalar()
        ]
        if missing and not (ahead and not connection.exec_driver_sql(script.ARE_MANY).scalar()):
            statements += [(script.DROP_CONCURRENTLY[name], indexes[name]) for name in missing]
    return statements


def _migrated(connection: Connection) -> list[Any]:
    """Return the modules of the migrations that the database has behind it."""
    scripts = ScriptDirectory.from_config(_config(connection))
    try:
        return [script.module for script in scripts.iterate_revisions(current(connection) or "base", "base")]
    except RevisionError:  # those of a newer version
        return []


def _ended_the_last(connection: Connection) -> bool:
    """Tell whether the migration at which the database is had left something, which is done by now."""
    afterwards = getattr(_module(connection, current(connection)), "afterwards", None)
    return afterwards is not None and afterwards(connection)


def _ours(name: str | None, kind: str, __parents: Any) -> bool:
    if kind == "schema":
        return name == SCHEMA
    return not (kind == "table" and name == "alembic_version")


def _lock(connection: Connection) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ONE_MIGRATION_AT_A_TIME})
    # Whoever waits for a table's lock keeps all that come later from it, heartbeats too: never for long. But for
    # longer than a second (deadlock_timeout), after which an autovacuum that is in the way is ended.
    connection.execute(text("SET LOCAL lock_timeout = '1500ms'"))


def _config(connection: Connection | None) -> Config:
    config = Config(_ini())
    config.attributes["connection"] = connection
    return config


def _ini() -> Path:
    package = Path(__file__).resolve().parent.parent
    installed = package / "alembic.ini"
    return installed if installed.is_file() else package.parent / "alembic.ini"
