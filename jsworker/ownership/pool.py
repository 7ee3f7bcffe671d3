"""Pools of connections to PostgreSQL, and one statement on one of them, straight through the driver.

A value that PostgreSQL can store and Python cannot hold (``infinity``, a year before Christ, a number of
5,000 digits) is read as PostgreSQL's text for it, so that a listing can show it and the rows beside it.
"""

import asyncio
import json
import logging
import math
import select
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import MAXYEAR, MINYEAR, UTC, datetime, tzinfo
from functools import lru_cache
from traceback import clear_frames
from typing import Any, Final, Self, SupportsIndex, TypeAlias, cast
from uuid import UUID

import psycopg
from psycopg.abc import Buffer, Loader
from psycopg.conninfo import make_conninfo, timeout_from_conninfo
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.pq import Format, PipelineStatus, TransactionStatus
from psycopg.rows import namedtuple_row, tuple_row
from psycopg.types.json import set_json_loads
from psycopg.types.numeric import FloatLoader
from sqlalchemy import TextClause, text
from sqlalchemy.dialects.postgresql import psycopg as dialect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from jsworker.core.errors import SettingsError
from jsworker.core.names import printable
from jsworker.core.own_sockets import own
from jsworker.core.settings.variables import shown_url, variable_of
from jsworker.ownership.session_settings import (
    BEGIN_OWN_SESSION,
    BEGIN_SESSION_THAT_KEEPS_PLANS,
    SESSION_SETTINGS,
)

Parameters: TypeAlias = Mapping[str, Any]
Connection: TypeAlias = psycopg.AsyncConnection[Any]
Row: TypeAlias = Any
"""A row that a statement returns: a named tuple, or a plain one if that was asked for."""

