"""The connection to PostgreSQL: one statement per transaction, with a deadline; and which database it is."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

from sqlalchemy import TextClause, text
from sqlalchemy.engine import URL

from jsworker.core.errors import DatabaseRefused, DatabaseTimeout, MigrationMissing, SettingsError
from jsworker.ownership.pool import (
    DRIVER_ERRORS,
    Parameters,
    Pool,
    Row,
    Transaction,
    arguments_of,
    driver_url,
)
from jsworker.ownership.refusals import CONFLICTS, map_error
from jsworker.ownership.session_settings import SESSION, check_session

T = TypeVar("T")

REVISIONS: Final = (
    *("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0013", "0014"),
    *("0015", "0016", "0017", "0018", "0019", "0020", "0021", "0022", "0023", "0024", "0025", "0026"),
)
"""The migrations that this version knows, in their order; a test compares them with the scripts."""

OLDEST_REVISION: Final = "0024"
"""The first migration that this version works on, the newest one of the previous minor version."""

_REVISION = text("SELECT version_num FROM jsworker.alembic_version")
_PING = text("SELECT 1")
# Not pg_control_checkpoint(): after a promotion it shows the old timeline until the next checkpoint has ended.
# The name of the WAL file that is being written begins with the timeline's eight hexadecimal digits; a standby
# writes none.
HISTORY = text("""
SELECT CAST((SELECT system_identifier FROM pg_control_system()) AS text) AS system_identifier,
  CASE WHEN pg_is_in_recovery() THEN NULL ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END AS timeline
""")

_HIDDEN = text("""
SELECT c.relname FROM pg_class AS c
WHERE c.relnamespace = to_regnamespace('jsworker') AND c.relrowsecurity AND row_security_active(c.oid)
  AND NOT EXISTS (SELECT FROM pg_policy AS p WHERE p.polrelid = c.oid)
