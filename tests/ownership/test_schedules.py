"""FIRE: each instant once, whoever comes first; and what writes, pauses and resumes schedules."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString
from uuid import UUID

import pytest
from psycopg.sql import SQL
from sqlalchemy import Engine

from jsworker.core.errors import DatabaseRefused, TransitionRefused
from jsworker.core.schedule_rules import Cron, Every, Schedule
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import schedules
from jsworker.ownership.transitions.schedules import Fired, NewSchedule, StoredSchedule

from .rows import KIND, Sql, insert_job, read_job, read_value
from .transitions import without

pytestmark = pytest.mark.usefixtures("sql")

NAME = "nightly"
LATER = datetime(2090, 1, 1, tzinfo=UTC)
BEFORE, SOON = datetime(2026, 1, 1, tzinfo=UTC), datetime(2080, 1, 1, tzinfo=UTC)


async def added(database: Database, schedule: Schedule = Every(days=1), name: str = NAME) -> None:  # noqa: B008 -- frozen
    new = NewSchedule(name, KIND, '{"n": 1}', schedule, LATER)
    await schedules.add(database, new, replace=False)


def change(sql: Sql, what: LiteralString) -> None:
    sql.execute(SQL("UPDATE jsworker.schedules SET {}").format(SQL(what)))


async def due(database: Database, sql: Sql, **policies: Any) -> StoredSchedule:
    """Add a schedule that has been due for a second, and read it."""
    await added(database, Every(days=1, **policies))
    change(sql, "next_at = date_trunc('second', clock_timestamp()) - interval '1 second'")
    [stored] = await schedules.upcoming(database)
    assert stored.next_at < stored.now
    return stored


async def fire(database: Database, stored: StoredSchedule, **changes: Any) -> Fired | None:
    values = {"seen": stored.next_at, "instant": stored.next_at, "then": LATER} | changes
    return await schedules.fire(database, stored, **values)


def row(sql: Sql, name: str = NAME) -> dict[str, Any]:
    [found] = sql.execute("SELECT * FROM jsworker.schedules WHERE name = %s", [name]).fetchall()
    return dict(found)


def jobs(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.jobs"))


async def test_an_instant_becomes_a_job_that_is_due_at_once(database: Database, sql: Sql) -> None:
    stored = await due(database, sql)
    fired = await fire(database, stored)
    assert fired is not None
    assert fired.job_id is not None
    job = read_job(sql, fired.job_id)
    assert (job["status"], job["kind"], job["payload"]) == ("queued", KIND, {"n": 1})
    assert (job["dispatch"], job["needs_publish"], job["attempts"]) == (1, True, 0)
    assert (job["schedule"], job["scheduled_for"]) == (NAME, stored.next_at)
    assert (row(sql)["next_at"], row(sql)["last_at"]) == (LATER, stored.next_at)
    assert row(sql)["last_job"] == fired.job_id


async def test_of_many_at_once_one_fires(database: Database, sql: Sql) -> None:
    stored = await due(database, sql)
    fired = await asyncio.gather(*(fire(database, stored) for _ in range(30)))
    assert len([each for each in fired if each is not None]) == 1
    assert jobs(sql) == 1


async def test_twice_and_late_it_is_fired_once(database: Database, sql: Sql) -> None:
    """A worker whose answer was lost asks again; a clock that went back makes nothing due again."""
    stored = await due(database, sql)
    assert await fire(database, stored) is not None
    assert await fire(database, stored) is None
    change(sql, "next_at = clock_timestamp() - interval '1 hour'")  # as if somebody had set the clock on
    assert await fire(database, stored) is None
    assert jobs(sql) == 1


GUARD: dict[str, LiteralString] = {
    r"s\.next_at = CAST\(:seen AS TIMESTAMP WITH TIME ZONE\)": "next_at = next_at - interval '1 s'",
    r"s\.next_at <= clock_timestamp\(\)": "next_at = '2080-01-01Z'",
    r"s\.revision = :revision": "revision = 7",
    r"NOT s\.paused": "paused = true",
}


@pytest.mark.parametrize("guard", GUARD)
async def test_each_predicate_of_the_guard_refuses_alone_and_is_needed(
    database: Database, sql: Sql, engine: Engine, guard: str
) -> None:
    stored = await due(database, sql)
    change(sql, GUARD[guard])
    before = row(sql)
    seen = before["next_at"] if "<=" in guard else stored.next_at
    assert await fire(database, stored, seen=seen) is None
    assert (row(sql), jobs(sql)) == (before, 0)
    mutant = without(schedules.FIRE, guard)
    values = {"name": NAME, "revision": stored.revision, "seen": seen, "due": stored.next_at, "then": LATER}
    with engine.begin() as connection:
        assert len(connection.execute(mutant, values | {"job_id": UUID(int=1)}).all()) == 1
    assert jobs(sql) == 1


async def test_no_other_schedule_is_fired_moved_or_resumed(database: Database, sql: Sql) -> None:
    stored = await due(database, sql)
    await added(database, name="other")
    sql.execute("UPDATE jsworker.schedules SET next_at = %s", [stored.next_at])
    before = row(sql, "other")
    assert await fire(database, stored) is not None
    await schedules.pause(database, NAME)
    assert (row(sql, "other"), jobs(sql)) == (before, 1)
    await schedules.pause(database, "other")
    await schedules.resume(database, NAME)
    assert row(sql, "other") == before | {"paused": True}


RESUME_GUARD: dict[str, LiteralString] = {
    r"s\.revision = :revision": "paused = true, revision = 7",
    r"\bs\.paused\b": "paused = false",
}


@pytest.mark.parametrize("guard", RESUME_GUARD)
async def test_each_predicate_of_resume_refuses_alone_and_is_needed(
    database: Database, sql: Sql, engine: Engine, guard: str
) -> None:
    stored = await due(database, sql)
    change(sql, RESUME_GUARD[guard])
    before = row(sql)
    values = {"name": NAME, "revision": stored.revision, "then": LATER}
    assert await database.run(schedules.RESUME, values) == []
    assert row(sql) == before
    with engine.begin() as connection:
        assert len(connection.execute(without(schedules.RESUME, guard), values).all()) == 1


async def test_a_rule_that_was_changed_after_the_clock_went_back_fires_no_instant_twice(
    database: Database, sql: Sql
) -> None:
    """The first instant of the new rule may be one that the old rule has fired."""
    stored = await due(database, sql)
    assert await fire(database, stored) is not None
    sql.execute("UPDATE jsworker.schedules SET next_at = %s, revision = 2", [stored.next_at])
    [again] = await schedules.upcoming(database)
    assert await fire(database, again) == Fired(None, held_up=False)
    assert (jobs(sql), row(sql)["next_at"]) == (1, LATER)


async def test_a_missed_instant_that_gets_no_job_moves_the_schedule_on(database: Database, sql: Sql) -> None:
    stored = await due(database, sql)
    assert await fire(database, stored, instant=None) == Fired(None)
    assert (row(sql)["next_at"], row(sql)["last_at"], jobs(sql)) == (LATER, None, 0)


@pytest.mark.parametrize(
    "status", ["scheduled", "queued", "processing", "completed", "failed", "cancelled", None]
)
@pytest.mark.parametrize("overlap", ["skip", "allow"])
async def test_overlap(database: Database, sql: Sql, overlap: str, status: str | None) -> None:
    """None: the last job has been pruned."""
    stored = await due(database, sql, overlap=overlap)
    last = UUID(int=5) if status is None else insert_job(sql, status)
    sql.execute("UPDATE jsworker.schedules SET last_job = %s", [last])
    before = jobs(sql)
    fired = await fire(database, stored)
    assert fired is not None
    left_out = overlap == "skip" and status in ("scheduled", "queued", "processing")
    assert (fired.job_id is None) is left_out
    assert jobs(sql) - before == (0 if left_out else 1)
    assert row(sql)["next_at"] == LATER
    assert (row(sql)["last_job"] == last) is left_out


async def test_a_job_that_is_refused_leaves_the_schedule_where_it_stands(
    database: Database, sql: Sql
) -> None:
    stored = await due(database, sql)
    sql.execute("ALTER TABLE jsworker.jobs ADD CONSTRAINT no_such_jobs CHECK (schedule IS NULL)")
    try:
        with pytest.raises(RowRefused, match="no_such_jobs"):
            await fire(database, stored)
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT no_such_jobs")
    assert row(sql)["next_at"] == stored.next_at
    assert await fire(database, stored) is not None


# --- What classes have ---


def of_code(name: str, schedule: Schedule, kind: str = KIND, payload: str = "{}") -> NewSchedule:
    return NewSchedule(name, kind, payload, schedule, LATER)


async def test_the_code_of_the_worker_that_started_last_wins(database: Database, sql: Sql) -> None:
    one, other = of_code("a", Every(hours=1)), of_code("b", Every(hours=2))
    assert await schedules.write_code(database, kinds=[KIND], new=[one, other]) == {}
    assert (row(sql, "a")["rule"], row(sql, "a")["set_by"], row(sql, "a")["revision"]) == (
        "every 3600 s",
        "code",
        1,
    )
    changed = of_code("a", Cron("0 3 * * *", tz="Europe/Berlin"))
    assert await schedules.write_code(database, kinds=[KIND], new=[changed]) == {}
    assert (row(sql, "a")["rule"], row(sql, "a")["tz"], row(sql, "a")["revision"]) == (
        "0 3 * * *",
        "Europe/Berlin",
        2,
    )
    assert await read_names(database) == ["a"]


async def read_names(database: Database) -> list[str]:
    return [each["name"] for each in await schedules.list_schedules(database)]


async def test_a_restart_with_the_same_code_changes_nothing(database: Database, sql: Sql) -> None:
    """Neither what is due nor what was missed is forgotten, and nobody's revision is in vain."""
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1))])
    change(sql, "next_at = clock_timestamp() - interval '1 hour', paused = true")
    before = row(sql, "a")
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1))])
    assert row(sql, "a") == before


