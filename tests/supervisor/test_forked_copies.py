"""A job forks its process: the copy never works as the worker."""

import re
import signal

import psutil
import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, counters
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.supervisor.test_deaths import ends_completed
from tests.support.polling import eventually

FOUND = "a job has forked its worker's process, and the copy"


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_copy_that_goes_on_as_the_worker_ends(
    event_loop: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise(
        "Copies", "CopiesInCallback", "CopiesWell", "Nap", event_loop=event_loop, concurrency=6
    )
    await parent.ready()
    for then in ("return", "raise", "wait"):
        job = await ends_completed(sql, (await client.enqueue("copies", {"then": then})).id)
        assert (job["result"], counters(job)) == (1, (1, 0, 0))
    assert parent.log.count(FOUND) == 3
    # Nor does it when it was made in a callback.
    for how in ("fork", "function"):
        job = await ends_completed(sql, (await client.enqueue("copies-in-callback", {"how": how})).id)
        assert (job["result"], counters(job)) == (1, (1, 0, 0))
    assert parent.log.count(FOUND) == 5
    # It runs no other job that was ready.
    jobs = await client.enqueue_many("copies", [{"then": "return"}] * 30)
    for each in jobs:
        assert counters(await ends_completed(sql, each.id)) == (1, 0, 0)
    assert parent.log.count(FOUND) == 5 + len(jobs)
    # Copies that run something else are left alone.
    job = await ends_completed(sql, (await client.enqueue("copies-well", {})).id)
    assert (job["result"], counters(job)) == ([2, 4, 6], (1, 0, 0))
    assert parent.log.count(FOUND) == 5 + len(jobs)
    assert counters(await ends_completed(sql, (await client.enqueue("nap", {"seconds": 0})).id)) == (1, 0, 0)
    assert parent.lines("child.died") == []


async def test_a_copy_of_an_isolated_process_ends_and_a_copy_can_be_ended_as_usual(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    supervise("CopiesApart", "Forks", isolated_processes=1)
    for then in ("return", "raise", "wait"):
        job = await ends_completed(sql, (await client.enqueue("copies-apart", {"then": then})).id)
        assert (job["result"], counters(job)) == (1, (1, 0, 0))
    ended = await ends_completed(sql, (await client.enqueue("forks", {})).id)
    assert ended["result"] == signal.SIGTERM


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_copy_that_outlives_its_worker_keeps_none_of_its_locks(
    event_loop: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("LeavesACopy", "LeavesACopyOfItsThread", event_loop=event_loop)
    copies: list[psutil.Process] = []
    try:
        for number, kind in enumerate(("leaves-a-copy", "leaves-a-copy-of-its-thread"), start=1):
            job_id = (await client.enqueue(kind, {})).id
            copies.append(await nth_copy(parent, number))
            job = await ends_completed(sql, job_id)
            assert counters(job) == (2, 0, 1)
            assert copies[-1].is_running()
            assert copies[-1].net_connections("inet") == []
    finally:
        for copy in copies:
            copy.kill()


async def nth_copy(parent: ParentProcess, number: int) -> psutil.Process:
    """Wait until so many copies have been left behind, and return the last one."""

    async def left() -> psutil.Process:
        pids = re.findall(r"copy (\d+) lives on", parent.log)
        assert len(pids) == number, parent.log
        return psutil.Process(int(pids[-1]))

    return await eventually(left, seconds=60.0)
