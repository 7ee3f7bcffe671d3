"""A process that may open no more files claims no jobs, says so, and at last makes way for a new one."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core import open_files
from jsworker.core.clock import boottime
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.maintenance import watches
from jsworker.worker.maintenance.watches import FILES_EXHAUSTED
from jsworker.worker.worker import Worker, WorkerDied
from tests.support.files_at_their_limit import no_more_files
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker
from tests.worker.tied import RecordedSupervision

DEGRADED = {"what": "open files", "reason": FILES_EXHAUSTED}
JOBS = 5


def problems_of(running: Running) -> list[str]:
    status = running.worker.status()
    assert status is not None
    return list(status.readiness.problems)


async def test_only_the_job_fails_that_finds_it_out(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    gate = Gate()

    async def open_a_file(job: Job[Any]) -> None:
        await gate.process(job)
        os.close(os.open(os.devnull, os.O_RDONLY))

    running = await start(scripted(open_a_file, max_attempts=1), with_settings=make_settings(concurrency=1))
    running.expects_short_runs(KIND)
    jobs = [handle.id for handle in await client.enqueue_many(KIND, [{}] * JOBS)]
    first = (await gate.met()).id

    async def are_claimed_ahead() -> None:
        assert [(await rows.job(job))["status"] for job in jobs] == ["processing"] * JOBS

    await eventually(are_claimed_ahead)
    # The connection of the first client may be busy with marks; this one's is idle.
    async with JobClient(client.settings) as idle:
        with no_more_files():
            gate.open()
            row = await rows.becomes(first, "failed")
            assert "Too many open files" in row["last_error"]
            for job in jobs:
                if job != first:
                    await rows.becomes(job, "queued")
            running.worker._components.files.wake()

            async def is_reported() -> None:
                assert DEGRADED in running.events.of("worker.degraded")

            await eventually(is_reported)
            late = (await idle.enqueue(KIND, {})).id
            await asyncio.sleep(0.5)  # if it were claimed, it would be handed back, and claimed again
            assert FILES_EXHAUSTED in problems_of(running)
    running.worker._components.files.wake()
    for job in jobs:
        if job != first:
            row = await rows.becomes(job, "completed")
            assert (row["attempts"], row["errors"]) == (1, 0)
    assert (await rows.becomes(late, "completed"))["fencing_token"] == 1
    assert {"what": "open files"} in running.events.of("worker.restored")
    assert FILES_EXHAUSTED not in problems_of(running)


async def test_one_that_was_closed_by_chance_is_not_enough() -> None:
    files = open_files.OpenFiles()
    files.look()
    assert not files.are_exhausted
    with no_more_files() as opened:
        files.look()
        assert files.are_exhausted
        os.close(opened.pop())
        assert not open_files.may_open_no_files()
        files.look()
        assert files.are_exhausted
    files.look()
    assert not files.are_exhausted


@pytest.mark.parametrize("is_supervised", [True, False])
async def test_a_new_process_replaces_it_when_it_has_no_jobs(
    client: JobClient,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_supervised: bool,
) -> None:
    monkeypatch.setattr(watches, "FILES_SECONDS", 0.05)
    gate = Gate()
    supervision = RecordedSupervision() if is_supervised else None
    running = Running(Worker([scripted(gate.process)], make_settings(), supervision=supervision))
    running.worker.on("*", running.events)
    working = asyncio.create_task(running.worker.run())
    job = await client.enqueue(KIND, {})
    await gate.met()
    looks = count_rounds(running.worker._components.files)
    with no_more_files() as opened:
        await rounds_pass(looks, 1)
        for _ in range(3):  # for its end
            os.close(opened.pop())
        later = boottime() + 16.0
        monkeypatch.setattr("jsworker.core.open_files.boottime", lambda: later)
        await rounds_pass(looks, 2)
        assert not working.done()
        gate.open()
        assert await job.result(timeout=60.0) == {}
        if is_supervised:
            await running.events.told("worker.stopped")
        else:
            await rounds_pass(looks, 2)
            assert not working.done()
    if is_supervised:
        with pytest.raises(WorkerDied, match=r"^open files ended in OSError: .*ulimit -n.* left them open$"):
            await working
    else:
        await running.worker.close()
        await working
