"""COMPLETE, FAIL and RELEASE: what they write, what a second try finds, when the answer is LOST."""

from typing import Any

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import control, settle
from jsworker.ownership.transitions.claim import claim
from jsworker.ownership.transitions.reset import reset_by_operator
from jsworker.ownership.transitions.settle import Completion, Failure, Return, Settled

from .calls import Settle, complete, fail, release
from .rows import (
    KIND,
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    change_job,
    counters,
    delete_rows,
    insert_job,
    read_events,
    read_job,
    read_value,
)

EACH_WRITE = pytest.mark.parametrize("write", [complete, fail, release])


class TestComplete:
    async def test_stores_result_and_end(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", stalls=1, errors=1, attempts=3, cancel_requested=True)
        assert await complete(database, job_id, result='{"lines": 1234}') is Settled.COMPLETED
        job = read_job(sql, job_id)
        assert (job["status"], job["result"]) == ("completed", {"lines": 1234})
        assert (job["worker_id"], job["last_activity_at"]) == (None, None)
        assert job["finished_at"] is not None
        assert job["completed_by"] == "alpha-1-aaaa"
        assert counters(job) == (3, 1, 1)
        assert read_events(sql, job_id) == []

    @pytest.mark.parametrize(("result", "stored"), [(None, None), ("null", None), ("[1]", [1]), ('"a"', "a")])
    async def test_any_json_is_a_result(
        self, database: Database, sql: Sql, result: str | None, stored: Any
    ) -> None:
        job_id = insert_job(sql, "processing")
        assert await complete(database, job_id, result=result) is Settled.COMPLETED
        assert read_job(sql, job_id)["result"] == stored

    async def test_answers_in_the_order_of_the_runs(self, database: Database, sql: Sql) -> None:
        ids = [insert_job(sql, "processing") for _ in range(5)]
        change_job(sql, ids[3], worker_id=OTHER_WORKER, fencing_token=2)
        runs = [Completion(job_id, 1, f'{{"n": {place}}}') for place, job_id in enumerate(ids)]
        settled = await settle.complete(database, worker_id=WORKER, runs=runs[::-1])
        assert settled == [Settled.COMPLETED, Settled.LOST] + [Settled.COMPLETED] * 3
        assert [read_job(sql, job_id)["result"] for job_id in ids] == [
            {"n": 0},
            {"n": 1},
            {"n": 2},
            None,
            {"n": 4},
        ]

    async def test_two_tokens_of_one_job_in_one_batch(self, database: Database, sql: Sql) -> None:
        """A run that lost its job and the run that has it now may end at the same time in one process."""
        job_id = insert_job(sql, "processing", fencing_token=2)
        runs = [Completion(job_id, 1, '"old"'), Completion(job_id, 2, '"new"')]
        assert await settle.complete(database, worker_id=WORKER, runs=runs) == [
            Settled.LOST,
            Settled.COMPLETED,
        ]
        assert read_job(sql, job_id)["result"] == "new"
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["fencing_token"]) == ("rejected", 1)