ORDER BY c.relname
""")
# The state of standbys is hidden from most logins, but there is a row for each.
_WAITS_FOR_STANDBY = text("""
SELECT current_setting('synchronous_standby_names') <> ''
  AND current_setting('synchronous_commit') NOT IN ('off', 'local') AND NOT pg_is_in_recovery()
  AND (NOT EXISTS (SELECT FROM pg_stat_replication WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum'))
    OR EXISTS (SELECT FROM pg_stat_activity
               WHERE wait_event = 'SyncRep' AND clock_timestamp() - query_start > interval '1 s')) AS waits
""")
_NO_SUCH_TABLE = frozenset({"42P01", "3F000"})
_CONFLICT_TRIES = 5
_END_AFTER = 2
"""Times its deadline, after which PostgreSQL itself ends a transaction of several statements."""
_BLOCKED_SECONDS = 1.0
"""Seconds after a deadline at which the event loop sees it, from which on the loop counts as blocked."""
_BYTES_A_SECOND = 1_000_000
"""The least throughput expected of a connection; halved for each earlier try of a statement."""
_MOST_DOUBLINGS = 6
_LEARNT_DOUBLINGS = 4
"""That the time-outs of earlier statements cause. This expects half of 1 Mbit/s, as of two statements at once on such a
line, and lets PostgreSQL's silence hold back a caller with a megabyte for 20 s; with more it would be minutes."""
_LARGE_BYTES = 65_536
"""The time of a statement with fewer bytes tells nothing about the line."""
READ_ONLY = text("""
SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', :read_milliseconds, true),
  set_config('enable_sort', :read_sort, true), set_config('jit', 'off', true)
""")
"""Makes the transaction that it is sent with read-only and limits the time of its statements."""
READ_ONLY_AS = text(f"""
{READ_ONLY.text}, set_config('role', CASE WHEN CAST(quote_ident(:read_role) AS regrole) IS NOT NULL THEN :read_role END, true)
""")
"""The same, with the rights of a role; the cast refuses one that does not exist by its name, not as a wrong value."""
_LATER_SECONDS = 1.0
"""A reader waits this much longer than the server's own time-out."""


class Database:
    """Pools on one database: statements, those that find rows by key, and heartbeats on a connection of their own.

    Every statement is a transaction by itself (autocommit, READ COMMITTED) and keeps no session state,
    so it works through PgBouncer in transaction mode.

    Attributes:
        url: for SQLAlchemy engines; its ``repr`` hides the password.
        place: where the database is, for messages: ``host:port/name``.
        revision: of its schema, as ``migrated_to`` found it last; None: not asked yet, or there is none.
    """

    revision: str | None = None

    def __init__(
        self,
        dsn: str | Callable[[], str],
        *,
        statement_timeout: float,
        pool_size: int = 5,
        owner: str = "connection",
    ) -> None:
        """Prepare the pools; nothing connects yet.

        ``dsn``: a function is called for each new connection; what it returns may have another password by then.
        ``statement_timeout`` is the seconds until a statement is given up; after ``close`` every statement raises
        RuntimeError, which says that the ``owner`` is closed.
        """
        self._dsn = dsn if callable(dsn) else lambda: dsn
        self.url = driver_url(self._dsn())
        self.place = place_of(self.url)
        self._statement_timeout = statement_timeout
        pool = partial(Pool, self.arguments, owner=owner)
        self._statements = pool(size=pool_size, overflow=pool_size)
        self._by_key = pool(size=pool_size, overflow=pool_size, keeps_plans=True)
        self._heartbeats = pool(size=1, overflow=2, keeps_plans=True)
        self._given_up: set[asyncio.Task[object]] = set()
        self._doublings = 0

    def seconds_for(self, size: int, *, tries: int = 0) -> float:
        """Return the seconds for a statement that sends or reads ``size`` bytes; each try doubles their part.

        So does each other large statement that is given up, until one is fast enough for less time.
        """
        doublings = max(self._doublings, min(tries, _MOST_DOUBLINGS))
        return self._statement_timeout + _seconds_of(size, doublings)

    def wait_at_least(self, seconds: float) -> None:
        """Give up statements after ``seconds`` at the earliest."""
        self._statement_timeout = max(self._statement_timeout, seconds)

    def arguments(self) -> dict[str, Any]:
        """Return the driver's arguments for a new connection.

        Raises OSError for a file that cannot be read, or a URL that cannot be used any more: it may be put right.
        """
        try:
            return arguments_of(driver_url(self._dsn()), statement_timeout=self._statement_timeout)
        except SettingsError as error:
            raise OSError(str(error)) from None

    def pools_by_name(self) -> dict[str, Pool]:
        """Return the pools by name, for inspection."""
        return {"statements": self._statements, "by_key": self._by_key, "heartbeats": self._heartbeats}

    def for_reading(self, *, seconds: float, role: str | None = None) -> "Reads":
        """Return this database for reads alone, on the same connections; with the rights of a role, if one is given."""
        return Reads(self, seconds, role)

    async def run(
        self,
        statement: TextClause,
        parameters: Parameters | None = None,
        *,
        seconds: float | None = None,
        size: int = 0,
        waits: bool = False,
    ) -> Sequence[Row]:
        """Run one statement as one transaction and return its rows, within ``seconds`` or ``seconds_for(size)``.

        ``size`` is about how many bytes it sends; their time tells what to expect of the line. With ``waits`` the
        statement may wait for a transaction of the application; such statements leave some connections to others.

        Raises:
            DatabaseUnavailable: no answer in time, or no connection. The statement
                may have been executed or not, and may even be executed later.
            RowRefused: the content of a row was refused; nothing was written.
            DatabaseRefused: anything else that PostgreSQL refused.
        """
        run = partial(self._statements.execute, statement, parameters, waits=waits)
        return await self._execute(run, seconds, size)

    async def run_along_index(
        self, statement: TextClause, parameters: Parameters, *, seconds: float | None = None
    ) -> Sequence[Row]:
        """Run, like ``run``, a statement that reads the first few of many rows in the order of an index."""
        run = partial(self._statements.execute, statement, parameters, along_index=True)
        return await self._execute(run, seconds)

    async def run_by_key(
        self,
        statement: TextClause,
        parameters: Parameters,
        *,
        seconds: float | None = None,
        size: int = 0,
        first: TextClause | None = None,
        waits: bool = False,
    ) -> Sequence[Row]:
        """Run, as ``run`` does, a frequent statement that finds rows by key or inserts few rows.

        The connection keeps the statement's plan; the rows are plain tuples.

        ``first`` is a statement with the same parameters that comes before it in the same transaction.
        """
        end_after = None if first is None else _END_AFTER * (seconds or self.seconds_for(size))
        run = partial(self._by_key.execute, plain=True, first=first, end_after=end_after, waits=waits)
        return await self._execute(partial(run, statement, parameters), seconds, size)

    async def copy_in(self, statement: TextClause, lines: str) -> None:
        """Send a COPY … FROM STDIN its lines; as one transaction, with the errors of ``run``."""
        await self.call(lambda: self._statements.copy_in(statement, lines), size=len(lines))

    async def in_transaction(
        self,
        write: Callable[[Transaction], Coroutine[Any, Any, T]],
        *,
        seconds: float | None = None,
        size: int = 0,
    ) -> T:
        """Call ``write`` in one transaction and return its result; with the errors of ``run``.

        ``write`` is called again after a conflict such as a deadlock.
        """
        end_after = _END_AFTER * (seconds or self.seconds_for(size))

        async def call() -> T:
            async with self._statements.transaction(end_after=end_after) as opened:
                return await write(opened)

        return await self._execute(call, seconds, size)

    async def run_heartbeat(
        self, statement: TextClause, parameters: Parameters | None = None
    ) -> Sequence[Row]:
        """Run as ``run``, on the connection kept for heartbeats."""
        return await self._execute(partial(self._heartbeats.execute, statement, parameters))

    async def ping(self) -> None:
        """Ask for a sign of life, on the connection kept for heartbeats."""
        await self.run_heartbeat(_PING)

    async def call(
        self, call: Callable[[], Coroutine[Any, Any, T]], seconds: float | None = None, size: int = 0
    ) -> T:
        """Return the result of a call of the driver, within a deadline; with the errors of ``run``."""
        seconds = self.seconds_for(size) if seconds is None else seconds
        # A task of its own: when the deadline strikes, the driver may need seconds more to cancel on the
        # server; the caller must not wait for that.
        task: asyncio.Task[T] = asyncio.create_task(call())
        loop = asyncio.get_running_loop()
        due_at = loop.time() + seconds
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done and loop.time() - due_at > _BLOCKED_SECONDS:
                # The loop was blocked: an answer may be here, unread, or the statement has not been sent yet.
                done, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if not done:
            self._give_up(task)
            late = f"PostgreSQL at {self.place} did not answer within {round(seconds, 3):g} s"
            if size > _LARGE_BYTES:
                # Not twice for two that were under way at once.
                if seconds >= self.seconds_for(size):
                    self._doublings = min(self._doublings + 1, _LEARNT_DOUBLINGS)
                late += f" to a statement of {size} bytes, for which the line may be too slow"
            raise DatabaseTimeout(late)
        try:
            result = task.result()
        except DRIVER_ERRORS as error:
            raise map_error(error, self.place) from None
        took = loop.time() - due_at + seconds
        if self._doublings and size > _LARGE_BYTES and took < _seconds_of(size, self._doublings - 1):
            self._doublings -= 1
        return result

    async def end_given_up(self) -> None:
        """Wait until statements that were given up have ended, and their locks with them; then ask for a sign of life."""
        if self._given_up:
            await asyncio.wait(set(self._given_up), timeout=self._statement_timeout)
        await self.ping()

    async def migrated_to(self) -> str | None:
        """Return the schema's revision, None when there is none."""
        try:
            rows = await self.run(_REVISION)
        except DatabaseRefused as error:
            if error.sqlstate not in _NO_SUCH_TABLE:
                raise
            rows = ()
        self.revision = rows[0].version_num if rows else None
        return self.revision

    async def hidden_tables(self) -> list[str]:
        """Return the names of tables whose rows PostgreSQL's row-level security hides from this login, all of them."""
        return [row.relname for row in await self.run(_HIDDEN)]

    async def waits_for_standby(self) -> bool:
        """Return whether commits are not answered because a synchronous standby is missing or late."""
        [row] = await self.run(_WAITS_FOR_STANDBY)
        return bool(row.waits)

    async def check_usable(self) -> str:
        """Refuse a database that this version cannot work with: as ``check_session`` and ``check_level``."""
        [session] = await self.run(SESSION)
        check_session(session._asdict(), self.place)
        return check_level(await self.migrated_to())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def open(self) -> None:
        """Take statements again after ``close``, also in another event loop."""
        for pool in self.pools_by_name().values():
            pool.open()

    async def close(self) -> None:
        """Close every connection, also those of statements that were given up."""
        while self._given_up:  # a cancel ends only the driver's current wait; it may wait again
            for task in self._given_up:
                task.cancel()
            await asyncio.wait(self._given_up, timeout=0.1)
        for pool in (self._heartbeats, self._by_key, self._statements):
            await pool.close()

    async def _execute(
        self, call: Callable[[], Coroutine[Any, Any, T]], seconds: float | None = None, size: int = 0
    ) -> T:
        for _ in range(_CONFLICT_TRIES - 1):
            try:
                return await self.call(call, seconds, size)
            except DatabaseRefused as error:
                if error.sqlstate not in CONFLICTS:
                    raise
        return await self.call(call, seconds, size)

    def _give_up(self, task: asyncio.Task[object]) -> None:
        task.cancel()
        self._given_up.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never retrieved


class MostRows:
    """The ``most`` rows that a statement may write: halved after each one that took too long, down to one."""

    def __init__(self, database: Database, most: int) -> None:
        self._database = database
        self.most = most

    async def write(self, write: Callable[[int], Awaitable[T]]) -> T:
        """Call ``write`` with ``most`` until it is in time, and return its result.

        Raises:
            DatabaseUnavailable: the database does not answer at all, or one row alone takes too long.
        """
        while True:
            try:
                return await write(self.most)
            except DatabaseTimeout:
                if self.most == 1:
                    raise
            self.most //= 2
            await self._database.end_given_up()  # their locked rows would be passed over


class Reads(Database):
    """A database whose ``run`` and ``run_along_index`` cannot write; the pools belong to another.

    Closing the database that it was made from closes it. Each statement of these methods is a read-only
    transaction, and the server ends it after ``seconds``.
    """

    def __init__(self, database: Database, seconds: float, role: str | None) -> None:
        self.__dict__.update(database.__dict__)
        self._first = READ_ONLY if role is None else READ_ONLY_AS
        self._statement_timeout = seconds + _LATER_SECONDS
        self._read = {"read_milliseconds": f"{seconds * 1000:.0f}"} | (
            {} if role is None else {"read_role": role}
        )

    async def run(
        self,
        statement: TextClause,
        parameters: Parameters | None = None,
        *,
        seconds: float | None = None,
        size: int = 0,  # noqa: ARG002 -- reads send little
        waits: bool = False,  # noqa: ARG002 -- and wait for no producer
    ) -> Sequence[Row]:
        """Run one reading statement; see ``Database.run``."""
        return await self._execute(self._reading(statement, parameters, read_sort="on"), seconds)

    async def run_along_index(
        self, statement: TextClause, parameters: Parameters, *, seconds: float | None = None
    ) -> Sequence[Row]:
        """Run one reading statement; see ``Database.run_along_index``."""
        return await self._execute(self._reading(statement, parameters, read_sort="off"), seconds)

    async def ping(self) -> None:
        """Ask for a sign of life, with the rights of the role; with the errors of ``run``."""
        await self.run(_PING)

    def _reading(self, statement: TextClause, parameters: Parameters | None, **read: str) -> Any:
        values = {**(parameters or {}), **self._read, **read}
        return partial(self._statements.execute, statement, values, first=self._first)


def _seconds_of(size: int, doublings: int) -> float:
    return size * (1 << doublings) / _BYTES_A_SECOND


def place_of(url: URL) -> str:
    """Return where a database is, for messages: ``host:port/name``."""
    hosts = url.query.get("host", ())
    listed = [hosts] if isinstance(hosts, str) else hosts
    host = f"[{url.host}]" if ":" in (url.host or "") else url.host or "local socket"
    place = ",".join(listed) or f"{host}:{url.port or 5432}"
    return f"{place}/{url.database or ''}"


def check_level(found: str | None) -> str:
    """Refuse a database that this version cannot work with, and return its revision.

    Both orders of a rolling upgrade work. A revision that this version does not know is newer: workers of the
    old version go on, because migrations only add. One from ``OLDEST_REVISION`` on is that of the previous
    version: statements leave out what later migrations add.

    Raises:
        MigrationMissing: never migrated, or migrated to an older revision than this version needs.
    """
    if found is None:
        raise MigrationMissing(f"the database has no jsworker schema: run `{MigrationMissing.command}`")
    if found in REVISIONS and REVISIONS.index(found) < REVISIONS.index(OLDEST_REVISION):
        raise MigrationMissing(
            f"the database is at migration {found}, this version needs {OLDEST_REVISION} or later:"
            f" run `{MigrationMissing.command}`"
        )
    return found


def upgrade_advice(found: str | None) -> str | None:
    """Return the advice to upgrade a database that works with this version but is older, or None."""
    if found not in REVISIONS[REVISIONS.index(OLDEST_REVISION) : -1]:
        return None
    return (
        f"the database is at migration {found}, older than this version's own, {REVISIONS[-1]}:"
        f" workers run without its new features until `{MigrationMissing.command}`"
    )


@dataclass(frozen=True, slots=True)
class DatabaseHistory:
    """What distinguishes one history of a database from another.

    Copies of a cluster keep its identifier; the timeline rises with every promotion, None on a standby.
    """

    system_identifier: str
    timeline: int | None


async def read_history(database: Database) -> DatabaseHistory:
    """Return the database's history; any role may ask, unless an administrator forbids it."""
    [row] = await database.run(HISTORY)
    timeline = None if row.timeline is None else int(row.timeline, 16)
    return DatabaseHistory(row.system_identifier, timeline)
