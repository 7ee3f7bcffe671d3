"""PRUNE: only what ended long ago goes, with its timeline, and no other statement waits for it."""

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier
from sqlalchemy import Connection, Engine, text

from jsworker.core.clock import boottime
from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.schema import FINAL, STATUSES
from jsworker.ownership.transitions import prune, refused_rows
from jsworker.ownership.transitions.enqueue import NewJob, enqueue, new_job_id
from jsworker.ownership.transitions.prune import Batch, Ended, next_limit
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.workflows import advance

from .calls import claimed, opened, retry
from .conftest import TestDatabases
from .flows import Stored, change, stored
from .polling import eventually
from .rows import KIND, Sql, ago, insert_job, read_value, slow_rows
from .test_plans import access_paths, connected, rows_read
from .winner import Winner

DAY = 86_400.0


def insert_event(sql: Sql, job_id: UUID) -> None:
    sql.execute("INSERT INTO jsworker.job_events (job_id, event) VALUES (%s, 'released')", [job_id])


def insert_old(sql: Sql, count: int, *, kind: str = KIND) -> list[UUID]:
    """Insert completed jobs of two days ago, the oldest first, each with a timeline of one entry."""
    jobs = [
        insert_job(sql, "completed", kind=kind, finished_at=ago(2 * DAY - position))
        for position in range(count)
    ]
    for job_id in jobs:
        insert_event(sql, job_id)
    return jobs


def jobs_left(sql: Sql) -> set[UUID]:
    return {row["id"] for row in sql.execute("SELECT id FROM jsworker.jobs")}


def events_left(sql: Sql) -> set[UUID]:
    return {row["job_id"] for row in sql.execute("SELECT job_id FROM jsworker.job_events")}


async def a_day_ago(database: Database, **only: Any) -> Ended:
    return Ended(await prune.cutoff(database, older_than=DAY), **only)


async def prune_all(database: Database, ended: Ended, *, limit: int = 10) -> list[Batch]:
    if ended.kind is None and ended.status is None:
        await prune.prune_workflows(database, ended.before)
    batches: list[Batch] = []
    while not batches or batches[-1].jobs == limit:
        since = batches[-1].last if batches else None
        batches.append(await prune.prune(database, ended, since=since, limit=limit))
    return batches


class TestWhatGoes:
    async def test_only_what_ended_before_the_cutoff_with_its_timeline(
        self, database: Database, sql: Sql
    ) -> None:
        old = [insert_job(sql, status, finished_at=ago(DAY + 60)) for status in FINAL]
        young = [insert_job(sql, status, finished_at=ago(DAY - 60)) for status in FINAL]
        for job_id in (*old, *old, *young):
            insert_event(sql, job_id)
        batch = await prune.prune(database, await a_day_ago(database), since=None, limit=100)
        assert (batch.jobs, batch.events) == (3, 6)
        assert batch.last is not None
        assert jobs_left(sql) == events_left(sql) == set(young)

    async def test_jobs_that_have_not_ended_stay_however_old_they_are(
        self, database: Database, sql: Sql
    ) -> None:
        live = {
            insert_job(sql, status, created_at=ago(9 * DAY), queued_at=ago(9 * DAY))
            for status in set(STATUSES) - set(FINAL)
        }
        assert await prune_all(database, await a_day_ago(database)) == [Batch(0, 0, None, 0, is_last=True)]
        assert jobs_left(sql) == live

    async def test_a_job_that_was_retried_stays(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "failed", finished_at=ago(2 * DAY))
        ended = await a_day_ago(database)
        await retry(database, job_id)
        assert (await prune.prune(database, ended, since=None, limit=10)).jobs == 0
        assert jobs_left(sql) == {job_id}

    async def test_one_kind_and_one_status(self, database: Database, sql: Sql) -> None:
        chosen = insert_job(sql, "failed", kind="chosen", finished_at=ago(2 * DAY))
        others = {
            insert_job(sql, "failed", kind="other", finished_at=ago(2 * DAY)),
            insert_job(sql, "completed", kind="chosen", finished_at=ago(2 * DAY)),
        }
        ended = await a_day_ago(database, kind="chosen", status="failed")
        assert await prune.count_old(database, ended) == 1
        assert (await prune.prune(database, ended, since=None, limit=10)).jobs == 1
        assert jobs_left(sql) == others
        assert chosen not in others

    async def test_nothing_of_a_status_that_is_not_final(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, queued_at=ago(2 * DAY))
        ended = await a_day_ago(database, status="queued")
        assert await prune.count_old(database, ended) == 0
        assert (await prune.prune(database, ended, since=None, limit=10)).jobs == 0
        assert jobs_left(sql) == {job_id}

    async def test_a_key_is_free_with_the_row_and_without_it(self, database: Database, sql: Sql) -> None:
        insert_job(sql, "completed", unique_key="k", finished_at=ago(2 * DAY))

        async def enqueued() -> bool:
            job = NewJob(new_job_id(), "{}", unique_key="k")
            return (await enqueue(database, KIND, job, publish_after=0.0)).created

        assert await enqueued()
        assert [batch.jobs for batch in await prune_all(database, await a_day_ago(database))] == [1]
        assert not await enqueued()


