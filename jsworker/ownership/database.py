"""The connection to PostgreSQL: pools, one statement per transaction, deadlines, errors without row contents."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Executable, Row, TextClause, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from jsworker.errors import DatabaseRefused, DatabaseUnavailable, JsworkerError
from jsworker.ownership.level import check_level

T = TypeVar("T")
Parameters = Mapping[str, Any]

_REVISION = text("SELECT version_num FROM jsworker.alembic_version")
_NO_SUCH_TABLE = frozenset({"42P01", "3F000"})

_CONNECT_TIMEOUT_SECONDS = 5
_CONFLICT_TRIES = 5
_COMES_BACK = (
    "starting up",
    "shutting down",
    "recovery mode",
    "accepting connections",
    "terminating connection",
    "too many",
    "connection slots",
    "no more connections",
)
"""In libpq's words (the last: PgBouncer's): refusals at the door that end by themselves."""
_READ_ONLY = "25006"
"""A failover left the connection on a standby."""
_NOT_TEXT = "22021"
"""What PostgreSQL says to bytes that are no text; the driver refuses most of them before they are sent."""


class RowRefused(JsworkerError):
    """A row's own content was refused (SQLSTATE 22xxx, 23xxx)."""

    def __init__(self, sqlstate: str, constraint: str | None) -> None:
        self.sqlstate = sqlstate
        self.constraint = constraint
        super().__init__(
            f"PostgreSQL refused a row: SQLSTATE {sqlstate}" + (f", {constraint}" * bool(constraint))
        )


class Database:
    """Two pools on one database: statements, and heartbeats on a connection of their own.

    Every statement is a transaction by itself (autocommit, READ COMMITTED) and keeps no session state,
    so it works through PgBouncer in transaction mode.
    """

    def __init__(self, dsn: str, *, statement_timeout: float, pool_size: int = 5) -> None:
        """Prepare the pools; nothing connects yet.

        Args:
            dsn: a PostgreSQL URL, password included.
            statement_timeout: seconds until a statement is given up and its connection dropped.
            pool_size: connections for statements.
        """
        self._url = driver_url(dsn)
        self._statement_timeout = statement_timeout
        self._statements = _engine(self._url, pool_size=pool_size, overflow=pool_size, wait=statement_timeout)
        self._heartbeats = _engine(self._url, pool_size=1, overflow=2, wait=statement_timeout)
        self._given_up: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> URL:
        """The database's URL for SQLAlchemy engines; its ``repr`` hides the password."""
        return self._url

    @property
    def place(self) -> str:
        """Where the database is, for messages: ``host:port/name``."""
        return place_of(self._url)

    async def run(self, statement: TextClause, parameters: Parameters | None = None) -> Sequence[Row[Any]]:
        """Run one statement as one transaction and return its rows.

        Raises:
            DatabaseUnavailable: no answer within the statement time-out, or no connection. The statement
                may have been executed or not, and may even be executed later.
            RowRefused: the content of a row was refused; nothing was written.
            DatabaseRefused: anything else that PostgreSQL refused.
        """
        return await self._within_deadline(self._statements, statement, parameters)

    async def run_heartbeat(
        self, statement: TextClause, parameters: Parameters | None = None
    ) -> Sequence[Row[Any]]:
        """Run one statement like ``run``, on the connection kept for heartbeats."""
        return await self._within_deadline(self._heartbeats, statement, parameters)

    async def migrated_to(self) -> str | None:
        """Return the schema's revision, None when there is none."""
        try:
            rows = await self.run(_REVISION)
        except DatabaseRefused as error:
            if getattr(error, "sqlstate", None) in _NO_SUCH_TABLE:
                return None
            raise
        return str(rows[0].version_num) if rows else None

    async def check_migrated(self) -> None:
        """Refuse a database whose schema this version cannot work with.

        Raises:
            MigrationMissing: run ``jsworker db upgrade``.
            DatabaseUnavailable: no answer.
        """
        check_level(await self.migrated_to())

    async def close(self) -> None:
        """Close every connection, also those of statements that were given up."""
        while self._given_up:  # each cancel ends only what the driver is waiting for just then
            for task in self._given_up:
                task.cancel()
            await asyncio.wait(self._given_up, timeout=0.1)
        await self._heartbeats.dispose()
        await self._statements.dispose()

    async def _within_deadline(
        self, engine: AsyncEngine, statement: TextClause, parameters: Parameters | None
    ) -> Sequence[Row[Any]]:
        for last in (False,) * (_CONFLICT_TRIES - 1) + (True,):
            try:
                return await self._call(lambda: _execute(engine, statement, parameters))
            except DatabaseRefused as error:
                if last or getattr(error, "sqlstate", None) not in {"40001", "40P01"}:
                    raise
        raise AssertionError

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        # A task of its own: when the deadline strikes, the driver may need seconds more to cancel on the
        # server; the caller must not wait for that.
        task: asyncio.Task[T] = asyncio.ensure_future(_awaited(call))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._statement_timeout)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if not done:
            self._give_up(task)
            raise DatabaseUnavailable(
                f"PostgreSQL at {self.place} did not answer within {self._statement_timeout:g} s"
            )
        try:
            return task.result()
        except (SQLAlchemyError, psycopg.Error, OSError, UnicodeError) as error:
            raise self._mapped(error) from None

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._given_up.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()

    def _mapped(self, error: Exception) -> JsworkerError:
        return map_error(error, self.place)


