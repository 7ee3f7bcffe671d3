"""Workers, the doctor, the audit."""

import asyncio
import itertools
import re

import pytest
from psycopg.sql import SQL

from jsworker import JobClient
from jsworker.client.client_publisher import ClientPublisher
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.dashboard import Access, dashboard
from jsworker.dashboard.pages import doctor
from jsworker.doctor import repairs
from jsworker.doctor.gather import gather
from tests.dashboard.conftest import PutJob
from tests.dashboard.viewer import Viewer
from tests.ownership.rows import Sql, ago, insert_job, set_clock_ahead
from tests.support.polling import eventually
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

EVIL = "'\"><script>alert(1)</script>"


class Quick(JobProcessor):
    kind = "quick"

    async def process(self, job: Job[dict[str, int]]) -> None:
        raise AssertionError(job)


class Sleepy(JobProcessor):
    kind = "sleepy"

    async def process(self, job: Job[dict[str, int]]) -> None:
        await job.update_progress(stage="asleep")
        await asyncio.sleep(job.payload.get("seconds", 600))


async def test_workers_stand_together_by_host(viewer: Viewer, rows: Rows, start: StartWorker) -> None:
    running = await start(Quick)
    kinds = [f"kind-{number:03}-of-a-long-name" for number in range(40)]
    await rows.query(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval,"
        " state, started_at, last_seen_at, supervisor_pid, memory_bytes, loop_lag_seconds)"
        " VALUES (%s, %s, 7, %s, 3, '0.0', '1 s', 'running', now() - interval '11 min',"
        " now() - interval '5 min', 4, 91226112, 0.25)",
        *(f"old {EVIL}", EVIL, kinds),
    )
    page = await viewer.see("/workers")
    assert running.worker.id in page.text
    assert f"old {EVIL}" in page.text
    assert "silent" in page.text
    assert page.text.count("1 process alive,") == 1
    assert "87 MiB 250 ms 5 m ago 6 m " in page.text  # up until its last heartbeat
    assert f"process 7, child of 4, version 0.0, kinds {', '.join(kinds)}" in page.text
    assert "0 processes alive, 0 of 0 slots busy" in page.text  # slots of the silent one are of no use
    await viewer.see("/workers?after=gone")


HOSTILE_LIMITS = (
    "[1]",
    "5",
    '{"quick": 5}',
    '{"quick": [1]}',
    '{"quick": {"rate": 1}}',
    '{"quick": {"rate": {}, "per": "x"}}',
)


async def test_a_hostile_row_takes_no_page_away(viewer: Viewer, put: PutJob, rows: Rows) -> None:
    await put("processing", claimed_at=SQL("timestamptz '-infinity'"))
    for lag in ("Infinity", "-Infinity", "NaN"):
        await rows.query(
            "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version,"
            " heartbeat_interval, state, loop_lag_seconds)"
            " VALUES (%s, 'h', 7, '{quick}', 3, '0.0', '1 h', 'running', %s)",
            lag,
            float(lag),
        )
    for limits in HOSTILE_LIMITS:
        await rows.query("UPDATE jsworker.workers SET limits = %s", limits)
        await viewer.see("/kinds")
    assert " inf s " in (await viewer.see("/")).text
    assert "nan s" in (await viewer.see("/workers")).text