class TestBatches:
    async def test_each_is_bounded_and_begins_where_the_one_before_has_ended(
        self, database: Database, sql: Sql
    ) -> None:
        jobs = insert_old(sql, 25)
        ended = await a_day_ago(database)
        assert await prune.count_old(database, ended) == 25
        first = await prune.prune(database, ended, since=None, limit=10)
        assert jobs_left(sql) == set(jobs[10:])  # the oldest go first
        second = await prune.prune(database, ended, since=first.last, limit=10)
        third = await prune.prune(database, ended, since=second.last, limit=10)
        assert [each.jobs for each in (first, second, third)] == [10, 10, 5]
        assert not jobs_left(sql)
        assert not events_left(sql)

    @pytest.mark.parametrize("moment", [None, "2020-01-01T00:00:00Z"])
    async def test_jobs_that_are_kept_are_passed_a_batch_at_a_time(
        self, database: Database, sql: Sql, engine: Engine, moment: str | None
    ) -> None:
        """Also where they ended in one moment, and are more than one batch finds."""
        jobs = insert_old(sql, 35)
        if moment is not None:
            sql.execute("UPDATE jsworker.jobs SET finished_at = %s", [moment])
        with engine.begin() as connection:
            connection.execute(text(MARKS), {"count": 30, "seconds": 3600.0})
        marked = {row["job_id"] for row in sql.execute("SELECT job_id FROM jsworker.refused_rows")}
        known = RefusedRows(database, worker_id=None)
        await known.look()
        ended, since, batches = await a_day_ago(database), None, list[Batch]()
        while not batches or not batches[-1].is_last:
            batches.append(await prune.prune(database, ended, since=since, limit=3, refused_rows=known))
            since = batches[-1].last or since
            assert len(batches) < 20
        assert sum(batch.jobs for batch in batches) == len(jobs) - 30
        assert jobs_left(sql) == marked
        if moment is None:
            assert [batch.jobs for batch in batches[:9]] == [0] * 9

    async def test_slow_jobs_behind_a_kept_one_of_the_same_instant_get_as_long_as_others(
        self, sql: Sql, database_url: str, engine: Engine
    ) -> None:
        for _ in range(3):
            insert_job(sql, "completed", finished_at="2020-01-01T00:00:00Z")
        with engine.begin() as connection:
            connection.execute(text(MARKS), {"count": 1, "seconds": 3600.0})
        kept = read_value(sql, "SELECT job_id FROM jsworker.refused_rows")
        with slow_rows(sql, "DELETE", "jobs", 2.0):
            async with opened(database_url, 1.5) as door:
                known = RefusedRows(door, worker_id=None)
                await known.look()
                ended, since, batches = await a_day_ago(door), None, list[Batch]()
                while not batches or not batches[-1].is_last:
                    batches.append(await prune.prune(door, ended, since=since, limit=1, refused_rows=known))
                    since = batches[-1].last or since
        assert jobs_left(sql) == {kept}

    async def test_jobs_that_ended_at_the_same_instant_all_go(self, database: Database, sql: Sql) -> None:
        for _ in range(25):
            insert_job(sql, "completed", finished_at="2020-01-01T00:00:00Z")
        batches = await prune_all(database, await a_day_ago(database))
        assert [batch.jobs for batch in batches] == [10, 10, 5]

    async def test_what_ends_meanwhile_is_not_the_business_of_this_pruning(
        self, database: Database, sql: Sql
    ) -> None:
        ended = Ended(await prune.cutoff(database, older_than=0.0))
        young = insert_job(sql, "completed")
        assert (await prune.prune(database, ended, since=None, limit=10)).jobs == 0
        assert jobs_left(sql) == {young}

    async def test_the_workers_that_run_are_counted(self, database: Database, sql: Sql) -> None:
        insert = """
            INSERT INTO jsworker.workers
              (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state, last_seen_at)
            VALUES (%s, 'h', 1, '{}', 1, '1', '5 s', %s, clock_timestamp() - %s * interval '1 second')
        """
        for name, state, silent in (("a", "running", 1), ("b", "running", 90), ("c", "stopped", 1)):
            sql.execute(insert, [name, state, silent])
        assert (await prune.prune(database, await a_day_ago(database), since=None, limit=1)).workers == 1

    @pytest.mark.parametrize(
        ("limit", "seconds", "then"),
        [(100, 0.001, 200), (900, 0.001, 1000), (100, 0.03, 100), (100, 0.5, 50), (1, 3.0, 1)],
    )
    def test_the_next_one_is_as_large_as_this_one_was_quick(
        self, limit: int, seconds: float, then: int
    ) -> None:
        assert next_limit(limit, seconds=seconds) == then