class TestFail:
    @pytest.mark.parametrize(
        ("row", "permanent", "outcome"),
        [
            ({}, None, (Settled.SCHEDULED, None)),
            ({"errors": 1, "attempts": 2}, None, (Settled.SCHEDULED, None)),
            ({"stalls": 2, "attempts": 3}, None, (Settled.SCHEDULED, None)),
            ({"errors": 2, "attempts": 3}, None, (Settled.FAILED, "attempts")),
            ({"max_attempts": 1}, None, (Settled.FAILED, "attempts")),
            ({}, "permanent", (Settled.FAILED, "permanent")),
            ({"errors": 2, "attempts": 3}, "payload", (Settled.FAILED, "payload")),
            ({"cancel_requested": True}, None, (Settled.CANCELLED, None)),
            ({"cancel_requested": True, "max_attempts": 1}, None, (Settled.CANCELLED, None)),
            ({"cancel_requested": True}, "permanent", (Settled.CANCELLED, None)),
        ],
    )
    async def test_where_the_job_goes(
        self,
        database: Database,
        sql: Sql,
        row: dict[str, Any],
        permanent: str | None,
        outcome: tuple[Settled, str | None],
    ) -> None:
        settled, reason = outcome
        job_id = insert_job(sql, "processing", **row)
        before = read_job(sql, job_id)
        assert await fail(database, job_id, permanent=permanent) is settled
        job = read_job(sql, job_id)
        assert job["status"] == settled.value
        counted = settled is not Settled.CANCELLED
        assert counters(job) == (
            before["attempts"] - (not counted),
            before["errors"] + counted,
            before["stalls"],
        )
        assert (job["last_error"], job["failure_reason"]) == ("broken", reason)
        assert (job["finished_at"] is None) is (settled is Settled.SCHEDULED)
        assert (job["worker_id"], job["needs_publish"], job["dispatch"]) == (None, False, 1)
        (event,) = read_events(sql, job_id)
        assert event["event"] == ("error" if settled is Settled.SCHEDULED else settled.value)
        assert (event["worker_id"], event["fencing_token"], event["error"]) == (WORKER, 1, "broken")
        assert event["detail"]["errors"] == job["errors"]
        assert event["detail"].get("reason") == reason

    async def test_the_next_attempt_waits_out_the_back_off(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        assert await fail(database, job_id) is Settled.SCHEDULED
        left = read_value(
            sql,
            "SELECT extract(epoch FROM run_at - clock_timestamp()) FROM jsworker.jobs WHERE id = %s",
            job_id,
        )
        assert 50 < left <= 60
        (event,) = read_events(sql, job_id)
        assert event["detail"]["run_at"].startswith(
            read_job(sql, job_id)["run_at"].strftime("%Y-%m-%dT%H:%M")
        )

    async def test_an_error_of_its_own_ends_the_talk_of_being_cleared(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing", cleared=True, clear_reason="deploy")
        await fail(database, job_id)
        job = read_job(sql, job_id)
        assert (job["cleared"], job["clear_reason"]) == (False, None)

    async def test_every_error_stays_in_the_timeline(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        await fail(database, job_id, error="first")
        change_job(sql, job_id, status="queued")
        await claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
        await fail(database, job_id, 2, error="second")
        errors = [(event["event"], event["error"]) for event in read_events(sql, job_id)]
        assert errors == [("error", "first"), ("claimed", None), ("error", "second")]


class TestRelease:
    async def test_gives_the_attempt_back(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", errors=1, attempts=2, dispatch=3)
        assert await release(database, job_id) is Settled.QUEUED
        job = read_job(sql, job_id)
        assert (job["status"], counters(job)) == ("queued", (1, 1, 0))
        assert (job["dispatch"], job["needs_publish"]) == (4, True)
        assert (job["cleared"], job["clear_reason"], job["fencing_token"]) == (True, "shutdown", 1)
        assert job["publish_after"] <= read_value(sql, "SELECT clock_timestamp()")
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["worker_id"], event["fencing_token"]) == ("released", WORKER, 1)
        assert event["detail"] == {"reason": "shutdown", "dispatch": 4}

    async def test_for_a_servers_fault_waits_and_counts_nothing(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", errors=1, attempts=2, dispatch=3)
        runs = [Return(job_id, 1, "SQLSTATE 57P01", 60.0)]
        assert await settle.release(database, worker_id=WORKER, runs=runs) == [Settled.SCHEDULED]
        job = read_job(sql, job_id)
        assert (job["status"], counters(job)) == ("scheduled", (1, 1, 0))
        assert (job["dispatch"], job["needs_publish"], job["cleared"]) == (3, False, True)
        assert job["run_at"] > read_value(sql, "SELECT clock_timestamp() + interval '50 seconds'")
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["detail"]["server_fault"]) == ("released", True)
        assert await settle.server_faults(database, job_id=job_id) == 1
        assert await settle.release(database, worker_id=WORKER, runs=runs) == [Settled.QUEUED]
        assert read_job(sql, job_id) == job

    async def test_faults_of_a_server_are_counted_in_a_row(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", fencing_token=2)
        for event in ("released", "released", "error", "released"):
            sql.execute(
                "INSERT INTO jsworker.job_events (job_id, event, detail) VALUES (%s, %s, %s)",
                (job_id, event, '{"server_fault": true}'),
            )
        assert await settle.server_faults(database, job_id=job_id) == 1

    async def test_for_a_servers_fault_of_a_cancelled_job_cancels_it(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing", cancel_requested=True)
        runs = [Return(job_id, 1, "SQLSTATE 57P01", 60.0)]
        assert await settle.release(database, worker_id=WORKER, runs=runs) == [Settled.CANCELLED]
        assert counters(read_job(sql, job_id)) == (0, 0, 0)

    async def test_of_a_cancelled_job_counts_nothing(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", cancel_requested=True)
        assert await release(database, job_id) is Settled.CANCELLED
        job = read_job(sql, job_id)
        assert (job["status"], counters(job)) == ("cancelled", (0, 0, 0))
        assert (job["dispatch"], job["needs_publish"], job["cleared"], job["clear_reason"]) == (
            1,
            False,
            False,
            None,
        )
        assert job["finished_at"] is not None
        (event,) = read_events(sql, job_id)
        assert event["event"] == "cancelled"


class TestSecondTry:
    """The commit happened and its answer was lost: asking again tells the truth and writes nothing."""

    @pytest.mark.parametrize(
        ("write", "row", "settled"),
        [
            (complete, {}, Settled.COMPLETED),
            (fail, {}, Settled.SCHEDULED),
            (fail, {"max_attempts": 1}, Settled.FAILED),
            (fail, {"cancel_requested": True}, Settled.CANCELLED),
            (release, {}, Settled.QUEUED),
            (release, {"cancel_requested": True}, Settled.CANCELLED),
        ],
    )
    async def test_tells_what_the_first_did(
        self, database: Database, sql: Sql, write: Settle, row: dict[str, Any], settled: Settled
    ) -> None:
        job_id = insert_job(sql, "processing", **row)
        assert await write(database, job_id) is settled
        after = read_job(sql, job_id), read_events(sql, job_id)
        assert await write(database, job_id) is settled
        assert (read_job(sql, job_id), read_events(sql, job_id)) == after

    @pytest.mark.parametrize(("write", "settled"), [(fail, Settled.SCHEDULED), (release, Settled.QUEUED)])
    async def test_tells_it_even_when_the_job_went_on(
        self, database: Database, sql: Sql, write: Settle, settled: Settled
    ) -> None:
        job_id = insert_job(sql, "processing")
        await write(database, job_id)
        change_job(sql, job_id, status="queued")
        await claim(database, worker_id=OTHER_WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
        await settle.complete(database, worker_id=OTHER_WORKER, runs=[Completion(job_id, 2, "{}")])
        after = read_job(sql, job_id)
        assert await write(database, job_id) is settled
        assert read_job(sql, job_id) == after

    async def test_a_fail_after_the_jobs_own_transaction_has_completed_it(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing")
        await complete(database, job_id)
        assert await fail(database, job_id) is Settled.COMPLETED
        assert read_job(sql, job_id)["status"] == "completed"


class TestLost:
    @EACH_WRITE
    @pytest.mark.parametrize(
        ("status", "row"),
        [
            ("processing", {"fencing_token": 2}),
            ("processing", {"fencing_token": 2, "worker_id": OTHER_WORKER}),
            ("queued", {"fencing_token": 1, "dispatch": 2}),
            ("scheduled", {"fencing_token": 1}),
            ("completed", {"fencing_token": 2}),
            (
                "completed",
                {"fencing_token": 1, "completed_by": OTHER_WORKER},
            ),  # after a failover lost my claim
            ("failed", {"fencing_token": 1}),
            ("cancelled", {"fencing_token": 1}),
        ],
    )
    async def test_changes_nothing_and_leaves_a_trace(
        self, database: Database, sql: Sql, write: Settle, status: str, row: dict[str, Any]
    ) -> None:
        job_id = insert_job(sql, status, **row)
        before = read_job(sql, job_id)
        assert await write(database, job_id) is Settled.LOST
        assert read_job(sql, job_id) == before
        assert read_events(sql, job_id) == [
            {
                "event": "rejected",
                "worker_id": WORKER,
                "fencing_token": 1,
                "error": None,
                "detail": {"write": write.__name__},
            }
        ]

    @EACH_WRITE
    async def test_a_row_that_is_gone(self, database: Database, sql: Sql, write: Settle) -> None:
        job_id = insert_job(sql, "processing")
        delete_rows(sql, "jobs")
        assert await write(database, job_id) is Settled.LOST

    async def test_another_workers_end_of_the_same_token_is_not_mine(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing", worker_id=OTHER_WORKER)
        runs = [Failure(job_id, 1, "broken", None, 1.0)]
        assert await settle.fail(database, worker_id=OTHER_WORKER, runs=runs) == [Settled.SCHEDULED]
        assert await fail(database, job_id) is Settled.LOST

    async def test_another_workers_completion_does_not_answer_for_my_commit(
        self, database: Database, sql: Sql
    ) -> None:
        for worker, is_mine in ((WORKER, True), (OTHER_WORKER, False)):
            job_id = insert_job(sql, "completed", completed_by=worker)
            asked = settle.was_committed(database, worker_id=WORKER, held=(job_id, 1))
            assert await asked is is_mine

    async def test_my_end_of_an_earlier_token_is_not_this_ones(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        await fail(database, job_id, 1)
        change_job(sql, job_id, status="queued")
        await claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
        await reset_by_operator(database, seen=[(job_id, 2)], reason="r")
        assert await complete(database, job_id, 2) is Settled.LOST
        assert await fail(database, job_id, 1) is Settled.SCHEDULED


class TestSplitting:
    async def test_one_result_that_jsonb_refuses(self, database: Database, sql: Sql) -> None:
        ids = [insert_job(sql, "processing") for _ in range(50)]
        runs = [Completion(job_id, 1, "{}") for job_id in ids]
        runs[17] = Completion(ids[17], 1, '{"name": "a\\u0000b"}')
        settled = await settle.complete(database, worker_id=WORKER, runs=runs)
        assert settled == [Settled.COMPLETED] * 17 + [Settled.REFUSED] + [Settled.COMPLETED] * 32
        statuses = sql.execute(
            "SELECT status, count(*) AS jobs FROM jsworker.jobs GROUP BY status ORDER BY status"
        ).fetchall()
        assert statuses == [{"status": "completed", "jobs": 49}, {"status": "processing", "jobs": 1}]
        assert read_events(sql, ids[17]) == []
        assert await fail(database, ids[17], permanent="result") is Settled.FAILED

    @pytest.mark.parametrize(
        "bad",
        [{"error": "a\0b"}, {"error": "a\ud800b"}, {"delay": float("nan")}, {"delay": float("inf")}],
        ids=["NUL", "surrogate", "NaN", "infinity"],
    )
    async def test_one_error_that_cannot_be_stored(
        self, database: Database, sql: Sql, bad: dict[str, Any]
    ) -> None:
        ids = [insert_job(sql, "processing") for _ in range(7)]
        runs = [Failure(job_id, 1, "broken", None, 1.0) for job_id in ids]
        runs[4] = runs[4]._replace(**bad)
        settled = await settle.fail(database, worker_id=WORKER, runs=runs)
        assert settled == [Settled.SCHEDULED] * 4 + [Settled.REFUSED] + [Settled.SCHEDULED] * 2
        assert read_job(sql, ids[4])["status"] == "processing"

    async def test_every_row_refused(self, database: Database, sql: Sql) -> None:
        runs = [Return(insert_job(sql, "processing"), 1, "a\0b") for _ in range(3)]
        assert await settle.release(database, worker_id=WORKER, runs=runs) == [Settled.REFUSED] * 3

    async def test_no_runs(self, database: Database) -> None:
        assert await settle.complete(database, worker_id=WORKER, runs=[]) == []


async def test_cancel_then_release(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert (await control.cancel(database, [job_id])).requested == [job_id]
    assert await release(database, job_id) is Settled.CANCELLED
    assert [event["event"] for event in read_events(sql, job_id)] == ["cancel_requested", "cancelled"]
