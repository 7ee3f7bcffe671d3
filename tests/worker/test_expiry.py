"""Jobs that are not begun in time are cancelled, by whichever worker comes first, and never run."""

from datetime import timedelta
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import SettingsError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.worker import components
from jsworker.worker.maintenance.expiry import Expiry
from tests.ownership.rows import Sql, slow_rows
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

OVER = "UPDATE jsworker.jobs SET expires_at = clock_timestamp() - interval '1 second'"


async def test_a_worker_cancels_what_has_expired_also_of_kinds_that_others_run(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    late = await client.enqueue("elsewhere", {}, delay=3600, expires_in=timedelta(hours=2))
    await rows.query(OVER)
    running = await start(scripted(echo))
    assert await running.events.told("jobs.expired") == [{"kind": "elsewhere", "jobs": 1}]
    job = await rows.job(late.id)
    assert (job["status"], job["failure_reason"]) == ("cancelled", "expired")
    assert await rows.told(late.id) == ["cancelled"]


WINDOWS = """
INSERT INTO jsworker.unique_windows (kind, key, job_id, until)
SELECT 'elsewhere', n, gen_random_uuid(), clock_timestamp() - interval '1 h' FROM generate_series(1, 300) AS n
"""


async def test_where_a_batch_takes_too_long_fewer_are_written_at_once(
    client: JobClient, rows: Rows, sql: Sql, settings: Settings
) -> None:
    await client.enqueue_many("elsewhere", [{}] * 300, expires_in=60)
    for statement in (OVER, WINDOWS):
        await rows.query(statement)
    with slow_rows(sql, "UPDATE", "jobs", 0.01), slow_rows(sql, "DELETE", "unique_windows", 0.01):
        async with Database(settings.database_dsn(), statement_timeout=1.5) as database:
            await Expiry(context := make_context(database)).step()
    assert context.health.up
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'queued'") == 0
    assert await rows.value("SELECT count(*) FROM jsworker.unique_windows") == 0


async def test_a_job_that_takes_too_long_to_cancel_holds_up_no_window(
    client: JobClient, rows: Rows, sql: Sql, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jsworker.worker.maintenance.expiry._BATCH", 2)
    late = await client.enqueue("elsewhere", {}, expires_in=60)
    for statement in (OVER, WINDOWS):
        await rows.query(statement)
    with slow_rows(sql, "UPDATE", "jobs", 60):
        async with Database(settings.database_dsn(), statement_timeout=1.5) as database:
            await Expiry(context := make_context(database)).step()
    assert context.health.up
    assert (await rows.job(late.id))["status"] == "queued"
    assert await rows.value("SELECT count(*) FROM jsworker.unique_windows") == 0


async def test_a_message_of_an_expired_job_is_acknowledged_and_starts_nothing(
    client: JobClient, rows: Rows, settings: Settings, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: Expiry) -> None: ...

    ran: list[Any] = []

    async def process(job: Job[Any]) -> None:
        ran.append(job.payload)

    monkeypatch.setattr(Expiry, "step", nothing)  # before any sweep
    over = await client.enqueue(KIND, {"over": True}, expires_in=60)
    await rows.query(OVER)
    await client.enqueue(KIND, {"over": False}, expires_in=60)
    # Nor is it found in the table before its message comes: it would be after two scans.
    rarely = settings.model_copy(update={"scan_interval": 25.0, "ack_wait": 120.0})
    running = await start(scripted(process), with_settings=rarely)
    [skipped] = await running.events.told("job.skipped")
    assert (skipped["job_id"], skipped["status"]) == (str(over.id), "expired")
    await running.events.told("job.completed")
    await running.stream_is_empty()
    assert ran == [{"over": False}]
    assert (await rows.job(over.id))["status"] == "queued"


async def test_windows_of_jobs_that_still_wait_keep_no_later_one_from_its_end(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "WINDOWS_SECONDS", 0.2)
    monkeypatch.setattr("jsworker.worker.maintenance.expiry._WINDOWS", 2)
    for number in range(7):
        await client.enqueue("elsewhere", {}, unique_key=f"key {number}", unique_for=3600, delay=7200)
    await rows.query(
        "UPDATE jsworker.unique_windows SET until = now() - interval '1 h', job_id ="
        " CASE key WHEN 'key 6' THEN gen_random_uuid() ELSE job_id END"
    )
    await rows.query("UPDATE jsworker.unique_windows SET until = now() - interval '1 s' WHERE key = 'key 6'")
    await start(scripted(echo))

    async def forgotten() -> None:
        keys = await rows.query("SELECT key FROM jsworker.unique_windows ORDER BY key")
        assert [row["key"] for row in keys] == [f"key {number}" for number in range(6)]

    await eventually(forgotten)


async def test_a_worker_forgets_windows_that_are_over(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "WINDOWS_SECONDS", 0.2)
    for key in ("over", "open"):
        await client.enqueue("elsewhere", {}, unique_key=key, unique_for=3600)
    await client.cancel(*[row["job_id"] for row in await rows.query("SELECT * FROM jsworker.unique_windows")])
    await rows.query("UPDATE jsworker.unique_windows SET until = clock_timestamp() WHERE key = 'over'")
    await start(scripted(echo))

    async def forgotten() -> None:
        assert [row["key"] for row in await rows.query("SELECT key FROM jsworker.unique_windows")] == ["open"]

    await eventually(forgotten)


async def test_a_class_gives_its_jobs_their_window(client: JobClient, rows: Rows) -> None:
    processor = type(scripted(echo, unique_for=timedelta(hours=1)))
    first = await client.enqueue(processor, {}, unique_key="a")
    await client.cancel(first.id)
    assert (await client.enqueue(processor, {}, unique_key="a")) == (first.id, False)
    assert (await client.enqueue(processor, {}, unique_key="a", unique="live")).created
    assert (await client.enqueue(processor, {})).created


async def test_a_class_gives_its_jobs_their_debounce(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    seen: list[Any] = []

    async def process(job: Job[Any]) -> None:
        seen.append(job.payload)

    processor = scripted(process, debounce=timedelta(minutes=1), debounce_max=600)
    [first, *others] = [await client.enqueue(type(processor), {"n": n}, unique_key="a") for n in range(3)]
    assert [(each.id, each.created) for each in others] == [(first.id, False)] * 2
    plain = await client.enqueue(type(processor), {"plain": True}, delay=3600)
    assert (await rows.job(plain.id))["waiting_key"] is None
    await rows.query("UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE id = %s", first.id)
    await start(processor)
    await rows.becomes(first.id, "completed")
    assert seen == [{"n": 2}]
    with pytest.raises(ValueError, match=r"^debounce=.* and delay=5: give one of them$"):
        await client.enqueue(type(processor), {}, unique_key="a", delay=5)
    assert (await client.enqueue(type(processor), {}, unique_key="a", unique="live", delay=5)).created


async def test_a_class_that_contradicts_itself_is_refused(start: StartWorker) -> None:
    with pytest.raises(
        SettingsError, match=r"^kind scripted \(Made\): unique_for=60 and unique='waiting': give one of them$"
    ):
        await start(scripted(echo, unique="waiting", unique_for=60))


async def test_a_class_gives_its_jobs_their_time(client: JobClient, rows: Rows) -> None:
    processor = type(scripted(echo, expires_in=timedelta(minutes=5)))
    one, other = await client.enqueue(processor, {}), await client.enqueue(processor, {}, expires_in=60)
    [many] = await client.enqueue_many(processor, [{}])
    by_name = await client.enqueue(KIND, {})
    seconds = "SELECT extract(epoch FROM expires_at - created_at) FROM jsworker.jobs WHERE id = %s"
    for job_id, expected in ((one.id, 300), (other.id, 60), (many.id, 300)):
        assert abs(float(await rows.value(seconds, job_id)) - expected) < 10
    assert await rows.value(seconds, by_name.id) is None


@pytest.mark.parametrize("value", [0, -1, "60", timedelta(0), float("nan"), 1e12])
async def test_a_class_with_no_sensible_time_is_refused(start: StartWorker, value: Any) -> None:
    with pytest.raises(
        SettingsError, match=r"^expires_in=.* of kind scripted \(Made\) must be None, a number"
    ):
        await start(scripted(echo, expires_in=value))