class TestBesideOthers:
    async def test_locked_rows_are_skipped_and_found_later(
        self, database: Database, sql: Sql, engine: Engine
    ) -> None:
        locked, *others = insert_old(sql, 5)
        ended = await a_day_ago(database)
        with engine.begin() as holder:
            holder.exec_driver_sql(f"SELECT FROM jsworker.jobs WHERE id = '{locked}' FOR NO KEY UPDATE")
            assert (await prune.prune(database, ended, since=None, limit=10)).jobs == len(others)
            assert jobs_left(sql) == events_left(sql) == {locked}
        assert (await prune.prune(database, ended, since=None, limit=10)).jobs == 1

    async def test_an_open_pruning_keeps_no_claim_waiting(
        self, database_url: str, sql: Sql, engine: Engine
    ) -> None:
        old = insert_old(sql, 50)
        waiting = [insert_job(sql) for _ in range(5)]
        with engine.begin() as pruner:
            assert prune_in(pruner, limit=100) == 50
            async with opened(database_url, statement_timeout=1.0) as door:
                # With messages about jobs that are just going: copies that came late.
                taken = await claimed(door, *waiting, *old[:5])
            pruner.rollback()
        assert {job.id for job in taken} == set(waiting)

    async def test_a_retry_passes_over_what_is_being_pruned_and_then_finds_nothing(
        self, database: Database, sql: Sql, engine: Engine, winner: Winner
    ) -> None:
        job_id = insert_job(sql, "failed", finished_at=ago(2 * DAY))
        with engine.begin() as pruner:
            assert prune_in(pruner, limit=1) == 1
            retrying = asyncio.create_task(retry(database, job_id))
            await winner.is_passed_over()
        with pytest.raises(TransitionRefused, match="does not exist"):
            await retrying

    async def test_twins_delete_each_row_once_and_never_wait(
        self, database: Database, database_url: str, sql: Sql
    ) -> None:
        insert_old(sql, 2000)
        ended = await a_day_ago(database)
        async with opened(database_url, 10.0) as other:
            doors = (database, other, database, other)
            runs = await asyncio.gather(*(prune_all(door, ended, limit=20) for door in doors))
        left = sum(batch.jobs for batch in await prune_all(database, ended))
        assert sum(batch.jobs for run in runs for batch in run) + left == 2000
        assert sum(batch.events for run in runs for batch in run) + left == 2000
        assert sum(1 for run in runs if sum(batch.jobs for batch in run)) > 1
        assert not jobs_left(sql)
        assert not events_left(sql)

    async def test_what_is_rolled_back_has_not_happened(self, sql: Sql, engine: Engine) -> None:
        jobs = insert_old(sql, 5)
        with engine.begin() as pruner:
            assert prune_in(pruner, limit=10) == 5
            pruner.rollback()
        assert jobs_left(sql) == events_left(sql) == set(jobs)