CONNECT_ARGUMENTS: Final[Parameters] = {
    "prepare_threshold": None,  # prepared statements belong to a session, which a pooler may swap
    "connect_timeout": 2,  # the driver's least; see ``arguments_of``
    "application_name": "jsworker",
    # Before the first statement: the driver returns bytes for text in SQL_ASCII. PgBouncer passes it on.
    "client_encoding": SESSION_SETTINGS["client_encoding"],
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""The driver's arguments for every connection of jsworker."""
ALONG_INDEX: Final = text("SELECT set_config('enable_sort', 'off', true), set_config('jit', 'off', true)")
"""For one transaction: the planner has no statistics of the partial indexes' predicates, and would
rather fetch and sort every row of a long queue than read the first few along the index. It adds so much to the cost
of a sort that is necessary that PostgreSQL would compile the statement, also in a pooler's session."""
END_AFTER: Final = text("SELECT set_config('transaction_timeout', :milliseconds, true)")
"""For one transaction that takes locks which others wait for, and then waits for its client, which may have been
stopped: PostgreSQL ends it. No other time-out does: between the statements of a pipeline a connection is active."""
_HAS_END_AFTER: Final = 170_000  # the version of PostgreSQL that has it
BY_INDEX: Final = text("SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)")
"""For the transaction that it is sent with. Without it MARK of a thousand ids read the whole table for each of
them, as long as the planner took the table for a short one."""
DRIVER_ERRORS: Final = (psycopg.Error, OSError, UnicodeError, NotImplementedError)
"""What the driver raises."""
_LONGEST_INTEGER: Final = 4_000
"""Digits; Python refuses to read more than 4,300."""
_SPARE_SECONDS: Final = 10.0
"""A connection of the overflow that was not used for so long is closed when the next one comes back."""
_LONGEST_LOGIN_SECONDS: Final = 5.0
"""More than seven round trips by way of a satellite, so many as a login with a password and TLS takes."""
_LATE_SECONDS: Final = 5.0
"""A connection may be made so long after its statement was given up."""
# It warns of each statement that was given up. Where logging is not configured, that would go to the user's stderr.
logging.getLogger("psycopg").addHandler(logging.NullHandler())
DIALECT: Final = dialect.dialect()  # type: ignore[no-untyped-call] # SQLAlchemy has not typed its dialects


class Pool:
    """Autocommit connections, lent for one statement each; the one that was used last comes first.

    SQLAlchemy's own pool would need three greenlets for each statement, and would leave a connection that was
    being made when its caller was cancelled to the garbage collector.

    Attributes:
        limit: connections that may be lent at once.
        in_use: connections that are lent now.
    """

    def __init__(
        self,
        arguments: Callable[[], Mapping[str, Any]],
        *,
        size: int,
        overflow: int,
        owner: str = "connection",
        keeps_plans: bool = False,
    ) -> None:
        """Prepare a pool of ``size`` connections that stay open, and ``overflow`` that are closed after a while.

        ``arguments`` returns the driver's arguments for each new connection. ``owner`` is what the error of a call after ``close`` names as closed.

        A pool with ``keeps_plans`` is for statements that find their rows by key: PostgreSQL plans them once
        for each connection and always by index, whatever it believes the size of the table to be. Behind a
        pooler, which may run every statement on another session, it plans each execution, also by index.
        """
        self.limit = size + overflow
        self.in_use = 0
        self._arguments = arguments
        self._keeps_plans = keeps_plans
        self._size = size
        self._owner = owner
        self._idle: list[tuple[Connection, float]] = []  # and when each came back
        self.open()

    def open(self) -> None:
        """Lend connections, after ``close`` again; the event loop may be another one then."""
        self._lendable = asyncio.Semaphore(self.limit)
        self._for_waiting = asyncio.Semaphore(self._size)
        self._closed = False

    async def execute(
        self,
        statement: TextClause,
        parameters: Parameters | None,
        *,
        plain: bool = False,
        along_index: bool = False,
        first: TextClause | None = None,
        end_after: float | None = None,
        waits: bool = False,
    ) -> Sequence[Row]:
        """Run one statement as one transaction and return its rows: named tuples, ``plain`` ones without names.

        With ``along_index`` the planner reads the rows in the order of an index rather than sort them. The
        statement ``first`` is executed before it in the same transaction, and sent together with it. PostgreSQL
        17 and later ends the transaction after ``end_after`` seconds if the statement has not come by then. With
        ``waits`` it may wait for a transaction of the application: such statements leave some connections to others.

        Raises:
            psycopg.Error, OSError, UnicodeError: as the driver raises them.
            RuntimeError: the pool is closed.
        """
        async with self._for_waiting if waits else nullcontext(), self._lend() as lent:
            cursor = lent.cursor(row_factory=tuple_row if plain else namedtuple_row)
            # A pooler's connection keeps no plans: each transaction sets the option.
            by_index = BY_INDEX if self._keeps_plans and lent.prepare_threshold is None else None
            in_order = ALONG_INDEX if along_index else None
            if before := [each for each in (by_index, in_order, first) if each is not None]:
                # The statements of a pipeline are one transaction, without BEGIN and COMMIT.
                async with lent.pipeline():
                    await _end_after(lent, end_after)
                    for each in before:
                        await lent.execute(_sql(each), parameters or {})
                    await cursor.execute(_sql(statement), parameters or {})
                return await cursor.fetchall() if _has_rows(cursor) else ()
            await cursor.execute(_sql(statement), parameters or {})
            return await cursor.fetchall() if _has_rows(cursor) else ()

    async def copy_in(self, statement: TextClause, lines: str) -> None:
        """Send a COPY … FROM STDIN its lines, in PostgreSQL's text format, as one transaction; errors as above."""
        async with self._lend() as lent, lent.cursor().copy(_sql(statement)) as copy:
            await copy.write(lines)

    @asynccontextmanager
    async def transaction(self, *, end_after: float) -> AsyncIterator["Transaction"]:
        """Begin a transaction of several statements, committed at the end of the block; errors as above."""
        async with self._lend() as lent, lent.transaction():
            await _end_after(lent, end_after)
            yield Transaction(lent)

    async def close(self) -> None:
        """Close every connection; one that is lent is closed when it comes back."""
        self._closed = True
        while self._idle:
            await self._idle.pop()[0].close()

    @asynccontextmanager
    async def _lend(self) -> AsyncIterator[Connection]:
        """Lend a connection; one that is not idle when it comes back is dropped.

        The next statement would get the rest of the previous answer. Dropped too is a connection whose server
        has become read only: another server may be the primary by now. One whose statement was given up is kept
        once PostgreSQL has said that it has ended: an overloaded server must not be asked for another as well.
        """
        async with self._lendable:
            if self._closed:
                raise RuntimeError(f"the {self._owner} is closed")
            lent = await self._idle_or_new()
            self.in_use += 1
            is_writable = True
            try:
                yield lent
            except ReadOnlySqlTransaction:
                is_writable = False
                raise
            finally:
                self.in_use -= 1
                await self._keep_or_close(lent, is_usable=is_writable and _is_idle(lent))

    async def _keep_or_close(self, connection: Connection, *, is_usable: bool = True) -> None:
        now = asyncio.get_running_loop().time()
        if is_usable and not self._closed:
            self._idle.append((connection, now))
        else:
            await connection.close()
        while len(self._idle) > self._size and self._idle[0][1] < now - _SPARE_SECONDS:
            await self._idle.pop(0)[0].close()

    async def _idle_or_new(self) -> Connection:
        while self._idle:
            lent, _ = self._idle.pop()
            if not _has_unasked_input(lent):
                return lent
            await lent.close()
        making = asyncio.create_task(self._make())
        try:
            await asyncio.wait({making})
            return making.result()
        except asyncio.CancelledError:
            # If every statement that is given up took its half-made connection with it, an overloaded server
            # would make nothing but connections that no statement waits for any more, and stay overloaded by that.
            with suppress(*DRIVER_ERRORS):  # TimeoutError is an OSError
                async with asyncio.timeout(_LATE_SECONDS):
                    await self._keep_or_close(await making)
            raise

    async def _make(self) -> Connection:
        connection = await connect({**self._arguments(), "autocommit": True})
        _read_anything(connection)
        try:
            begin = BEGIN_SESSION_THAT_KEEPS_PLANS if self._keeps_plans else BEGIN_OWN_SESSION
            begun = await connection.execute(begin, [connection.info.backend_pid])
            if self._keeps_plans and begun.rowcount > 0:
                connection.prepare_threshold = 0
        except BaseException:
            await connection.close()
            raise
        return connection


class Transaction:
    """Statements that commit together, each with a snapshot of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def run(self, statement: TextClause, parameters: Parameters | None = None) -> Sequence[Row]:
        """Run a statement and return its rows."""
        cursor = self._connection.cursor(row_factory=namedtuple_row)
        await cursor.execute(_sql(statement), parameters or {})
        return await cursor.fetchall() if _has_rows(cursor) else ()

    async def copy_in(self, statement: TextClause, lines: Iterable[str]) -> None:
        """Send a COPY … FROM STDIN its lines, in PostgreSQL's text format, piece by piece."""
        async with self._connection.cursor().copy(_sql(statement)) as copy:
            for piece in lines:
                await copy.write(piece)


async def _end_after(connection: Connection, seconds: float | None) -> None:
    if seconds is not None and connection.info.server_version >= _HAS_END_AFTER:
        await connection.execute(_sql(END_AFTER), {"milliseconds": str(round(seconds * 1000))})


async def connect(arguments: Mapping[str, Any]) -> Connection:
    """Open a connection; a cancelled or failed attempt leaves nothing open."""
    try:
        connection = await psycopg.AsyncConnection.connect(**arguments)
    except BaseException as error:
        clear_frames(error.__traceback__)  # else a kept error would keep the half-made connection open
        if isinstance(error, RuntimeError):  # the process may start no thread for the lookup of the host
            raise OSError(f"no connection can be made: {error}") from None
        raise
    own(connection)
    return connection


def arguments_of(url: URL, *, statement_timeout: float = math.inf) -> dict[str, Any]:
    """Return the driver's arguments to connect to a URL.

    A login to one host may take as long as the URL's ``connect_timeout``. If it has none, all the hosts share two
    thirds of the statement time-out, so that the last of them, or the next address of a name, is tried in time.
    """
    _, arguments = DIALECT.create_connect_args(url)  # type: ignore[no-untyped-call] # as above
    hosts = str(arguments.get("host", "")).count(",") + 1
    allowed = int(min(statement_timeout * 2 / 3 / hosts, _LONGEST_LOGIN_SECONDS))
    seconds = arguments.get("connect_timeout", max(CONNECT_ARGUMENTS["connect_timeout"], allowed))
    return {**arguments, **CONNECT_ARGUMENTS, "connect_timeout": seconds}


def driver_url(dsn: str) -> URL:
    """Return a PostgreSQL URL for SQLAlchemy, with the driver in it.

    Raises SettingsError when SQLAlchemy cannot read the hosts and ports in its query, and for an option in it that
    libpq does not know, or that is given twice, or for a ``connect_timeout`` that is no number.
    """
    url = make_url(dsn).set(drivername="postgresql+psycopg")
    try:
        arguments = arguments_of(url)
    except (ArgumentError, ValueError):
        rule = "must list hosts and ports in its query as ?host=a,b&port=1,2 or as ?host=a:1&host=b:2"
        raise SettingsError(f"{shown_url('database_url', dsn)} {rule}") from None
    # Without the URL from here on: an option that is misspelled may be the password.
    variable = variable_of("database_url")
    for name, value in arguments.items():
        if isinstance(value, tuple):
            raise SettingsError(f"{variable} must give the option {printable(name, 80)} once")
    rule = f"{variable} must have options of PostgreSQL in its query"
    if "conninfo" in arguments:  # psycopg takes it for a string of other options
        raise SettingsError(f'{rule}: invalid connection option "conninfo"')
    try:
        make_conninfo(**arguments)
    except psycopg.ProgrammingError as error:
        raise SettingsError(f"{rule}: {printable(str(error).strip(), 200)}") from None
    try:
        timeout_from_conninfo(arguments)
    except psycopg.ProgrammingError:
        raise SettingsError(f"{variable} must have a number of seconds as connect_timeout") from None
    return url


def uuid_array(ids: Iterable[UUID]) -> str:
    """Return ids as PostgreSQL's text of an array; the driver takes five times as long for a list."""
    return f"{{{','.join([each.hex for each in ids])}}}"


def number_array(numbers: Iterable[int]) -> str:
    """Return numbers as PostgreSQL's text of an array, for the same reason."""
    return f"{{{','.join(map(str, numbers))}}}"


async def backend_of(connection: Connection) -> int:
    """Return the process id of the server's backend; behind a pooler it differs from the connection's own."""
    [pid] = await (await connection.execute("SELECT pg_backend_pid()")).fetchone() or [0]
    return int(pid)


def _has_rows(cursor: psycopg.AsyncCursor[Row]) -> bool:
    """Return whether a statement returned rows, perhaps none; ``description`` makes an object of each column."""
    result = cursor.pgresult
    return result is not None and result.nfields > 0


def _is_idle(connection: Connection) -> bool:
    driver = connection.pgconn
    return (
        driver.transaction_status == TransactionStatus.IDLE and driver.pipeline_status == PipelineStatus.OFF
    )


def _has_unasked_input(connection: Connection) -> bool:
    """Return whether an idle connection is closed or has input, usually that the server ends it."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def for_psycopg(statement: TextClause) -> tuple[str, dict[str, Any]]:
    """Return a statement's SQL and parameters for ``cursor.execute`` of psycopg 3 or psycopg2."""
    compiled = statement.compile(dialect=DIALECT)
    return str(compiled), dict(compiled.params)


@lru_cache(maxsize=256)
def _sql(statement: TextClause) -> str:
    return str(statement.compile(dialect=DIALECT))


class FarTime(datetime):
    """A time outside the years 1 to 9999: compares as the nearest one within, is written as in PostgreSQL.

    ``text`` is PostgreSQL's text for it, which PostgreSQL can also read.
    """

    text: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the time for PostgreSQL's ``text``."""
        is_past = text.startswith("-") or text.endswith("BC")
        far = cls(MINYEAR, 1, 1, tzinfo=UTC) if is_past else cls(MAXYEAR, 12, 31, 23, 59, 59, 999_999, UTC)
        far.text = text
        return far

    def __str__(self) -> str:
        return self.text

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Callable[[str], Self], tuple[str]]:
        return type(self).read, (self.text,)

    def isoformat(self, *_: Any, **__: Any) -> str:
        """Return PostgreSQL's text for it, because ISO 8601 has none."""
        return self.text

    def astimezone(self, _zone: tzinfo | None = None) -> Self:
        """Return the same time: it is too far away for a zone to matter."""
        return self