async def test_another_payload_keeps_the_instant_and_the_pause(database: Database, sql: Sql) -> None:
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1))])
    change(sql, "next_at = '2030-01-01', paused = true")
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1), payload='{"n": 2}')])
    after = row(sql, "a")
    assert (after["payload"], after["revision"], after["paused"]) == ({"n": 2}, 2, True)
    assert after["next_at"].year == 2030
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=2), payload='{"n": 2}')])
    assert row(sql, "a")["next_at"] == LATER


async def test_two_versions_that_start_at_once_leave_the_schedules_of_both(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes its schedules between the two statements of the first one."""
    run = database.run

    async def run_and_let_the_other_start(*args: Any, **options: Any) -> Any:
        rows = await run(*args, **options)
        monkeypatch.setattr(database, "run", run)
        await schedules.write_code(database, kinds=[KIND], new=[of_code("new", Every(hours=1))])
        return rows

    monkeypatch.setattr(database, "run", run_and_let_the_other_start)
    await schedules.write_code(database, kinds=[KIND], new=[of_code("old", Every(hours=1))])
    assert sorted(await read_names(database)) == ["new", "old"]


async def test_what_was_read_before_a_change_fires_nothing(database: Database, sql: Sql) -> None:
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1))])
    change(sql, "next_at = clock_timestamp() - interval '1 second'")
    [stored] = await schedules.upcoming(database)
    await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1), payload='{"n": 2}')])
    assert await fire(database, stored) is None
    assert jobs(sql) == 0


async def test_other_kinds_and_operators_schedules_stay(database: Database, sql: Sql) -> None:
    await added(database, name="by hand")
    await schedules.write_code(database, kinds=["other"], new=[of_code("o", Every(hours=1), kind="other")])
    await schedules.write_code(database, kinds=[KIND], new=[of_code("by hand", Every(hours=7))])
    await schedules.write_code(database, kinds=[KIND], new=[])
    assert sorted(await read_names(database)) == ["by hand", "o"]
    assert (row(sql, "by hand")["set_by"], row(sql, "by hand")["rule"]) == ("operator", "every 86400 s")


async def test_a_pause_outlasts_a_version_without_the_schedule(database: Database, sql: Sql) -> None:
    of_new = [of_code("a", Every(hours=1)), of_code("b", Every(hours=1))]
    await schedules.write_code(database, kinds=[KIND], new=of_new)
    await schedules.pause(database, "a")
    await schedules.write_code(database, kinds=[KIND], new=[])
    assert await read_names(database) == ["a"]
    await schedules.write_code(database, kinds=[KIND], new=of_new)
    assert (row(sql, "a")["paused"], row(sql, "b")["paused"]) == (True, False)


async def test_a_name_that_another_kind_has_is_named(database: Database, sql: Sql) -> None:
    await schedules.write_code(database, kinds=["other"], new=[of_code("a", Every(hours=1), kind="other")])
    taken = await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=2))])
    assert taken == {"a": "other"}
    assert row(sql, "a")["rule"] == "every 3600 s"


async def test_a_schedule_moves_with_its_name_to_another_kind_of_the_same_worker(
    database: Database, sql: Sql
) -> None:
    await schedules.write_code(
        database, kinds=[KIND, "other"], new=[of_code("a", Every(hours=1), kind="other")]
    )
    assert (
        await schedules.write_code(database, kinds=[KIND, "other"], new=[of_code("a", Every(hours=1))]) == {}
    )
    assert row(sql, "a")["kind"] == KIND


async def test_the_schedules_of_a_start_are_written_all_or_none(database: Database, sql: Sql) -> None:
    bad = of_code("b", Every(hours=1), kind="no kind")
    with pytest.raises(DatabaseRefused, match="schedules_kind"):
        await schedules.write_code(database, kinds=[KIND], new=[of_code("a", Every(hours=1)), bad])
    assert await read_names(database) == []


async def test_a_locked_schedule_holds_up_nobody(database: Database, sql: Sql, engine: Engine) -> None:
    stored = await due(database, sql)
    with engine.begin() as holder:
        holder.exec_driver_sql("SELECT FROM jsworker.schedules FOR UPDATE")
        assert await fire(database, stored) is None
    assert await fire(database, stored) is not None


async def test_a_clock_that_was_ahead_silences_a_schedule_until_it_is_resumed(
    database: Database, sql: Sql
) -> None:
    await added(database)
    change(sql, "last_at = '2080-01-01Z', next_at = '2080-01-02Z', paused = true")
    await schedules.resume(database, NAME)
    assert row(sql)["last_at"] is None
    change(sql, "next_at = clock_timestamp() - interval '1 second'")
    [stored] = await schedules.upcoming(database)
    assert (fired := await fire(database, stored)) is not None
    assert fired.job_id is not None


async def test_changed_code_fires_no_instant_again_after_the_clock_went_back(
    database: Database, sql: Sql
) -> None:
    await schedules.write_code(database, kinds=[KIND], new=[of_code(NAME, Every(hours=1))])
    change(sql, "next_at = date_trunc('second', clock_timestamp()) - interval '1 second'")
    [stored] = await schedules.upcoming(database)
    assert await fire(database, stored) is not None
    change(sql, "last_at = clock_timestamp() + interval '2 seconds'")  # as if it had gone back since
    before = row(sql)["last_at"]
    await schedules.write_code(database, kinds=[KIND], new=[of_code(NAME, Every(hours=2))])
    assert (row(sql)["revision"], row(sql)["last_at"]) == (2, before)


async def test_times_are_compared_in_utc(database: Database, sql: Sql) -> None:
    """In a session's zone two instants around a change of the clocks are an hour too far apart."""
    stored = await due(database, sql)
    assert (stored.next_at.tzinfo, stored.now.tzinfo) == (UTC, UTC)


# --- What operators do ---


async def test_two_schedules_of_one_name(database: Database, sql: Sql) -> None:
    await added(database)
    with pytest.raises(TransitionRefused, match="there is a schedule 'nightly' already"):
        await added(database)
    new = NewSchedule(NAME, "other", "{}", Every(hours=1), LATER)
    await schedules.add(database, new, replace=True)
    assert (row(sql)["kind"], row(sql)["revision"]) == ("other", 2)


@pytest.mark.parametrize("kind", [KIND, "other"])
async def test_the_last_job_of_another_kind_holds_up_none(database: Database, sql: Sql, kind: str) -> None:
    before = await due(database, sql, overlap="skip")
    assert await fire(database, before) is not None  # its job waits
    again = NewSchedule(NAME, kind, "{}", Every(hours=1, overlap="skip"), LATER)
    await schedules.add(database, again, replace=True)
    change(sql, "next_at = clock_timestamp()")
    [stored] = await schedules.upcoming(database)
    assert (fired := await fire(database, stored)) is not None
    assert (fired.job_id is None) is fired.held_up is (kind == KIND)


async def test_a_kind_that_gets_its_schedule_back_waits_for_its_own_job(database: Database, sql: Sql) -> None:
    """In a roll-out, an old process takes back what the new version gave to another kind."""
    before = await due(database, sql, overlap="skip")
    assert await fire(database, before) is not None
    for kind in ("other", KIND):
        again = NewSchedule(NAME, kind, "{}", Every(hours=1, overlap="skip"), LATER)
        await schedules.add(database, again, replace=True)
    change(sql, "next_at = clock_timestamp()")
    [stored] = await schedules.upcoming(database)
    assert await fire(database, stored) == Fired(None, held_up=True)


@pytest.mark.parametrize(("was_due", "is_due"), [(LATER, SOON), (BEFORE, BEFORE)])
async def test_one_that_is_replaced_goes_on_from_the_present(
    database: Database, sql: Sql, was_due: datetime, is_due: datetime
) -> None:
    """Also if the clock was far ahead for a while; what was missed is not forgotten."""
    await added(database)
    sql.execute("UPDATE jsworker.schedules SET next_at = %s", [was_due])
    again = NewSchedule(NAME, KIND, "{}", Every(days=1), SOON)
    assert await schedules.add(database, again, replace=True) == is_due
    assert row(sql)["next_at"] == is_due


async def test_a_pause_ends_with_the_next_instant(database: Database, sql: Sql) -> None:
    stored = await due(database, sql)
    await schedules.pause(database, NAME)
    assert await schedules.upcoming(database) == []
    assert await fire(database, stored) is None
    then = await schedules.resume(database, NAME)
    assert then == row(sql)["next_at"] == Every(days=1).after(stored.now)
    assert await schedules.resume(database, NAME) == then
    assert await fire(database, stored) is None
    assert jobs(sql) == 0


async def test_run_now_is_a_job_besides(database: Database, sql: Sql) -> None:
    await added(database)
    job = read_job(sql, await schedules.run_now(database, NAME))
    assert (job["status"], job["schedule"], job["needs_publish"]) == ("queued", NAME, True)
    assert abs(job["scheduled_for"] - job["created_at"]) < timedelta(seconds=5)
    assert (row(sql)["next_at"], row(sql)["last_job"]) == (LATER, None)  # no instant's job: it holds up none


async def test_names_that_there_are_not(database: Database) -> None:
    for act in (schedules.pause, schedules.resume, schedules.run_now, schedules.remove):
        with pytest.raises(TransitionRefused, match="there is no schedule 'x'"):
            await act(database, "x")


async def test_what_cannot_be_read_cannot_be_resumed(database: Database, sql: Sql) -> None:
    await added(database)
    change(sql, "paused = true, rule = 'once in a blue moon'")
    with pytest.raises(TransitionRefused, match=r"schedule 'nightly': cron rule .* bad minute"):
        await schedules.resume(database, NAME)
