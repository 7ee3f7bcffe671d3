"""Nobody reads stderr, and its pipe is full: supervision and workers go on, and end in time."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from jsworker import JobClient
from jsworker.embedded.resources import free_port
from tests.ownership.rows import Sql, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.supervisor.test_deaths import ends_completed
from tests.supervisor.test_http import answers
from tests.support.polling import eventually

WATCHDOG_SECONDS = 3.0


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe into which not one more byte fits."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * size)
    os.set_blocking(writing, True)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def workers(parent: ParentProcess) -> list[int]:
    return [child.pid for child in psutil.Process(parent.pid).children()]


async def owner_of(sql: Sql, job_id: object) -> int:
    """Wait until a Nap job sleeps: one that its owner has claimed and not begun has no stall by its death."""

    async def asleep() -> int:
        row = sql.execute(
            "SELECT w.pid FROM jsworker.jobs AS j JOIN jsworker.workers AS w ON w.id = j.worker_id"
            " WHERE j.id = %s AND j.stage = 'asleep'",
            [job_id],
        ).fetchone()
        assert row is not None
        return int(row["pid"])

    return await eventually(asleep, seconds=60.0)


async def test_children_are_watched_killed_and_replaced_and_all_ends_in_time(
    supervise: Supervise, client: JobClient, sql: Sql, full_pipe: tuple[int, int]
) -> None:
    port = free_port()
    parent = supervise(
        "Nap",
        "Blocks",
        output=full_pipe[1],
        log_level="debug",
        http_port=port,
        watchdog_timeout=WATCHDOG_SECONDS,
    )
    killed = (await client.enqueue("nap", {"seconds": 3600})).id
    first = await owner_of(sql, killed)
    parent.send(signal.SIGKILL, first)
    assert (await ends_completed(sql, killed, seconds=60.0))["stalls"] == 1
    hung = (await client.enqueue("blocks", {})).id
    assert (await ends_completed(sql, hung, seconds=60.0))["stalls"] == 1
    assert first not in workers(parent)
    many = [
        (await client.enqueue("nap", {"seconds": 0})).id for _ in range(300)
    ]  # 64 KB of debug lines and more
    for job_id in many:
        await ends_completed(sql, job_id, seconds=60.0)
    await answers(f"http://127.0.0.1:{port}/livez", 200)

    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0
    assert read_job(sql, hung)["status"] == "completed"
