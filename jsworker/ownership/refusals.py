"""PostgreSQL's refusals as jsworker's errors: never with the contents of a row."""

import psycopg
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from jsworker.errors import DatabaseBusy, DatabaseRefused, DatabaseUnavailable, JsworkerError

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
_SERVER_CLASSES = ("08", "53", "57P")
"""Connection lost, resources used up (connection slots, disk), server shut down or not up yet."""
_CONFLICTS = ("40001", "40P01")
"""Serialisation failure, deadlock."""


class RowRefused(JsworkerError):
    """A row's own content was refused (SQLSTATE 22xxx, 23xxx)."""

    def __init__(self, sqlstate: str, constraint: str | None) -> None:
        self.sqlstate = sqlstate
        self.constraint = constraint
        super().__init__(
            f"PostgreSQL refused a row: SQLSTATE {sqlstate}" + (f", {constraint}" * bool(constraint))
        )


def server_fault(error: BaseException | None) -> str | None:
    """Return in words the server's fault that an error of the driver tells; None: it is the statement's own.

    The same statement may succeed later: the connection, its slot or the server was lost, or others were in the way.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    sqlstate = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    if sqlstate is not None:
        known = sqlstate.startswith(_SERVER_CLASSES) or sqlstate in (*_CONFLICTS, _READ_ONLY)
        return f"SQLSTATE {sqlstate}" if known else None
    if isinstance(cause, PoolTimeoutError):
        return "no free connection"
    return "connection lost" if isinstance(cause, psycopg.OperationalError | OSError) else None


def is_read_only(error: BaseException) -> bool:
    """Tell whether a write was sent to a standby, or in a transaction that may not write."""
    return isinstance(error, psycopg.Error) and error.sqlstate == _READ_ONLY


def is_behind(cause: BaseException, error: BaseException) -> bool:
    """Tell whether ``error`` is ``cause``, or was raised because of it or while it was being dealt with."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if one is cause:
            return True
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return False


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


def _unconnected(cause: BaseException | None, place: str) -> JsworkerError:
    said = str(cause) if cause is not None else "connection lost"
    for line in said.splitlines():
        _, fatal, reason = line.partition("FATAL:")
        if fatal and not any(word in reason for word in _COMES_BACK):
            return DatabaseRefused(f"PostgreSQL at {place} refused the login: {reason.strip()}")
    first = said.strip().splitlines()[0] if said.strip() else type(cause).__name__
    unavailable = DatabaseBusy if "FATAL:" in said else DatabaseUnavailable
    return unavailable(f"PostgreSQL at {place} is not available: {first[:200]}")


def _primary(cause: BaseException | None) -> str:
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return cause.diag.message_primary[:200]
    return "no reason given"
