"""Sessions for ``job.transaction()``: the caller's rows and the job's completion in one commit."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jsworker.errors import OwnershipLost
from jsworker.ownership.pool import connect_arguments
from jsworker.ownership.settle import Completion, complete_statement
from jsworker.ownership.timeline import REJECTED


class Sessions:
    """Pools for the jobs' own transactions, apart from the worker's: a job that hoards connections harms itself."""

    def __init__(self, url: URL, *, worker_id: str, size: int) -> None:
        """Prepare the pools; nothing connects yet.

        Args:
            url: the database.
            worker_id: the owner of the jobs that are completed here.
            size: connections in each of the two pools: the worker's job slots.
        """
        self._worker_id = worker_id
        options: dict[str, Any] = {
            "isolation_level": "READ COMMITTED",
            "hide_parameters": True,
            "pool_size": size,
            "max_overflow": 0,
            # A connection that died with the server must not cost a job an attempt.
            "pool_pre_ping": True,
            "connect_args": connect_arguments(),
        }
        self._async_engine = create_async_engine(url, **options)
        self._engine = create_engine(url, **options)

    @asynccontextmanager
    async def transaction(self, completion: Callable[[], Completion]) -> AsyncIterator[AsyncSession]:
        """Open a session, and complete the job with its last statement.

        Args:
            completion: asked at the end of the block.

        Raises:
            OwnershipLost: another run owns the job; everything is rolled back.
        """
        async with AsyncSession(self._async_engine, expire_on_commit=False) as session:
            async with session.begin():
                yield session
                ended = completion()
                result = await session.execute(complete_statement(self._worker_id, ended))
                if result.first() is not None:
                    return
                await session.rollback()
            async with session.begin():
                await session.execute(REJECTED, self._rejected(ended))
            raise _lost(ended)

    @contextmanager
    def sync_transaction(self, completion: Callable[[], Completion]) -> Iterator[Session]:
        """Open a plain session for a processor's thread; otherwise as ``transaction``."""
        with Session(self._engine, expire_on_commit=False) as session:
            with session.begin():
                yield session
                ended = completion()
                if session.execute(complete_statement(self._worker_id, ended)).first() is not None:
                    return
                session.rollback()
            with session.begin():
                session.execute(REJECTED, self._rejected(ended))
            raise _lost(ended)

    async def close(self) -> None:
        """Close both pools."""
        await self._async_engine.dispose()
        self._engine.dispose()

    def _rejected(self, ended: Completion) -> dict[str, Any]:
        return {"worker_id": self._worker_id, "ids": [ended.id], "tokens": [ended.token], "write": "complete"}


def _lost(ended: Completion) -> OwnershipLost:
    return OwnershipLost(
        f"job {ended.id}: token {ended.token} no longer owns it; the transaction is rolled back"
    )