def map_error(error: Exception, place: str) -> JsworkerError:
    """Return jsworker's error for a driver's: SQLSTATE and constraint, never the row (its DETAIL holds payloads)."""
    if isinstance(error, (PoolTimeoutError, InvalidRequestError)):
        return DatabaseUnavailable(
            f"no free connection to PostgreSQL at {place} within the statement time-out"
        )
    cause = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    if sqlstate is None and isinstance(cause, (psycopg.DataError, UnicodeError)):
        return RowRefused(_NOT_TEXT, None)
    if sqlstate is None:
        return _unconnected(cause, place)
    if sqlstate[:2] in {"22", "23"}:
        diagnosis = cause.diag if isinstance(cause, psycopg.Error) else None
        return RowRefused(sqlstate, diagnosis.constraint_name if diagnosis else None)
    if sqlstate[:2] in {"08", "53", "57"} or sqlstate == _READ_ONLY:
        return DatabaseUnavailable(f"PostgreSQL at {place} is not available: SQLSTATE {sqlstate}")
    refused = DatabaseRefused(
        f"PostgreSQL at {place} refused a statement: {_primary(cause)} (SQLSTATE {sqlstate})"
    )
    refused.sqlstate = sqlstate
    return refused


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


async def _execute(
    engine: AsyncEngine, statement: Executable, parameters: Parameters | None
) -> Sequence[Row[Any]]:
    async with engine.connect() as connection:
        result = await connection.execute(statement, parameters)
        return result.all() if result.returns_rows else ()


def _engine(url: URL, *, pool_size: int, overflow: int, wait: float) -> AsyncEngine:
    return create_async_engine(
        url,
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,
        hide_parameters=True,
        pool_size=pool_size,
        max_overflow=overflow,
        pool_timeout=wait,
        pool_reset_on_return=None,
        connect_args=connect_arguments(),
    )


def connect_arguments() -> dict[str, Any]:
    """Return what every connection of jsworker asks of the driver."""
    # prepare_threshold None: prepared statements belong to a session, which a pooler may swap.
    return {
        "prepare_threshold": None,
        "connect_timeout": _CONNECT_TIMEOUT_SECONDS,
        "application_name": "jsworker",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }


def driver_url(dsn: str) -> URL:
    """Return a PostgreSQL URL for SQLAlchemy, with the driver in it."""
    return make_url(dsn).set(drivername="postgresql+psycopg")


def place_of(url: URL) -> str:
    """Return where a database is, for messages: ``host:port/name``."""
    return f"{url.host or 'local socket'}:{url.port or 5432}/{url.database or ''}"


def _unconnected(cause: BaseException | None, place: str) -> JsworkerError:
    said = str(cause) if cause is not None else "connection lost"
    for line in said.splitlines():
        _, fatal, reason = line.partition("FATAL:")
        if fatal and not any(word in reason for word in _COMES_BACK):
            return DatabaseRefused(f"PostgreSQL at {place} refused the login: {reason.strip()}")
    first = said.strip().splitlines()[0] if said.strip() else type(cause).__name__
    return DatabaseUnavailable(f"PostgreSQL at {place} is not available: {first[:200]}")


def _primary(cause: BaseException | None) -> str:
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return cause.diag.message_primary[:200]
    return "no reason given"
