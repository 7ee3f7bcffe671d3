"""A stale owner's job is claimed without a detour through the queue: reset and claim in one statement."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import claim, heartbeat, settle
from jsworker.ownership.transitions.claim import ClaimedJob, Taken
from jsworker.ownership.transitions.reset import Suspect
from jsworker.ownership.transitions.settle import Settled

from .calls import complete, reset_stale, suspect
from .rows import (
    KIND,
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    age,
    ago,
    change_job,
    counters,
    event_names,
    insert_job,
    read_events,
    read_job,
    seconds,
)
from .winner import Winner

REASON = f"worker {WORKER} stopped responding"


async def claim_stale(database: Database, *seen: Suspect, worker_id: str = OTHER_WORKER) -> Taken:
    return await claim.claim_stale(database, worker_id=worker_id, kind=KIND, seen=seen, limits=LIMITS)


async def test_a_row_that_is_refused_keeps_no_other_from_its_new_owner(database: Database, sql: Sql) -> None:
    jobs = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(5)]
    refused = jobs.pop(2)
    check = f"CHECK (id <> '{refused}' OR worker_id <> '{OTHER_WORKER}')"
    sql.execute(f"ALTER TABLE jsworker.jobs ADD CONSTRAINT theirs {check}".encode())
    try:
        taken = await claim_stale(database, *[suspect(sql, job_id) for job_id in (*jobs, refused)])
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT theirs")
    assert {job.id for job in taken.claimed} == set(jobs)
    assert {job_id: error.constraint for job_id, error in taken.refused_rows.items()} == {refused: "theirs"}
    assert read_job(sql, refused)["worker_id"] == WORKER


async def test_counts_the_stall_and_gives_a_new_owner_and_token(database: Database, sql: Sql) -> None:
    row: dict[str, Any] = {
        "errors": 1,
        "attempts": 2,
        "dispatch": 4,
        "checkpoint": "[1]",
        "claimed_at": ago(90),
    }
    job_id = insert_job(sql, "processing", last_activity_at=ago(60), payload='{"a": 1}', **row)
    limits = claim.RunLimits(stale_after=40.0, crash_after=20.0, timeout=60.0, max_attempts=9, max_stalls=9)
    seen = [suspect(sql, job_id)]
    taken = await claim.claim_stale(database, worker_id=OTHER_WORKER, kind=KIND, seen=seen, limits=limits)
    job = read_job(sql, job_id)
    assert (job["status"], job["worker_id"], job["fencing_token"]) == ("processing", OTHER_WORKER, 2)
    assert (counters(job), job["dispatch"], job["needs_publish"]) == ((3, 1, 1), 4, False)
    assert (job["stale_after"], job["crash_after"]) == (timedelta(seconds=40), timedelta(seconds=20))
    assert (job["max_attempts"], job["max_stalls"]) == (3, 3)  # as the first claim has fixed them
    assert (job["cleared"], job["clear_reason"]) == (True, REASON)
    assert age(sql, job["last_activity_at"]) < 5
    assert age(sql, job["claimed_at"]) < 5
    assert -60 < age(sql, job["deadline_at"]) < -55
    assert taken == Taken(
        [
            ClaimedJob(
                id=job_id,
                kind=KIND,
                payload='{"a": 1}',
                fencing_token=2,
                dispatch=4,
                attempt=3,
                max_attempts=3,
                cleared=True,
                clear_reason=REASON,
                deadline=job["deadline_at"],
                checkpoint="[1]",
                traceparent=None,
                tracestate=None,
                cancel_requested=False,
                stalls=1,
                max_stalls=3,
                waited=taken.claimed[0].waited,
                stored_bytes=taken.claimed[0].stored_bytes,
            )
        ],
        {},
    )
    detail = {"attempt": 3, "cleared": True, "clear_reason": REASON}
    assert read_events(sql, job_id) == [
        {
            "event": "claimed",
            "worker_id": OTHER_WORKER,
            "fencing_token": 2,
            "error": None,
            "detail": detail | {"cause": "stale", "owner": WORKER, "counted": True, "stalls": 1},
        }
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"last_activity_at": ago(50)},
        {"fencing_token": 2},
        {"stale_after": seconds(90)},
        {"stale_after": None},
        {"stalls": 1, "attempts": 2},
        {"max_stalls": 1},
        {"cancel_requested": True},
        {"kind": "other-kind"},
    ],
    ids=str,
)
async def test_leaves_what_is_not_its_own(
    database: Database, sql: Sql, running: UUID, change: dict[str, Any]
) -> None:
    seen = suspect(sql, running)
    change_job(sql, running, **change)
    before = read_job(sql, running)
    assert await claim_stale(database, seen) == Taken([], {})
    assert (read_job(sql, running), event_names(sql, running)) == (before, [])


@pytest.mark.parametrize(
    ("limit_key", "key", "over_for", "is_claimed"),
    [
        (None, "", None, False),
        ("a", "", None, False),
        ("a", "a", None, False),
        ("a", "a", -60.0, False),
        ("a", "a", 60.0, True),
        ("a", "b", None, True),
        (None, "a", None, True),
    ],
)
async def test_nothing_begins_while_its_key_or_kind_is_paused(
    database: Database, sql: Sql, limit_key: str | None, key: str, over_for: float | None, *, is_claimed: bool
) -> None:
    job_id = insert_job(sql, "processing", last_activity_at=ago(60), limit_key=limit_key)
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, paused_at, paused_until) "
        "VALUES (%s, %s, now(), now() - make_interval(secs => %s))",
        [KIND, key, over_for],
    )
    taken = await claim_stale(database, suspect(sql, job_id))
    assert [job.id for job in taken.claimed] == [job_id] * is_claimed
    assert read_job(sql, job_id)["worker_id"] == (OTHER_WORKER if is_claimed else WORKER)


async def test_read_back_finds_it(database: Database, sql: Sql, running: UUID) -> None:
    taken = await claim_stale(database, suspect(sql, running))
    without_content = [job._replace(payload=None, checkpoint=None) for job in taken.claimed]
    assert await claim.read_back(database, worker_id=OTHER_WORKER, ids=[running]) == without_content


async def test_one_bad_row_keeps_no_neighbour_back(database: Database, sql: Sql) -> None:
    ids = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(6)]
    bad = insert_job(sql, "processing", last_activity_at=ago(60), fencing_token=2**53)
    seen = [suspect(sql, job_id) for job_id in [*ids[:2], bad, *ids[2:]]]
    taken = await claim_stale(database, *seen)
    assert {job.id for job in taken.claimed} == set(ids)
    assert taken.refused_rows.keys() == {bad}


async def test_the_former_owner_is_fenced(database: Database, sql: Sql, running: UUID) -> None:
    await claim_stale(database, suspect(sql, running))
    before = read_job(sql, running)
    assert await complete(database, running) is Settled.LOST
    beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(running, 1)])
    assert beat.lost == {(running, 1)}
    assert read_job(sql, running) == before
    assert event_names(sql, running) == ["claimed", "rejected"]
    runs = [settle.Completion(running, 2, "{}")]
    assert await settle.complete(database, worker_id=OTHER_WORKER, runs=runs) == [Settled.COMPLETED]


class TestRaces:
    async def test_it_leaves_a_job_that_its_owner_is_completing(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        seen = suspect(sql, running)
        winner.completes(running)
        assert (await claim_stale(database, seen)).claimed == []
        winner.commit()
        assert read_job(sql, running)["result"] == "winner"

    async def test_it_leaves_a_job_that_is_being_reset(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        seen = suspect(sql, running)
        winner.resets(running)
        assert (await claim_stale(database, seen)).claimed == []
        winner.commit()
        assert counters(read_job(sql, running)) == (1, 0, 1)

    async def test_it_takes_the_job_when_the_reset_is_undone(
        self, database: Database, sql: Sql, winner: Winner, running: UUID
    ) -> None:
        seen = suspect(sql, running)
        winner.resets(running)
        assert (await claim_stale(database, seen)).claimed == []
        winner.rollback()
        assert [job.fencing_token for job in (await claim_stale(database, seen)).claimed] == [2]

    async def test_a_sweeper_behind_it_finds_nothing(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        seen = suspect(sql, running)
        await claim_stale(database, seen)
        assert await reset_stale(database, seen) == []
        assert counters(read_job(sql, running)) == (2, 0, 1)

    async def test_a_hundred_at_once_give_one_owner(
        self, database: Database, sql: Sql, running: UUID
    ) -> None:
        seen = suspect(sql, running)
        answers = await asyncio.gather(
            *(claim_stale(database, seen, worker_id=f"worker-{place}") for place in range(100))
        )
        assert sum(len(answer.claimed) for answer in answers) == 1
        assert (read_job(sql, running)["fencing_token"], counters(read_job(sql, running))) == (2, (2, 0, 1))
