"""Priorities of jobs: who writes them, what keeps them, and SET_PRIORITY with its races."""

import asyncio
from typing import Any

import psycopg
import pytest

from jsworker.core.errors import TransitionRefused
from jsworker.core.priorities import HIGH, LOW, NORMAL, PRIORITIES, Turns, priority_number
from jsworker.core.schedule_rules import Every
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import priorities, publish, republish, schedules
from jsworker.ownership.transitions.enqueue import NewJob, enqueue, enqueue_many, new_job_id
from jsworker.ownership.transitions.publish import Sent
from jsworker.ownership.transitions.schedules import NewSchedule

from .calls import claimed, fail, release, reset_stale, retry, set_priority, suspect
from .rows import (
    KIND,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    event_names,
    insert_job,
    read_events,
    read_job,
)
from .winner import Winner


class TestWriting:
    @pytest.mark.usefixtures("copied_or_inserted")
    async def test_every_way_in(self, database: Database, sql: Sql) -> None:
        one = NewJob(new_job_id(), "{}", priority=HIGH)
        copied = [NewJob(new_job_id(), "{}", priority=each) for each in (LOW, NORMAL, HIGH)]
        keyed = [NewJob(new_job_id(), "{}", f"k-{each}", priority=each) for each in (LOW, NORMAL, HIGH)]
        await enqueue(database, KIND, one, publish_after=0.0)
        await enqueue_many(database, KIND, copied)
        await enqueue_many(database, KIND, keyed)
        for job in (one, *copied, *keyed):
            assert read_job(sql, job.id)["priority"] == job.priority
        outgoing = {each.id: each.priority for each in await publish.take_outgoing(database, limit=10)}
        assert outgoing == {job.id: job.priority for job in (one, *copied, *keyed)}

    async def test_producers_that_know_no_priority_write_normal_jobs(self, sql: Sql) -> None:
        assert read_job(sql, insert_job(sql))["priority"] == NORMAL

    @pytest.mark.parametrize("number", [-1, 3, 32_767])
    async def test_no_other_number_can_be_stored(self, database: Database, sql: Sql, number: int) -> None:
        with pytest.raises(psycopg.errors.CheckViolation, match="jobs_priority"):
            insert_job(sql, priority=number)
        with pytest.raises(RowRefused, match="jobs_priority"):
            await enqueue(database, KIND, NewJob(new_job_id(), "{}", priority=number), publish_after=0.0)

    async def test_jobs_of_a_schedule_have_its_priority(self, database: Database, sql: Sql) -> None:
        now = await schedules.database_now(database)
        new = NewSchedule("nightly", KIND, "{}", Every(hours=1), now, LOW)
        await schedules.add(database, new, replace=False)
        [stored] = await schedules.upcoming(database)
        then = Every(hours=1).after(stored.now)
        fired = await schedules.fire(database, stored, seen=stored.next_at, instant=stored.next_at, then=then)
        assert fired is not None
        assert fired.job_id is not None
        assert read_job(sql, fired.job_id)["priority"] == LOW
        assert read_job(sql, await schedules.run_now(database, "nightly"))["priority"] == LOW
        [listed] = await schedules.list_schedules(database)
        assert listed["priority"] == "low"


class TestKeeping:
    """What brings a job back to the queue leaves it in its lane."""

    async def test_through_its_whole_life(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(1), priority=HIGH, max_attempts=2, max_stalls=5)
        assert await publish.promote(database, limit=10) == 1
        [job] = await claimed(database, job_id)
        assert job.priority == HIGH
        await release(database, job_id)
        await claimed(database, job_id)
        change_job(sql, job_id, last_activity_at=ago(600))
        assert len(await reset_stale(database, suspect(sql, job_id))) == 1
        [outgoing] = await publish.take_outgoing(database, limit=10)
        assert outgoing.priority == HIGH
        [again] = await claimed(database, job_id)
        await fail(database, job_id, again.fencing_token, permanent="permanent")
        await retry(database, job_id)
        await publish.mark(database, [Sent(job_id, read_job(sql, job_id)["dispatch"], 7, None)])
        gone = (job_id, read_job(sql, job_id)["dispatch"])
        assert await republish.republish(database, worker_id=WORKER, gone=[gone]) == [job_id]
        assert read_job(sql, job_id)["priority"] == HIGH


