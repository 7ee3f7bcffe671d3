"""What CLAIM and the owner's signs of life write, and how the counters add up over a whole life."""

import asyncio
import secrets
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import TextClause

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import claim, heartbeat, publish
from jsworker.ownership.transitions import refused_rows as marks
from jsworker.ownership.transitions.enqueue import NewJob, enqueue, new_job_id
from jsworker.ownership.transitions.refused_rows import RefusedRows

from .calls import reset_stale, suspect
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
)


class TestClaim:
    async def test_gives_the_row_a_new_owner_and_token(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(
            sql, needs_publish=True, payload='{"a": 1}', dispatch=4, traceparent="00-aa", tracestate="b"
        )
        limits = claim.RunLimits(
            stale_after=30.0, crash_after=15.0, timeout=60.0, max_attempts=7, max_stalls=2
        )
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=limits)
        job = read_job(sql, job_id)
        assert (job["status"], job["worker_id"], job["fencing_token"]) == ("processing", WORKER, 1)
        assert counters(job) == (1, 0, 0)
        assert not job["needs_publish"]
        assert (job["stale_after"], job["crash_after"]) == (timedelta(seconds=30), timedelta(seconds=15))
        assert (job["max_attempts"], job["max_stalls"]) == (7, 2)
        assert 0 <= age(sql, job["last_activity_at"]) < 5
        assert job["started_at"] is not None
        assert -60 < age(sql, job["deadline_at"]) < -55
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
            traceparent="00-aa",
            tracestate="b",
            cancel_requested=False,
            stalls=0,
            max_stalls=2,
            waited=claimed.waited,
            stored_bytes=claimed.stored_bytes,
        )
        assert claimed.waited == pytest.approx((job["claimed_at"] - job["queued_at"]).total_seconds())
        assert taken.refused_rows == {}

    async def test_brings_small_values_only(self, database: Database, sql: Sql) -> None:
        small, noise = '"small"', f'"{secrets.token_hex(claim.INLINE_BYTES // 2)}"'
        zeros = f'"{"0" * claim.INLINE_BYTES}"'  # compressed, it is stored in a few hundred bytes
        values = [(small, None), (small, small), (noise, None), (zeros, None), (small, zeros), (small, noise)]
        given = {
            insert_job(sql, payload=payload, checkpoint=checkpoint): (payload, checkpoint)
            for payload, checkpoint in values
        }
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=list(given), limits=LIMITS)
        brought = {given[one.id] for one in taken.claimed if one.payload is not None}
        assert brought == {(small, None), (small, small)}
        for one in taken.claimed:
            whole = await claim.fetch_content(database, worker_id=WORKER, claimed=one)
            assert (whole.payload, whole.checkpoint) == given[one.id]
            if given[one.id] in brought:
                assert whole == one
            else:
                assert one.checkpoint is None
                assert one.stored_bytes > 100
            with pytest.raises(OwnershipLost, match=f"job {one.id}: token 2 no longer owns it"):
                await claim.fetch_content(database, worker_id=WORKER, claimed=one._replace(fencing_token=2))

    async def test_tells_no_first_claim_but_every_later_one(self, database: Database, sql: Sql) -> None:
        first = insert_job(sql)
        again = insert_job(sql, fencing_token=4, errors=1, attempts=1, checkpoint="[1]", started_at=ago(60))
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[again, first], limits=LIMITS)
        assert {(one.id, one.fencing_token, one.attempt, one.checkpoint) for one in taken.claimed} == {
            (first, 1, 1, None),
            (again, 5, 2, "[1]"),
        }
        assert age(sql, read_job(sql, again)["started_at"]) > 50
        assert event_names(sql, first) == []
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
        limits = claim.RunLimits(
            stale_after=None, crash_after=None, timeout=None, max_attempts=3, max_stalls=3
        )
        await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=limits)
        job = read_job(sql, job_id)
        assert (job["stale_after"], job["crash_after"], job["deadline_at"]) == (None, None, None)

    async def test_one_bad_row_keeps_no_neighbour_back(self, database: Database, sql: Sql) -> None:
        good = [insert_job(sql) for _ in range(6)]
        bad = insert_job(sql, fencing_token=2**53)
        ids = [*good[:3], bad, *good[3:]]
        taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=ids, limits=LIMITS)
        assert {one.id for one in taken.claimed} == set(good)
        assert taken.refused_rows.keys() == {bad}
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

    async def test_tells_it_although_the_timeline_takes_no_entry(self, database: Database, sql: Sql) -> None:
        running = insert_job(sql, "processing", dispatch=3)
        sql.execute("ALTER TABLE jsworker.job_events ADD CONSTRAINT theirs CHECK (false) NOT VALID")
        try:
            why = await claim.look_at_refused(database, kind=KIND, ids=[running], worker_id=OTHER_WORKER)
        finally:
            sql.execute("ALTER TABLE jsworker.job_events DROP CONSTRAINT theirs")
        assert why == {running: claim.RefusedJob("processing", 3, WORKER)}


