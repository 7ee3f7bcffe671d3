"""The database's clock was ahead and is corrected: what was written meanwhile lies ahead of it."""

from typing import Any
from uuid import UUID

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import clock_ahead, heartbeat, publish, republish, reset, workers
from jsworker.ownership.transitions.clock_ahead import bring_back
from jsworker.ownership.transitions.refused_rows import Mark, RefusedRows, marks_of

from .rows import KIND, OTHER_WORKER, WORKER, Sql, ago, change_job, insert_job, read_job, read_value, seconds

HOUR = ago(-3600)


async def late(database: Database) -> list[reset.Suspect]:
    return (await reset.look_for_late(database, heartbeat_interval=5.0, limit=10)).suspects


async def test_a_silent_owner_is_late_a_whole_threshold_later(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing", last_activity_at=HOUR)
    assert await bring_back(database, kinds=[]) == 1
    assert await late(database) == []
    sql.execute("UPDATE jsworker.jobs SET last_activity_at = last_activity_at - interval '31 s'")
    [suspect] = await late(database)
    taken = await reset.reset_stale(
        database, worker_id=OTHER_WORKER, stale=[suspect], reason="silent", counted=True
    )
    assert [job.id for job in taken.resets] == [job_id]


async def test_a_live_owner_goes_on(database: Database, sql: Sql) -> None:
    """Its heartbeats are accepted before and afterwards, and its row is never late."""
    job_id = insert_job(sql, "processing", last_activity_at=HOUR)
    in_flight = [(job_id, 1)]
    await bring_back(database, kinds=[KIND])
    assert (await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=in_flight)).alive == {(job_id, 1)}
    assert await late(database) == []
    change_job(sql, job_id, last_activity_at=HOUR)
    assert (await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=in_flight)).alive == {(job_id, 1)}
    assert await bring_back(database, kinds=[KIND]) == 0
    assert read_job(sql, job_id)["fencing_token"] == 1


async def test_a_heartbeat_that_came_first_stays(database: Database, sql: Sql) -> None:
    """The row was found, and then its owner wrote it."""
    job_id = insert_job(sql, "processing", last_activity_at=ago(20))
    before = read_job(sql, job_id)
    await database.run(clock_ahead.BRING_BACK, {"ids": [job_id]})
    assert read_job(sql, job_id) == before


async def test_a_message_is_published_and_the_idle_poll_finds_the_job(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, needs_publish=True, publish_after=HOUR, queued_at=HOUR)
    waiting: dict[str, Any] = {"kind": KIND, "older_than": 0.0, "limit": 5, "besides": []}
    assert await publish.take_outgoing(database, limit=5) == []
    assert await republish.waiting(database, **waiting) == []
    assert await bring_back(database, kinds=[KIND]) == 1
    assert [one.id for one in await publish.take_outgoing(database, limit=5)] == [job_id]
    assert await republish.waiting(database, **waiting) == [job_id]


@pytest.mark.parametrize(
    ("status", "columns"),
    [
        ("scheduled", {"run_at": HOUR}),
        ("processing", {"last_activity_at": ago(-30)}),
        ("processing", {"stale_after": seconds(9000)}),
        ("queued", {"needs_publish": True, "publish_after": ago(-30), "queued_at": ago(-30)}),
        ("queued", {"kind": "of-others", "queued_at": HOUR}),
        ("completed", {"queued_at": HOUR, "publish_after": HOUR}),
    ],
)
async def test_what_may_lie_ahead_stays(
    database: Database, sql: Sql, status: str, columns: dict[str, Any]
) -> None:
    job_id = insert_job(sql, status, **columns)
    before = read_job(sql, job_id)
    assert await bring_back(database, kinds=[KIND]) == 0
    await database.run(clock_ahead.BRING_BACK, {"ids": [job_id] if status == "completed" else []})
    assert read_job(sql, job_id) == before


