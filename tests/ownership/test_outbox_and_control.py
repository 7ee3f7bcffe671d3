"""PUBLISH, MARK, PROMOTE, CANCEL and RETRY: what each writes, and what it tells."""

import pytest

from jsworker.core.errors import TransitionRefused
from jsworker.core.tracing import TraceContext
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import control, publish, reset
from jsworker.ownership.transitions.claim import read_back
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.settle import Settled

from .calls import claimed, release, retry
from .rows import (
    KIND,
    NOW,
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
    read_value,
)


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
        (taken,) = await publish.take_outgoing(database, limit=10)
        assert taken == publish.Outgoing(job_id, KIND, 3, True, "deploy", "00-aa", "b")
        assert -5 <= age(sql, read_job(sql, job_id)["publish_after"]) < 0
        assert await publish.take_outgoing(database, limit=10) == []
        change_job(sql, job_id, publish_after=ago(0))
        assert [one.id for one in await publish.take_outgoing(database, limit=10)] == [job_id]

    async def test_texts_of_any_length_are_read_cut(self, database: Database, sql: Sql) -> None:
        """Compressed they are small, and a thousand of them would fill the memory of every worker."""
        parent = f"00-{'a' * 32}-{'b' * 16}-01"
        context = TraceContext(parent, "v" * 512)
        fits = insert_job(sql, needs_publish=True, clear_reason="c" * 1_000, **context._asdict())
        rows = {fits: context.headers()}
        for values, headers in (
            ({"tracestate": "v" * 2_000_000}, {"traceparent": parent}),
            ({"traceparent": parent + "0" * 2_000_000}, None),
        ):
            columns = {**context._asdict(), **values, "clear_reason": "c" * 2_000_000}
            rows[insert_job(sql, needs_publish=True, **columns)] = headers
        ids = list(rows)
        outgoing = await publish.take_outgoing(database, limit=10)
        for read in (
            outgoing,
            await claimed(database, *ids),
            await read_back(database, worker_id=WORKER, ids=ids),
        ):
            found = {one.id: TraceContext(one.traceparent, one.tracestate).headers() for one in read}
            assert found == rows
            assert {one.clear_reason for one in read} == {"c" * 1_000}
            assert max(len(each) for one in read for each in one if isinstance(each, str)) == 1_000

    async def test_the_longest_due_goes_first(self, database: Database, sql: Sql) -> None:
        late = insert_job(sql, needs_publish=True, publish_after=ago(10))
        later = insert_job(sql, needs_publish=True, publish_after=ago(20))
        assert [one.id for one in await publish.take_outgoing(database, limit=1)] == [later]
        assert [one.id for one in await publish.take_outgoing(database, limit=1)] == [late]

    async def test_mark_remembers_where_the_message_is(self, database: Database, sql: Sql) -> None:
        ids = [insert_job(sql, needs_publish=True, dispatch=2) for _ in range(3)]
        created = read_value(sql, "SELECT clock_timestamp()")
        change_job(sql, ids[1], dispatch=3)
        sent = [publish.Sent(job_id, 2, 40 + place, created) for place, job_id in enumerate(ids)]
        assert await publish.mark(database, sent) == 2
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
        assert await publish.promote(database, limit=2) == 2
        assert [read_job(sql, job_id)["status"] for job_id in due] == ["scheduled", "queued", "queued"]
        job = read_job(sql, due[1])
        assert (job["dispatch"], job["needs_publish"]) == (5, True)
        assert age(sql, job["queued_at"]) < 5
        assert await publish.promote(database, limit=2) == 1
        assert await publish.promote(database, limit=2) == 0


