"""Sessions for ``job.transaction()``: the caller's rows and the job's completion in one commit.

The first transaction imports SQLAlchemy's sessions: they take megabytes that most workers never need.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.errors import LockNotAvailable
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import Engine, ExceptionContext
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.pool import connect
from jsworker.ownership.refusals import is_answer_of_its_own, is_cause_of, is_read_only, server_fault
from jsworker.ownership.session_settings import begin_sessions
from jsworker.ownership.transitions.child_jobs import insertions
from jsworker.ownership.transitions.settle import Completion, complete_statement
from jsworker.ownership.transitions.timeline import REJECTED

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

_ATTEMPT: Final = "jsworker_attempt"
_KEY_HELD: Final = (
    "another transaction is taking the unique key of a child job, and has not ended (SQLSTATE 55P03)"
)
# The job's own row is locked by then and no heartbeat renews it: an INSERT must not wait for a key for ever.
_WAIT_FOR_KEYS: Final = text("SELECT set_config('lock_timeout', :milliseconds, true)")


class Attempt:
    """The state of one try of a job's own transaction.

    Attributes:
        fault: the server's fault that ended it, in words; None if no such fault did.
        committing: whether its COMMIT may have been sent.
        connection: the connection that it runs on; None if it has not begun.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.committing = False
        self.connection: Connection | None = None
        self._seen: tuple[BaseException, str] | None = None
        self._is_outlived = False

    def note(self, error: BaseException) -> None:
        """Record an error that the driver raised in this transaction."""
        if (words := server_fault(error)) is None:
            # An error of the statement's own shows that the transaction is usable after an earlier fault.
            self._is_outlived |= is_answer_of_its_own(error)
        else:
            self._seen, self._is_outlived = (error, words), False
            if self.committing:
                self.fault = words

    @contextmanager
    def inserting(self) -> Iterator[None]:
        """Record a lock time-out as a server's fault: another transaction holds a child job's key."""
        try:
            yield
        except DBAPIError as error:
            if isinstance(error.orig, LockNotAvailable):
                self.fault = _KEY_HELD
            raise

    @contextmanager
    def recording_fault(self) -> Iterator[None]:
        """Record whether a server's fault ends the block, even if its code hid the fault by another error."""
        try:
            yield
        except Exception as error:
            if self.connection is None:
                self.fault = server_fault(error)
            elif self._seen is not None:
                cause, words = self._seen
                # A rollback to a savepoint makes a transaction usable again, for example after a deadlock.
                if is_cause_of(cause, error) or not (self._is_outlived or _is_usable(self.connection)):
                    self.fault = words
            raise


