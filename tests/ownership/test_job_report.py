"""What doctor and figures read of limits, schedules and workflows: what is full, late or held for nothing."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any, LiteralString

import pytest
from psycopg.sql import SQL, Identifier

from jsworker.core.schedule_rules import Every
from jsworker.ownership.database import Database
from jsworker.ownership.queries import job_report
from jsworker.ownership.queries.job_report import (
    KeyLimit,
    LeftBatches,
    LimitUse,
    RegisteredWorker,
    SilentOwner,
    Waiting,
    backlog,
)
from jsworker.ownership.transitions import limits, schedules, workers
from jsworker.ownership.transitions.limits import Numbers
from jsworker.ownership.transitions.schedules import NewSchedule
from jsworker.ownership.transitions.workflows import advance

from .flows import change, stored
from .rows import HELD, KIND, WORKER, Sql, ago, empty_tables, insert_job, seconds
from .test_registry import ROW

pytestmark = pytest.mark.usefixtures("_no_rows")
TIMES = {
    "jobs": ("created_at", "finished_at", "held_at"),
    "batches": ("created_at", "finished_at"),
    "workflows": ("created_at", "finished_at"),
}

FINISHED: LiteralString = "finished_at = clock_timestamp(), outcome = 'completed'"
PROPAGATED: LiteralString = "finished_at = clock_timestamp(), outcome = 'completed', propagated = true"
DECLARED = {"max_running": 2, "rate": None, "per": None, "key": "'a'"}


@pytest.fixture
def _no_rows(sql: Sql) -> None:
    empty_tables(sql, ("limits", "schedules", "workers", "batch_needs", "batches", "workflows"))


def age(sql: Sql, table: LiteralString) -> None:
    """Let all rows of a table be two minutes older, past the trigger by which ended jobs stay as they are."""
    columns = SQL(", ").join(
        SQL("{0} = {0} - interval '2 minutes'").format(Identifier(column)) for column in TIMES[table]
    )
    with sql.transaction():
        sql.execute("SET LOCAL session_replication_role = replica")
        sql.execute(SQL("UPDATE jsworker.{} SET {}").format(Identifier(table), columns))


async def test_owners_that_are_silent(database: Database, sql: Sql) -> None:
    """Also beside times and thresholds that nobody but a person writes."""
    await workers.seen(database, ROW, state="running")
    insert_job(sql, "processing", last_activity_at=ago(300), stale_after=seconds(200))
    insert_job(sql, "processing", last_activity_at=ago(300), stale_after=SQL("interval '178000000 years'"))
    insert_job(sql, "processing", worker_id="gone", last_activity_at=ago(60))
    insert_job(sql, "processing", worker_id="long gone", last_activity_at=SQL("'-infinity'"))
    insert_job(sql, "processing", worker_id="heard", last_activity_at=ago(10))
    found = [SilentOwner(*row) for row in await database.run(job_report.SILENT_OWNERS)]
    assert [(owner.worker_id, owner.jobs, owner.registered) for owner in found] == [
        (WORKER, 1, True),
        ("gone", 1, False),
        ("long gone", 1, False),
    ]
    assert (round(found[0].seconds_silent), found[2].seconds_silent) == (300, math.inf)


async def left(database: Database) -> LeftBatches:
    [row] = await database.run(job_report.LEFT_BATCHES)
    return LeftBatches(*row)


async def registered(database: Database) -> RegisteredWorker:
    [row] = await database.run(job_report.WORKERS)
    return RegisteredWorker(*row)


async def of_limits(database: Database) -> list[KeyLimit]:
    rows = await database.run(job_report.LIMITS, {"after_kind": "", "after_key": ""})
    return [KeyLimit(*row) for row in rows]


async def waiting(database: Database, kind: str = KIND) -> Waiting:
    return (await backlog(database, [KIND], most=10)).kinds[kind]


class TestLeftWorkflows:
    async def test_a_batch_whose_members_have_ended(self, database: Database, sql: Sql) -> None:
        flow = await stored(database, sql, ("parts", 2, []), ("merge", 1, ["parts"]))
        first, last = flow.members("parts")
        await flow.complete(first)
        for table in TIMES:
            age(sql, table)
        assert await left(database) == LeftBatches(0, 0, 0)
        await flow.complete(last)
        assert await left(database) == LeftBatches(0, 0, 0)  # it has just ended
        age(sql, "jobs")
        assert await left(database) == LeftBatches(1, 0, 0)
        await advance(database, [flow.batch("parts")])
        assert await left(database) == LeftBatches(0, 0, 0)

    async def test_a_batch_that_is_finished_and_what_needs_it_was_not_looked_for(
        self, database: Database, sql: Sql
    ) -> None:
        flow = await stored(database, sql, ("parts", 1, []), ("merge", 1, ["parts"]))
        await flow.complete(flow.member("parts"))
        change(sql, "batches", FINISHED, flow.batch("parts"))
        for table in ("jobs", "workflows"):
            age(sql, table)
        assert await left(database) == LeftBatches(0, 0, 0)
        age(sql, "batches")
        assert await left(database) == LeftBatches(1, 0, 0)

    async def test_a_workflow_whose_batches_have_finished(self, database: Database, sql: Sql) -> None:
        flow = await stored(database, sql, ("parts", 1, []))
        await flow.complete(flow.member("parts"))
        change(sql, "batches", PROPAGATED, flow.batch("parts"))
        for table in ("jobs", "workflows"):
            age(sql, table)
        assert await left(database) == LeftBatches(0, 0, 0)
        age(sql, "batches")
        assert await left(database) == LeftBatches(0, 1, 0)
        await advance(database, [], workflows=[flow.id])
        assert await left(database) == LeftBatches(0, 0, 0)

    async def test_jobs_that_are_held_by_needs_that_are_none(self, database: Database, sql: Sql) -> None:
        flow = await stored(database, sql, ("parts", 1, []), ("merge", 3, ["parts"]))
        insert_job(sql, "scheduled", **HELD | {"held_by": "needs"})
        assert await left(database) == LeftBatches(0, 0, 0)
        for table in TIMES:
            age(sql, table)
        assert await left(database) == LeftBatches(0, 0, 1)
        sql.execute("DELETE FROM jsworker.batch_needs WHERE batch = %s", [flow.batch("merge")])
        assert await left(database) == LeftBatches(0, 0, 4)

    async def test_jobs_that_were_forgotten_when_their_needs_had_finished(
        self, database: Database, sql: Sql
    ) -> None:
        flow = await stored(database, sql, ("parts", 1, []), ("merge", 3, ["parts"]))
        await flow.complete(flow.member("parts"))
        change(sql, "batches", PROPAGATED, flow.batch("parts"))
        for table in ("jobs", "workflows"):
            age(sql, table)
        assert await left(database) == LeftBatches(0, 0, 0)
        age(sql, "batches")
        assert await left(database) == LeftBatches(0, 0, 3)


async def test_a_paused_kind_is_looked_at_beside_very_many_paused_keys(database: Database, sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, paused_at, paused_by)"
        " SELECT 'busy', CAST(n AS text), now(), 'w' FROM generate_series(1, %s) AS n",
        [job_report.MOST_HELD_KEYS],
    )
    await limits.pause(database, KIND, "", seconds=None, paused_by="ann", reason=None)
    found = await of_limits(database)
    assert len(found) == job_report.MOST_HELD_KEYS
    assert [each.paused_by for each in found if not each.key] == ["ann"]


@pytest.mark.parametrize("key", ["acme", ""])
async def test_what_is_held_by_a_key_that_nobody_limits_any_more(
    database: Database, sql: Sql, key: str
) -> None:
    insert_job(sql, "scheduled", **HELD | {"limit_key": key, "held_at": ago(100)})
    insert_job(sql, "scheduled", **HELD | {"limit_key": key})
    insert_job(sql, "scheduled", **HELD | {"limit_key": "limited"})
    await limits.set_numbers(database, KIND, "limited", Numbers(1))
    found = {limit.key: limit for limit in await of_limits(database)}
    assert set(found) == {key, "limited"}
    assert found[key][:4] == KeyLimit(KIND, key, 1_000_000, 2, None)[:4]
    assert 100 <= (found[key].held_for or 0) < 160


async def test_a_limit_that_was_lifted_holds_nothing(database: Database, sql: Sql) -> None:
    insert_job(sql, "scheduled", **HELD | {"limit_key": "", "held_at": ago(100)})
    await limits.set_numbers(database, KIND, "", Numbers(1))
    await limits.reset_numbers(database, KIND, "")
    [found] = await of_limits(database)
    assert found.free == 1_000_000


class TestUseOfLimits:
    @pytest.mark.parametrize(
        ("running", "use"),
        [
            ({}, LimitUse(0, 2, 0)),
            ({"": 1}, LimitUse(1, 2, 0)),
            ({"": 2}, LimitUse(2, 2, 1)),
            ({"a": 1, "b": 2, "c": 2}, LimitUse(2, 2, 2)),
            ({"a": 1, "wide": 9}, LimitUse(9, 10, 0)),
            ({"a": 1, "wide": 1}, LimitUse(1, 2, 0)),
        ],
    )
    async def test_is_that_of_the_fullest_key(
        self, database: Database, sql: Sql, running: dict[str, int], use: LimitUse
    ) -> None:
        await limits.set_numbers(database, KIND, "", Numbers(2))
        await limits.set_numbers(database, KIND, "wide", Numbers(10))
        for key, jobs in running.items():
            for _ in range(jobs):
                insert_job(sql, "processing", limit_key=key)
        insert_job(sql, "processing", kind="other", limit_key="a")
        assert (await waiting(database)).limit == use

    async def test_kinds_that_are_not_asked_for_are_told_together(self, database: Database, sql: Sql) -> None:
        for kind, most in (("other", 2), ("another", 4)):
            await limits.set_numbers(database, kind, "", Numbers(most))
            insert_job(sql, "processing", kind=kind, limit_key="")
        found = await backlog(database, [KIND], most=10)
        assert found.kinds[KIND].limit is None
        assert found.others is not None
        assert found.others.limit == LimitUse(1, 2, 0)

    async def test_a_rate_is_none(self, database: Database, sql: Sql) -> None:
        await limits.set_numbers(database, KIND, "", Numbers(None, 5, 1.0))
        insert_job(sql, "processing", limit_key="")
        assert (await waiting(database)).limit is None


class TestLagOfSchedules:
    async def lag(self, database: Database, sql: Sql, change: LiteralString) -> float | None:
        for name in ("nightly", "hourly"):
            [first] = sql.execute("SELECT clock_timestamp() AS at").fetchall()
            new = NewSchedule(name, KIND, "{}", Every(days=1), first["at"] + timedelta(days=1))
            await schedules.add(database, new, replace=False)
        sql.execute(SQL("UPDATE jsworker.schedules SET {} WHERE name = 'nightly'").format(SQL(change)))
        return (await waiting(database)).schedule_lag_seconds

    async def test_is_since_when_the_first_is_due(self, database: Database, sql: Sql) -> None:
        lag = await self.lag(database, sql, "next_at = clock_timestamp() - interval '100 seconds'")
        assert 100 <= (lag or 0) < 160

    @pytest.mark.parametrize(
        "change",
        ["paused = false", "next_at = clock_timestamp() - interval '100 seconds', paused = true"],
        ids=["none due", "paused"],
    )
    async def test_is_none(self, database: Database, sql: Sql, change: LiteralString) -> None:
        assert await self.lag(database, sql, change) == 0

    async def test_without_a_schedule(self, database: Database) -> None:
        assert (await waiting(database)).schedule_lag_seconds is None


@pytest.mark.parametrize("declared", [{}, {KIND: DECLARED}])
async def test_limits_that_a_worker_declares(database: Database, sql: Sql, declared: dict[str, Any]) -> None:
    await workers.seen(database, replace(ROW, limits=declared), state="running")
    found = await registered(database)
    assert found.limits == declared
    sql.execute("UPDATE jsworker.workers SET limits = NULL")
    older = await registered(database)
    assert older.limits is None
