"""Stops itself between the two statements of an admission: ``python -m … URL JOB``."""

import asyncio
import os
import signal
import sys
from typing import Any
from uuid import UUID

import psycopg

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import admission

from .rows import KIND, LIMITS, WORKER

_execute = psycopg.AsyncCursor.execute


async def _stop_before_admit(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
    if "asked AS MATERIALIZED" in str(query):
        os.kill(os.getpid(), signal.SIGSTOP)
    return await _execute(cursor, query, *args, **options)


async def _main(url: str, job: str) -> None:
    async with Database(url, statement_timeout=0.5) as database:
        await admission.admit(database, worker_id=WORKER, kind=KIND, limits=LIMITS, ids=[UUID(job)])


if __name__ == "__main__":
    psycopg.AsyncCursor.execute = _stop_before_admit  # type: ignore[method-assign,assignment] # for the stop
    asyncio.run(_main(*sys.argv[1:]))