@pytest.mark.parametrize("hours", [3, -3])
async def test_ages_are_by_postgresqls_clock(settings: Settings, sql: Sql, hours: int) -> None:
    set_clock_ahead(sql, hours * 3600)
    job_id = insert_job(sql, "processing", claimed_at=ago(1500), last_activity_at=ago(1500))
    sql.execute(
        SQL(
            "INSERT INTO jsworker.workers"
            " (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)"
            " VALUES ('w', 'h', 7, '{{quick}}', 3, '0.0', '1 h', 'running', {})"
        ).format(ago(1500))
    )
    sql.execute(
        SQL(
            "INSERT INTO jsworker.statistics"
            " SELECT date_trunc('minute', {}), 'quick', 7, 7, 0, 0, 0, 0, 1, 1,"
            " array_fill(0, ARRAY[18]), array_fill(0, ARRAY[18])"
        ).format(ago(120))
    )
    given = {name: getattr(settings, name) for name in settings.model_fields_set - {"nats_url"}}
    async with JobClient(Settings(**given)) as client:
        viewer = Viewer(dashboard(client))
        assert "25 m ago" in (await viewer.see("/workers")).text
        page = await viewer.see(f"/jobs/{job_id}")
        assert "Running for 25 m" in page.text
        assert "Last heartbeat 25 m ago" in page.text
        overview = await viewer.see("/")
        assert "least 0, most 7" in overview.text  # of the last hour
        assert "cancelled while running, or expired: last 0, least 0, most 0." in overview.text
        await viewer.http.aclose()


async def test_a_worker_is_drained_and_claims_jobs_again(
    viewer: Viewer, rows: Rows, start: StartWorker
) -> None:
    running = await start(Quick)
    page = await viewer.see((await viewer.see("/workers")).links["Drain …"])
    assert "Running jobs that continue: 0; jobs claimed ahead that are handed back: 0" in page.text
    page = await viewer.press(page, f"Drain worker {running.worker.id}")
    assert f"worker {running.worker.id} is to be drained" in page.text
    await running.events.told("worker.drained")
    assert await rows.value("SELECT drained_at IS NOT NULL FROM jsworker.workers")
    page = await viewer.see((await viewer.see("/workers")).links["Undrain …"])
    page = await viewer.press(page, f"Undrain worker {running.worker.id}")
    await running.events.told("worker.undrained")
    assert await rows.query("SELECT action, target FROM jsworker.audit ORDER BY at") == [
        {"action": verb, "target": {"worker": running.worker.id}} for verb in ("drain", "undrain")
    ]
    for query, line in (("?worker=gone", "no worker has id gone"), ("", "a worker is needed")):
        assert line in (await viewer.see(f"/workers/drain{query}", 400)).text
    await running.worker.close()
    page = await viewer.see(f"/workers/drain?worker={running.worker.id}")
    assert "It has stopped." in page.text
    assert not page.has("Drain")


async def test_where_a_run_and_its_worker_are(settings: Settings, rows: Rows, start: StartWorker) -> None:
    running = await start(Sleepy)
    async with JobClient(settings) as client:
        job = await client.enqueue(Sleepy, {})

        async def has_begun() -> None:
            assert (await rows.job(job.id))["stage"] == "asleep"

        await eventually(has_begun)
        viewer = Viewer(dashboard(client))
        page = await viewer.see((await viewer.see(f"/jobs/{job.id}")).links["Where is it?"])
        assert "in Sleepy.process" in page.text
        page = await viewer.see(page.links["All of its worker"])
        assert f"worker {running.worker.id}, pid" in page.text
        assert f"job {job.id} of kind sleepy" in page.text
        assert "no worker has id gone" in (await viewer.see("/workers/stack?worker=gone")).text
        await viewer.see("/workers/stack", 400)
        reader = Viewer(dashboard(client, authorize=lambda _: Access.READ))
        assert "Where is it?" not in (await reader.see(f"/jobs/{job.id}")).links
        await reader.see(f"/jobs/{job.id}/stack", 403)
        for each in (viewer, reader):
            await each.http.aclose()


async def test_the_doctor_examines_when_asked(settings: Settings, start: StartWorker) -> None:
    await start(Quick)
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client))
        assert "What was found" not in (await viewer.see("/doctor")).text
        page = await viewer.see("/doctor?examine=yes")
        assert "PostgreSQL" in page.text
        assert "checks found nothing" in page.text
        await viewer.press(await viewer.see("/doctor/repair"), "Repair")
        await viewer.http.aclose()
        [last, *_] = await client.audit()
    assert last.action == "doctor.repair"