async def test_more_than_one_batch_and_a_refused_row(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_ahead, "_BATCH", 2)
    ids = [insert_job(sql, "processing", last_activity_at=HOUR) for _ in range(5)]
    sql.execute("""
        CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END';
        CREATE TRIGGER refuse BEFORE UPDATE ON jsworker.jobs FOR EACH ROW WHEN (OLD.message = 'no')
          EXECUTE FUNCTION public.refuse()
    """)
    try:
        sql.execute("UPDATE jsworker.jobs SET message = 'no' WHERE id = %s", [ids[0]])
        assert await bring_back(database, kinds=[]) == 4
    finally:
        sql.execute("DROP TRIGGER refuse ON jsworker.jobs; DROP FUNCTION public.refuse()")


async def test_a_pause_that_no_time_of_postgresql_could_hold_stops_no_other(
    database: Database, sql: Sql
) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, set_by, paused_at, paused_until, paused_by) VALUES"
        " ('a', '', NULL, '9999-12-31Z', '0001-01-01Z', 'somebody'),"
        " ('b', '', NULL, now() + interval '1 d', now() + interval '1 d 60 s', 'ann')"
    )
    await clock_ahead.bring_back_others(database, "limits")
    [written, paused] = sql.execute(
        "SELECT paused_at > clock_timestamp() AS ahead, paused_until - paused_at AS length,"
        " paused_until < clock_timestamp() + interval '1 h' AS soon FROM jsworker.limits ORDER BY kind"
    ).fetchall()
    assert (written["ahead"], written["soon"]) == (True, True)
    assert (paused["ahead"], paused["soon"], paused["length"].total_seconds()) == (False, True, 60.0)


async def test_a_refused_row_is_tried_again_after_its_pause(database: Database, sql: Sql) -> None:
    ahead, other, *written = (insert_job(sql, "scheduled", run_at=ago(5)) for _ in range(4))
    await RefusedRows(database, worker_id=WORKER).note(
        "promote", [(job_id, RowRefused("23514", None)) for job_id in (ahead, other, *written)]
    )
    sql.execute(
        "UPDATE jsworker.refused_rows SET first_at = first_at + interval '30 days',"
        " last_at = last_at + interval '30 days', retry_at = retry_at + interval '30 days' WHERE job_id = %s",
        [ahead],
    )
    sql.execute("UPDATE jsworker.refused_rows SET last_at = 'infinity' WHERE job_id = %s", written[:1])
    # A pause that no time of PostgreSQL could hold stops no other.
    sql.execute(
        "UPDATE jsworker.refused_rows SET last_at = '290000-01-01', retry_at = '2020-01-01'"
        " WHERE job_id = %s",
        written[1:],
    )

    async def mark(job_id: UUID) -> Mark:
        [found] = (await marks_of(database, [job_id]))[job_id]
        return found

    before, stays = await mark(ahead), await mark(other)
    await clock_ahead.bring_back_others(database, "refused rows")
    after = await mark(ahead)
    assert after.first_at == after.last_at < before.last_at
    assert after.retry_at - after.last_at == before.retry_at - before.last_at
    assert await mark(other) == stays
    assert read_value(sql, "SELECT count(*) FROM jsworker.refused_rows WHERE last_at >= '290000-01-01'") == 2


@pytest.mark.parametrize("hours", [0, 24])
async def test_a_worker_that_is_gone_is_not_alive(database: Database, sql: Sql, hours: int) -> None:
    sql.execute(
        "INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval,"
        " state, started_at, last_seen_at) VALUES ('w', 'h', 1, '{}', 1, '1', '5 s', 'running',"
        " clock_timestamp() - interval '1 h', clock_timestamp() - interval '30 s')"
    )
    sql.execute(
        "UPDATE jsworker.workers SET last_seen_at = last_seen_at + make_interval(hours => %s)", [hours]
    )
    before = await workers.get_worker(database, "w")
    await clock_ahead.bring_back_others(database, "workers")
    sql.execute("UPDATE jsworker.workers SET last_seen_at = last_seen_at - interval '21 s'")
    after = await workers.get_worker(database, "w")
    assert before is not None
    assert after is not None
    assert (before["alive"], after["alive"]) == (hours > 0, False)
    assert before["started_at"] == after["started_at"]
