"""Load on jsworker: a backlog that is drained, jobs at a steady pace, and figures of both by the database."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any
from uuid import UUID

import psycopg

from benchmarks.measures.jsworker_processes import worker_command, workers
from benchmarks.measures.sample_processors import NOOP, STAMP, Noop, Stamp
from benchmarks.processes import running
from benchmarks.runs import rate
from benchmarks.systems.database import tidy
from jsworker import JobClient
from jsworker.core.settings import load_settings
from jsworker.ownership.transitions.enqueue import new_job_id

_POLL_SECONDS = 0.2
_START_SECONDS = 60.0
_UNFINISHED = (
    "SELECT EXISTS (SELECT FROM jsworker.jobs WHERE id >= %s AND status IN ('queued', 'processing'))"
)
_FINISHED = """
SELECT extract(epoch FROM finished_at)::double precision FROM jsworker.jobs
WHERE finished_at >= to_timestamp(%s) AND id >= %s ORDER BY finished_at
"""
_LATENCIES = "SELECT result::double precision FROM jsworker.jobs WHERE id >= %s AND kind = 'stamp'"

_FIRST_OF_ALL = UUID(int=0)


def new_client(variables: Mapping[str, str]) -> JobClient:
    """Return a client for a database and stream of the benchmark."""
    overrides = {name.removeprefix("JSWORKER_").lower(): value for name, value in variables.items()}
    return JobClient(load_settings(**overrides))


async def preload(variables: Mapping[str, str], jobs: int) -> UUID:
    """Enqueue no-op jobs and publish every message; return an id below all of theirs."""
    first = new_job_id()
    async with new_client(variables) as client:
        await client.enqueue_many(Noop, [{"n": n} for n in range(jobs)])
    await publish_all(variables)
    return first


async def publish_all(variables: Mapping[str, str]) -> None:
    """Publish until the outbox is empty; jobs that a closed client had taken are due after five seconds."""
    waiting = "SELECT EXISTS (SELECT FROM jsworker.jobs WHERE CAST(needs_publish AS integer) = 1)"
    async with new_client(variables) as client:

        async def all_published() -> bool:
            await client.publish_pending()
            return await is_false(variables["JSWORKER_DATABASE_URL"], waiting)

        await until(all_published)


async def wait_until_finished(url: str, first: UUID, *, seconds: float = 600.0) -> None:
    """Wait until no job from this id on is queued or runs.

    Raises:
        TimeoutError: it took too long.
    """
    await until(lambda: is_false(url, _UNFINISHED, first), seconds=seconds)


def finished_per_second(url: str, *, first: UUID = _FIRST_OF_ALL, since: float = 0.0) -> float:
    """Return jobs per second from 5 % done to all done, by the database's clock.

    Args:
        url: the database.
        first: only jobs from this id on.
        since: only jobs that ended after this Unix time.
    """
    with psycopg.connect(url) as connection:
        return rate([float(row[0]) for row in connection.execute(_FINISHED, [since, first])])


def backlog_rate(variables: Mapping[str, str], jobs: int, *, listed_at: str | None = None) -> float:
    """Return no-op jobs per second of one worker process with a preloaded backlog.

    Args:
        variables: of jsworker.
        jobs: how many.
        listed_at: URL of the database itself, if ``variables`` name a pooler.
    """
    url = listed_at or variables["JSWORKER_DATABASE_URL"]
    first = asyncio.run(preload(variables, jobs))
    tidy(url)
    with _worker(variables, NOOP, listed_at):
        asyncio.run(wait_until_finished(url, first))
    return finished_per_second(url, first=first)


def paced_latencies(
    variables: Mapping[str, str], *, per_second: float, seconds: float, listed_at: str | None = None
) -> list[float]:
    """Return milliseconds from the call of ``enqueue`` to the start of ``process`` of an idle worker."""
    url = listed_at or variables["JSWORKER_DATABASE_URL"]
    with _worker(variables, STAMP, listed_at):
        return asyncio.run(_paced(variables, url, per_second, seconds))


@contextmanager
def _worker(variables: Mapping[str, str], target: str, listed_at: str | None) -> Iterator[None]:
    """Run one worker; if it uses a pooler, wait until it is registered in the database at ``listed_at``."""
    if listed_at in (None, variables["JSWORKER_DATABASE_URL"]):
        with workers(1, [target], variables):
            yield
        return
    name = f"bench-{secrets.token_hex(4)}"
    with running([worker_command(1, [target], name)], variables) as (supervisor,):
        registered = "SELECT NOT EXISTS (SELECT FROM jsworker.workers WHERE starts_with(id, %s))"

        async def is_registered() -> bool:
            supervisor.check()
            return await is_false(listed_at or "", registered, f"{name}-")

        asyncio.run(until(is_registered, seconds=_START_SECONDS))
        yield


async def _paced(variables: Mapping[str, str], url: str, per_second: float, seconds: float) -> list[float]:
    async with new_client(variables) as client:
        await enqueue_at_pace(client, per_second=per_second, seconds=min(1.0, seconds))  # opens connections
        first = new_job_id()
        await enqueue_at_pace(client, per_second=per_second, seconds=seconds)
    await wait_until_finished(url, first)
    return latencies(url, first)


async def enqueue_at_pace(client: JobClient, *, per_second: float, seconds: float) -> None:
    """Enqueue one by one at fixed times, whether or not the previous calls have returned."""
    started = time.monotonic()
    async with asyncio.TaskGroup() as calls:
        for n in range(max(1, round(per_second * seconds))):
            await asyncio.sleep(max(0.0, started + n / per_second - time.monotonic()))
            calls.create_task(_enqueue_stamp(client))


async def _enqueue_stamp(client: JobClient) -> None:
    await client.enqueue(Stamp, {"at": time.monotonic()})


def latencies(url: str, first: UUID, last: UUID | None = None) -> list[float]:
    """Return the start latencies in milliseconds of the stamp jobs between two ids."""
    below = "" if last is None else " AND id < %s"
    with psycopg.connect(url) as connection:
        rows = connection.execute((_LATENCIES + below).encode(), [first] if last is None else [first, last])
        return [float(row[0]) * 1000 for row in rows]


def p50_and_p99(milliseconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    return median(milliseconds), quantiles(milliseconds, n=100, method="inclusive")[98]


async def until(is_so: Callable[[], Awaitable[bool]], *, seconds: float = 600.0) -> None:
    """Wait until ``is_so`` returns true.

    Raises:
        TimeoutError: it did not within ``seconds``.
    """
    async with asyncio.timeout(seconds):
        while not await is_so():  # noqa: ASYNC110 -- the state of another process
            await asyncio.sleep(_POLL_SECONDS)


async def is_false(url: str, query: str, *values: Any) -> bool:
    """Return whether the one value of a statement is false."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        row = await (await connection.execute(query.encode(), values)).fetchone()
    return row is not None and not row[0]