class TestReading:
    async def test_each_lane_waits_by_itself(self, database: Database, sql: Sql) -> None:
        jobs = {each: insert_job(sql, queued_at=ago(60 + each), priority=each) for each in (0, 1, 2)}
        insert_job(sql, kind="other-kind", queued_at=ago(60), priority=HIGH)
        for priority, job_id in jobs.items():
            for past_refused in (False, True):
                found = await republish.waiting(
                    database,
                    kind=KIND,
                    older_than=0.0,
                    limit=10,
                    besides=[],
                    past_refused=past_refused,
                    priority=priority,
                )
                assert found == [job_id]

    async def test_the_place_of_a_message_is_that_of_its_lane(self, database: Database, sql: Sql) -> None:
        insert_job(sql, queued_at=ago(60), stream_seq=3, priority=LOW)
        [posted] = await republish.posted(database, after=None, older_than=0.0, limit=10)
        assert posted.priority == LOW

    async def test_lanes_with_jobs(self, database: Database, sql: Sql) -> None:
        insert_job(sql, priority=LOW)
        insert_job(sql, "scheduled", run_at=ago(-60), priority=HIGH)
        insert_job(sql, "processing", priority=HIGH)
        insert_job(sql)
        places = [(kind, each) for kind in (KIND, "other-kind") for each in (HIGH, LOW)]
        assert await priorities.lanes_with_jobs(database, places) == [(KIND, LOW)]
        assert await priorities.lanes_with_jobs(database, []) == []


