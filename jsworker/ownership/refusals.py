"""PostgreSQL's refusals as jsworker's errors: never with the contents of a row."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TypeVar
from uuid import UUID

import psycopg
from sqlalchemy.exc import DBAPIError

from jsworker.core.errors import (
    DatabaseBusy,
    DatabaseFailing,
    DatabaseRefused,
    DatabaseTimeout,
    DatabaseUnavailable,
    JsworkerError,
    LockTimeout,
    TooManyConnections,
    TooManyFiles,
)
from jsworker.core.open_files import NO_FILES, may_open_no_files
from jsworker.core.tracebacks import held_by, members_of
from jsworker.ownership.pool import Row

_NONE_LEFT = (
    *("too many", "connection slots", "no more connections"),
    *("zu viele", "verbleibenden Verbindungen", "trop de", "emplacements de connexions"),
    *("demasiad", "conexiones restantes", "多すぎます", "残りの接続"),
)
_COMES_BACK = (
    *("starting up", "shutting down", "recovery mode", "accepting connections", "terminating connection"),
    *("query_wait_timeout", "server_login_retry", "cannot connect to server", "server down"),
    # With lc_messages in German, French, Spanish and Japanese. In most other languages FATAL is translated, too.
    *("startet", "fährt herunter", "Wiederherstellungsmodus", "nimmt noch keine", "nimmt keine"),
    *("Verbindung wird abgebrochen", "se lance", "s'arrête", "en cours de restauration", "n'accepte pas"),
    *("arrêt des connexions", "iniciándose", "apagándose", "modo de recuperación", "no está aceptando"),
    *("terminando la conexión", "起動処理中", "シャットダウンしています", "リカバリモード"),
    *("接続を受け付けていません", "接続を終了しています"),
)
"""Parts of the texts of login refusals that are temporary, first those for lack of a connection: PostgreSQL's in
English, PgBouncer's, and PostgreSQL's in other languages: the driver gives no SQLSTATE with them."""
_READ_ONLY = "25006"  # a failover left the connection on a standby
_WRITES_NOTHING = (
    "is read-only, as a standby is or with default_transaction_read_only = on;"
    " let JSWORKER_DATABASE_URL name the primary, or a login that may write, or set that off"
)
_ENDED = ("25P03", "25P04")  # by PostgreSQL, because this process was stopped or slow within a transaction
_NOT_TEXT = "22021"  # invalid text; the driver refuses most such bytes before they are sent
_OF_A_ROW = frozenset({"21", "22", "23", "27", "2F", "38", "39", "44", "54", "P0"})
"""Classes of SQLSTATE for a row's content, of a constraint, or of what a trigger did."""
_OF_THE_SERVER = frozenset({"25", "40", "53", "55", "57", "58"})
"""Classes that mean the same inside a trigger as outside: a lock, a time-out, a full disk, a standby."""
_RAISE = "exec_stmt_raise"
"""The function of PostgreSQL's source that executes a RAISE of PL/pgSQL, whatever SQLSTATE that names."""
_OUT_OF_IDS = ("54000", {"varsup.c", "multixact.c"})
"""The SQLSTATE and the files of PostgreSQL's source that refuse every write when transaction ids have run out."""
_INSUFFICIENT_PRIVILEGE = "42501"
# Connection lost, slots or disk used up, server shut down or not up yet, the disk is broken.
_SERVER_CLASSES = ("08", "53", "57P", "580")
QUERY_CANCELED = "57014"  # for example by a statement_timeout of the server
_IN_FAILED_TRANSACTION = "25P02"  # every statement after a failed one, until a rollback
CONFLICTS = ("40001", "40P01")  # serialisation failure, deadlock


class RowRefused(DatabaseRefused):
    """A row's own content was refused: by its types, by a constraint, or by what a trigger did.

    The statement would be taken without that row, so this says nothing about the database's health.
    """

    def __init__(self, sqlstate: str, constraint: str | None) -> None:
        self.sqlstate = sqlstate
        self.constraint = constraint
        named = f", {constraint}" if constraint else ""
        super().__init__(f"PostgreSQL refused a row: SQLSTATE {sqlstate}{named}")


class RowLocked(RowRefused):
    """Another transaction keeps a row locked, or is taking its unique key."""

    def __init__(self, constraint: str | None = None) -> None:
        super().__init__(LockTimeout.sqlstate, constraint)
        self.args = ("locked by another transaction: try again",)


_TAKEN_MEANWHILE = ("23505", "jobs_unique_waiting")
_TRIES = 5
_PAUSES: Final = (0.02, 0.1, 0.3, 0.6)
"""Seconds between the tries for locked rows."""
_MOST_TIMEOUTS: Final = 50
"""So often one action waits for a lock in vain, for 0.2 s each; the halves that are left are refused without a try."""

