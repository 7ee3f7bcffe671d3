"""RESET: where a job goes that is taken back, what is counted, and which rows a sweeper looks at."""

from typing import Any

import pytest

from jsworker.ownership import lease, reset
from jsworker.ownership.database import Database
from jsworker.ownership.reset import Reset

from .calls import reset_stale, suspect
from .rows import (
    KIND,
    OTHER_WORKER,
    WORKER,
    Sql,
    age,
    ago,
    counters,
    insert_job,
    read_events,
    read_job,
    seconds,
)


class TestReset:
    @pytest.mark.parametrize(
        ("row", "counted", "expected"),
        [
            ({}, True, ("queued", (1, 0, 1))),
            ({}, False, ("queued", (0, 0, 0))),
            ({"errors": 2, "attempts": 3}, True, ("queued", (3, 2, 1))),
            ({"stalls": 1, "attempts": 2}, True, ("scheduled", (2, 0, 2))),
            ({"stalls": 1, "attempts": 2}, False, ("queued", (1, 0, 1))),
            ({"stalls": 2, "attempts": 3}, True, ("failed", (3, 0, 3))),
            ({"stalls": 2, "attempts": 3}, False, ("queued", (2, 0, 2))),
            ({"max_stalls": 1}, True, ("failed", (1, 0, 1))),
            ({"cancel_requested": True}, True, ("cancelled", (1, 0, 1))),
            ({"cancel_requested": True}, False, ("cancelled", (0, 0, 0))),
            ({"cancel_requested": True, "max_stalls": 1}, True, ("cancelled", (1, 0, 1))),
            (
                {"cancel_requested": True, "stalls": 2, "attempts": 3, "errors": 0},
                False,
                ("cancelled", (2, 0, 2)),
            ),
        ],
    )
    async def test_by_the_stale_rule(
        self,
        database: Database,
        sql: Sql,
        row: dict[str, Any],
        counted: bool,  # noqa: FBT001 -- a parameter of the table
        expected: tuple[str, tuple[int, ...]],
    ) -> None:
        status, expected_counters = expected
        job_id = insert_job(sql, "processing", last_activity_at=ago(60), **row)
        (answer,) = await reset_stale(database, suspect(sql, job_id), counted=counted)
        job = read_job(sql, job_id)
        assert (job["status"], counters(job)) == (status, expected_counters)
        assert (job["worker_id"], job["last_activity_at"]) == (None, None)
        assert job["fencing_token"] == 1
        assert job["dispatch"] == (2 if status == "queued" else 1)
        assert job["needs_publish"] is (status == "queued")
        assert job["cleared"] is (status in ("queued", "scheduled"))
        assert job["clear_reason"] == "silent"
        assert job["failure_reason"] == ("stalled" if status == "failed" else None)
        assert answer == Reset(job_id, KIND, status, 1, job["dispatch"], WORKER)
        assert read_events(sql, job_id) == [
            {
                "event": "reset",
                "worker_id": OTHER_WORKER,
                "fencing_token": 1,
                "error": None,
                "detail": {
                    "cause": "stale",
                    "reason": "silent",
                    "owner": WORKER,
                    "to": status,
                    "counted": counted,
                    "stalls": job["stalls"],
                    "dispatch": job["dispatch"],
                },
            }
        ]

    @pytest.mark.parametrize(("stalls", "base"), [(1, 5), (2, 10), (4, 40), (30, 600)])
    async def test_the_back_off_after_a_stall_doubles_up_to_ten_minutes(
        self, database: Database, sql: Sql, stalls: int, base: float
    ) -> None:
        ids = [
            insert_job(
                sql,
                "processing",
                last_activity_at=ago(60),
                stalls=stalls,
                attempts=stalls + 1,
                max_stalls=99,
            )
            for _ in range(8)
        ]
        await reset_stale(database, *(suspect(sql, one) for one in ids), counted=True)
        delays = [-age(sql, read_job(sql, job_id)["run_at"]) for job_id in ids]
        assert all(0.8 * base - 5 < delay <= 1.2 * base for delay in delays)
        assert len(set(delays)) == len(delays)

    @pytest.mark.parametrize(
        ("row", "status", "expected"),
        [
            ({}, "queued", (0, 0, 0)),
            ({"stalls": 2, "errors": 1, "attempts": 4}, "queued", (3, 1, 2)),
            ({"max_stalls": 1}, "queued", (0, 0, 0)),
            ({"cancel_requested": True}, "cancelled", (0, 0, 0)),
        ],
    )
    async def test_by_an_operator(
        self, database: Database, sql: Sql, row: dict[str, Any], status: str, expected: tuple[int, ...]
    ) -> None:
        job_id = insert_job(sql, "processing", **row)
        (answer,) = await reset.reset_by_operator(database, seen=[(job_id, 1)], reason="deploy")
        job = read_job(sql, job_id)
        assert (job["status"], counters(job)) == (status, expected)
        assert job["dispatch"] == (2 if status == "queued" else 1)
        assert job["needs_publish"] is job["cleared"] is (status == "queued")
        assert job["clear_reason"] == "deploy"
        assert answer == Reset(job_id, KIND, status, 1, job["dispatch"], WORKER)
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["worker_id"]) == ("reset", None)
        assert event["detail"]["cause"] == "operator"
        assert event["detail"]["counted"] is False

    async def test_a_batch_takes_what_it_may(self, database: Database, sql: Sql) -> None:
        stale = insert_job(sql, "processing", last_activity_at=ago(60))
        renewed = insert_job(sql, "processing", last_activity_at=ago(60))
        seen = [suspect(sql, stale), suspect(sql, renewed)]
        await lease.heartbeat(database, worker_id=WORKER, hand=[(renewed, 1)])
        taken = await reset.reset_stale(
            database, worker_id=OTHER_WORKER, stale=seen, reason="r", counted=True
        )
        assert [one.id for one in taken] == [stale]
        assert read_job(sql, renewed)["status"] == "processing"

    async def test_suspects_are_found_from_two_missed_heartbeats_on(
        self, database: Database, sql: Sql
    ) -> None:
        fresh = insert_job(sql, "processing", last_activity_at=ago(9))
        late = insert_job(sql, "processing", last_activity_at=ago(11))
        stale = insert_job(sql, "processing", last_activity_at=ago(40), fencing_token=3)
        impatient = insert_job(sql, "processing", last_activity_at=ago(5), stale_after=seconds(4))
        found = await reset.suspects(database, heartbeat_interval=5.0, limit=10)
        assert [(one.id, one.stale, one.fencing_token, one.stale_after) for one in found] == [
            (stale, True, 3, 30.0),
            (impatient, True, 1, 4.0),
            (late, False, 1, 30.0),
        ]
        assert fresh not in {one.id for one in found}
        assert found[0].last_activity_at == read_job(sql, stale)["last_activity_at"]

    async def test_rows_that_are_never_stale_hide_no_stale_one(self, database: Database, sql: Sql) -> None:
        for silence in (9000, 8000):
            insert_job(sql, "processing", last_activity_at=ago(silence), stale_after=None)
        patient = insert_job(sql, "processing", last_activity_at=ago(100), stale_after=seconds(3600))
        stale = insert_job(sql, "processing", last_activity_at=ago(40))
        found = await reset.suspects(database, heartbeat_interval=5.0, limit=2)
        assert [one.id for one in found] == [stale, patient]
        (last,) = (await reset.suspects(database, heartbeat_interval=5.0, limit=10))[3:]
        assert (last.stale_after, last.stale) == (None, False)