def prune_in(connection: Connection, *, limit: int) -> int:
    """Prune what is older than a day inside the caller's transaction."""
    before = connection.execute(prune.CUTOFF, {"older_than": DAY}).scalar_one()
    values = {"since": "-infinity", "before": before, "kind": None, "status": None, "limit": limit}
    return int(connection.execute(prune.PRUNE, values).one().jobs)


ENDED = 200_000
ENDED_JOBS = """
INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), %(kind)s, '{"path": "a/b/c"}', 'completed', 1, 1,
  now() - interval '30 days' + n * interval '1 ms', 1
FROM generate_series(1, %(count)s) AS n
"""
LIVE_JOBS = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, publish_after, queued_at)
SELECT uuidv7(), %(kind)s, '{}', 'queued', 1, now(), now() FROM generate_series(1, 5000)
"""
TIMELINES = """
INSERT INTO jsworker.job_events (job_id, event)
SELECT id, 'released' FROM jsworker.jobs WHERE status = 'completed'
"""
STEPS = """
INSERT INTO jsworker.job_steps (job_id, name, fencing_token)
SELECT id, 'charge', 1 FROM jsworker.jobs WHERE status = 'completed' ON CONFLICT DO NOTHING
"""

MARKS = """
INSERT INTO jsworker.refused_rows
  (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, tries, retry_at)
SELECT id, 'prune', kind, status, fencing_token, dispatch, '23503', 1,
  clock_timestamp() + make_interval(secs => :seconds)
FROM jsworker.jobs WHERE status = 'completed' ORDER BY finished_at, id LIMIT :count
"""

HARDLY_ANY_ENDED = ENDED_JOBS.replace("%(count)s", "10")
MARKS_THAT_ARE_GONE = """
INSERT INTO jsworker.refused_rows
  (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, tries, retry_at)
