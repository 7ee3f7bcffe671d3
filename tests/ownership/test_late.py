"""Which rows a sweeper looks at, in which order, and what else it learns with them."""

from dataclasses import replace
from typing import Any

import pytest
from psycopg.sql import SQL

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import reset, workers
from jsworker.worker.recovery.sweeper import LateRows, Proof

from .rows import OTHER_WORKER, WORKER, Sql, ago, insert_job, read_job, seconds
from .test_registry import ROW


async def test_from_two_missed_heartbeats_on(database: Database, sql: Sql) -> None:
    fresh = insert_job(sql, "processing", last_activity_at=ago(9))
    late = insert_job(sql, "processing", last_activity_at=ago(11))
    stale = insert_job(sql, "processing", last_activity_at=ago(40), fencing_token=3)
    impatient = insert_job(sql, "processing", last_activity_at=ago(5), stale_after=seconds(4))
    found = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects
    assert [(one.id, one.stale, one.crashed, one.fencing_token, one.stale_after) for one in found] == [
        (stale, True, True, 3, 30.0),
        (impatient, True, False, 1, 4.0),
        (late, False, False, 1, 30.0),
    ]
    assert fresh not in {one.id for one in found}
    assert found[0].last_activity_at == read_job(sql, stale)["last_activity_at"]


async def test_a_crash_threshold_below_two_heartbeats_of_the_sweeper(database: Database, sql: Sql) -> None:
    """The owner beats faster than the one who looks."""
    crashed = insert_job(sql, "processing", last_activity_at=ago(4), crash_after=seconds(3))
    (found,) = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects
    assert (found.id, found.crash_after, found.crashed, found.stale) == (crashed, 3.0, True, False)


FAR, FAR_BACK = SQL("interval '178000000 years'"), SQL("interval '-178000000 years'")
ENDLESS, ENDLESS_BACK = SQL("interval 'infinity'"), SQL("interval '-infinity'")
LAST, FIRST = SQL("timestamptz '294276-12-31 23:59:59.9+00'"), SQL("timestamptz '4714-11-24 00:00+00 BC'")
NEVER, EVER = SQL("timestamptz 'infinity'"), SQL("timestamptz '-infinity'")
NOT_LATE: tuple[dict[str, Any], ...] = (
    {"stale_after": FAR, "crash_after": FAR},
    {"stale_after": None, "crash_after": FAR},
    {"stale_after": ENDLESS, "crash_after": ENDLESS},
    {"last_activity_at": LAST, "claimed_at": LAST},
    {"last_activity_at": NEVER, "stale_after": ENDLESS_BACK},
)
STALE: tuple[dict[str, Any], ...] = (
    {"stale_after": FAR_BACK},
    {"stale_after": ENDLESS_BACK, "crash_after": ENDLESS_BACK},
    {"last_activity_at": FIRST, "claimed_at": FIRST},
    {"last_activity_at": FIRST, "stale_after": FAR_BACK, "crash_after": FAR_BACK},
    {"last_activity_at": EVER, "claimed_at": EVER},
)


async def test_times_that_cannot_be_added_hide_no_other_row(database: Database, sql: Sql) -> None:
    """Nobody but a person writes such thresholds and times; they must not end the recovery of all others."""
    await workers.seen(database, replace(ROW, concurrency=1), state="running")
    for columns in NOT_LATE:
        insert_job(sql, "processing", **columns)
    odd = {insert_job(sql, "processing", **columns) for columns in STALE}
    late = insert_job(sql, "processing", last_activity_at=ago(60))
    sql.execute("ANALYZE jsworker.jobs")  # so short a table is read as a whole, by each reset, too
    lateness = await reset.look_for_late(database, heartbeat_interval=5.0, limit=100)
    assert {one.id for one in lateness.suspects} == {late, *odd}
    rows = LateRows(scan_interval=1.0)
    rows.look(lateness, now=0.0)
    stale = rows.look(lateness, now=10.0).stale
    taken = await reset.reset_stale(database, worker_id=WORKER, stale=stale, reason="silent", counted=True)
    assert late in {job.id for job in taken.resets}
    assert {job.id for job in taken.resets} | taken.refused.keys() == {late, *odd}