def _read_anything(connection: Connection) -> None:
    for name, loader in _LOADERS.items():
        connection.adapters.register_loader(name, loader)
    connection.adapters.register_loader("numeric", FloatLoader)  # extract() returns numeric
    connection.adapters.register_dumper(FarTime, _FarTimeDumper)
    set_json_loads(read_json, connection)


def read_json(data: str | bytes) -> Any:
    """Return a JSON value; numbers that Python cannot hold become text, as do values nested too deeply."""
    try:
        return json.loads(data, parse_int=_integer, parse_float=_number)
    except RecursionError:
        return data.decode() if isinstance(data, bytes) else data


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else digits


def _number(digits: str) -> float | str:
    number = float(digits)
    return number if math.isfinite(number) else digits


def _loader(name: str, read_text: Callable[[str], Any]) -> type[Loader]:
    """Return a loader that reads like the driver's own, and falls back to ``read_text`` if that fails."""
    oid_of_type = psycopg.adapters.types[name].oid
    usual = cast("type[Loader]", psycopg.adapters.get_loader(oid_of_type, Format.TEXT))

    class Lenient(psycopg.adapt.Loader):
        def __init__(self, oid: int, context: Any = None) -> None:
            super().__init__(oid, context)
            self._load = usual(oid, context).load

        def load(self, data: Buffer) -> Any:
            if bytes(data[-8:]) != b"infinity":  # which the driver reads as zero in an interval
                try:
                    return self._load(data)
                except (psycopg.DataError, OverflowError):
                    pass  # ``suppress`` takes longer than the reading, for each row of a claim
            return read_text(bytes(data).decode())

    return Lenient


class _FarTimeDumper(psycopg.adapt.Dumper):
    oid = psycopg.adapters.types["timestamptz"].oid

    def dump(self, obj: datetime) -> bytes:
        return str(obj).encode()


_LOADERS: Final = {
    "timestamptz": _loader("timestamptz", FarTime.read),
    "interval": _loader("interval", str),
}
