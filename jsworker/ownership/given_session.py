"""A transaction of a job on a session or a connection that somebody else has opened, and commits or rolls back."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Executable, PoolProxiedConnection, Uuid, bindparam, func, literal, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

GivenSession: TypeAlias = AsyncSession | AsyncConnection | Session | Connection
"""The session or connection that ``job.transaction()`` uses when one job is run alone."""


@asynccontextmanager
async def savepoint(given: object) -> AsyncIterator[AsyncSession]:
    """Yield a session in a savepoint, which an error in the block rolls back to.

    Raises TypeError if ``given`` is neither an AsyncSession nor an AsyncConnection.
    """
    if isinstance(given, AsyncSession):
        async with given.begin_nested():
            yield given
    elif isinstance(given, AsyncConnection):
        if not given.in_transaction() and not _commits_each_statement(await given.get_raw_connection()):
            await given.begin()  # else the session would begin it, and commit it
        async with (
            AsyncSession(given, join_transaction_mode="create_savepoint", expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session
    else:
        raise TypeError(_needs("an AsyncSession or AsyncConnection", given))


@contextmanager
def sync_savepoint(given: object) -> Iterator[Session]:
    """Do the same for a plain function."""
    if isinstance(given, Session):
        with given.begin_nested():
            yield given
    elif isinstance(given, Connection):
        if not given.in_transaction() and not _commits_each_statement(given.connection):
            given.begin()
        with (
            Session(given, join_transaction_mode="create_savepoint", expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session
    else:
        raise TypeError(_needs("a Session or Connection", given))


def _commits_each_statement(pooled: PoolProxiedConnection) -> bool:
    """Return whether a connection has the isolation level AUTOCOMMIT, which knows no savepoints."""
    return bool(getattr(pooled.dbapi_connection, "autocommit", False))


def _needs(what: str, given: object) -> str:
    has = "none was given" if given is None else f"not {type(given).__name__}"
    return f"job.transaction() needs run_job(…, session=…), {what}: {has}"


def completed_row(job_id: UUID) -> Executable:
    """Return a statement with the one row of a job that was completed; it writes nothing."""
    return select(literal(job_id, Uuid()).label("id"), literal("completed").label("status"))


def added_rows(job_ids: list[UUID]) -> Executable:
    """Return a statement with a row for each of these ids; it writes nothing."""
    ids = bindparam("ids", job_ids, type_=ARRAY(Uuid()))
    return select(func.unnest(ids).label("id"))
