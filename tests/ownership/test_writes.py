"""What each transition writes: the state it ends in, the counters, and the timeline row beside it."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from jsworker.errors import OwnershipLost, TransitionRefused
from jsworker.ownership import claim, control, lease, outbox, reset
from jsworker.ownership.database import Database
from jsworker.ownership.enqueue import NewJob, enqueue, new_job_id
from jsworker.ownership.reset import Reset, Suspect

from .rows import (
    KIND,
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    insert_job,
    read_events,
    read_job,
    read_value,
    seconds,
)

COUNTERS = ("attempts", "errors", "stalls")


def counters(job: dict[str, Any]) -> tuple[int, ...]:
    return tuple(job[name] for name in COUNTERS)


def since(sql: Sql, job: dict[str, Any], column: str) -> float:
    """Return the age of an instant in the row, in seconds by the database's clock."""
    return float(read_value(sql, "SELECT extract(epoch FROM clock_timestamp() - %s)", job[column]))


def events(sql: Sql, job_id: UUID) -> list[str]:
    return [event["event"] for event in read_events(sql, job_id)]


class TestClaim:
    async def test_gives_the_row_a_new_owner_and_token(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(
            sql, needs_publish=True, payload='{"a": 1}', dispatch=4, traceparent="00-aa", tracestate="b"
        )
        limits = claim.Limits(stale_after=30.0, crash_after=15.0, timeout=60.0, max_attempts=7, max_stalls=2)
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=limits)
        job = read_job(sql, job_id)
        assert (job["status"], job["worker_id"], job["fencing_token"]) == ("processing", WORKER, 1)
        assert counters(job) == (1, 0, 0)
        assert not job["needs_publish"]
        assert (job["stale_after"], job["crash_after"]) == (timedelta(seconds=30), timedelta(seconds=15))
        assert (job["max_attempts"], job["max_stalls"]) == (7, 2)
        assert 0 <= since(sql, job, "last_activity_at") < 5
        assert job["started_at"] is not None
        assert -60 < since(sql, job, "deadline_at") < -55
        (claimed,) = taken.claimed
        assert claimed == claim.ClaimedJob(
            id=job_id,
            kind=KIND,
            payload='{"a": 1}',
            fencing_token=1,
            dispatch=4,
            attempt=1,
            max_attempts=7,
            cleared=False,
            clear_reason=None,
            deadline=job["deadline_at"],
            checkpoint=None,
            queued_at=job["queued_at"],
            claimed_at=job["claimed_at"],
            traceparent="00-aa",
            tracestate="b",
            cancel_requested=False,
        )
        assert taken.refused_rows == frozenset()

    async def test_tells_no_first_claim_but_every_later_one(self, database: Database, sql: Sql) -> None:
        first = insert_job(sql)
        again = insert_job(sql, fencing_token=4, errors=1, attempts=1, checkpoint="[1]", started_at=ago(60))
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[again, first], limits=LIMITS)
        assert {(one.id, one.fencing_token, one.attempt, one.checkpoint) for one in taken.claimed} == {
            (first, 1, 1, None),
            (again, 5, 2, "[1]"),
        }
        assert since(sql, read_job(sql, again), "started_at") > 50
        assert events(sql, first) == []
        assert read_events(sql, again) == [
            {
                "event": "claimed",
                "worker_id": WORKER,
                "fencing_token": 5,
                "error": None,
                "detail": {"attempt": 2, "cleared": False, "clear_reason": None},
            }
        ]

    async def test_the_producers_limits_stand(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, max_attempts=1, max_stalls=9)
        (job,) = (
            await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
        ).claimed
        assert job.max_attempts == 1
        assert read_job(sql, job_id)["max_stalls"] == 9

    async def test_open_limits_stay_open(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql)
        limits = claim.Limits(stale_after=None, crash_after=None, timeout=None, max_attempts=3, max_stalls=3)
        await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=limits)
        job = read_job(sql, job_id)
        assert (job["stale_after"], job["crash_after"], job["deadline_at"]) == (None, None, None)

    async def test_one_bad_row_keeps_no_neighbour_back(self, database: Database, sql: Sql) -> None:
        good = [insert_job(sql) for _ in range(6)]
        bad = insert_job(sql, fencing_token=2**63 - 1)
        ids = [*good[:3], bad, *good[3:]]
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=ids, limits=LIMITS)
        assert {one.id for one in taken.claimed} == set(good)
        assert taken.refused_rows == {bad}
        assert read_job(sql, bad)["status"] == "queued"

    async def test_tells_why_a_job_was_refused(self, database: Database, sql: Sql) -> None:
        done, running = insert_job(sql, "completed"), insert_job(sql, "processing", dispatch=3)
        ids = [done, running, new_job_id()]
        taken = await claim.claim(database, worker_id=OTHER_WORKER, kind=KIND, ids=ids, limits=LIMITS)
        assert taken.claimed == []
        assert await claim.look_at_refused(database, kind=KIND, ids=ids) == {
            done: claim.RefusedJob("completed", 1, None),
            running: claim.RefusedJob("processing", 3, WORKER),
        }