SELECT uuidv7(), 'prune', %(kind)s, 'completed', 1, 1, '23503', 1, now() FROM generate_series(1, %(count)s);
DELETE FROM jsworker.refused_rows
"""
"""What PostgreSQL knows then: that the pages of this table hold no row."""


@pytest.fixture(scope="module")
def full_url(databases: TestDatabases, migrated: str) -> str:
    return databases.create_full(migrated, LIVE_JOBS, ENDED_JOBS, TIMELINES, STEPS, kind=KIND, count=ENDED)


@pytest.fixture(
    scope="module", params=["before ANALYZE", "after ANALYZE", "ANALYZE when hardly anything had ended"]
)
def table(request: pytest.FixtureRequest, databases: TestDatabases, migrated: str) -> Iterator[Connection]:
    if request.param == "ANALYZE when hardly anything had ended":
        before = LIVE_JOBS, HARDLY_ANY_ENDED, TIMELINES, STEPS, MARKS_THAT_ARE_GONE, "ANALYZE"
        url = databases.create_full(migrated, *before, ENDED_JOBS, TIMELINES, STEPS, kind=KIND, count=ENDED)
    else:
        url = request.getfixturevalue("full_url")
        if request.param == "after ANALYZE":
            url = databases.create_analyzed(url)
    with connected(url) as connection:
        yield connection


class TestPlan:
    """However large the table, and whatever PostgreSQL knows of it, a batch reads its own rows."""

    @pytest.mark.parametrize("limit", [1, prune.FIRST_LIMIT, prune.LARGEST_LIMIT])
    @pytest.mark.parametrize("place", [None, ENDED // 2])
    def test_a_batch(self, table: Connection, limit: int, place: int | None) -> None:
        parameters = values(table, place) | {"limit": limit}
        paths = access_paths(table, prune.PRUNE, parameters)
        # Of a member of a batch that is looked up, if it is: while there are hardly any, without an index.
        others = {path for path in paths if "workers" not in path and "batches" not in path}
        assert others == {
            "jobs_finished",
            "jobs_pkey",
            "job_events_job",
            "job_steps_pkey",
        }
        assert (
            rows_read(table, prune.PRUNE, parameters) <= 11 * limit + 30
        )  # some nodes tell of the same rows

    def test_nothing_to_do(self, table: Connection) -> None:
        parameters = values(table, None) | {"limit": 100, "before": "2000-01-01"}
        assert rows_read(table, prune.PRUNE, parameters) <= 1

    KEPT = ENDED // 2

    def keep(self, table: Connection) -> None:
        """Set the oldest jobs aside in the open transaction, as if a foreign key kept them."""
        table.execute(text(MARKS), {"count": self.KEPT, "seconds": 3600.0})

    def test_however_many_are_kept_the_search_ends_soon(self, table: Connection) -> None:
        parameters = values(table, None) | {"limit": 100}
        self.keep(table)
        assert rows_read(table, prune.FIND, parameters) <= 2 * 100 + 30
        self.keep(table)
        paths = access_paths(table, prune.FIND, parameters)
        assert paths - {"Seq Scan on workers"} == {"jobs_finished", "refused_rows_pkey"}

    def test_a_look_at_the_marks_of_kept_jobs_reads_some(self, table: Connection) -> None:
        parameters = {"since": UUID(int=0), "limit": refused_rows.MOST_MARKS}
        self.keep(table)
        assert access_paths(table, refused_rows.TIDY, parameters) == {"jobs_pkey", "refused_rows_pkey"}
        self.keep(table)
        found = table.execute(refused_rows.TIDY, parameters).one()
        table.rollback()
        assert (found.marks, found.attempted) == (refused_rows.MOST_MARKS, ["prune"])

    def test_marks_that_are_over_are_deleted_in_time(self, table: Connection) -> None:
        """A join of all marks with those of a batch takes minutes where statistics tell of none."""
        table.execute(text("SET LOCAL statement_timeout = '30 s'"))
        limit = refused_rows.MOST_MARKS
        self.keep(table)
        table.execute(text("UPDATE jsworker.refused_rows SET attempted = 'expire', fencing_token = 7"))
        found = table.execute(refused_rows.TIDY, {"since": UUID(int=0), "limit": limit}).one()
        assert (found.marks, found.attempted) == (limit, None)
        assert len(table.execute(refused_rows.TRY_AGAIN, {"limit": limit}).all()) == limit
        left = table.execute(text("SELECT job_id FROM jsworker.refused_rows LIMIT 2000")).scalars().all()
        table.execute(refused_rows.FORGET, {"ids": left, "attempted": "expire"})
        remain = table.execute(text("SELECT count(*) FROM jsworker.refused_rows")).scalar_one()
        table.rollback()
        assert remain == self.KEPT - 2 * limit - len(left)

    def test_a_count_reads_nothing_that_has_not_ended(self, table: Connection) -> None:
        assert "jobs_finished" in access_paths(table, prune.OLD_JOBS, values(table, ENDED - 1000))


def values(connection: Connection, place: int | None) -> dict[str, Any]:
    """Return the parameters of a batch that begins at the beginning, or at a place among the ended jobs."""
    since: Any = "-infinity"
    if place is not None:
        query = (
            "SELECT finished_at FROM jsworker.jobs WHERE status = 'completed' ORDER BY 1 OFFSET %s LIMIT 1"
        )
        since = connection.exec_driver_sql(query, (place,)).scalar_one()
        connection.rollback()
    return {"since": since, "before": "2100-01-01", "kind": None, "status": None}


CONNECTED = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'jsworker'
"""
"""A connection may keep its figures for seconds, but not beyond its end."""


