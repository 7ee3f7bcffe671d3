"""What an operator takes back is told by exactly one worker, and counted once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import reset
from jsworker.telemetry.metrics import Metrics
from tests.support.polling import eventually
from tests.worker.lives import KIND, Lives
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows, open_rows
from tests.worker.running import Running, StartWorker, new_worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def cleared(*workers: Running) -> list[dict[str, object]]:
    """Return what these workers have told of jobs that an operator took back."""
    told = [fields for running in workers for fields in running.events.of("job.cleared")]
    return [fields for fields in told if fields["cause"] == "operator"]


async def test_an_operators_clear_is_told_by_one_of_the_workers_and_counted(
    start: StartWorker, client: JobClient, settings: Settings
) -> None:
    gate = Gate()
    holder = new_worker(scripted(gate.process), settings=settings)
    registry = CollectorRegistry()
    Metrics(registry).watch(holder.worker)
    await holder.worker.start()
    try:
        other = await start(scripted(echo, kind="other"))
        job = (await client.enqueue("scripted", {})).id
        held = await gate.met()
        taken = await client.clear_and_reenqueue(job, "it hangs")

        async def told() -> None:
            assert len(cleared(holder, other)) == 1

        await eventually(told)
        assert cleared(holder, other) == [
            {
                "job_id": str(job),
                "kind": "scripted",
                "fencing_token": held.fencing_token,
                "owner": taken.owner,
                "cause": "operator",
                "to": "queued",
            }
        ]
        assert taken.owner == holder.worker.id
        labels = {"kind": "scripted", "cause": "operator", "counted": "false"}
        counted = registry.get_sample_value("jsworker_stalls_total", labels)
        assert counted == len(cleared(holder))
        assert holder.events.of("job.stalled") == []
        gate.open()
    finally:
        await holder.end()


async def test_what_was_taken_back_while_no_worker_lived_is_told_by_the_first_and_only_by_it(
    start: StartWorker, database: Database, rows: Rows, settings: Settings
) -> None:
    lives = Lives(database, rows, settings)
    jobs = [await lives.hold("gone") for _ in range(3)]
    await rows.query("UPDATE jsworker.jobs SET cancel_requested = true WHERE id = %s", jobs[2])
    seen: list[tuple[UUID, int]] = [(job, 1) for job in jobs]
    await reset.reset_by_operator(database, seen=seen, reason="by hand")
    await reset.reset_by_operator(database, seen=seen, reason="again")
    first = await start(scripted(echo, kind=KIND))
    await first.events.told("job.cleared", times=3)
    second = await start(scripted(echo, kind=KIND))
    await second.events.told("reconcile.completed")
    for running in (first, second):
        await running.worker.close()
    assert sorted((str(told["job_id"]), told["to"]) for told in cleared(first, second)) == sorted(
        (str(job), "cancelled" if job == jobs[2] else "queued") for job in jobs
    )
    assert [fields["job_id"] for fields in first.events.of("job.cancelled")] == [str(jobs[2])]
    assert await rows.value("SELECT count(*) FROM jsworker.untold_resets") == 0


@asynccontextmanager
async def locked_entry(settings: Settings, job: UUID) -> AsyncIterator[int]:
    """Hold the lock of an entry about this job, which nobody has told yet; yield how many were before it."""
    connection = (await open_rows(settings)).connection
    entry = (
        "INSERT INTO jsworker.untold_resets (job_id, kind, status, fencing_token, dispatch, owner, stalls)"
    )
    try:
        for before in count():
            await connection.execute(f"{entry} VALUES (%s, 'scripted', 'queued', 1, 1, 'x', 0)", [job])
            async with connection.transaction():
                look = "SELECT id FROM jsworker.untold_resets FOR UPDATE SKIP LOCKED"
                if (await connection.execute(look)).rowcount:  # else the worker was quicker
                    yield before
                    return
    finally:
        await connection.close()


async def test_an_entry_that_somebody_has_locked_is_left_to_later(
    client: JobClient, start: StartWorker, settings: Settings
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = (await client.enqueue("scripted", {})).id
    await gate.met()
    other = UUID(int=4711)

    def told_of(job_id: UUID) -> bool:
        return str(job_id) in {fields["job_id"] for fields in cleared(running)}

    async def is_told() -> None:
        assert told_of(job)

    async with locked_entry(settings, other) as before:

        async def those_before_are_told() -> None:
            assert len(cleared(running)) == before

        await eventually(those_before_are_told)
        await client.clear_and_reenqueue(job, "it hangs")
        await eventually(is_told)
        assert len(cleared(running)) == before + 1

    async def others_is_told() -> None:
        assert len(cleared(running)) == before + 2

    await eventually(others_is_told)
    assert told_of(other)
    assert running.events.of("worker.degraded") == []
    gate.open()
