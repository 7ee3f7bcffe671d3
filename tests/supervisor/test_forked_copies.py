"""A job forks its process: the copy never works as the worker."""

import re

import psutil
import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, counters
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import ends_completed


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_copy_that_goes_on_as_the_worker_ends(
    event_loop: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Copies", "Nap", event_loop=event_loop)
    for then in ("return", "raise", "wait"):
        job = await ends_completed(sql, (await client.enqueue("copies", {"then": then})).id)
        assert (job["result"], counters(job)) == (1, (1, 0, 0))
    assert counters(await ends_completed(sql, (await client.enqueue("nap", {"seconds": 0})).id)) == (1, 0, 0)
    assert parent.lines("child.died") == []
    assert parent.log.count("a job has forked its worker's process, and the copy") == 3


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_copy_runs_no_other_job_that_was_ready(
    event_loop: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Copies", event_loop=event_loop, concurrency=6)
    await parent.ready()
    jobs = await client.enqueue_many("copies", [{"then": "return"}] * 30)
    for job in jobs:
        assert counters(await ends_completed(sql, job.id)) == (1, 0, 0)
    assert parent.log.count("a job has forked its worker's process, and the copy") == len(jobs)


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_copy_made_in_a_callback_ends(
    event_loop: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("CopiesInCallback", event_loop=event_loop)
    for how in ("fork", "function"):
        job = await ends_completed(sql, (await client.enqueue("copies-in-callback", {"how": how})).id)
        assert (job["result"], counters(job)) == (1, (1, 0, 0))
    assert parent.log.count("a job has forked its worker's process, and the copy") == 2


async def test_a_copy_of_an_isolated_process_ends(supervise: Supervise, client: JobClient, sql: Sql) -> None:
    supervise("CopiesApart", isolated_processes=1)
    for then in ("return", "raise", "wait"):
        job = await ends_completed(sql, (await client.enqueue("copies-apart", {"then": then})).id)
        assert (job["result"], counters(job)) == (1, (1, 0, 0))


async def test_copies_that_run_something_else_are_left_alone(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    supervise("CopiesWell")
    job = await ends_completed(sql, (await client.enqueue("copies-well", {})).id)
    assert (job["result"], counters(job)) == ([2, 4, 6], (1, 0, 0))


@pytest.mark.parametrize("processor", ["LeavesACopy", "LeavesACopyOfItsThread"])
@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_copy_that_outlives_its_worker_keeps_none_of_its_locks(
    processor: str, event_loop: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise(processor, event_loop=event_loop)
    kind = "leaves-a-copy" if processor == "LeavesACopy" else "leaves-a-copy-of-its-thread"
    job_id = (await client.enqueue(kind, {})).id
    await parent.says("lives on")
    found = re.search(r"copy (\d+) lives on", parent.log)
    assert found
    copy = psutil.Process(int(found[1]))
    try:
        job = await ends_completed(sql, job_id)
        assert counters(job) == (2, 0, 1)
        assert copy.is_running()
        assert copy.net_connections("inet") == []
    finally:
        copy.kill()