class TestLease:
    async def test_a_heartbeat_renews_and_tells_of_a_cancel(self, database: Database, sql: Sql) -> None:
        alive = insert_job(sql, "processing", last_activity_at=ago(20))
        asked = insert_job(sql, "processing", last_activity_at=ago(20), cancel_requested=True)
        taken = insert_job(sql, "processing", worker_id=OTHER_WORKER, last_activity_at=ago(20))
        beat = await heartbeat.heartbeat(
            database, worker_id=WORKER, in_flight=[(alive, 1), (asked, 1), (taken, 1), (alive, 2)]
        )
        assert beat.alive == {(alive, 1), (asked, 1)}
        assert beat.cancelled == {(asked, 1)}
        assert beat.lost == {(taken, 1), (alive, 2)}
        assert beat.locked == frozenset()
        assert [age(sql, read_job(sql, one)["last_activity_at"]) < 5 for one in (alive, asked, taken)] == [
            True,
            True,
            False,
        ]

    async def test_nothing_in_hand(self, database: Database) -> None:
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[])
        none: frozenset[heartbeat.Held] = frozenset()
        assert beat == heartbeat.Beat(none, none, none, none, none, {}, {})

    async def test_a_heartbeat_reads_what_the_rows_allow(self, database: Database, sql: Sql) -> None:
        thresholds: list[dict[str, Any]] = [
            {"stale_after": timedelta(hours=1, microseconds=500)},
            {"stale_after": None, "crash_after": timedelta(seconds=15)},
            {"stale_after": None, "crash_after": None},
        ]
        held = [(insert_job(sql, "processing", **columns), 1) for columns in thresholds]
        beat = await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=held)
        assert beat.silences == dict(zip(held, (3600.0005, 15.0, None), strict=True))
        assert beat.activities == {each: read_job(sql, each[0])["last_activity_at"] for each in held}

    async def test_progress_keeps_what_it_is_not_given(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", last_activity_at=ago(20))
        await progress(database, job_id, stage="clone", value=0.25, message="half")
        await progress(database, job_id, stage=None, value=0.5, message=None)
        job = read_job(sql, job_id)
        assert (job["stage"], job["progress"], job["message"]) == ("clone", 0.5, "half")
        assert age(sql, job["last_activity_at"]) < 5

    async def test_a_checkpoint_is_a_sign_of_life(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", last_activity_at=ago(20))
        await heartbeat.save_checkpoint(
            database, worker_id=WORKER, held=(job_id, 1), checkpoint='{"page": 7}'
        )
        job = read_job(sql, job_id)
        assert job["checkpoint"] == {"page": 7}
        assert age(sql, job["last_activity_at"]) < 5
        assert age(sql, job["progress_at"]) < 5

    @pytest.mark.parametrize("clock_ahead", [False, True])
    async def test_a_late_try_changes_nothing_once_a_later_write_was_answered(
        self, database: Database, sql: Sql, *, clock_ahead: bool
    ) -> None:
        ahead = ago(-3600) if clock_ahead else None  # the clock was set back since
        held = (insert_job(sql, "processing", progress_at=ahead), 1)
        before = read_job(sql, held[0])
        seen = before["progress_at"]
        mine: dict[str, Any] = {"worker_id": WORKER, "held": held}
        checkpoint: dict[str, Any] = {"checkpoint": "1"}
        quiet: dict[str, Any] = {"stale_after": 3660.0, "crash_after": 3615.0}
        tries: list[tuple[TextClause, dict[str, Any]]] = []
        for _ in range(2):
            tries.append((heartbeat.CHECKPOINT, checkpoint | {"seen": seen, "write": "checkpoint"}))
            seen = await heartbeat.save_checkpoint(database, **mine, **checkpoint, seen=seen)
            tries.append((heartbeat.QUIET, quiet | {"seen": seen, "write": "quiet"}))
            seen = await heartbeat.set_thresholds(database, **mine, **quiet, seen=seen)
        seen = await heartbeat.save_checkpoint(database, **mine, checkpoint="2", seen=seen)
        quiet = {"stale_after": 30.0, "crash_after": 15.0}
        seen = await heartbeat.set_thresholds(database, **mine, **quiet, seen=seen)
        written = read_job(sql, held[0])
        for late, values in tries:
            [row] = await database.run(late, heartbeat.by_owner(WORKER, held) | values)
            assert (row.progress_at, row.is_written) == (seen, False)
        assert read_job(sql, held[0]) == written
        assert (written["checkpoint"], written["stale_after"]) == (2, before["stale_after"])
        assert event_names(sql, held[0]) == []

    async def test_a_write_is_repeated_if_another_one_came_between(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing")
        mine: dict[str, Any] = {"worker_id": WORKER, "held": (job_id, 1)}
        saves = (heartbeat.save_checkpoint(database, **mine, checkpoint=str(n)) for n in range(8))
        seen = await asyncio.gather(*saves)
        assert len(set(seen)) == 8
        await progress(database, job_id, stage="clone", value=0.25, message=None)
        await heartbeat.save_checkpoint(database, **mine, checkpoint="8", seen=seen[0])
        job = read_job(sql, job_id)
        assert (job["checkpoint"], job["progress"]) == (8, 0.25)
        assert job["progress_at"] > max(seen)
        assert event_names(sql, job_id) == []

    async def test_a_quiet_phase_sets_the_patience_and_a_second_try_changes_nothing(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing", last_activity_at=ago(20))
        for stale_after in (90, 90, 30, 30):
            await heartbeat.set_thresholds(
                database,
                worker_id=WORKER,
                held=(job_id, 1),
                stale_after=float(stale_after),
                crash_after=stale_after - 15.0,
            )
            job = read_job(sql, job_id)
            assert job["stale_after"] == timedelta(seconds=stale_after)
            assert job["crash_after"] == timedelta(seconds=stale_after - 15)
            assert age(sql, job["last_activity_at"]) < 5

    @pytest.mark.parametrize("later", ["quiet", "beside", "heartbeat", "over"])
    async def test_the_end_of_a_quiet_phase_is_not_written_late(
        self, database: Database, sql: Sql, later: str
    ) -> None:
        held = (insert_job(sql, "processing"), 1)
        usual: dict[str, Any] = {"stale_after": 30.0, "crash_after": 15.0}
        quiet: dict[str, Any] = {"stale_after": 3630.0, "crash_after": 3615.0}
        owner: dict[str, Any] = {"database": database, "worker_id": WORKER}

        async def restore(seen: heartbeat.Beat) -> frozenset[heartbeat.Held]:
            return await heartbeat.restore_thresholds(
                **owner, thresholds={held: usual}, activities=seen.activities
            )

        await heartbeat.set_thresholds(**owner, held=held, **quiet)
        seen = await heartbeat.heartbeat(**owner, in_flight=[held])
        if later == "heartbeat":
            await heartbeat.heartbeat(**owner, in_flight=[held])
        elif later == "over":  # answered, and executed a second time
            assert await restore(seen) == {held}
        if later == "beside":
            await heartbeat.set_thresholds_beside(**owner, thresholds={held: quiet})
        elif later != "heartbeat":
            await heartbeat.set_thresholds(**owner, held=held, **quiet)
        before = read_job(sql, held[0])
        assert await restore(seen) == frozenset()
        assert read_job(sql, held[0]) == before
        assert before["stale_after"] == timedelta(seconds=3630)
        assert await restore(await heartbeat.heartbeat(**owner, in_flight=[held])) == {held}
        after = read_job(sql, held[0])
        assert (after["stale_after"], after["crash_after"]) == (timedelta(seconds=30), timedelta(seconds=15))

    async def test_a_shorter_phase_of_another_run_that_is_written_late_shortens_nothing(
        self, database: Database, sql: Sql
    ) -> None:
        held = [
            (insert_job(sql, "processing", **columns), 1)
            for columns in ({}, {"stale_after": None}, {"stale_after": None, "crash_after": None})
        ]
        for more in (60.0, 5.0):
            limits = ((30.0 + more, 15.0 + more), (None, 15.0 + more), (None, None))
            thresholds = {
                each: {"stale_after": stale, "crash_after": crash}
                for each, (stale, crash) in zip(held, limits, strict=True)
            }
            written = await heartbeat.set_thresholds_beside(database, worker_id=WORKER, thresholds=thresholds)
            assert written == set(held)
        rows = [read_job(sql, job_id) for job_id, _ in held]
        assert [(row["stale_after"], row["crash_after"]) for row in rows] == [
            (timedelta(seconds=90), timedelta(seconds=75)),
            (None, timedelta(seconds=75)),
            (None, None),
        ]

    async def test_the_time_of_progress_is_that_of_the_jobs_own_signs(
        self, database: Database, sql: Sql
    ) -> None:
        held = (insert_job(sql, "processing"), 1)
        limits: dict[str, Any] = {"stale_after": 90.0, "crash_after": 75.0}

        def is_logged() -> bool:
            found = read_job(sql, held[0])["progress_at"] is not None
            change_job(sql, held[0], progress_at=None)
            return found

        await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[held])
        assert not is_logged()
        await heartbeat.set_thresholds_beside(database, worker_id=WORKER, thresholds={held: limits})
        assert not is_logged()
        await heartbeat.set_thresholds(database, worker_id=WORKER, held=held, **limits)
        assert is_logged()
        await heartbeat.update_progress(
            database, worker_id=WORKER, held=held, stage=None, progress=None, message=None
        )
        assert is_logged()

    async def test_a_quiet_phase_leaves_no_limit_where_there_is_none(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "processing", stale_after=None)
        await heartbeat.set_thresholds(
            database, worker_id=WORKER, held=(job_id, 1), stale_after=None, crash_after=None
        )
        job = read_job(sql, job_id)
        assert (job["stale_after"], job["crash_after"]) == (None, None)

    async def test_a_lost_run_is_told_so(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", fencing_token=2)
        held = (job_id, 1)
        before = read_job(sql, job_id)
        for write in (
            heartbeat.update_progress(
                database, worker_id=WORKER, held=held, stage="s", progress=None, message=None
            ),
            heartbeat.save_checkpoint(database, worker_id=WORKER, held=held, checkpoint="1"),
            heartbeat.set_thresholds(database, worker_id=WORKER, held=held, stale_after=9.0, crash_after=3.0),
        ):
            with pytest.raises(OwnershipLost, match=rf"^job {job_id}: token 1 no longer owns it$"):
                await write
        assert not await heartbeat.heartbeat_alone(database, worker_id=WORKER, held=held)
        assert read_job(sql, job_id) == before

    async def test_rows_in_nobodys_hand(self, database: Database, sql: Sql) -> None:
        stray, held, claiming, older_token = (
            insert_job(sql, "processing", claimed_at=ago(60), fencing_token=2) for _ in range(4)
        )
        young = insert_job(sql, "processing")
        found = await heartbeat.orphaned_claims(
            database,
            worker_id=WORKER,
            in_flight=[(held, 2), (older_token, 1)],
            claiming=[claiming],
            older_than=6.0,
        )
        orphan = heartbeat.Orphan(ended=False, has_key=False)
        assert found == {(stray, 2): orphan, (older_token, 2): orphan}
        assert young not in dict(found.keys())


async def progress(
    database: Database, job_id: UUID, *, stage: str | None, value: float, message: str | None
) -> None:
    await heartbeat.update_progress(
        database, worker_id=WORKER, held=(job_id, 1), stage=stage, progress=value, message=message
    )


async def test_a_life_with_everything_conserves_the_attempts(database: Database, sql: Sql) -> None:
    """The CHECK holds at each step; here the sums themselves are followed over claims and resets."""
    job_id = new_job_id()
    await enqueue(database, KIND, NewJob(job_id, "{}", max_stalls=9), publish_after=0.0)
    seen = []
    for token, counted in enumerate((True, False, True, True), start=1):
        await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
        seen.append(counters(read_job(sql, job_id)))
        change_job(sql, job_id, last_activity_at=ago(60))
        (answer,) = await reset_stale(database, suspect(sql, job_id), counted=counted)
        assert answer.fencing_token == token
        seen.append(counters(read_job(sql, job_id)))
        if answer.status == "scheduled":
            change_job(sql, job_id, run_at=ago(1))
            assert await publish.promote(database, limit=10) == 1
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


async def test_a_mark_that_is_written_during_a_look_is_known_after_it(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    for _ in range(20):  # mostly the first will do
        sql.execute("DELETE FROM jsworker.refused_rows")
        refused_rows = RefusedRows(database, worker_id=WORKER)
        refused = [(job_id, RowRefused("23514", None))]
        await asyncio.gather(refused_rows.note("fail", refused), refused_rows.look())
        assert refused_rows.any_of("fail")
    sql.execute("DELETE FROM jsworker.refused_rows")
    await refused_rows.look()
    assert not refused_rows.any_of("fail")


async def test_looks_at_marks_go_on_where_the_one_before_has_ended(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MOST_MARKS", 10)
    jobs = sorted(insert_job(sql, "completed") for _ in range(35))
    mark = (
        "INSERT INTO jsworker.refused_rows"
        " (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, retry_at)"
        " SELECT id, %s, kind, status, fencing_token, dispatch, '23503', now() + %s * interval '1 hour'"
        " FROM jsworker.jobs WHERE id = ANY(%s)"
    )
    sql.execute(mark, ["prune", 1, jobs[:30]])
    sql.execute(mark, ["prune", -1, jobs[30:]])
    sql.execute(mark, ["fail", 1, jobs[25:]])
    gone = [*jobs[:5], *jobs[20:35:5]]
    sql.execute("DELETE FROM jsworker.jobs WHERE id = ANY(%s)", [gone])
    known = RefusedRows(database, worker_id=WORKER)
    await known.look()
    assert (known.any_of("prune"), known.any_of("fail")) == (True, False)  # it has not come that far
    known.expect("claim")
    for _ in range(4):  # more than enough marks for four looks
        await known.look()
    left = [
        (row["attempted"], row["job_id"])
        for row in sql.execute("SELECT attempted, job_id FROM jsworker.refused_rows")
    ]
    assert len(left) == 45 - 3
    assert not {("fail", jobs[25]), ("fail", jobs[30]), ("prune", jobs[30])}.intersection(left)
    assert all(known.any_of(name) for name in ("prune", "fail", "claim"))
    for _ in range(5):
        await known.look()
    assert (known.any_of("prune", "fail"), known.any_of("claim")) == (True, False)
