"""What the sweeps read of the queue, and REPUBLISH."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import publish, republish
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.republish import Posted

from .calls import claimed
from .rows import KIND, OTHER_WORKER, WORKER, Sql, ago, insert_job, read_events, read_job
from .winner import Winner

OTHER_KIND = "other-kind"


def queue(sql: Sql, *ages: float, kind: str = KIND) -> list[UUID]:
    """Queue jobs that have waited for so many seconds, their messages published."""
    return [insert_job(sql, kind=kind, queued_at=ago(age)) for age in ages]


class TestWaiting:
    async def waiting(self, database: Database, **changes: object) -> list[UUID]:
        values: dict[str, object] = {"kind": KIND, "older_than": 30.0, "limit": 10, "besides": []}
        return await republish.waiting(database, **(values | changes))  # type: ignore[arg-type] # as the door names them

    async def test_the_oldest_first(self, database: Database, sql: Sql) -> None:
        middle, oldest, youngest = queue(sql, 60, 90, 40)
        queue(sql, 10)
        insert_job(sql, "processing", queued_at=ago(99))
        insert_job(sql, "scheduled", queued_at=ago(99))
        assert await self.waiting(database) == [oldest, middle, youngest]
        assert await self.waiting(database, limit=2) == [oldest, middle]
        assert await self.waiting(database, besides=[oldest, youngest]) == [middle]
        assert await self.waiting(database, limit=1, besides=[oldest, new_job_id()]) == [middle]
        assert len(await self.waiting(database, older_than=0.0)) == 4

    async def test_however_many_set_aside_stand_before_the_others(self, database: Database, sql: Sql) -> None:
        aside = queue(sql, *range(100, 160))
        sql.execute(
            "INSERT INTO jsworker.refused_rows"
            " (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, worker_id, retry_at)"
            " SELECT id, 'claim', kind, status, fencing_token, dispatch, 'P0001', 'w', now() + interval '1 h'"
            " FROM jsworker.jobs"
        )
        middle, oldest = queue(sql, 60, 90)
        assert await self.waiting(database, limit=5, past_refused=True) == [oldest, middle]
        sql.execute("UPDATE jsworker.refused_rows SET retry_at = now() WHERE job_id = %s", (aside[0],))
        assert await self.waiting(database, limit=5, past_refused=True) == [aside[0], oldest, middle]

    async def test_with_or_without_a_message(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, queued_at=ago(60), needs_publish=True)
        assert await self.waiting(database) == [job_id]

    async def test_only_those_that_no_first_delivery_will_bring(self, database: Database, sql: Sql) -> None:
        unpublished = insert_job(sql, queued_at=ago(60), needs_publish=True)
        passed, at_it, unmarked, _ = (
            insert_job(sql, queued_at=ago(age), stream_seq=seq)
            for age, seq in ((50, 6), (49, 7), (48, None), (47, 8))
        )
        expected = [unpublished, passed, at_it, unmarked]
        assert await self.waiting(database, delivered=7) == expected
        assert await self.waiting(database, delivered=7, limit=2) == expected[:2]
        # However many stand before it that messages will bring.
        for _ in range(60):
            insert_job(sql, queued_at=ago(70), stream_seq=9)
        assert await self.waiting(database, delivered=7) == expected

    async def test_jobs_of_one_instant(self, database: Database, sql: Sql) -> None:
        ids = {insert_job(sql, queued_at=datetime(2020, 1, 1, tzinfo=UTC)) for _ in range(7)}
        assert set(await self.waiting(database)) == ids

    async def test_only_of_the_kind(self, database: Database, sql: Sql) -> None:
        queue(sql, 100)
        late, later = queue(sql, 50, 40, kind=OTHER_KIND)
        assert await self.waiting(database, kind=OTHER_KIND) == [late, later]
        assert await self.waiting(database, kind="nothing") == []


class TestPosted:
    async def posted(self, database: Database, **changes: object) -> list[Posted]:
        values: dict[str, object] = {"after": None, "older_than": 30.0, "limit": 10}
        return await republish.posted(database, **(values | changes))  # type: ignore[arg-type] # as the door names them

    async def test_tells_where_the_message_is(self, database: Database, sql: Sql) -> None:
        created = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
        job_id = insert_job(sql, queued_at=ago(60), dispatch=3, stream_seq=7, stream_created=created)
        queued_at = read_job(sql, job_id)["queued_at"]
        assert await self.posted(database) == [Posted(job_id, KIND, 3, 7, created, queued_at)]
        insert_job(sql, queued_at=ago(50))
        (_, unknown) = await self.posted(database)
        assert (unknown.stream_seq, unknown.stream_created) == (None, None)

    async def test_only_published_ones_of_an_age(self, database: Database, sql: Sql) -> None:
        (job_id,) = queue(sql, 60)
        insert_job(sql, queued_at=ago(60), needs_publish=True)
        queue(sql, 10)
        insert_job(sql, "processing", queued_at=ago(60))
        assert [one.id for one in await self.posted(database)] == [job_id]

    @pytest.mark.parametrize(
        ("queued", "published", "columns", "is_due"),
        [
            (60, 59, {"dispatch": 1}, True),
            (3600, 1, {"dispatch": 1}, True),  # NATS was away: it is the first message all the same
            (3600, 1, {"dispatch": 5, "fencing_token": 4, "attempts": 4, "errors": 4}, True),
            (60, 59, {"dispatch": 50}, True),  # held 49 times
            (3600, 5, {"dispatch": 2}, False),
            (3600, 31, {"dispatch": 2}, True),
            (3600, 35, {"dispatch": 3}, False),
            (3600, 95, {"dispatch": 3}, True),
            (65, 10, {"dispatch": 3}, False),
            (65, 35, {"dispatch": 3}, True),
            (36_000, 200, {"dispatch": 2**40}, False),
            (36_000, 305, {"dispatch": 2**40}, True),
            (60, -3600, {"dispatch": 2}, True),  # before a failover to a server whose clock is behind
            (60, 1, {"dispatch": 0, "fencing_token": 2**40}, True),
            (60, None, {"dispatch": 9}, True),
        ],
    )
    async def test_what_was_published_again_is_due_later_each_time(
        self,
        database: Database,
        sql: Sql,
        queued: float,
        published: float | None,
        columns: dict[str, int],
        *,
        is_due: bool,
    ) -> None:
        published_at = None if published is None else ago(published)
        insert_job(sql, queued_at=ago(queued), published_at=published_at, **columns)
        assert [one.is_due for one in await self.posted(database)] == [is_due]

    async def test_pages_hold_each_job_once_in_order(self, database: Database, sql: Sql) -> None:
        instants = [datetime(2020, 1, 1, 0, 0, second, tzinfo=UTC) for second in range(4)]
        kinds = [KIND, OTHER_KIND, "third-kind"]
        for place in range(60):
            insert_job(sql, kind=kinds[place % 3], queued_at=instants[place % 4])
        seen: list[Posted] = []
        after = None
        while page := await self.posted(database, after=after, limit=7):
            assert len(page) == 7 or len(seen) + len(page) == 60
            seen += page
            after = page[-1].queued_at, page[-1].id
        order = [(one.queued_at, one.id) for one in seen]
        assert order == sorted(set(order))
        assert len(order) == 60

    async def test_what_waits_for_its_relay_is_passed_over(self, database: Database, sql: Sql) -> None:
        for age in range(100, 140):
            insert_job(sql, queued_at=ago(age), needs_publish=True)
        (job_id,) = queue(sql, 60)
        assert [one.id for one in await self.posted(database, limit=11)] == [job_id]
        assert await self.posted(database, limit=9) == []  # found once the relay has been there


class TestRepublish:
    async def republish(self, database: Database, *gone: tuple[UUID, int]) -> list[UUID]:
        return await republish.republish(database, worker_id=WORKER, gone=gone)

    async def test_gives_a_new_dispatch_that_is_due(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, queued_at=ago(60), publish_after=ago(60), dispatch=3, stream_seq=7)
        before = read_job(sql, job_id)
        assert await self.republish(database, (job_id, 3)) == [job_id]
        job = read_job(sql, job_id)
        changed = {"dispatch": 4, "needs_publish": True, "publish_after": job["publish_after"]}
        assert job == before | changed
        assert job["publish_after"] > before["publish_after"]
        assert [one.dispatch for one in await publish.take_outgoing(database, limit=10)] == [4]
        assert read_events(sql, job_id) == [
            {
                "event": "republished",
                "worker_id": WORKER,
                "fencing_token": 0,
                "error": None,
                "detail": {"dispatch": 4, "lost_seq": 7},
            }
        ]

    async def test_once_for_each_dispatch(self, database: Database, sql: Sql) -> None:
        (job_id,) = queue(sql, 60)
        assert await self.republish(database, (job_id, 1)) == [job_id]
        assert await self.republish(database, (job_id, 1)) == []
        assert await self.republish(database, (job_id, 2)) == []  # it waits for its relay
        assert await publish.mark(database, [publish.Sent(job_id, 2, 9, None)]) == 1
        assert await self.republish(database, (job_id, 2)) == [job_id]

    async def test_a_claim_is_faster(self, database: Database, sql: Sql, winner: Winner) -> None:
        taken, other = queue(sql, 60, 50)
        winner.claims(taken, OTHER_WORKER)
        assert await self.republish(database, (taken, 1), (other, 1)) == [other]
        winner.commit()
        assert await self.republish(database, (taken, 1)) == []
        assert read_events(sql, taken) == []

    async def test_a_claim_comes_after(self, database: Database, sql: Sql) -> None:
        (job_id,) = queue(sql, 60)
        await self.republish(database, (job_id, 1))
        assert [job.dispatch for job in await claimed(database, job_id)] == [2]
        assert not read_job(sql, job_id)["needs_publish"]

    @pytest.mark.parametrize("count", [0, 1203])
    async def test_many(self, database: Database, sql: Sql, count: int) -> None:
        ids = queue(sql, *[60.0] * count)
        assert sorted(await self.republish(database, *((job_id, 1) for job_id in ids))) == sorted(ids)

    async def test_one_bad_row_keeps_no_neighbour_back(self, database: Database, sql: Sql) -> None:
        good, last = queue(sql, 60, 50)
        bad = insert_job(sql, queued_at=ago(55), dispatch=2**53, fencing_token=1)
        gone = [(good, 1), (bad, 2**53), (last, 1)]
        assert set(await self.republish(database, *gone)) == {good, last}