async def test_a_last_sign_of_life_at_the_first_instant(database: Database, sql: Sql) -> None:
    """Nothing can be subtracted from it to see which jobs had not begun."""
    await workers.seen(database, replace(ROW, concurrency=1), state="running")
    ids = {insert_job(sql, "processing", last_activity_at=FIRST, claimed_at=FIRST) for _ in range(2)}
    taken = await reset.reset_dead(database, worker_id=OTHER_WORKER, owner=WORKER, reason="it is gone")
    assert {job.id for job in taken.resets} == ids


async def test_never_stale_but_crashed(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing", last_activity_at=ago(20), stale_after=None)
    (found,) = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects
    assert (found.id, found.stale_after, found.stale) == (job_id, None, False)
    assert (found.crash_after, found.crashed) == (15.0, True)


async def test_never_crashed_but_stale(database: Database, sql: Sql) -> None:
    insert_job(sql, "processing", last_activity_at=ago(40), crash_after=None)
    (found,) = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects
    assert (found.stale, found.crash_after, found.crashed) == (True, None, False)


async def test_what_no_sweeper_may_touch_is_no_suspect(database: Database, sql: Sql) -> None:
    insert_job(sql, "processing", last_activity_at=ago(9000), stale_after=None, crash_after=None)
    assert (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects == []


async def test_rows_that_are_never_stale_hide_no_stale_one(database: Database, sql: Sql) -> None:
    for silence in (8000, 9000):
        insert_job(sql, "processing", last_activity_at=ago(silence), stale_after=None)
    patient = insert_job(sql, "processing", last_activity_at=ago(100), stale_after=seconds(3600))
    stale = insert_job(sql, "processing", last_activity_at=ago(40))
    found = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=2)).suspects
    assert [one.id for one in found] == [stale, patient]
    last = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects[2:]
    assert [one.stale_after for one in last] == [None, None]
    assert last[0].last_activity_at < last[1].last_activity_at


@pytest.mark.parametrize("status", ["queued", "completed"])
async def test_owners_are_those_who_hold_running_jobs(database: Database, sql: Sql, status: str) -> None:
    assert (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).owners == 0
    for owner in (WORKER, WORKER, OTHER_WORKER):
        insert_job(sql, "processing", worker_id=owner)
    insert_job(sql, status)
    insert_job(sql, "processing", worker_id="gamma-3-cccc", last_activity_at=ago(60))
    found = await reset.look_for_late(database, heartbeat_interval=5.0, limit=0)
    assert (found.suspects, found.owners) == ([], 3)


async def test_owners_of_late_rows_are_counted_beyond_the_limit(database: Database, sql: Sql) -> None:
    """Else an outage that silences owners with more jobs than one look returns would be no mass event."""
    for owner in ("alpha", "beta", "gamma"):
        insert_job(sql, "processing", worker_id=owner, last_activity_at=ago(60))
        insert_job(sql, "processing", worker_id=owner, last_activity_at=ago(60))
    insert_job(sql, "processing", worker_id="delta")
    found = await reset.look_for_late(database, heartbeat_interval=5.0, limit=1)
    assert (len(found.suspects), found.owners, found.late_owners) == (1, 4, 3)
    late = LateRows(scan_interval=1.0)
    late.look(found, now=0.0)
    assert late.look(found, now=10.0) == Proof([], held=1, braked=False)


async def test_since_when_the_database_is_up(database: Database, sql: Sql) -> None:
    query = "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8 AS seconds"
    before = sql.execute(query).fetchone()
    found = await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)
    after = sql.execute(query).fetchone()
    assert before is not None
    assert after is not None
    assert before["seconds"] <= found.database_up_for <= after["seconds"]


async def test_whether_the_owner_answers(database: Database, sql: Sql) -> None:
    """Proven by itself: silence of a worker that could never be asked is no evidence."""
    await workers.seen(database, ROW, state="running", answers=True)
    proven = insert_job(sql, "processing", last_activity_at=ago(60))
    unregistered = insert_job(sql, "processing", worker_id=OTHER_WORKER, last_activity_at=ago(60))
    found = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects
    assert {one.id: one.answers for one in found} == {proven: True, unregistered: False}
    await workers.seen(database, ROW, state="running")
    found = (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects
    assert {one.answers for one in found} == {False}
