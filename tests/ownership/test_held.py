"""Held rows: scheduled for an event. No clock makes them due, and whoever looks at jobs sees them."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from jsworker.core.errors import JobNotFound
from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_filter import JobFilter, Selection
from jsworker.ownership.queries.job_report import OVERDUE, backlog
from jsworker.ownership.schema import HELD_BY
from jsworker.ownership.statements import compiled, j
from jsworker.ownership.transitions import control, hold, publish, republish

from .rows import HELD, KIND, LIMITS, WORKER, Sql, ago, change_job, insert_job, read_job
from .transitions import without

LATER = datetime(2090, 1, 1, tzinfo=UTC)

WAKE = compiled(
    sa.update(j)
    .values(**hold.WOKEN)
    .where(j.c.id == sa.bindparam("id"), predicates.held_by("limit"))
    .returning(j.c.id)
)
HOLD = compiled(
    sa.update(j)
    .values(**hold.held_now("limit"))
    .where(j.c.id == sa.bindparam("id"), predicates.queued)
    .returning(j.c.id)
)


@pytest.mark.parametrize("why", HELD_BY)
async def test_no_sweep_takes_a_held_job(database: Database, sql: Sql, why: str) -> None:
    job_id = insert_job(
        sql, "scheduled", **HELD | {"held_by": why}, dispatch=1, queued_at=ago(3600), created_at=ago(3600)
    )
    before = read_job(sql, job_id)
    assert await publish.promote(database, limit=10) == 0
    assert await publish.take_outgoing(database, limit=10) == []
    assert await republish.posted(database, after=None, older_than=0.0, limit=10) == []
    assert await republish.waiting(database, kind=KIND, older_than=0.0, limit=10, besides=[]) == []
    assert await republish.republish(database, worker_id=WORKER, gone=[(job_id, 1)]) == []
    assert await republish.queued_kinds(database, kinds=[KIND]) == set()
    assert read_job(sql, job_id) == before


async def test_it_cannot_be_claimed(database: Database, sql: Sql) -> None:
    from jsworker.ownership.transitions import claim  # noqa: PLC0415 -- beside its only use

    job_id = insert_job(sql, "scheduled", **HELD, dispatch=1)
    taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
    assert taken.claimed == []
    refused = await claim.look_at_refused(database, kind=KIND, ids=[job_id])
    assert refused[job_id].status == "scheduled"


async def test_it_is_cancelled_as_any_scheduled_job(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "scheduled", **HELD, due_at=LATER)
    assert (await control.cancel(database, [job_id])).cancelled == [job_id]
    row = read_job(sql, job_id)
    assert (row["status"], row["held_by"], row["held_at"], row["due_at"]) == ("cancelled", None, None, None)


def test_an_older_versions_cancel_ends_it_too(sql: Sql) -> None:
    job_id = insert_job(sql, "scheduled", **HELD)
    sql.execute("UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now() WHERE id = %s", [job_id])
    assert read_job(sql, job_id)["held_by"] == "limit"


class TestWake:
    """What WAKE writes; who wakes whom is said where the reasons are."""

    def run(self, engine: Engine, job_id: UUID) -> int:
        with engine.begin() as connection:
            return len(connection.execute(WAKE, {"id": job_id}).all())

    def test_it_is_queued_again_at_its_old_place(self, engine: Engine, sql: Sql) -> None:
        place = datetime(2026, 1, 1, tzinfo=UTC)
        job_id = insert_job(sql, "scheduled", **HELD, dispatch=4, queued_at=place)
        assert self.run(engine, job_id) == 1
        row = read_job(sql, job_id)
        assert (row["status"], row["dispatch"], row["needs_publish"]) == ("queued", 5, True)
        assert (row["queued_at"], row["held_by"], row["held_at"]) == (place, None, None)
        assert self.run(engine, job_id) == 0

    def test_one_that_was_never_queued_gets_a_place(self, engine: Engine, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", **HELD, due_at=ago(1))
        assert self.run(engine, job_id) == 1
        row = read_job(sql, job_id)
        assert (row["status"], row["dispatch"]) == ("queued", 1)
        assert row["queued_at"] is not None

    def test_one_with_a_delay_of_its_own_waits_for_it(self, engine: Engine, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled", **HELD, due_at=LATER)
        assert self.run(engine, job_id) == 1
        row = read_job(sql, job_id)
        assert (row["status"], row["run_at"], row["dispatch"]) == ("scheduled", LATER, 0)
        assert (row["needs_publish"], row["held_by"], row["due_at"]) == (False, None, None)

    @pytest.mark.parametrize(
        ("guard", "columns"),
        [
            (r"j\.held_by = 'limit'", {"held_by": "needs"}),
            (r"j\.status = 'scheduled'", {"status": "cancelled", "finished_at": ago(0)}),
        ],
    )
    def test_each_predicate_of_the_guard_is_needed(
        self, engine: Engine, sql: Sql, guard: str, columns: dict[str, object]
    ) -> None:
        job_id = insert_job(sql, "scheduled", **HELD | columns)
        before = read_job(sql, job_id)
        assert self.run(engine, job_id) == 0
        assert read_job(sql, job_id) == before
        sql.execute("ALTER TABLE jsworker.jobs DISABLE TRIGGER jobs_guard")
        try:
            sql.execute(
                "UPDATE jsworker.jobs SET finished_at = NULL, status = 'scheduled' WHERE id = %s", [job_id]
            )
            with engine.begin() as connection:
                assert len(connection.execute(without(WAKE, guard), {"id": job_id}).all()) == 1
        finally:
            sql.execute("ALTER TABLE jsworker.jobs ENABLE TRIGGER jobs_guard")


def test_hold_keeps_the_place(engine: Engine, sql: Sql) -> None:
    place = datetime(2026, 1, 1, tzinfo=UTC)
    job_id = insert_job(sql, needs_publish=True, queued_at=place, run_at=place, dispatch=3)
    with engine.begin() as connection:
        assert len(connection.execute(HOLD, {"id": job_id}).all()) == 1
    row = read_job(sql, job_id)
    assert (row["status"], row["held_by"], row["run_at"], row["needs_publish"]) == (
        "scheduled",
        "limit",
        None,
        False,
    )
    assert (row["queued_at"], row["dispatch"]) == (place, 3)
    assert row["held_at"] is not None


class TestReading:
    async def test_a_list_of_scheduled_jobs_ends_with_those_that_are_held(
        self, database: Database, sql: Sql
    ) -> None:
        held = [
            insert_job(sql, "scheduled", **HELD | {"held_by": why}) for why in ("needs", "limit", "limit")
        ]
        other = insert_job(sql, "scheduled", **HELD, kind="other-kind")
        due = [insert_job(sql, "scheduled", run_at=ago(-n)) for n in (20, 10)]
        in_order = [*reversed(due), *held[1:], other, held[0]]
        everything = await listing.list_jobs(database, status="scheduled")
        assert [job["id"] for job in everything.jobs] == in_order
        after, found = None, []
        while True:
            page = await listing.list_jobs(database, status="scheduled", limit=2, after=after)
            found += [job["id"] for job in page.jobs]
            if (after := page.after) is None:
                break
        assert found == in_order
        of_kind = await listing.list_jobs(database, status="scheduled", kind="other-kind")
        assert [job["id"] for job in of_kind.jobs] == [other]
        assert of_kind.jobs[0]["held_by"] == "limit"

    async def test_a_list_of_scheduled_jobs_of_a_kind_goes_on_behind_held_ones(
        self, database: Database, sql: Sql
    ) -> None:
        held = [insert_job(sql, "scheduled", **HELD) for _ in range(5)]
        page = await listing.list_jobs(database, status="scheduled", kind=KIND, limit=3)
        assert [job["id"] for job in page.jobs] == held[:3]
        page = await listing.list_jobs(database, status="scheduled", kind=KIND, limit=3, after=page.after)
        assert [job["id"] for job in page.jobs] == held[3:]

    async def test_a_list_goes_on_behind_no_job_without_a_place(self, database: Database, sql: Sql) -> None:
        with pytest.raises(JobNotFound):
            await listing.list_jobs(database, status="scheduled", after=insert_job(sql))

    async def test_a_search_goes_on_behind_a_job_that_moves_on_meanwhile(
        self, database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "PAGE", 2)
        due = [insert_job(sql, "scheduled", run_at=ago(-n)) for n in (10, 20, 30, 40, 50)]
        change_job(sql, due[-1], limit_key="this")
        read = database.run_along_index

        async def read_and_hold(*args: Any) -> Any:
            rows = await read(*args)
            if due[1] in [row.id for row in rows]:
                change_job(sql, due[1], **HELD)
            return rows

        monkeypatch.setattr(database, "run_along_index", read_and_hold)
        page = await listing.list_jobs(database, status="scheduled", limit=1, where=JobFilter(key="this"))
        assert [job["id"] for job in page.jobs] == [due[-1]]

    @pytest.mark.parametrize("kind", [None, KIND])
    async def test_a_filter_means_held_jobs_as_well(
        self, database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch, kind: str | None
    ) -> None:
        monkeypatch.setattr(listing, "PAGE", 3)
        wanted = {insert_job(sql, "scheduled", **HELD | {"held_by": why}) for why in HELD_BY * 3}
        wanted |= {insert_job(sql, "scheduled") for _ in range(4)}
        insert_job(sql)
        found = [
            job_id
            async for page in listing.matching(database, Selection(("scheduled",), kind=kind))
            for job_id, _ in page
        ]
        assert len(found) == len(wanted)
        assert set(found) == wanted

    async def test_they_are_counted_by_reason_and_are_not_overdue(self, database: Database, sql: Sql) -> None:
        insert_job(sql, "scheduled", **HELD | {"held_at": ago(100)})
        insert_job(sql, "scheduled", **HELD | {"held_by": "needs"})
        found = (await backlog(database, [KIND], most=10)).kinds[KIND]
        assert found.held == {"limit": 1, "rate": 0, "paused": 0, "needs": 1}
        assert 100 <= found.held_oldest_seconds["limit"] < 160
        assert found.jobs["scheduled"] == 2
        [late] = await database.run(OVERDUE, {"older_than": 0.0})
        assert late.jobs == 0