async def test_pruning_goes_on_at_its_pace_while_an_old_transaction_pins_what_was_deleted(
    databases: TestDatabases, migrated: str
) -> None:
    url = databases.create(migrated)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as sql, psycopg.connect(url) as old:
        sql.execute("ALTER TABLE jsworker.jobs SET (autovacuum_enabled = off)")
        sql.execute(ENDED_JOBS.replace("%(count)s", "20000").replace("%(kind)s", f"'{KIND}'").encode())
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM jsworker.jobs")
        async with opened(url, 10.0) as door:
            batches = await prune_all(door, await a_day_ago(door), limit=1000)
            assert sum(batch.jobs for batch in batches) == 20_000
        last = max(batch.last for batch in batches if batch.last)  # the batch too many at the end has none
        await eventually(lambda: read_value(sql, CONNECTED) == 0, "the figures of what it has read are in")
        insert_job(sql, "completed", finished_at=ago(20 * DAY))
        before = index_reads(sql)
        async with opened(url, 10.0) as door:
            assert (await prune.prune(door, await a_day_ago(door), since=last, limit=10)).jobs == 1
        await eventually(lambda: read_value(sql, CONNECTED) == 0, "the figures of what it has read are in")
        assert 0 < index_reads(sql) - before < 20
        old.rollback()


def index_reads(sql: Sql) -> int:
    sql.execute("SELECT pg_stat_force_next_flush()")
    sql.execute("SELECT pg_stat_clear_snapshot()")
    query = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'jobs_finished'"
    return int(read_value(sql, query))


OLD_WORKFLOWS = """
WITH old AS (
  INSERT INTO jsworker.workflows (id, name, finished_at, outcome)
  SELECT gen_random_uuid(), 'old', clock_timestamp() - interval '2 days', 'completed'
  FROM generate_series(1, %s)
  RETURNING id, finished_at, outcome
)
INSERT INTO jsworker.batches (id, workflow, name, kind, place, finished_at, outcome, propagated)
SELECT gen_random_uuid(), id, 'only', 'old', 0, finished_at, outcome, true FROM old
"""


