"""PostgreSQL's refusals as jsworker's errors: never with the contents of a row."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from jsworker.errors import DatabaseRefused, DatabaseUnavailable, JsworkerError

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
_INSUFFICIENT_PRIVILEGE = "42501"


class RowRefused(JsworkerError):
    """A row's own content was refused (SQLSTATE 22xxx, 23xxx)."""

    def __init__(self, sqlstate: str, constraint: str | None) -> None:
        self.sqlstate = sqlstate
        self.constraint = constraint
        super().__init__(
            f"PostgreSQL refused a row: SQLSTATE {sqlstate}" + (f", {constraint}" * bool(constraint))
        )


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


@contextmanager
def operators_rights(call: str) -> Iterator[None]:
    """Name what is missing where the login of a producer or reader wants to do what operators do."""
    try:
        yield
    except DatabaseRefused as error:
        if error.sqlstate != _INSUFFICIENT_PRIVILEGE:
            raise
        refused = DatabaseRefused(
            f"{call} needs UPDATE on jsworker.jobs, which role jsworker_worker has: {error}"
        )
        refused.sqlstate = error.sqlstate
        raise refused from None


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
