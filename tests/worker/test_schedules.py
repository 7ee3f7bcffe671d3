"""Workers write the schedules of their classes, and fire what is due, theirs or not, each instant once."""

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from jsworker import Cron, Every, JobClient, Limit
from jsworker.core.errors import SettingsError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.schedules import MOST_READ
from jsworker.telemetry.metrics import Metrics
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows, open_rows
from tests.worker.running import StartWorker

MAKE_DUE = "UPDATE jsworker.schedules SET next_at = clock_timestamp() - interval '1 second'"
FORBID = """
CREATE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'not for you' USING ERRCODE = 'insufficient_privilege'; END $$
"""
TRIGGER = """
CREATE TRIGGER forbid BEFORE INSERT ON jsworker.jobs FOR EACH ROW WHEN (NEW.kind = 'forbidden')
EXECUTE FUNCTION forbid()
"""
WAIT = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(600); RETURN NEW; END $$
"""
WAIT_TRIGGER = """
CREATE TRIGGER wait BEFORE INSERT ON jsworker.jobs FOR EACH ROW WHEN (NEW.kind = 'slow')
EXECUTE FUNCTION wait()
"""
LIKE_THE_LAST = """
INSERT INTO jsworker.schedules (name, kind, payload, rule, tz, missed, overlap, next_at, set_by, priority)
SELECT 'locked ' || n, 'locked', payload, rule, tz, missed, overlap, clock_timestamp() + interval '2 s',
  set_by, priority