class TestWorkflows:
    @pytest.fixture
    async def flow(self, database: Database, sql: Sql) -> Stored:
        """A workflow that has ended, and so have its jobs, two days ago."""
        flow = await stored(database, sql, ("a", 3, ()), ("b", 1, ("a",)))
        await flow.complete(*flow.members("a"))
        await advance(database, [flow.batch("a")])
        await flow.complete(flow.member("b"))
        await advance(database, [flow.batch("b")])
        sql.execute("UPDATE jsworker.jobs SET finished_at = finished_at - interval '2 days'")
        return flow

    @pytest.mark.usefixtures("flow")
    async def test_it_stays_as_a_whole(self, database: Database, sql: Sql) -> None:
        """Its jobs ended long ago; itself it did not."""
        assert [batch.jobs for batch in await prune_all(database, await a_day_ago(database))] == [0]
        assert await prune.count_old(database, await a_day_ago(database)) == 0
        assert len(jobs_left(sql)) == 4

    async def test_it_goes_as_a_whole(self, database: Database, sql: Sql, flow: Stored) -> None:
        change(sql, "workflows", "finished_at = clock_timestamp() - interval '2 days'", flow.id)
        assert await prune.count_old(database, await a_day_ago(database)) == 4
        one = await a_day_ago(database, status="completed")
        assert (await prune.prune(database, one, since=None, limit=10)).jobs == 0
        assert [batch.jobs for batch in await prune_all(database, await a_day_ago(database))] == [4]
        for table in ("workflows", "batches", "batch_needs", "jobs"):
            assert sql.execute(SQL("SELECT FROM jsworker.{}").format(Identifier(table))).fetchall() == []

    @pytest.mark.parametrize("moment", ["2020-01-01T00:00:00Z", "-infinity", "0044-03-15 00:00:00+00 BC"])
    async def test_members_that_stay_hold_up_no_other(
        self, database: Database, sql: Sql, flow: Stored, moment: str
    ) -> None:
        """Also where they ended in one moment, and are more than one batch finds."""
        sql.execute("UPDATE jsworker.jobs SET finished_at = %s", [moment])
        younger = [insert_job(sql, "completed", finished_at=ago(2 * DAY)) for _ in range(3)]
        ended, since, deleted = await a_day_ago(database), None, 0
        for _ in range(10):
            batch = await prune.prune(database, ended, since=since, limit=2)
            since, deleted = batch.last, deleted + batch.jobs
            if batch.is_last:
                break
        assert deleted == len(younger)
        assert jobs_left(sql) == {*flow.members("a"), *flow.members("b")}

    @pytest.mark.parametrize(("count", "seconds", "left"), [(24, 0.2, 0), (1, 3.0, 0), (1, 60.0, 1)])
    async def test_where_many_take_too_long_fewer_go_at_once_and_one_holds_up_no_job(
        self,
        database_url: str,
        sql: Sql,
        monkeypatch: pytest.MonkeyPatch,
        *,
        count: int,
        seconds: float,
        left: int,
    ) -> None:
        monkeypatch.setattr(prune, "_WORKFLOWS", count)
        sql.execute(OLD_WORKFLOWS, [count])
        insert_old(sql, 1)
        with slow_rows(sql, "DELETE", "batches", seconds):
            async with opened(database_url, 1.5) as door:
                assert sum(batch.jobs for batch in await prune_all(door, await a_day_ago(door))) == 1
        assert read_value(sql, "SELECT count(*) FROM jsworker.workflows") == left

    async def test_one_that_is_opened_again_stays(self, database: Database, sql: Sql, flow: Stored) -> None:
        change(sql, "workflows", "finished_at = NULL, outcome = NULL", flow.id)
        assert [batch.jobs for batch in await prune_all(database, await a_day_ago(database))] == [0]

    async def test_a_workflow_that_a_foreign_key_keeps_keeps_no_other(
        self, database: Database, sql: Sql, flow: Stored
    ) -> None:
        change(sql, "workflows", "finished_at = clock_timestamp() - interval '2 days'", flow.id)
        insert_job(sql, "completed", finished_at=ago(2 * DAY))
        sql.execute("CREATE TABLE kept (workflow uuid REFERENCES jsworker.workflows (id))")
        try:
            sql.execute("INSERT INTO kept VALUES (%s)", [flow.id])
            assert [batch.jobs for batch in await prune_all(database, await a_day_ago(database))] == [1]
            assert len(jobs_left(sql)) == 4
        finally:
            sql.execute("DROP TABLE kept")

    async def test_those_that_are_kept_are_tried_again_after_growing_pauses(
        self, database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = boottime()
        monkeypatch.setattr(prune, "boottime", lambda: now)
        monkeypatch.setattr(prune, "_WORKFLOWS", 4)
        sql.execute(OLD_WORKFLOWS, [11])
        kept = {row["id"] for row in sql.execute("SELECT id FROM jsworker.workflows LIMIT 5")}
        sql.execute("CREATE TABLE kept (workflow uuid REFERENCES jsworker.workflows (id))")
        workflows, before = prune.OldWorkflows(database), await prune.cutoff(database, older_than=DAY)

        async def refused() -> int:
            """How many are refused for the first time in a pass."""
            workflows.begin(before)
            batches = [await workflows.delete_some()]
            while not batches[-1].is_last:
                batches.append(await workflows.delete_some())
            return sum(len(batch.refused) for batch in batches)

        try:
            sql.execute("INSERT INTO kept SELECT unnest(%s::uuid[])", [list(kept)])
            assert await refused() == len(kept)
            assert {row["id"] for row in sql.execute("SELECT id FROM jsworker.workflows")} == kept
            assert workflows._passed == kept
            now += 200
            assert await refused() == 0  # they are known, however long a pass took
            sql.execute("DELETE FROM kept")
            now += 61
            assert await refused() == 0  # the second pause is twice as long
            assert read_value(sql, "SELECT count(*) FROM jsworker.workflows") == len(kept)
            now += 61
            assert await refused() == 0
            assert read_value(sql, "SELECT count(*) FROM jsworker.workflows") == 0
        finally:
            sql.execute("DROP TABLE kept")
