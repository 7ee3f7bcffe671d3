"""Migrating a database to this version's schema: what the command line and alembic itself call."""

import io
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, Row, create_engine, text
from sqlalchemy.engine import URL, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from alembic import command
from jsworker.core.errors import DatabaseRefused, JsworkerError, SettingsError
from jsworker.core.names import printable
from jsworker.ownership.database import REVISIONS, place_of
from jsworker.ownership.pool import arguments_of, driver_url
from jsworker.ownership.refusals import RowRefused, map_error
from jsworker.ownership.schema import SCHEMA, metadata
from jsworker.ownership.session_settings import SESSION, begin_sessions, check_session

if TYPE_CHECKING:
    from alembic.runtime.environment import EnvironmentContext

T = TypeVar("T")

_LONGEST_WAIT_SECONDS: Final = 60.0
_LOCK_NOT_AVAILABLE: Final = "55P03"
_DEADLOCK: Final = "40P01"
_DUPLICATE_TABLE: Final = "42P07"
# The build of an index waits for snapshots, too, of transactions that hold no lock on the tables. When a transaction of
# another role began is hidden from most logins.
_HOLDERS: Final = text("""
SELECT held.transaction, held.pid, held.gid, held.role,
  CAST(extract(epoch FROM clock_timestamp() - held.since) AS double precision) AS seconds
FROM (
  SELECT l.virtualtransaction AS transaction, l.pid, p.gid, coalesce(a.usename, p.owner) AS role,
    coalesce(a.xact_start, p.prepared) AS since
  FROM pg_locks AS l
  JOIN pg_class AS c ON c.oid = l.relation AND c.relnamespace = to_regnamespace('jsworker') AND c.relkind = 'r'
  LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
  LEFT JOIN pg_locks AS x ON l.pid IS NULL AND x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction
    AND x.locktype = 'transactionid' AND x.granted
  LEFT JOIN pg_prepared_xacts AS p ON p.transaction = x.transactionid
  WHERE l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  UNION
  SELECT 'snapshot ' || CAST(a.backend_xmin AS text), a.pid, NULL, a.usename, a.xact_start
  FROM pg_stat_activity AS a
  WHERE :of_a_build AND a.datname = current_database() AND a.backend_xmin IS NOT NULL
    AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
) AS held
WHERE held.pid IS DISTINCT FROM pg_backend_pid() ORDER BY seconds DESC NULLS LAST
""")
_LOCK_TIMEOUT: Final = text("SELECT set_config('lock_timeout', :limit, false)")
_HELD_SECONDS: Final = 1.0
"""Transactions younger than this are not what an upgrade waits for."""
_NAMED: Final = 3
_FUNCTION: Final = re.compile(r"\S+\([^()]*\)")
_ONE_MIGRATION_AT_A_TIME: Final = 0x6A73776F
_ONE_BUILDER_AT_A_TIME = 0x6A737778
_LOOK_AGAIN_SECONDS = 0.5
_LOCK: Final = f"SELECT pg_advisory_xact_lock({_ONE_MIGRATION_AT_A_TIME})"
_TRY_LOCK: Final = f"SELECT pg_try_advisory_xact_lock({_ONE_MIGRATION_AT_A_TIME})"
# A statement that waits for a table's lock blocks all later statements on the table, heartbeats too, so it
# never waits for long. But it waits longer than deadlock_timeout (a second), after which PostgreSQL ends an
# autovacuum that is in the way.
_NEVER_FOR_LONG: Final = "SET LOCAL lock_timeout = '1500ms'"
# An index or a check of many jobs takes as long as it takes. By pg_settings, because not every version has all.
_NO_TIME_LIMITS: Final = """\
SELECT set_config(name, '0', {is_local}) FROM pg_settings
WHERE name IN
  ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')"""
_IN_SESSION: Final = _NO_TIME_LIMITS.format(is_local="false")
_IN_TRANSACTION: Final = _NO_TIME_LIMITS.format(is_local="true")
_SCRIPT_HEAD: Final = """\
-- jsworker's tables from {since} to {until}. Each part is a transaction of its own; indexes are built between them, beside
-- those who write. Run it statement by statement and stop at the first error: psql -v ON_ERROR_STOP=1 -f FILE
"""
_MUST_BE_AT: Final = """\
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM jsworker.alembic_version WHERE version_num = '{revision}') THEN
    RAISE 'the database must be at migration {revision} for this part';
  END IF;
END $$;"""
"""Who runs the script may not stop at the first error: then nothing after it is applied either."""