FROM jsworker.schedules, generate_series(1, %s) AS n
"""
# In days: far from any instant but the one that a test makes due, at whatever time of day it runs.
SELDOM = 366
JOBS = "SELECT kind, schedule, scheduled_for, status FROM jsworker.jobs ORDER BY scheduled_for"


async def test_each_instant_is_run_once_by_three_workers(rows: Rows, start: StartWorker) -> None:
    seen: list[datetime | None] = []

    async def process(job: Job[Any]) -> dict[str, Any]:
        seen.append(job.scheduled_for)
        return {}

    workers = [await start(scripted(process, schedule=Every(seconds=1))) for _ in range(3)]

    async def five_without_a_gap() -> None:  # a later one may begin sooner
        assert len(seen) >= 5
        instants = sorted(each for each in seen if each is not None)
        assert len(instants) == len(seen)
        assert [each - instants[0] for each in instants] == [timedelta(seconds=n) for n in range(len(seen))]

    await eventually(five_without_a_gap)
    [schedule] = await rows.query("SELECT * FROM jsworker.schedules")
    assert (schedule["name"], schedule["kind"], schedule["set_by"]) == (KIND, KIND, "code")
    fired = [event for running in workers for event in running.events.of("schedule.fired")]
    assert len({event["scheduled_for"] for event in fired}) == len(fired)


async def test_the_jobs_of_a_schedule_have_the_limit_key_of_their_class(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    seldom = Every(days=SELDOM, payload={"tenant": "a"})
    running = await start(scripted(echo, limit=Limit(1, key="tenant"), schedule=seldom))
    await client.schedules.add("by hand", "elsewhere", Every(days=SELDOM), limit_key="b")
    await client.schedules.run_now("by hand")
    await rows.query(MAKE_DUE)
    running.worker._components.schedules.wake()
    await running.events.told("schedule.fired", times=2)
    keys = await rows.query("SELECT kind, limit_key FROM jsworker.jobs ORDER BY 1, 2")
    assert [(row["kind"], row["limit_key"]) for row in keys] == [
        ("elsewhere", "b"),
        ("elsewhere", "b"),
        (KIND, "a"),
    ]


async def test_a_worker_fires_the_schedules_of_kinds_that_others_run(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    await client.schedules.add("nightly", "elsewhere", Cron("0 3 * * *", payload={"n": 1}))
    await rows.query(MAKE_DUE)
    running.worker._components.schedules.wake()
    [fired] = await running.events.told("schedule.fired")
    [job] = await rows.query("SELECT * FROM jsworker.jobs")
    assert (job["kind"], job["payload"], job["schedule"]) == ("elsewhere", {"n": 1}, "nightly")
    assert (fired["job_id"], fired["scheduled_for"]) == (str(job["id"]), job["scheduled_for"])
    assert fired["seconds_late"] >= 1


async def test_what_was_missed_is_left_out_and_told(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    await client.schedules.add("seldom", KIND, Every(days=SELDOM, missed="skip"))
    await rows.query("UPDATE jsworker.schedules SET next_at = clock_timestamp() - interval '1 hour'")
    running.worker._components.schedules.wake()
    [skipped] = await running.events.told("schedule.skipped")
    assert skipped["reason"].startswith("it was missed by 360")
    assert await rows.query("SELECT id FROM jsworker.jobs") == []
    assert await rows.value("SELECT next_at > clock_timestamp() FROM jsworker.schedules") is True


async def test_what_no_job_catches_up_is_told_once_and_counted(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    Metrics(registry := CollectorRegistry()).listen(running.worker.events)
    await client.schedules.add("one", "elsewhere", Every(minutes=10))
    await client.schedules.add("two", "elsewhere", Every(minutes=10, catch_up=2))
    await rows.query("UPDATE jsworker.schedules SET next_at = clock_timestamp() - interval '1 hour'")
    firsts = await rows.query("SELECT name, next_at FROM jsworker.schedules")
    running.worker._components.schedules.wake()
    await running.events.told("schedule.fired", times=3)
    told = {event["schedule"]: event for event in running.events.of("schedule.skipped")}
    assert {name: event["scheduled_for"] for name, event in told.items()} == {
        row["name"]: row["next_at"] for row in firsts
    }
    assert told["one"]["reason"].endswith(" s: coalesce")
    assert told["two"]["reason"].endswith(" s: catch_up=2")
    one, two = told["one"]["instants"], told["two"]["instants"]
    assert (6 <= one <= 7, 5 <= two <= 6) == (
        True,
        True,
    )  # one more is due if the tenth minute begins meanwhile
    counted = registry.get_sample_value("jsworker_schedule_instants_skipped_total", {"kind": "elsewhere"})
    assert counted == one + two


async def test_an_instant_is_left_out_while_the_last_job_lives(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    await client.schedules.add("slow", "elsewhere", Every(days=SELDOM, overlap="skip"))
    for name in ("schedule.fired", "schedule.skipped"):
        await rows.query(MAKE_DUE)
        running.worker._components.schedules.wake()
        await running.events.told(name)
    assert len(await rows.query(JOBS)) == 1
    assert running.events.of("schedule.skipped")[0]["reason"] == "the job of the last one still lives"


async def test_one_that_cannot_be_fired_is_told_and_stops_no_other(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(scripted(echo))
    for name in ("unreadable", "refused", "forbidden", "sound"):
        await client.schedules.add(name, name, Every(days=SELDOM))
    await rows.query("UPDATE jsworker.schedules SET rule = 'at noon, more or less' WHERE name = 'unreadable'")
    await rows.query("ALTER TABLE jsworker.jobs ADD CONSTRAINT odd CHECK (kind <> 'refused')")
    await rows.query(FORBID)
    await rows.query(TRIGGER)
    await rows.query(MAKE_DUE)
    running.worker._components.schedules.wake()
    await running.events.told("schedule.fired")
    told = await running.events.told("schedule.refused", times=3)
    reasons = {event["schedule"]: event["reason"] for event in told}
    assert "must have five fields" in reasons["unreadable"] or "bad minute" in reasons["unreadable"]
    assert "odd" in reasons["refused"]
    assert "42501" in reasons["forbidden"]
    assert [job["kind"] for job in await rows.query(JOBS)] == ["sound"]
    # Set aside, they are tried again; repaired, one is fired.
    await rows.query("ALTER TABLE jsworker.jobs DROP CONSTRAINT odd")
    running.worker._components.scheduler._aside.clear()
    running.worker._components.schedules.wake()
    await running.events.told("schedule.fired", times=2)
    assert running.events.of("worker.degraded") == []


async def test_one_whose_job_takes_too_long_to_insert_is_told_and_stops_no_other(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    for name in ("slow", "sound"):
        await client.schedules.add(name, name, Every(days=SELDOM))
    await rows.query(WAIT)
    await rows.query(WAIT_TRIGGER)
    await rows.query(MAKE_DUE)
    await rows.query("UPDATE jsworker.schedules SET next_at = next_at - interval '1 s' WHERE name = 'slow'")
    running.worker._components.schedules.wake()
    [fired] = await running.events.told("schedule.fired")
    assert fired["schedule"] == "sound"
    assert running.events.of("schedule.refused") == []  # once is nothing to repair
    [refused] = await running.events.told("schedule.refused")
    assert (refused["schedule"], "did not answer within" in refused["reason"]) == ("slow", True)
    assert running.events.of("worker.degraded") == []


async def test_very_many_whose_rows_are_locked_hold_up_no_other(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    await client.schedules.add("last", "last", Every(days=SELDOM))
    await rows.query(LIKE_THE_LAST, MOST_READ)
    locking = await open_rows(settings)
    async with locking.connection.transaction():
        await locking.query("SELECT FROM jsworker.schedules WHERE name <> 'last' FOR UPDATE")
        await rows.query(
            "UPDATE jsworker.schedules SET next_at = clock_timestamp() + interval '3 s' WHERE name = 'last'"
        )
        running = await start(scripted(echo))
        [fired] = await running.events.told("schedule.fired")
    assert fired["schedule"] == "last"
    await running.events.told("schedule.fired", times=1 + MOST_READ)
    await locking.connection.close()


async def test_one_that_is_refused_once_is_fired_before_its_instant_counts_as_missed(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    await client.schedules.add("refused", "refused", Every(days=SELDOM, missed="skip"))
    await rows.query("ALTER TABLE jsworker.jobs ADD CONSTRAINT odd CHECK (kind <> 'refused')")
    await rows.query(MAKE_DUE)
    running.worker._components.schedules.wake()
    await running.events.told("schedule.refused")
    await rows.query("ALTER TABLE jsworker.jobs DROP CONSTRAINT odd")
    await running.events.told("schedule.fired")
    assert running.events.of("schedule.skipped") == []
    assert running.worker._components.scheduler._pauses == {}


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"schedule": "0 3 * * *"},
            r"schedule of kind scripted \(Made\): must be a Cron, an Every, or several",
        ),
        ({"schedule": {"": Every(days=1)}}, "must be text of 1 to 100 printable characters"),
        ({"schedule": Every(days=1, payload=[1])}, "payload of kind scripted"),
        ({"schedule": Every(days=1, payload={"at": object()})}, "payload"),
        ({"schedule": Every(days=1, payload={"text": "x" * 2**20})}, "exceeds JSWORKER_MAX_PAYLOAD_BYTES"),
    ],
)
async def test_a_schedule_that_cannot_be_used_ends_the_start(
    start: StartWorker, attributes: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        await start(scripted(echo, **attributes))


async def test_a_long_outage_of_one_schedule_holds_up_no_other(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await client.schedules.add("frequent", "elsewhere", Every(seconds=30, catch_up=120))
    await client.schedules.add("seldom", "seldom", Every(days=SELDOM))
    await rows.query("UPDATE jsworker.schedules SET next_at = clock_timestamp() - interval '2 hours'")
    running = await start(scripted(echo))  # not before: it might fire an instant later than those
    fired = await running.events.told("schedule.fired", times=121)
    names = [event["schedule"] for event in fired]
    assert "seldom" in names[:51]
    instants = [event["scheduled_for"] for event in fired if event["schedule"] == "frequent"]
    assert len(instants) >= 120
    assert {later - earlier for earlier, later in pairwise(instants)} == {timedelta(seconds=30)}


async def test_two_schedules_of_one_name_end_the_start(client: JobClient, start: StartWorker) -> None:
    one = scripted(echo, schedule={"nightly": Every(days=1)})
    two = scripted(echo, kind="second", schedule={"nightly": Every(days=2)})
    with pytest.raises(SettingsError, match="'nightly' of kind second: kind scripted has one of that name"):
        await start(one, two)
    await start(one)
    other = await start(two)  # perhaps of another application
    [told] = await other.events.told("worker.degraded")
    assert told["what"] == "schedule nightly"
    assert "kind scripted has one of that name" in told["reason"]


async def test_without_rights_to_schedules_a_worker_works_all_the_same(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation whose roles are older than its tables."""
    await rows.query("ALTER TABLE jsworker.schedules RENAME TO gone")
    running = await start(scripted(echo))
    job = await client.enqueue(KIND, {"n": 1})
    await rows.becomes(job.id, "completed")
    degraded = await running.events.told("worker.degraded")
    assert {event["what"] for event in degraded} == {"schedules"}


async def test_the_schedules_of_a_client(client: JobClient, database: Database) -> None:
    assert await client.schedules.list() == []
    first = await client.schedules.add("nightly", KIND, Cron("0 3 * * *", tz="Europe/Berlin"))
    [listed] = await client.schedules.list()
    assert (listed["name"], listed["rule"], listed["next_at"]) == ("nightly", "0 3 * * *", first)
    await client.schedules.pause("nightly")
    assert (await client.schedules.list())[0]["paused"] is True
    assert await client.schedules.resume("nightly") == first
    job = await client.schedules.run_now("nightly")
    assert (await client.get(job.id)).schedule == "nightly"
    await client.schedules.remove("nightly")
    assert await client.schedules.list() == []
    with pytest.raises(TypeError, match="must be a Cron or an Every"):
        await client.schedules.add("x", KIND, "0 3 * * *")  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ValueError, match="must match"):
        await client.schedules.add("x", "No Kind", Every(days=1))