T = TypeVar("T")
Refused = list[tuple[T, RowRefused]]
"""Members of a batch whose own row was refused, each with its refusal."""


def server_fault(error: BaseException | None) -> str | None:
    """Return in words the server's fault behind a driver's error; None if the error is the statement's own.

    The same statement may succeed later: the connection, slot or server was lost, or others conflicted.
    A pool without a free connection is not a server's fault: the jobs themselves hold its connections.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, psycopg.Error) or (sqlstate := cause.sqlstate) is None:
        return "connection lost" if isinstance(cause, psycopg.OperationalError | OSError) else None
    known = sqlstate.startswith(_SERVER_CLASSES) or sqlstate in (*CONFLICTS, _READ_ONLY) or _has_no_ids(cause)
    return f"SQLSTATE {sqlstate}" if known else None


def is_answer_of_its_own(error: BaseException) -> bool:
    """Return whether the server refused the statement itself, not because an earlier one had failed."""
    return isinstance(error, psycopg.Error) and error.sqlstate not in (None, _IN_FAILED_TRANSACTION)


def is_read_only(error: BaseException) -> bool:
    """Return whether a write was sent to a standby, or in a transaction that may not write."""
    return isinstance(error, psycopg.Error) and error.sqlstate == _READ_ONLY


def is_cause_of(cause: BaseException, error: BaseException) -> bool:
    """Return whether ``error`` is ``cause``, or was raised from it or while it was being handled."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if one is cause:
            return True
        seen.add(id(one))
        waiting += [held_by(one, "__cause__"), held_by(one, "__context__"), *members_of(one)]
    return False


def map_error(error: Exception, place: str) -> JsworkerError:
    """Return jsworker's error for a driver's: SQLSTATE and constraint, never the row (its DETAIL holds payloads)."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, NotImplementedError):  # of a time in a style that a pooler's session has
        return DatabaseRefused(f"PostgreSQL at {place} sent what the driver cannot read: {str(cause)[:200]}")
    if not isinstance(cause, psycopg.Error) or cause.sqlstate is None:
        is_no_text = isinstance(cause, psycopg.DataError | UnicodeError)
        return RowRefused(_NOT_TEXT, None) if is_no_text else _unconnected(cause, place)
    sqlstate, diagnosis = cause.sqlstate, cause.diag
    if _is_of_a_row(cause, sqlstate):
        return RowRefused(sqlstate, diagnosis.constraint_name)
    reason = (diagnosis.message_primary or "no reason given")[:200]
    if sqlstate[:2] in {"08", "57"} or sqlstate in (_READ_ONLY, *_ENDED):
        unavailable = DatabaseTimeout if sqlstate == QUERY_CANCELED else DatabaseUnavailable
        why = _WRITES_NOTHING if sqlstate == _READ_ONLY else f"is not available: {reason}"
        return unavailable(f"PostgreSQL at {place} {why} (SQLSTATE {sqlstate})")
    kind: type[DatabaseRefused | DatabaseFailing] = DatabaseRefused
    if sqlstate[:2] in {"53", "58"} or _has_no_ids(cause):
        kind = DatabaseFailing
    elif sqlstate == LockTimeout.sqlstate:
        kind = LockTimeout
    refused = kind(f"PostgreSQL at {place} refused a statement: {reason} (SQLSTATE {sqlstate})")
    refused.sqlstate = sqlstate
    return refused


def _is_of_a_row(error: psycopg.Error, sqlstate: str) -> bool:
    """Return whether another row might be accepted; only a trigger gives our statements' errors a context."""
    if _has_no_ids(error):
        return False
    if error.diag.source_function == _RAISE or sqlstate[:2] in _OF_A_ROW:
        return True
    return error.diag.context is not None and sqlstate[:2] not in _OF_THE_SERVER


def _has_no_ids(error: psycopg.Error) -> bool:
    sqlstate, files = _OUT_OF_IDS
    return error.sqlstate == sqlstate and error.diag.source_file in files


def _unconnected(cause: BaseException | None, place: str) -> JsworkerError:
    said = str(cause).strip()
    for line in said.splitlines():
        _, fatal, reason = line.partition("FATAL:")
        if fatal and not any(word in reason for word in (*_NONE_LEFT, *_COMES_BACK)):
            return DatabaseRefused(f"PostgreSQL at {place} refused the login: {reason.strip()}")
    if "FATAL:" not in said and may_open_no_files():
        return TooManyFiles(f"PostgreSQL at {place} is not available: {NO_FILES}")
    first = said.splitlines()[0] if said else type(cause).__name__
    unavailable = f"PostgreSQL at {place} is not available: {first[:200]}"
    if "FATAL:" not in said:
        return DatabaseUnavailable(unavailable)
    none_left = any(word in said for word in _NONE_LEFT)
    return TooManyConnections(unavailable) if none_left else DatabaseBusy(unavailable)