def upgrade_database(
    dsn: str, revision: str = "head", *, tell: Callable[[str], None] = lambda _: None
) -> str | None:
    """Migrate a database and return the revision reached.

    Workers go on meanwhile: each migration is a transaction of its own, and waits in short turns for a table
    that another open transaction has locked. Migrations completed before an error stay.

    While another upgrade migrates or builds indexes, this waits, however long that takes; ``tell`` is first called
    with a line for people, once with each.

    Raises:
        DatabaseUnavailable: no answer, or the login was refused.
        DatabaseRefused: the role may not do this, the database's encoding is not UTF8, the database is at a
            revision that this version does not know, or a transaction held a table, or delayed the build of
            an index, for a minute.
    """
    turns = Retrying(
        retry=retry_if_exception(_is_locked),
        stop=stop_after_delay(_LONGEST_WAIT_SECONDS),
        wait=wait_fixed(1.0),
        reraise=True,
    )
    tell = cache(tell)  # not again for each migration
    build = partial(_build_indexes, revision=revision, tell=tell)
    upgrade = partial(_upgrade_by_one, revision=revision, tell=tell)
    done = False
    reached: str | None = None
    while not done:
        turns(_migrating, dsn, build, in_transaction=False)
        reached, done = turns(_migrating, dsn, upgrade)
    return reached


def current_revision(dsn: str) -> str | None:
    """Return the revision at which a database is; None when it was never migrated."""
    return _migrating(dsn, _current)


def upgrade_script(since: str = "base") -> str:
    """Return the SQL that migrates a database from a revision to this version's; ``base``: from nothing.

    No database is asked: the script builds an existing index anew, and rows that break a new rule stop it.

    Raises ValueError for a revision that this version does not know.
    """
    written = io.StringIO()
    config = _config(None, output_buffer=written)
    scripts = ScriptDirectory.from_config(config)
    try:
        steps = list(scripts.iterate_revisions("head", since))[::-1]
    except (CommandError, RevisionError):
        raise ValueError(f"revision {since} is none of this version's: {', '.join(REVISIONS)}") from None
    written.write(_SCRIPT_HEAD.format(since="nothing" if since == "base" else since, until=REVISIONS[-1]))
    if steps:
        written.write(f"\n{_IN_SESSION};\n")
    for step in steps:
        written.write(f"\n-- {step.revision}: {' '.join(step.doc.split())}\n\n")
        for name, build in getattr(step.module, "CONCURRENTLY", {}).items():
            written.write(f"{step.module.DROP_CONCURRENTLY[name]};\n\n{build};\n\n")
        config.attributes["step"] = step
        command.upgrade(config, f"{step.down_revision or 'base'}:{step.revision}", sql=True)
    return written.getvalue()


def run_migrations(context: "EnvironmentContext") -> None:
    """Run what alembic asks for; alembic's own command uses the database of JSWORKER_DATABASE_URL.

    Raises CommandError for a downgrade: no migration has one.
    """
    if context.is_offline_mode():
        _write_step(context, context.config.attributes.get("step"))
        return
    connection: Connection | None = context.config.attributes.get("connection")
    if connection is not None:
        _migrate(context, connection)
        return
    dsn = os.environ.get("JSWORKER_DATABASE_URL")
    if not dsn:
        raise SettingsError("JSWORKER_DATABASE_URL must be set")
    with _engine(driver_url(dsn)).begin() as opened:
        _begin(opened)
        _migrate(context, opened)


def _engine(url: URL) -> Engine:
    arguments = arguments_of(url)
    engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=arguments)
    begin_sessions(engine)
    return engine


def _is_locked(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) in (_LOCK_NOT_AVAILABLE, _DEADLOCK)


def _holders(engine: Engine, *, of_a_build: bool) -> str:
    def look() -> list[Row[Any]]:
        with engine.connect() as connection:
            return list(connection.execute(_HOLDERS, {"of_a_build": of_a_build}))

    found = [row for row in look() if row.seconds is None or row.seconds >= _HELD_SECONDS]
    if any(row.seconds is None for row in found):
        time.sleep(_HELD_SECONDS)
        again = {(row.transaction, row.pid) for row in look()}
        found = [row for row in found if (row.transaction, row.pid) in again]
    named = list(dict.fromkeys(map(_named, found)))[:_NAMED]
    what = "the build of an index waits for" if of_a_build else "a table is held by"
    return (
        f"{what} {', '.join(named)}: end it, or try again later" if named else f"{what} somebody: try again"
    )