class Sessions:
    """Pools for the jobs' own transactions, apart from the worker's: a job that hoards connections harms itself."""

    def __init__(self, database: Database, *, worker_id: str, size: int, lock_seconds: float) -> None:
        """Prepare two pools, for coroutines and for threads; an unused one connects nothing.

        Args:
            database: whose login the connections use.
            worker_id: the owner of the jobs that are completed here.
            size: connections of each: the worker's job slots.
            lock_seconds: how long a child job waits for a unique key that another transaction is taking.
        """
        self._worker_id = worker_id
        self._wait = {"milliseconds": str(max(1, round(lock_seconds * 1000)))}
        self._url = database.url
        self._arguments = database.arguments
        self._options: dict[str, Any] = {
            "isolation_level": "READ COMMITTED",
            "hide_parameters": True,
            "pool_size": size,
            "max_overflow": 0,
            # A connection that died with the server is replaced before the block begins.
            "pool_pre_ping": True,
        }
        self._making = Lock()  # threads may begin their first transactions at once

    @cached_property
    def _async_engine(self) -> "AsyncEngine":
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 -- see the first lines

        engine = create_async_engine(
            self._url, async_creator=lambda: connect(self._arguments()), **self._options
        )
        _prepare(engine.sync_engine)
        return engine

    @cached_property
    def _engine(self) -> Engine:
        engine = create_engine(
            self._url, creator=lambda: psycopg.connect(**self._arguments()), **self._options
        )
        _prepare(engine)
        return engine

    @asynccontextmanager
    async def transaction(
        self, completion: Callable[[], Completion], attempt: Attempt | None = None
    ) -> "AsyncIterator[AsyncSession]":
        """Open a connected session; at the end of the block, call ``completion`` and write what it returns.

        Only the insertion of child jobs follows the statement that completes the job.

        Raises:
            OwnershipLost: another run owns the job; everything is rolled back.
            DBAPIError: the driver's, of a statement.
        """
        from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415 -- see the first lines

        attempt = attempt or Attempt()
        async with AsyncSession(self._async_engine, expire_on_commit=False) as session:
            async with session.begin():
                try:
                    with attempt.recording_fault():
                        connection = await session.connection(execution_options={_ATTEMPT: attempt})
                        attempt.connection = connection.sync_connection
                        yield session
                        ended = completion()
                        result = await session.execute(complete_statement(self._worker_id, ended))
                        is_mine = result.first() is not None
                        if is_mine and ended.child_jobs:
                            with attempt.inserting():
                                await session.execute(_WAIT_FOR_KEYS, self._wait)
                                for insertion in insertions(self._worker_id, ended):
                                    while insertion.is_due:
                                        found = await session.execute(insertion.statement, insertion.values)
                                        insertion.note(found.all())
                except asyncio.CancelledError:
                    await session.invalidate()  # a rollback would wait for a server that may be silent
                    raise
                if is_mine:
                    attempt.committing = True
                    return
                await session.rollback()
            with suppress(SQLAlchemyError):  # the timeline then lacks an entry, but the job is lost anyway
                async with session.begin():
                    await session.execute(REJECTED, self._rejected(ended))
            raise _lost(ended)

    @contextmanager
    def sync_transaction(
        self, completion: Callable[[], Completion], attempt: Attempt | None = None
    ) -> "Iterator[Session]":
        """Open a plain session for a processor's thread; otherwise as ``transaction``."""
        from sqlalchemy.orm import Session  # noqa: PLC0415 -- see the first lines

        attempt = attempt or Attempt()
        with self._making:
            engine = self._engine
        with Session(engine, expire_on_commit=False) as session:
            with session.begin():
                with attempt.recording_fault():
                    attempt.connection = session.connection(execution_options={_ATTEMPT: attempt})
                    yield session
                    ended = completion()
                    result = session.execute(complete_statement(self._worker_id, ended))
                    is_mine = result.first() is not None
                    if is_mine and ended.child_jobs:
                        with attempt.inserting():
                            session.execute(_WAIT_FOR_KEYS, self._wait)
                            for insertion in insertions(self._worker_id, ended):
                                while insertion.is_due:
                                    found = session.execute(insertion.statement, insertion.values)
                                    insertion.note(found.all())
                if is_mine:
                    attempt.committing = True
                    return
                session.rollback()
            with suppress(SQLAlchemyError), session.begin():
                session.execute(REJECTED, self._rejected(ended))
            raise _lost(ended)

    async def close(self) -> None:
        """Close both pools."""
        made = vars(self)
        if "_async_engine" in made:
            await self._async_engine.dispose()
        if "_engine" in made:
            self._engine.dispose()

    def _rejected(self, ended: Completion) -> dict[str, Any]:
        return {"worker_id": self._worker_id, "ids": [ended.id], "tokens": [ended.token], "write": "complete"}


def _prepare(engine: Engine) -> None:
    begin_sessions(engine)

    @event.listens_for(engine, "handle_error")
    def note(context: ExceptionContext) -> None:
        if context.connection is None:
            return
        attempt = context.connection.get_execution_options().get(_ATTEMPT)
        if attempt is not None:
            attempt.note(context.original_exception)
        if is_read_only(context.original_exception):
            # A failover left the pool's connections on a standby: drop them all. SQLAlchemy 2.0 types it wrongly.
            context.is_disconnect = True  # type: ignore[misc, unused-ignore]


def _is_usable(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return False
    driver = connection.connection.driver_connection
    usable = (TransactionStatus.IDLE, TransactionStatus.INTRANS)
    return driver is not None and driver.info.transaction_status in usable


def _lost(ended: Completion) -> OwnershipLost:
    says = f"job {ended.id}: token {ended.token} no longer owns it; the transaction is rolled back"
    return OwnershipLost(says)