def operators_rights(call: str, right: str = "UPDATE on jsworker.jobs") -> AbstractContextManager[None]:
    """Name the missing right when the login of a producer or reader calls an operator's function."""
    return needed_right(call, right, "jsworker_operator")


def readers_right(
    call: str = "reading", right: str = "SELECT on jsworker's tables"
) -> AbstractContextManager[None]:
    """Name the missing right when the login of a producer reads what it may not."""
    return needed_right(call, right, "jsworker_reader")


@contextmanager
def needed_right(call: str, right: str, role: str) -> Iterator[None]:
    """Name the right that a call needs, and the role that has it, when PostgreSQL refuses it for lack of one."""
    try:
        yield
    except DatabaseRefused as error:
        if error.sqlstate != _INSUFFICIENT_PRIVILEGE or error.role is not None:
            raise
        refused = DatabaseRefused(f"{call} needs {right}, which role {role} has: {error}")
        refused.sqlstate, refused.role = error.sqlstate, role
        raise refused from None


async def in_halves(
    members: Sequence[T],
    write: Callable[[Sequence[T]], Awaitable[Sequence[Row]]],
    *,
    size: int | None = None,
) -> tuple[list[Row], Refused[T]]:
    """Write a batch; when PostgreSQL refuses it, write its halves, so that a bad row never fails its neighbours.

    With a ``size`` no statement writes more members than that. Returns the rows that ``write`` returned, and
    the refused members with the refusal of each. When another job takes the key of a member after the
    statement has begun, the batch is written again: the next statement sees that job.
    """
    tries = _TRIES * len(members)
    rows: list[Row] = []
    refused: Refused[T] = []
    size = size or len(members)
    batches = [members[start : start + size] for start in range(0, len(members), size or 1)]
    while batches:
        batch = batches.pop(0)
        try:
            rows += await write(batch)
        except RowRefused as error:
            if (error.sqlstate, error.constraint) == _TAKEN_MEANWHILE and (tries := tries - 1) >= 0:
                batches.insert(0, batch)
            elif len(batch) == 1:
                refused.append((batch[0], error))
            else:
                middle = len(batch) // 2
                batches[:0] = [batch[:middle], batch[middle:]]
    return rows, refused


async def write_unlocked(
    ids: Sequence[UUID],
    write: Callable[[Sequence[UUID]], Awaitable[Sequence[Row]]],
    look: Callable[[Sequence[UUID]], Awaitable[Sequence[Row]]],
    is_meant: Callable[[Row], bool] = lambda _: True,
    *,
    size: int | None = None,
) -> tuple[list[Row], Refused[UUID], dict[UUID, Row]]:
    """Write jobs with a statement that skips locked rows and waits for keys only briefly, several times if needed.

    It waits for locked rows between the tries, where it holds no locks itself: a transaction that locks one row
    may last as long as it likes, and must not hold up the heartbeats of the others.

    Args:
        ids: the jobs; a job is written once, however often it is named.
        write: returns a row with the id of each job that it has written; with more than one, it is called for
            halves after a refusal.
        look: returns rows of jobs that were not written, without locks.
        is_meant: whether ``write`` should have written a job, by its row from ``look``.
        size: how many jobs a statement writes at most.

    Returns:
        the rows of ``write``; the refused jobs, those that stay locked with RowLocked; and by id the rows of
        ``look`` of all others.
    """
    timeouts = 0

    async def briefly(some: Sequence[UUID]) -> Sequence[Row]:
        nonlocal timeouts
        if timeouts == _MOST_TIMEOUTS:
            raise RowLocked
        try:
            return await write(some)
        except LockTimeout:
            timeouts += 1
            raise RowLocked from None

    rows: list[Row] = []
    refused: Refused[UUID] = []
    seen: dict[UUID, Row] = {}
    left = list(dict.fromkeys(ids))
    for pause in (*_PAUSES, None):
        some, bad = await in_halves(left, briefly, size=size)
        rows += some
        refused += [one for one in bad if not isinstance(one[1], RowLocked)]
        done = {row.id for row in some}.union(job_id for job_id, _ in refused)
        left = [job_id for job_id in left if job_id not in done]
        found = {row.id: row for row in await look(left)} if left else {}
        seen |= {job_id: row for job_id, row in found.items() if not is_meant(row)}
        left = [job_id for job_id, row in found.items() if is_meant(row)]
        if not left or pause is None or timeouts == _MOST_TIMEOUTS:
            break
        await asyncio.sleep(pause)
    return rows, [*refused, *((job_id, RowLocked()) for job_id in left)], seen