def _named(row: Row[Any]) -> str:
    what = f"prepared transaction {row.gid}" if row.pid is None else f"pid {row.pid}"
    age = "" if row.seconds is None else f", open for {row.seconds:.0f} s"
    return printable(f"{what} of role {row.role}{age}", 200)


def _migrating(dsn: str, call: Callable[[Connection], T], *, in_transaction: bool = True) -> T:
    """Return what ``call`` returns for a connection in one transaction, or in autocommit mode."""
    url = driver_url(dsn)
    engine = _engine(url)
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
        if getattr(mapped, "sqlstate", None) == _DUPLICATE_TABLE:
            raise DatabaseRefused(
                f"{mapped}: by jsworker.alembic_version, no migration has made it"
            ) from None
        if not _is_locked(mapped):
            raise _of_a_function(error, mapped, place) from None
        holders = _holders(engine, of_a_build=not in_transaction)
        refused = DatabaseRefused(f"PostgreSQL at {place} cannot be migrated: {holders}")
        refused.sqlstate = _LOCK_NOT_AVAILABLE
        raise refused from None


def _of_a_function(error: DBAPIError | psycopg.Error, mapped: JsworkerError, place: str) -> JsworkerError:
    """Return the error of a trigger's function by its name, or the error as it was mapped.

    Its text may hold the content of a row; PostgreSQL's log has it.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    context = cause.diag.context if isinstance(cause, psycopg.Error) else None
    named = _FUNCTION.search(context or "")
    if named is None or not isinstance(mapped, RowRefused):
        return mapped
    refused = DatabaseRefused(
        f"PostgreSQL at {place} cannot be migrated: function {printable(named[0], 200)} of a trigger or an event "
        f"trigger refused it (SQLSTATE {mapped.sqlstate}); PostgreSQL's log has its reason"
    )
    refused.sqlstate = mapped.sqlstate
    return refused


def _upgrade_by_one(
    connection: Connection, revision: str, tell: Callable[[str], None]
) -> tuple[str | None, bool]:
    """Migrate one revision up, in the connection's transaction; return the revision and whether that is all.

    While a migration is still to be done: if the previous one has left work for afterwards, this does only
    that work; if indexes must be built first, it does nothing.
    """
    _begin(connection, tell)
    ahead, behind = _ways(connection, revision)
    current = _current(connection)
    if current is not None and current not in REVISIONS:
        raise DatabaseRefused(
            f"the database is at migration {current}, which is newer than this version's own {REVISIONS[-1]}:"
            " it is left as it is"
        )
    if ahead and (_ended_the_last(connection, behind) or _to_build(connection, revision)):
        return _current(connection), False
    command.upgrade(_config(connection), ahead[-1].revision if ahead else revision)
    return _current(connection), len(ahead) <= 1


def _build_indexes(connection: Connection, revision: str, tell: Callable[[str], None]) -> None:
    """Build the indexes of the next migration up to ``revision`` while others write, if there are many jobs.

    When no migration is left, those of all migrations that are missing or invalid are built anew. One upgrade builds at
    a time, others wait. The connection is in autocommit mode: an index whose build fails is built anew the next time.
    After an error the caller closes the connection, which gives the lock back.
    """
    lock = {"key": _ONE_BUILDER_AT_A_TIME}
    while _to_build(connection, revision):
        # Tried again and again: a statement that waits for the lock would hold a snapshot, and the build of
        # the other upgrade waits for the end of all snapshots.
        if not connection.execute(text("SELECT pg_try_advisory_lock(:key)"), lock).scalar():
            tell("waiting for another upgrade, which builds indexes")
            time.sleep(_LOOK_AGAIN_SECONDS)
            continue
        connection.execute(text(_IN_SESSION))
        # The build waits for every transaction under way, but no statement waits for the build.
        connection.execute(_LOCK_TIMEOUT, {"limit": f"{_LONGEST_WAIT_SECONDS:g}s"})
        for drop, build in _to_build(connection, revision):
            connection.exec_driver_sql(drop)
            connection.exec_driver_sql(build)
        connection.execute(text("RESET lock_timeout"))
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), lock)


def _current(connection: Connection) -> str | None:
    options = {"version_table_schema": SCHEMA}
    heads = MigrationContext.configure(connection, opts=options).get_current_heads()
    if len(heads) > 1:
        raise CommandError(f"table alembic_version must have one row, not {len(heads)}: {', '.join(heads)}")
    return heads[0] if heads else None


def _migrate(context: "EnvironmentContext", connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=_ours,
    )
    if context.get_context().opts["fn"].__name__ == "downgrade":
        raise CommandError(
            "schema jsworker has no downgrade: leave it as it is, workers of the previous version run on it"
        )
    connection.execute(CreateSchema(SCHEMA, if_not_exists=True))
    with context.begin_transaction():
        context.run_migrations()


def _write_step(context: "EnvironmentContext", step: Script | None) -> None:
    if step is None:
        raise CommandError(
            "alembic's --sql leaves out what belongs between the migrations: run `jsworker db sql`"
        )
    context.configure(
        dialect_name="postgresql", dialect_opts={"paramstyle": "named"}, version_table_schema=SCHEMA
    )
    migration = context.get_context()
    written = _WrittenStatements(migration.impl.static_output, getattr(step.module, "IS_VALID", None))
    migration.connection.exec_driver_sql = written.exec_driver_sql  # type: ignore[union-attr,method-assign] # alembic's own stands in for a connection and lacks this
    with context.begin_transaction():
        for statement in (_LOCK, _NEVER_FOR_LONG, "CREATE SCHEMA IF NOT EXISTS jsworker"):
            migration.impl.static_output(f"{statement};")
        if step.down_revision is not None:
            migration.impl.static_output(_MUST_BE_AT.format(revision=step.down_revision))
        context.run_migrations()


class _WrittenStatements:
    """Stands in for the connection of a migration that is written as SQL; it answers without a database."""

    def __init__(self, write: Callable[[str], None], is_valid: str | None) -> None:
        self._write = write
        self._is_valid = is_valid

    def exec_driver_sql(self, statement: str, _parameters: object = None) -> "Result[Any]":
        """Write a statement; answer a query as if the indexes were there and nothing were in the way."""
        if not statement.lstrip().startswith("SELECT"):
            self._write(f"{statement.strip().replace('%%', '%')};")
        rows = [(True,)] if statement == self._is_valid else []
        return IteratorResult(SimpleResultMetaData(["answer"]), iter(rows))


def _ways(connection: Connection, revision: str) -> tuple[list[Script], list[Script]]:
    """Return the migrations up to ``revision``, the next one last, and those done, the last one first."""
    scripts = _scripts()
    current = _current(connection) or "base"
    try:
        behind = list(scripts.iterate_revisions(current, "base"))
        return list(scripts.iterate_revisions(revision, current)), behind
    except RevisionError:
        return [], []  # a revision of a newer version, or one that the upgrade itself refuses


@cache
def _scripts() -> ScriptDirectory:
    """Return the migrations, loaded once, because each step of an upgrade needs them several times."""
    return ScriptDirectory.from_config(_config(None))


def _to_build(connection: Connection, revision: str) -> list[tuple[str, str]]:
    """Return the statements that drop and build each missing index that no transaction should build."""
    ahead, behind = _ways(connection, revision)
    statements: list[tuple[str, str]] = []
    for module in [script.module for script in ahead[-1:] or behind]:
        indexes: Mapping[str, str] = getattr(module, "CONCURRENTLY", {})
        missing = [
            name for name in indexes if not connection.exec_driver_sql(module.IS_VALID, (name,)).scalar()
        ]
        if missing and not (ahead and not connection.exec_driver_sql(module.ARE_MANY).scalar()):
            statements += [(module.DROP_CONCURRENTLY[name], indexes[name]) for name in missing]
    return statements


def _ended_the_last(connection: Connection, behind: list[Script]) -> bool:
    """Do what the last migration has left to be done afterwards; return whether there was anything."""
    afterwards = getattr(behind[0].module, "afterwards", None) if behind else None
    return afterwards is not None and afterwards(connection)


def _ours(name: str | None, kind: str, __parents: Any) -> bool:
    if kind == "schema":
        return name == SCHEMA
    return not (kind == "table" and name == "alembic_version")


def _begin(connection: Connection, tell: Callable[[str], None] = lambda _: None) -> None:
    """Refuse a database that jsworker cannot work with, then wait for other migrations to end."""
    session = connection.execute(SESSION).one()
    check_session(session._asdict(), place_of(connection.engine.url))
    connection.execute(text(_IN_TRANSACTION))
    if not connection.execute(text(_TRY_LOCK)).scalar():
        tell(f"waiting for another migration, which holds the advisory lock {_ONE_MIGRATION_AT_A_TIME}")
        connection.execute(text(_LOCK))
    connection.execute(text(_NEVER_FOR_LONG))


def _config(connection: Connection | None, **options: Any) -> Config:
    package = Path(__file__).resolve().parent.parent
    installed = package / "alembic.ini"
    config = Config(installed if installed.is_file() else package.parent / "alembic.ini", **options)
    config.attributes["connection"] = connection
    return config