def give_repairs(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound repairs, but not the examination before them, which takes its time on a busy machine."""
    monkeypatch.setattr(doctor, "_LONGEST_SECONDS", 30.0)
    monkeypatch.setattr(doctor, "repair", lambda facts, **_: repairs.repair(facts, seconds=seconds))


async def test_a_repair_that_takes_long_leaves_the_rest_to_workers(
    settings: Settings, start: StartWorker, put: PutJob, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish_without_end(_: ClientPublisher) -> None:
        await asyncio.Event().wait()

    worker = await start(Quick)  # makes the stream
    await worker.worker.close()
    job_id = await put("scheduled", run_at=SQL("clock_timestamp() - interval '1 hour'"))
    monkeypatch.setattr(ClientPublisher, "publish_pending", publish_without_end)
    give_repairs(5.0, monkeypatch)
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client, authorize=lambda _: Access(Access.ALL.actions, name="ann")))
        page = await viewer.press(await viewer.see("/doctor/repair"), "Repair")
        assert re.search(
            r"queued 1 scheduled job, published for \d s and left other messages to workers", page.text
        )
        await viewer.http.aclose()
        [action] = await client.audit()
    assert (action.action, action.actor, action.changed) == ("doctor.repair", "ann", 1)
    assert (await rows.job(job_id))["status"] == "queued"


async def test_a_repair_that_never_ends_is_in_the_audit(
    settings: Settings, start: StartWorker, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def promote_without_end(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    worker = await start(Quick)
    await worker.worker.close()
    await put("scheduled", run_at=SQL("clock_timestamp() - interval '1 hour'"))
    monkeypatch.setattr(repairs, "promote", promote_without_end)
    give_repairs(1.0, monkeypatch)
    async with JobClient(settings) as client:
        viewer = Viewer(dashboard(client, authorize=lambda _: Access(Access.ALL.actions, name="ann")))
        page = await viewer.press(await viewer.see("/doctor/repair"), "Repair")
        assert "it took longer than 2 s and was ended: the rest may have been done, or not" in page.text
        await viewer.http.aclose()
        [action] = await client.audit()
    assert (action.action, action.actor, action.changed) == ("doctor.repair", "ann", 0)


async def test_a_repair_whose_queueing_takes_too_long_publishes_nothing(
    settings: Settings, start: StartWorker, put: PutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start(Quick)
    await worker.worker.close()
    await put("scheduled", run_at=SQL("clock_timestamp() - interval '1 hour'"))
    clock = itertools.count(step=100.0)
    monkeypatch.setattr(repairs, "boottime", lambda: next(clock))
    found = await repairs.repair(await gather(settings), seconds=30.0)
    says = "queued 0 scheduled jobs in 15 s and left others to workers"
    says += ", published for 0 s and left other messages to workers"
    assert [(each.check, each.says) for each in found] == [("fix.jobs", says)]


async def test_the_audit_lists_who_did_what(client: JobClient) -> None:
    for number in range(51):
        await client.pause(f"kind-{number}", actor=EVIL)
    viewer = Viewer(dashboard(client, authorize=lambda _: Access(frozenset({"pause"}), name="ada")))
    await viewer.press(await viewer.see("/kinds/pause?kind=mail"), "Pause", {"reason": EVIL})
    page = await viewer.see("/audit")
    assert "ada login" in page.text
    assert f"kind mail, reason {EVIL}" in page.text
    assert "kind kind-0 " not in page.text
    assert "kind kind-0 " in (await viewer.see(page.links["Next page"])).text
    await viewer.see("/audit?after=x", 400)
    await client.select(status="queued", kind="mail").cancel(actor="ada")
    assert "jobs kind=mail, status=queued 0 0" in (await viewer.see("/audit")).text
    await viewer.http.aclose()