class TestHighestDispatches:
    """What a producer may write at most can be promoted, claimed and put back like any other job."""

    async def test_queued(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, dispatch=2**52)
        assert [job.id for job in await claimed(database, job_id)] == [job_id]
        assert await release(database, job_id) is Settled.QUEUED
        assert read_job(sql, job_id)["dispatch"] == 2**52 + 1

    async def test_scheduled(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(1), dispatch=2**52 - 1)
        assert await publish.promote(database, limit=1) == 1
        assert read_job(sql, job_id)["dispatch"] == 2**52


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
            assert event_names(sql, job_id) == ["cancelled"]
        job = read_job(sql, running)
        assert (job["status"], job["cancel_requested"], job["worker_id"]) == ("processing", True, WORKER)
        (event,) = read_events(sql, running)
        assert (event["event"], event["fencing_token"], event["detail"]) == (
            "cancel_requested",
            1,
            {"owner": WORKER},
        )
        assert [event_names(sql, job_id) for job_id in final] == [[], [], []]

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
        await retry(database, job_id)
        job = read_job(sql, job_id)
        assert (job["status"], counters(job), job["fencing_token"]) == ("queued", (0, 0, 0), 5)
        assert (job["dispatch"], job["needs_publish"]) == (6, True)
        assert (job["finished_at"], job["failure_reason"], job["cancel_requested"]) == (None, None, False)
        assert (job["cleared"], job["clear_reason"]) == (False, None)
        (event,) = read_events(sql, job_id)
        assert (event["event"], event["fencing_token"]) == ("retried", 5)
        assert event["detail"] == {"dispatch": 6, "was": "failed", "failed_for": "attempts"}

    async def test_a_cancelled_job_is_retried_whatever_it_waited_for(
        self, database: Database, sql: Sql
    ) -> None:
        held = {"held_by": "limit", "held_at": NOW, "due_at": NOW}  # as an older version leaves it
        job_id = insert_job(
            sql, "cancelled", expires_at=ago(60), behind=new_job_id(), failure_reason="expired", **held
        )
        await retry(database, job_id)
        job = read_job(sql, job_id)
        assert (job["status"], job["dispatch"], job["needs_publish"]) == ("queued", 2, True)
        left = ("held_by", "held_at", "due_at", "behind", "expires_at", "finished_at", "failure_reason")
        assert [job[name] for name in left] == [None] * len(left)
        (event,) = read_events(sql, job_id)
        assert event["detail"] == {"dispatch": 2, "was": "cancelled", "failed_for": "expired"}

    async def test_a_retried_job_may_still_expire(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "cancelled", expires_at=ago(-3600))
        await retry(database, job_id)
        assert read_job(sql, job_id)["expires_at"] is not None

    @pytest.mark.parametrize("column", ["unique_key", "waiting_key"])
    async def test_a_cancelled_job_whose_key_is_taken_stays(
        self, database: Database, sql: Sql, column: str
    ) -> None:
        job_id = insert_job(sql, "cancelled", **{column: "k"})
        insert_job(sql, "queued", **{column: "k"})
        with pytest.raises(TransitionRefused, match="cannot be retried: a live job holds its"):
            await retry(database, job_id)

    async def test_what_was_cancelled_for_its_needs_is_not_retried(
        self, database: Database, sql: Sql
    ) -> None:
        job_id = insert_job(sql, "cancelled", failure_reason="needs")
        with pytest.raises(TransitionRefused, match="cancelled because of what it needs: retry"):
            await retry(database, job_id)

    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing", "completed"])
    async def test_only_an_unsuccessful_job_can_be_retried(
        self, database: Database, sql: Sql, status: str
    ) -> None:
        job_id = insert_job(sql, status)
        with pytest.raises(
            TransitionRefused, match=rf"^job {job_id} is {status}; only a failed or cancelled job can be"
        ):
            await retry(database, job_id)

    async def test_retry_of_no_job(self, database: Database) -> None:
        job_id = new_job_id()
        with pytest.raises(TransitionRefused, match=rf"^job {job_id} does not exist$"):
            await retry(database, job_id)

    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing"])
    async def test_retry_while_a_live_job_holds_the_key(
        self, database: Database, sql: Sql, status: str
    ) -> None:
        job_id = insert_job(sql, "failed", unique_key="order-1")
        holder = insert_job(sql, status, unique_key="order-1")
        before = read_job(sql, job_id)
        with pytest.raises(TransitionRefused, match=r"a live job holds its unique key$"):
            await retry(database, job_id)
        assert read_job(sql, job_id) == before
        await control.cancel(database, [holder])
        if status == "processing":
            await reset.reset_by_operator(database, seen=[(holder, 1)], reason="r")
        await retry(database, job_id)

    async def test_another_refusal_of_a_retry_is_not_hidden(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "failed", dispatch=2**53)
        with pytest.raises(Exception, match="SQLSTATE 23514, jobs_numbers"):
            await retry(database, job_id)
