"""SNOOZE: the job waits again, nothing is counted but the snooze; late, twice, and beside a twin."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions.settle import Settled, Snoozing
from jsworker.ownership.transitions.snooze import snooze

from .calls import claimed, retry
from .rows import (
    OTHER_WORKER,
    WORKER,
    Sql,
    counters,
    event_names,
    insert_job,
    read_events,
    read_job,
    read_value,
)
from .winner import Winner


async def put_off(
    database: Database, job_id: UUID, token: int = 1, *, delay: float = 60.0, most: int | None = 1000
) -> Settled:
    runs = [Snoozing(job_id, token, "not yet", delay, most, "snoozed too often")]
    return (await snooze(database, worker_id=WORKER, runs=runs))[0]


@pytest.mark.parametrize(
    ("row", "most", "settled"),
    [
        ({}, 1000, Settled.SNOOZED),
        ({"snoozes": 4}, 5, Settled.SNOOZED),
        ({"snoozes": 5}, 5, Settled.FAILED),
        ({"snoozes": 2**31 - 1}, 5, Settled.FAILED),
        ({"snoozes": 5}, None, Settled.SNOOZED),
        ({"errors": 2, "stalls": 1, "attempts": 4}, 1000, Settled.SNOOZED),
        ({"errors": 2, "stalls": 1, "attempts": 4, "snoozes": 7}, 7, Settled.FAILED),
        ({"cancel_requested": True}, 1000, Settled.CANCELLED),
        ({"cancel_requested": True, "snoozes": 5}, 5, Settled.CANCELLED),
    ],
)
async def test_where_the_job_goes(
    database: Database, sql: Sql, row: dict[str, Any], most: int | None, settled: Settled
) -> None:
    job_id = insert_job(sql, "processing", last_error="earlier", cleared=True, clear_reason="reset", **row)
    before = read_job(sql, job_id)
    assert await put_off(database, job_id, most=most) is settled
    job = read_job(sql, job_id)
    failed, again = settled is Settled.FAILED, settled is Settled.SNOOZED
    assert job["status"] == ("scheduled" if again else settled.value)
    attempts, errors, stalls = counters(before)
    assert counters(job) == ((attempts, errors + 1, stalls) if failed else (attempts - 1, errors, stalls))
    assert job["snoozes"] == before["snoozes"] + (again and most is not None)
    assert job["last_error"] == ("snoozed too often" if failed else "earlier")
    assert job["failure_reason"] == ("snoozes" if failed else None)
    assert (job["finished_at"] is None) is again
    assert (job["worker_id"], job["needs_publish"], job["dispatch"]) == (None, False, 1)
    assert (job["cleared"], job["clear_reason"]) == (False, None)
    [event] = read_events(sql, job_id)
    assert event["event"] == settled.value
    assert (event["worker_id"], event["fencing_token"]) == (WORKER, 1)
    assert event["error"] == ("snoozed too often" if failed else None)
    assert event["detail"]["reason"] == ("snoozes" if failed else "not yet")
    assert ("run_at" in event["detail"]) is again


async def test_it_waits_for_as_long_as_was_said(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await put_off(database, job_id, delay=3600.0) is Settled.SNOOZED
    left = "SELECT extract(epoch FROM run_at - clock_timestamp()) FROM jsworker.jobs WHERE id = %s"
    assert 3500 < read_value(sql, left, job_id) <= 3600


async def test_the_longest_wait_can_be_written(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await put_off(database, job_id, delay=10 * 366 * 86400.0) is Settled.SNOOZED


async def test_asked_again_after_a_lost_answer_it_is_counted_once(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await put_off(database, job_id) is Settled.SNOOZED
    before = read_job(sql, job_id)
    assert await put_off(database, job_id) is Settled.SNOOZED
    assert read_job(sql, job_id) == before
    assert event_names(sql, job_id) == ["snoozed"]


async def test_a_zombie_puts_nothing_off(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql)
    await claimed(database, job_id, worker_id=OTHER_WORKER)
    before = read_job(sql, job_id)
    assert await put_off(database, job_id) is Settled.LOST
    assert read_job(sql, job_id) == before
    [event] = read_events(sql, job_id)
    assert (event["event"], event["detail"]["write"]) == ("rejected", "snooze")


@pytest.mark.parametrize("wins", ["resets", "completes", "fails", "releases"])
async def test_behind_the_lock_of_who_ended_the_run_it_writes_nothing(
    database: Database, sql: Sql, winner: Winner, running: UUID, wins: str
) -> None:
    getattr(winner, wins)(running)
    late = asyncio.create_task(put_off(database, running))
    await winner.blocks()
    winner.commit()
    became = {"resets": Settled.LOST, "completes": Settled.COMPLETED, "fails": Settled.SCHEDULED}
    assert await late is became.get(wins, Settled.QUEUED)
    assert read_job(sql, running)["snoozes"] == 0


async def test_behind_the_lock_of_a_cancel_it_cancels(database: Database, sql: Sql, winner: Winner) -> None:
    job_id = insert_job(sql, "processing")
    winner.cancels(job_id)
    late = asyncio.create_task(put_off(database, job_id))
    await winner.blocks()
    winner.commit()
    assert await late is Settled.CANCELLED
    assert counters(read_job(sql, job_id)) == (0, 0, 0)


async def test_a_locked_row_is_not_waited_for_in_a_batch(
    database: Database, sql: Sql, winner: Winner
) -> None:
    locked, free = insert_job(sql, "processing"), insert_job(sql, "processing")
    winner.fails(locked)
    runs = [Snoozing(each, 1, "not yet", 60.0, 1000, "") for each in (locked, free)]
    settled = await snooze(database, worker_id=WORKER, runs=runs, wait=False)
    assert settled == [Settled.LOCKED, Settled.SNOOZED]


async def test_a_retry_by_hand_begins_to_count_anew(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing", snoozes=5)
    assert await put_off(database, job_id, most=5) is Settled.FAILED
    await retry(database, job_id)
    assert (read_job(sql, job_id)["snoozes"], counters(read_job(sql, job_id))) == (0, (0, 0, 0))
