"""``raise Snooze``: from coroutines, threads and quarantine, at a drain, cancelled, timed out, lost."""

import asyncio
import math
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from jsworker import JobClient, Snooze
from jsworker.core.errors import SettingsError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.kinds import resolve_kinds
from tests.support.polling import eventually
from tests.worker.perilous import PutOff
from tests.worker.processors import KIND, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

DUE = "UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE id = %s AND status = 'scheduled'"


async def later(job: Job[Any]) -> None:
    raise Snooze(3600, "the rates are not there yet")


def later_in_a_thread(job: Job[Any]) -> None:
    raise Snooze(timedelta(hours=1), "the rates are not there yet")


@pytest.mark.parametrize("process", [later, later_in_a_thread], ids=["coroutine", "thread"])
async def test_the_job_waits_and_nothing_is_counted(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    running = await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    wait = (row["run_at"] - datetime.now(UTC)).total_seconds()
    assert 3300 < wait <= 3605
    assert (row["attempts"], row["errors"], row["stalls"], row["snoozes"]) == (0, 0, 0, 1)
    assert row["last_error"] is None
    [told] = await rows.timeline(job.id)
    assert (told["event"], told["detail"]["reason"]) == ("snoozed", "the rates are not there yet")
    [event] = await running.events.told("job.snoozed")
    assert (event["after"], event["reason"]) == (3600, "the rates are not there yet")
    assert running.events.names(job.id) == ["job.claimed", "job.started", "job.snoozed"]
    await running.stream_is_empty()


async def test_it_runs_again_as_the_same_attempt(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> Any:
        if job.fencing_token < 4:
            raise Snooze(0)
        return [job.attempt, job.fencing_token, job.cleared]

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["attempts"], row["snoozes"]) == ([1, 4, False], 1, 3)


async def test_one_snooze_too_many_fails_the_job(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> Any:
        raise Snooze(0, "still empty")

    processor = scripted(process, max_snoozes=3)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["errors"], row["attempts"], row["snoozes"]) == ("snoozes", 1, 1, 3)
    assert row["last_error"] == "snoozed more often than max_snoozes=3 allows: still empty"
    [failed] = await running.events.told("job.failed")
    assert failed["error"] == row["last_error"]
    assert await rows.told(job.id) == ["snoozed", *(["claimed", "snoozed"] * 2), "claimed", "failed"]
    [(_, error)] = processor.failed
    assert str(error) == row["last_error"]


async def test_in_quarantine_the_owner_writes_it(client: JobClient, rows: Rows, start: StartWorker) -> None:
    running = await start(PutOff)
    job = await client.enqueue("put-off", {})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["attempts"], row["stalls"], row["snoozes"], row["last_error"]) == (0, 0, 1, None)
    [event] = await running.events.told("job.snoozed")
    assert (event["after"], event["reason"]) == (3600, "alone, and later")
    await rows.query(DUE, job.id)
    [_, _] = await running.events.told("job.snoozed", times=2)
    assert [each["quarantined"] for each in running.events.of("job.started")] == [True, True]


async def test_in_a_transaction_of_the_job_all_is_rolled_back(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await rows.query("CREATE TABLE effects (n int)")

    async def process(job: Job[Any]) -> None:
        async for attempt in job.transaction(retry=True):
            async with attempt as session:
                await session.execute(text("INSERT INTO effects VALUES (1)"))
                raise Snooze(3600)

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["snoozes"], row["errors"]) == (1, 0)
    assert await rows.query("SELECT * FROM effects") == []


async def test_after_its_own_transaction_the_job_is_done(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction(result=1):
            pass
        raise Snooze(3600)

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    [error] = await running.events.told("job.error")
    assert "it asked to run again" in error["error"]
    assert row["snoozes"] == 0


async def test_a_job_that_is_to_be_cancelled_is_not_put_off(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Snooze(3600) from None

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    await client.cancel(job.id)
    row = await rows.becomes(job.id, "cancelled")
    assert (row["attempts"], row["errors"], row["snoozes"]) == (0, 0, 0)


@pytest.mark.parametrize("threaded", [False, True], ids=["coroutine", "thread"])
async def test_a_run_that_has_timed_out_has_failed(
    client: JobClient, rows: Rows, start: StartWorker, *, threaded: bool
) -> None:
    async def process(job: Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Snooze(3600) from None

    def plain(job: Job[Any]) -> None:
        while not job.should_stop:
            time.sleep(0.01)
        raise Snooze(3600)

    await start(scripted(plain if threaded else process, timeout=0.2, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["errors"], row["snoozes"]) == ("attempts", 1, 0)
    assert row["last_error"].startswith("timed out after 0.2 s")


async def test_a_worker_that_drains_puts_it_off_all_the_same(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        while not job.should_stop:  # noqa: ASYNC110 -- a processor has no other way to learn it
            await asyncio.sleep(0.01)
        raise Snooze(3600)

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    await running.worker.close()
    row = await rows.job(job.id)
    assert (row["status"], row["snoozes"], row["cleared"]) == ("scheduled", 1, False)


async def test_a_run_that_has_lost_its_job_puts_nothing_off(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    go_on = asyncio.Event()

    async def process(job: Job[Any]) -> None:
        await go_on.wait()
        raise Snooze(1)

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.started")
    await rows.take_back(job.id)
    go_on.set()
    await running.events.told("job.lost")
    assert (await rows.job(job.id))["snoozes"] == 0
    assert not running.events.of("job.snoozed")


async def test_a_row_that_cannot_be_put_off_fails_its_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await rows.query("ALTER TABLE jsworker.jobs ADD CONSTRAINT no_snoozes CHECK (snoozes = 0)")
    running = await start(scripted(later, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert row["last_error"].startswith("cannot be snoozed: ")
    assert "no_snoozes" in row["last_error"]
    [failed] = await running.events.told("job.failed")
    assert failed["error"] == row["last_error"]


async def test_it_is_told_to_prometheus_and_in_the_log(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    from prometheus_client import CollectorRegistry  # noqa: PLC0415

    from jsworker.telemetry.metrics import Metrics  # noqa: PLC0415

    registry = CollectorRegistry()
    running = await start(scripted(later))
    Metrics(registry).listen(running.worker.events)
    await client.enqueue(KIND, {})

    async def counted() -> None:
        labels = {"kind": KIND, "outcome": "snoozed"}
        assert registry.get_sample_value("jsworker_runs_ended_total", labels) == 1.0

    await eventually(counted)


@pytest.mark.parametrize(
    "after", [-1, -0.001, math.nan, math.inf, 1e12, 10**400, True, "60", None, timedelta(days=-1), [1]]
)
def test_a_wait_that_is_none_is_refused_where_it_is_given(after: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^snooze after=.* must be a timedelta or a number of seconds, from 0 to"
    ):
        Snooze(after)


@pytest.mark.parametrize("most", [0, -1, 10**7, True, 2.5, None])
def test_a_class_with_another_limit_is_refused_at_the_start(settings: Settings, most: Any) -> None:
    with pytest.raises(SettingsError, match=r"max_snoozes=.* must be a whole number from 1 to 1000000"):
        resolve_kinds([scripted(later, max_snoozes=most)], settings)
