"""A worker writes down what it has done, at the latest when it ends; an error there harms no job."""

from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import DatabaseUnavailable, Fail
from jsworker.core.job import Job
from jsworker.worker.maintenance import statistics
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


async def test_what_runs_came_to_is_written_by_kind(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        if job.payload["fails"]:
            raise Fail("no")

    running = await start(scripted(process))
    jobs = await client.enqueue_many(KIND, [{"fails": n == 0} for n in range(3)])
    await rows.becomes(jobs[0].id, "failed")
    for job in jobs[1:]:
        await rows.becomes(job.id, "completed")
    await running.worker.close()
    [found] = await rows.query(
        "SELECT kind, sum(started) AS started, sum(completed) AS completed, sum(failed) AS failed,"
        " sum((SELECT sum(n) FROM unnest(waits) AS n)) AS waits,"
        " sum((SELECT sum(n) FROM unnest(runs) AS n)) AS runs"
        " FROM jsworker.statistics GROUP BY kind"
    )
    assert tuple(found.values()) == (KIND, 3, 2, 1, 3, 3)


async def test_without_the_table_jobs_go_on(client: JobClient, rows: Rows, start: StartWorker) -> None:
    await rows.query("ALTER TABLE jsworker.statistics RENAME TO put_aside")
    try:

        async def process(job: Job[Any]) -> None:
            return

        running = await start(scripted(process))
        job = await client.enqueue(KIND, {})
        await rows.becomes(job.id, "completed")
        await running.worker._components.statistics.step()
        assert [event["what"] for event in running.events.of("worker.degraded")] == ["statistics"]
        assert (await client.result((await client.enqueue(KIND, {})).id, timeout=60)) is None
    finally:
        await rows.query("ALTER TABLE jsworker.put_aside RENAME TO statistics")
    await running.worker._components.statistics.step()
    assert [event["what"] for event in running.events.of("worker.restored")] == ["statistics"]


async def test_a_lock_on_the_table_does_not_take_the_database_for_silent(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def locked(*_: Any) -> None:
        raise DatabaseUnavailable("did not answer within 3 s")

    running = await start(scripted(echo))
    monkeypatch.setattr(statistics, "forget_statistics", locked)
    await running.worker._components.statistics.step()
    assert running.events.of("worker.degraded") == []
