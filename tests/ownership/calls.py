"""The calls of the door that most tests make, each in its shortest form: ``WORKER`` and one job."""

import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import control, priorities, reset, settle
from jsworker.ownership.transitions.claim import ClaimedJob, claim
from jsworker.ownership.transitions.reschedule import reschedule_all
from jsworker.ownership.transitions.reset import Reset, Suspect
from jsworker.ownership.transitions.settle import Completion, Failure, Return, Settled

from .rows import KIND, LIMITS, OTHER_WORKER, WORKER, Sql, read_job

ONE = text("SELECT 1 AS one")
Settle = Callable[[Database, UUID], Coroutine[None, None, Settled]]


async def claimed(database: Database, *job_ids: UUID, worker_id: str = WORKER) -> list[ClaimedJob]:
    taken = await claim(database, worker_id=worker_id, kind=KIND, ids=job_ids, limits=LIMITS)
    return taken.claimed


async def complete(database: Database, job_id: UUID, token: int = 1, *, result: str | None = "{}") -> Settled:
    runs = [Completion(job_id, token, result)]
    return (await settle.complete(database, worker_id=WORKER, runs=runs))[0]


async def fail(
    database: Database, job_id: UUID, token: int = 1, *, error: str = "broken", permanent: str | None = None
) -> Settled:
    runs = [Failure(job_id, token, error, permanent, 60.0)]
    return (await settle.fail(database, worker_id=WORKER, runs=runs))[0]


async def release(database: Database, job_id: UUID, token: int = 1) -> Settled:
    runs = [Return(job_id, token, "shutdown")]
    return (await settle.release(database, worker_id=WORKER, runs=runs))[0]


async def retry(database: Database, job_id: UUID) -> None:
    (await control.retry_all(database, [job_id])).check()


async def set_priority(database: Database, job_id: UUID, priority: int) -> None:
    (await priorities.set_priorities(database, [job_id], priority)).check()


async def reschedule(database: Database, job_id: UUID, run_at: datetime) -> None:
    (await reschedule_all(database, [job_id], run_at)).check()


def suspect(sql: Sql, job_id: UUID) -> Suspect:
    """Return a row as a sweeper would have seen it just now."""
    job = read_job(sql, job_id)
    return Suspect(
        job_id,
        KIND,
        job["worker_id"],
        job["fencing_token"],
        job["last_activity_at"],
        30.0,
        stale=True,
        crash_after=15.0,
        crashed=True,
        answers=True,
    )


async def reset_stale(database: Database, *suspects: Suspect, counted: bool = True) -> list[Reset]:
    taken = await reset.reset_stale(
        database, worker_id=OTHER_WORKER, stale=suspects, reason="silent", counted=counted
    )
    assert not taken.refused, f"refused: {taken.refused}"
    return taken.resets


@asynccontextmanager
async def opened(url: str, statement_timeout: float = 3.0) -> AsyncIterator[Database]:
    database = Database(url, statement_timeout=statement_timeout)
    try:
        yield database
    finally:
        await database.close()


def everything_said(error: BaseException) -> str:
    return "\n".join([str(error), repr(error), repr(error.args), *traceback.format_exception(error)])