class TestLease:
    async def test_a_heartbeat_renews_and_tells_of_a_cancel(self, database: Database, sql: Sql) -> None:
        alive = insert_job(sql, "processing", last_activity_at=ago(20))
        asked = insert_job(sql, "processing", last_activity_at=ago(20), cancel_requested=True)
        taken = insert_job(sql, "processing", worker_id=OTHER_WORKER, last_activity_at=ago(20))
        beat = await lease.heartbeat(
            database, worker_id=WORKER, hand=[(alive, 1), (asked, 1), (taken, 1), (alive, 2)]
        )
        assert beat.alive == {(alive, 1), (asked, 1)}
        assert beat.cancelled == {(asked, 1)}
        assert beat.lost == {(taken, 1), (alive, 2)}
        assert beat.locked == frozenset()
        assert [since(sql, read_job(sql, one), "last_activity_at") < 5 for one in (alive, asked, taken)] == [
            True,
            True,
            False,
        ]

    async def test_nothing_in_hand(self, database: Database) -> None:
        beat = await lease.heartbeat(database, worker_id=WORKER, hand=[])
        assert beat == lease.Beat(*(frozenset[lease.Held]() for _ in range(5)))

    async def test_progress_keeps_what_it_is_not_given(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", last_activity_at=ago(20))
        await progress(database, job_id, stage="clone", value=0.25, message="half")
        await progress(database, job_id, stage=None, value=0.5, message=None)
        job = read_job(sql, job_id)
        assert (job["stage"], job["progress"], job["message"]) == ("clone", 0.5, "half")
        assert since(sql, job, "last_activity_at") < 5

    async def test_a_checkpoint_is_a_sign_of_life(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", last_activity_at=ago(20))
        await lease.save_checkpoint(database, worker_id=WORKER, held=(job_id, 1), checkpoint='{"page": 7}')
        job = read_job(sql, job_id)
        assert job["checkpoint"] == {"page": 7}
        assert since(sql, job, "last_activity_at") < 5

    async def test_a_quiet_phase_lengthens_and_shortens(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", last_activity_at=ago(20))
        for longer, stale_after in ((60.0, 90), (-60.0, 30)):
            await lease.lengthen(database, worker_id=WORKER, held=(job_id, 1), seconds=longer)
            job = read_job(sql, job_id)
            assert job["stale_after"] == timedelta(seconds=stale_after)
            assert job["crash_after"] == timedelta(seconds=stale_after - 15)
            assert since(sql, job, "last_activity_at") < 5

    async def test_a_quiet_phase_leaves_no_limit_where_there_is_none(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing", stale_after=None)
        await lease.lengthen(database, worker_id=WORKER, held=(job_id, 1), seconds=60.0)
        assert read_job(sql, job_id)["stale_after"] is None

    async def test_a_lost_run_is_told_so(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", fencing_token=2)
        held = (job_id, 1)
        before = read_job(sql, job_id)
        for write in (
            lease.update_progress(
                database, worker_id=WORKER, held=held, stage="s", progress=None, message=None
            ),
            lease.save_checkpoint(database, worker_id=WORKER, held=held, checkpoint="1"),
            lease.lengthen(database, worker_id=WORKER, held=held, seconds=1.0),
        ):
            with pytest.raises(OwnershipLost, match=rf"^job {job_id}: token 1 no longer owns it$"):
                await write
        assert not await lease.heartbeat_alone(database, worker_id=WORKER, held=held)
        assert read_job(sql, job_id) == before

    async def test_rows_in_nobodys_hand(self, database: Database, sql: Sql) -> None:
        stray, held, claiming, older_token = (
            insert_job(sql, "processing", claimed_at=ago(60), fencing_token=2) for _ in range(4)
        )
        young = insert_job(sql, "processing")
        found = await lease.strays(
            database,
            worker_id=WORKER,
            hand=[(held, 2), (older_token, 1)],
            claiming=[claiming],
            older_than=6.0,
        )
        assert found == [(stray, 2), (older_token, 2)]
        assert young not in dict(found)


async def progress(
    database: Database, job_id: UUID, *, stage: str | None, value: float, message: str | None
) -> None:
    await lease.update_progress(
        database, worker_id=WORKER, held=(job_id, 1), stage=stage, progress=value, message=message
    )


def suspect(sql: Sql, job_id: UUID) -> Suspect:
    job = read_job(sql, job_id)
    return Suspect(
        id=job_id,
        kind=job["kind"],
        worker_id=job["worker_id"],
        fencing_token=job["fencing_token"],
        last_activity_at=job["last_activity_at"],
        stale_after=30.0,
        stale=True,
    )


async def reset_stale(database: Database, sql: Sql, *job_ids: UUID, counted: bool) -> list[Reset]:
    stale = [suspect(sql, job_id) for job_id in job_ids]
    return await reset.reset_stale(
        database, worker_id=OTHER_WORKER, stale=stale, reason="silent", counted=counted
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
        (answer,) = await reset_stale(database, sql, job_id, counted=counted)
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
        await reset_stale(database, sql, *ids, counted=True)
        delays = [-since(sql, read_job(sql, job_id), "run_at") for job_id in ids]
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
        for age in (9000, 8000):
            insert_job(sql, "processing", last_activity_at=ago(age), stale_after=None)
        patient = insert_job(sql, "processing", last_activity_at=ago(100), stale_after=seconds(3600))
        stale = insert_job(sql, "processing", last_activity_at=ago(40))
        found = await reset.suspects(database, heartbeat_interval=5.0, limit=2)
        assert [one.id for one in found] == [stale, patient]
        (last,) = (await reset.suspects(database, heartbeat_interval=5.0, limit=10))[3:]
        assert (last.stale_after, last.stale) == (None, False)


class TestOutbox:
    async def test_a_due_message_is_taken_once_in_five_seconds(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(
            sql,
            needs_publish=True,
            dispatch=3,
            cleared=True,
            clear_reason="deploy",
            traceparent="00-aa",
            tracestate="b",
        )
        (taken,) = await outbox.take_outgoing(database, limit=10)
        assert taken == outbox.Outgoing(job_id, KIND, 3, True, "deploy", "00-aa", "b")
        assert -5 <= since(sql, read_job(sql, job_id), "publish_after") < 0
        assert await outbox.take_outgoing(database, limit=10) == []
        change_job(sql, job_id, publish_after=ago(0))
        assert [one.id for one in await outbox.take_outgoing(database, limit=10)] == [job_id]

    async def test_the_longest_due_goes_first(self, database: Database, sql: Sql) -> None:
        late = insert_job(sql, needs_publish=True, publish_after=ago(10))
        later = insert_job(sql, needs_publish=True, publish_after=ago(20))
        assert [one.id for one in await outbox.take_outgoing(database, limit=1)] == [later]
        assert [one.id for one in await outbox.take_outgoing(database, limit=1)] == [late]

    async def test_mark_remembers_where_the_message_is(self, database: Database, sql: Sql) -> None:
        ids = [insert_job(sql, needs_publish=True, dispatch=2) for _ in range(3)]
        created = read_value(sql, "SELECT clock_timestamp()")
        change_job(sql, ids[1], dispatch=3)
        sent = [outbox.Sent(job_id, 2, 40 + place, created) for place, job_id in enumerate(ids)]
        assert await outbox.mark(database, sent) == 2
        rows = [read_job(sql, job_id) for job_id in ids]
        assert [(row["needs_publish"], row["stream_seq"], row["stream_created"]) for row in rows] == [
            (False, 40, created),
            (True, None, None),
            (False, 42, created),
        ]
        assert rows[0]["published_at"] is not None

    async def test_promote_queues_what_is_due(self, database: Database, sql: Sql) -> None:
        due = [insert_job(sql, "scheduled", run_at=ago(age), dispatch=4) for age in (1, 3, 2)]
        insert_job(sql, "scheduled")
        assert await outbox.promote(database, limit=2) == 2
        assert [read_job(sql, job_id)["status"] for job_id in due] == ["scheduled", "queued", "queued"]
        job = read_job(sql, due[1])
        assert (job["dispatch"], job["needs_publish"]) == (5, True)
        assert since(sql, job, "queued_at") < 5
        assert await outbox.promote(database, limit=2) == 1
        assert await outbox.promote(database, limit=2) == 0


class TestControl:
    async def test_cancel_of_every_state(self, database: Database, sql: Sql) -> None:
        scheduled = insert_job(sql, "scheduled")
        queued = insert_job(sql, "queued", needs_publish=True)
        running = insert_job(sql, "processing")
        final = {insert_job(sql, status): status for status in ("completed", "failed", "cancelled")}
        unknown = new_job_id()
        answer = await control.cancel(database, [scheduled, unknown, *final, running, queued])
        assert set(answer.cancelled) == {scheduled, queued}
        assert answer.requested == [running]
        assert answer.final == final
        assert answer.unknown == [unknown]
        for job_id in (scheduled, queued):
            job = read_job(sql, job_id)
            assert (job["status"], job["needs_publish"], job["cancel_requested"]) == (
                "cancelled",
                False,
                False,
            )
            assert job["finished_at"] is not None
            assert events(sql, job_id) == ["cancelled"]
        job = read_job(sql, running)
        assert (job["status"], job["cancel_requested"], job["worker_id"]) == ("processing", True, WORKER)
        (event,) = read_events(sql, running)
        assert (event["event"], event["fencing_token"], event["detail"]) == (
            "cancel_requested",
            1,
            {"owner": WORKER},
        )
        assert [events(sql, job_id) for job_id in final] == [[], [], []]

    async def test_retry_starts_over_but_keeps_the_token(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(
            sql,
            "failed",
            fencing_token=5,
            errors=3,
            stalls=2,
            attempts=5,
            last_error="broken",
            cancel_requested=True,
            cleared=True,
            clear_reason="r",
            dispatch=5,
        )
        await control.retry(database, job_id)
        job = read_job(sql, job_id)
        assert (job["status"], counters(job), job["fencing_token"]) == ("queued", (0, 0, 0), 5)
        assert (job["dispatch"], job["needs_publish"]) == (6, True)
        assert (job["finished_at"], job["failure_reason"], job["cancel_requested"]) == (None, None, False)
        assert (job["cleared"], job["clear_reason"]) == (False, None)
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["fencing_token"]) == ("retried", 5)
        assert event["detail"] == {"dispatch": 6, "failed_for": "attempts"}

    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing", "completed", "cancelled"])
    async def test_only_a_failed_job_can_be_retried(self, database: Database, sql: Sql, status: str) -> None:
        job_id = insert_job(sql, status)
        with pytest.raises(
            TransitionRefused, match=rf"^job {job_id} is {status}; only a failed job can be retried$"
        ):
            await control.retry(database, job_id)

    async def test_retry_of_no_job(self, database: Database) -> None:
        job_id = new_job_id()
        with pytest.raises(TransitionRefused, match=rf"^job {job_id} does not exist$"):
            await control.retry(database, job_id)

    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing"])
    async def test_retry_while_a_live_job_holds_the_key(
        self, database: Database, sql: Sql, status: str
    ) -> None:
        job_id = insert_job(sql, "failed", unique_key="order-1")
        holder = insert_job(sql, status, unique_key="order-1")
        before = read_job(sql, job_id)
        with pytest.raises(TransitionRefused, match=r"a live job holds its unique key$"):
            await control.retry(database, job_id)
        assert read_job(sql, job_id) == before
        await control.cancel(database, [holder])
        if status == "processing":
            await reset.reset_by_operator(database, seen=[(holder, 1)], reason="r")
        await control.retry(database, job_id)

    async def test_another_refusal_of_a_retry_is_not_hidden(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "failed", dispatch=2**63 - 1)
        with pytest.raises(Exception, match="SQLSTATE 22003"):
            await control.retry(database, job_id)


async def test_a_life_with_everything_conserves_the_attempts(database: Database, sql: Sql) -> None:
    """The CHECK holds at each step; here the sums themselves are followed over claims and resets."""
    job_id = new_job_id()
    await enqueue(database, KIND, NewJob(job_id, "{}", max_stalls=9), publish_after=0.0)
    seen = []
    for token, counted in enumerate((True, False, True, True), start=1):
        await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
        seen.append(counters(read_job(sql, job_id)))
        change_job(sql, job_id, last_activity_at=ago(60))
        (answer,) = await reset_stale(database, sql, job_id, counted=counted)
        assert answer.fencing_token == token
        seen.append(counters(read_job(sql, job_id)))
        if answer.status == "scheduled":
            change_job(sql, job_id, run_at=ago(1))
            assert await outbox.promote(database, limit=10) == 1
    assert seen == [
        (1, 0, 0),
        (1, 0, 1),
        (2, 0, 1),
        (1, 0, 1),
        (2, 0, 1),
        (2, 0, 2),
        (3, 0, 2),
        (3, 0, 3),
    ]
    assert read_job(sql, job_id)["dispatch"] == 5