class TestSetPriority:
    @pytest.mark.parametrize("state", ["queued", "scheduled"])
    async def test_of_a_waiting_job(self, database: Database, sql: Sql, state: str) -> None:
        waits = {"run_at": ago(-60)} if state == "scheduled" else {"queued_at": ago(60)}
        job_id = insert_job(sql, state, **waits)
        before = read_job(sql, job_id)
        await set_priority(database, job_id, HIGH)
        job = read_job(sql, job_id)
        is_queued = state == "queued"
        assert (job["priority"], job["needs_publish"]) == (HIGH, is_queued)
        assert job["dispatch"] == before["dispatch"] + is_queued
        # Its place in the order is kept.
        assert (job["queued_at"], job["run_at"]) == (before["queued_at"], before["run_at"])
        [event] = read_events(sql, job_id)
        assert event["event"] == "priority_set"
        assert event["detail"] == {"priority": "high", "was": "normal", "dispatch": job["dispatch"]}

    async def test_what_it_has_already_is_not_set_again(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, priority=LOW)
        before = read_job(sql, job_id)
        await set_priority(database, job_id, LOW)
        assert read_job(sql, job_id) == before
        assert event_names(sql, job_id) == []

    @pytest.mark.parametrize("state", ["processing", "completed", "failed", "cancelled"])
    async def test_of_no_other_job(self, database: Database, sql: Sql, state: str) -> None:
        job_id = insert_job(sql, state)
        before = read_job(sql, job_id)
        with pytest.raises(TransitionRefused, match=f"is {state}; only a waiting job's priority can be set"):
            await set_priority(database, job_id, HIGH)
        assert read_job(sql, job_id) == before
        with pytest.raises(TransitionRefused, match="does not exist"):
            await set_priority(database, new_job_id(), HIGH)

    async def test_where_postgresql_refuses_the_row(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, dispatch=2**52)  # of a job that was never claimed no more can be counted
        with pytest.raises(TransitionRefused, match=r"cannot be set: .* jobs_numbers"):
            await set_priority(database, job_id, HIGH)

    async def test_two_at_once(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.run(priorities.SET_PRIORITY, {"ids": [job_id], "priority": HIGH})
        second = asyncio.create_task(set_priority(database, job_id, HIGH))
        await winner.is_passed_over()
        winner.commit()
        await second
        job = read_job(sql, job_id)
        assert (job["priority"], job["dispatch"]) == (HIGH, 2)
        assert event_names(sql, job_id) == ["priority_set"]

    async def test_claim_first(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.claims(job_id, OTHER_WORKER)
        setting = asyncio.create_task(set_priority(database, job_id, HIGH))
        await winner.is_passed_over()
        winner.commit()
        with pytest.raises(TransitionRefused, match="is processing"):
            await setting
        job = read_job(sql, job_id)
        assert (job["priority"], job["dispatch"], job["needs_publish"]) == (NORMAL, 1, False)

    async def test_before_a_claim_by_the_old_message(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql)
        winner.run(priorities.SET_PRIORITY, {"ids": [job_id], "priority": HIGH})
        assert await claimed(database, job_id) == []  # its row is locked: it is claimed again
        winner.commit()
        [job] = await claimed(database, job_id)
        assert (job.dispatch, job.priority) == (2, HIGH)
        assert not read_job(sql, job_id)["needs_publish"]

    async def test_a_mark_of_the_old_message_leaves_the_new_one_to_be_published(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        job_id = insert_job(sql, needs_publish=True)
        winner.marks(job_id)
        setting = asyncio.create_task(set_priority(database, job_id, LOW))
        await winner.is_passed_over()
        winner.commit()
        await setting
        assert await publish.mark(database, [Sent(job_id, 1, 9, None)]) == 0
        [outgoing] = await publish.take_outgoing(database, limit=10)
        assert (outgoing.dispatch, outgoing.priority) == (2, LOW)

    async def test_beside_a_promotion(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(1))
        winner.run(publish.PROMOTE, {"limit": 10, "within": 1e9})
        setting = asyncio.create_task(set_priority(database, job_id, HIGH))
        await winner.is_passed_over()
        winner.commit()
        await setting
        job = read_job(sql, job_id)
        assert (job["priority"], job["needs_publish"], job["dispatch"]) == (HIGH, True, 2)

    async def test_beside_a_cancel(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql)
        winner.cancels(job_id)
        setting = asyncio.create_task(set_priority(database, job_id, HIGH))
        await winner.is_passed_over()
        winner.commit()
        with pytest.raises(TransitionRefused, match="is cancelled"):
            await setting


class TestNames:
    def test_every_name_has_a_number(self) -> None:
        assert [priority_number(name) for name in PRIORITIES] == [HIGH, NORMAL, LOW]

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("urgent", "'urgent'"),
            ("High", "'High'"),
            ("", "''"),
            (0, "0"),
            (None, "None"),
            (b"high", "b'high'"),
            (["high"], "['high']"),
            ("high\x00", r"'high\x00'"),
        ],
    )
    def test_no_other_has(self, value: Any, shown: str) -> None:
        with pytest.raises(ValueError, match="must be one of high, normal, low") as caught:
            priority_number(value)
        assert str(caught.value).startswith(f"priority={shown} must")


class TestTurns:
    def counted(self, turns: Turns, count: int, lanes: tuple[int, ...] = (HIGH, NORMAL, LOW)) -> list[int]:
        given = [0, 0, 0]
        for _ in range(count):
            lane = turns.in_order(lanes)[0]
            turns.take(lane)
            given[lane] += 1
        return given

    def test_8_3_1(self) -> None:
        assert self.counted(Turns(), 12) == [8, 3, 1]
        assert self.counted(Turns(), 1200) == [800, 300, 100]

    def test_a_lane_alone_gets_all_and_owes_nothing(self) -> None:
        turns = Turns()
        assert self.counted(turns, 1000, (LOW,)) == [0, 0, 1000]
        assert self.counted(turns, 14)[LOW] == 1

    def test_a_lane_without_work_saves_no_turns(self) -> None:
        turns = Turns()
        self.counted(turns, 1000, (NORMAL, LOW))
        assert self.counted(turns, 13)[HIGH] <= 9

    @pytest.mark.parametrize("turns", [1, 2, 5, 12, 13, 40, 48, 49, 5000])
    def test_parts_are_all_there_is_and_no_more(self, turns: int) -> None:
        parts = [Turns().part(lane, turns, among=(0, 1, 2), ahead=[0, 0, 0]) for lane in (0, 1, 2)]
        assert abs(sum(parts) - turns) <= 2
        if turns >= 12:
            assert parts[0] > parts[1] > parts[2] >= 1

    def test_the_part_of_a_lane_is_all_where_no_other_has_work(self) -> None:
        assert Turns().part(LOW, 7, among=(), ahead=[0, 0, 0]) == 7
        assert Turns().part(LOW, 0, among=(HIGH,), ahead=[0, 0, 0]) == 0
        assert Turns().part(LOW, -3, among=(HIGH,), ahead=[0, 0, 0]) == 0

    def test_what_waits_already_counts(self) -> None:
        """The one free slot goes to the lane that has nothing in line yet."""
        assert Turns().part(NORMAL, 1, among=(HIGH, NORMAL), ahead=[8, 0, 0]) == 1
        assert Turns().part(HIGH, 1, among=(HIGH, NORMAL), ahead=[8, 0, 0]) == 0
