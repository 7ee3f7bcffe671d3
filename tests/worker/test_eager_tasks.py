"""A worker in an application whose event loop executes the first step of each task at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

JOBS = 500
"""More than the calls of one recursion, if each job that does not suspend began the next one."""


def _not_eager(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.Task(coroutine, loop=loop, **options)


@pytest.fixture
async def made() -> AsyncIterator[list[str]]:
    """What the task factory of the loop was asked for; it is eager from Python 3.12 on."""
    names: list[str] = []
    factory = getattr(asyncio, "eager_task_factory", _not_eager)

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        names.append(coroutine.__qualname__)
        return factory(loop, coroutine, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(make)
    yield names
    loop.set_task_factory(None)


async def test_jobs_that_do_not_suspend_run_one_after_the_other(
    made: list[str],
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
) -> None:
    async def close(_job: Job[Any]) -> None:
        raise GeneratorExit

    # A heartbeat would hand back what was claimed ahead if this process stood still for a second.
    settings = make_settings(heartbeat_interval=20.0)
    running = await start(
        scripted(echo), scripted(close, kind="closes", max_attempts=1), with_settings=settings
    )
    running.expects_short_runs(KIND)
    await client.enqueue_many(KIND, [{}] * JOBS)
    closed = await client.enqueue("closes", {})
    assert "GeneratorExit" in (await rows.becomes(closed.id, "failed"))["last_error"]

    async def all_completed() -> None:
        found = "SELECT count(*) FROM jsworker.jobs WHERE status = 'completed' AND fencing_token = 1"
        assert await rows.value(found) == JOBS

    await eventually(all_completed)
    assert made  # those that wait at once, such as loops, may begin eagerly
    assert [name for name in made if name.startswith(("Pipeline.", "Batcher."))] == []
