"""What is kept beside the jobs: workers, the installation's id, dead messages; and how all of it is read."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg.sql import SQL

from jsworker.core.errors import JobNotFound
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import RunAge
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_filter import Selection
from jsworker.ownership.queries.listing import SeenJob
from jsworker.ownership.transitions import control, dead_messages, workers
from jsworker.ownership.transitions.enqueue import new_job_id

from .rows import KIND, NOW, OTHER_WORKER, WORKER, Sql, ago, change_job, insert_job, read_value

ROW = workers.WorkerRow(
    id=WORKER,
    hostname="alpha",
    pod_uid="uid",
    container="main",
    boot_id="boot",
    pid_namespace="pid:[1]",
    pid=1,
    process_started="12345",
    kinds=["count-lines", "other-kind"],
    concurrency=10,
    version="0.1.0",
    heartbeat_interval=5.0,
)


class TestWorkers:
    async def test_a_worker_is_registered_and_seen_again(self, database: Database, sql: Sql) -> None:
        await workers.seen(database, ROW, state="running")
        sql.execute("UPDATE jsworker.workers SET last_seen_at = last_seen_at - interval '1 hour'")
        first = sql.execute("SELECT * FROM jsworker.workers").fetchall()
        await workers.seen(database, ROW, state="draining")
        again = sql.execute("SELECT * FROM jsworker.workers").fetchall()
        (before,), (after,) = first, again
        assert before["heartbeat_interval"] == timedelta(seconds=5)
        assert (before["kinds"], before["concurrency"], before["answers"]) == (ROW.kinds, 10, False)
        assert (before["pod_uid"], before["container"], before["boot_id"]) == ("uid", "main", "boot")
        assert (before["pid_namespace"], before["pid"], before["process_started"]) == ("pid:[1]", 1, "12345")
        assert after["last_seen_at"] - before["last_seen_at"] >= timedelta(hours=1)
        assert after == before | {"state": "draining", "last_seen_at": after["last_seen_at"]}

    async def test_a_worker_tells_how_it_is(self, database: Database) -> None:
        supervised = replace(ROW, supervisor_pid=7)
        for memory_bytes, lag in ((1, 0.5), (2**40, None)):
            values: dict[str, Any] = {"memory_bytes": memory_bytes, "loop_lag_seconds": lag}
            await workers.seen(database, supervised, state="running", **values)
            worker = await workers.get_worker(database, WORKER)
            assert worker is not None
            assert {name: worker[name] for name in values} == values
            assert worker["supervisor_pid"] == 7

    async def test_a_row_that_somebody_deleted_comes_back(self, database: Database, sql: Sql) -> None:
        await workers.seen(database, ROW, state="running")
        sql.execute("DELETE FROM jsworker.workers")
        await workers.seen(database, ROW, state="running")
        assert read_value(sql, "SELECT count(*) FROM jsworker.workers") == 1

    async def test_workers_are_listed_with_their_running_jobs(self, database: Database, sql: Sql) -> None:
        await workers.seen(database, ROW, state="running")
        for status in ("processing", "processing", "queued"):
            insert_job(sql, status)
        insert_job(sql, "processing", worker_id=OTHER_WORKER)
        (worker,) = await workers.list_workers(database, limit=10)
        assert (worker["id"], worker["state"], worker["processing"]) == (WORKER, "running", 2)
        assert await workers.list_workers(database, limit=0) == []

    @pytest.mark.parametrize(
        ("interval", "silent", "alive"),
        [
            ("5 s", 19.0, True),
            ("5 s", 21.0, False),
            ("10 s", 39.0, True),
            ("178000000 years", 1e6, True),
            ("-178000000 years", 19.0, True),
            ("-infinity", 21.0, False),
        ],
    )
    async def test_whether_it_is_alive(
        self, database: Database, sql: Sql, interval: str, silent: float, *, alive: bool
    ) -> None:
        """Also by an interval that nobody but a person writes: it must not hide all other workers."""
        await workers.seen(database, ROW, state="running")
        change = SQL("UPDATE jsworker.workers SET heartbeat_interval = {}::interval, last_seen_at = {}")
        sql.execute(change.format(interval, ago(silent)))
        (worker,) = await workers.list_workers(database, limit=10)
        assert worker["alive"] is alive


class TestInstallation:
    async def test_the_first_to_ask_makes_the_id(self, database: Database, sql: Sql) -> None:
        found = await workers.installation_id(database)
        assert await workers.installation_id(database) == found
        assert read_value(sql, "SELECT id FROM jsworker.installation") == found

    async def test_all_who_ask_at_once_get_the_same(self, database: Database) -> None:
        answers = await asyncio.gather(*(workers.installation_id(database) for _ in range(10)))
        assert len(set(answers)) == 1

    async def test_a_table_that_takes_no_row(self, database: Database, sql: Sql) -> None:
        sql.execute(
            "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"
        )
        sql.execute(
            "CREATE TRIGGER vanish BEFORE INSERT ON jsworker.installation"
            " FOR EACH ROW EXECUTE FUNCTION vanish()"
        )
        with pytest.raises(AssertionError, match="neither inserted nor found"):
            await workers.installation_id(database)
        sql.execute("DROP FUNCTION vanish() CASCADE")


LETTER = dead_messages.NewDeadMessage("jobs.a", 1, None, "malformed", b"x")


async def keep(database: Database, letter: dead_messages.NewDeadMessage = LETTER) -> int:
    """Keep a message and return its id."""
    (kept,), refused = await dead_messages.keep(database, [letter])
    assert refused == []
    return kept


class TestDeadMessages:
    async def test_a_message_is_kept_listed_read_and_dropped(self, database: Database) -> None:
        stored_at = datetime(2026, 1, 2, tzinfo=UTC)
        first = await keep(database, replace(LETTER, stream_seq=7, stored_at=stored_at, data=b"\x00{"))
        second = await keep(database, replace(LETTER, subject="jobs.b", stream_seq=None, data=b""))
        listed = await dead_messages.list_dead(database, limit=10)
        assert [row["id"] for row in listed] == [second, first]
        assert {name: listed[1][name] for name in listed[1] if name != "at"} == {
            "id": first,
            "subject": "jobs.a",
            "stream_seq": 7,
            "stored_at": stored_at,
            "reason": "malformed",
            "bytes": 2,
            "truncated": False,
        }
        kept = dead_messages.DeadMessage(first, "jobs.a", b"\x00{", truncated=False)
        assert await dead_messages.read_dead(database, [first, 10**9]) == [kept]
        assert [one.id for one in await dead_messages.read_dead(database, [second, first])] == [first, second]
        assert await dead_messages.drop_dead(database, [second, 10**9]) == [second]
        assert await dead_messages.drop_dead(database, [first]) == [first]
        assert await dead_messages.list_dead(database, limit=10) == []

    async def test_a_long_message_is_cut(self, database: Database) -> None:
        size = dead_messages.KEPT_BYTES
        for length, truncated in ((size, False), (size + 1, True)):
            found = await keep(
                database, replace(LETTER, subject="s" * 1000, reason="r" * 1000, data=b"x" * length)
            )
            (kept,) = await dead_messages.read_dead(database, [found])
            assert (len(kept.data), kept.truncated, len(kept.subject)) == (size, truncated, 500)

    async def test_only_the_newest_are_kept(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dead_messages, "KEPT_MESSAGES", 3)
        ids = [await keep(database) for _ in range(5)]
        assert [one.id for one in await dead_messages.read_dead(database, ids)] == ids[2:]

    async def test_a_batch_larger_than_what_is_kept_leaves_its_newest(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dead_messages, "KEPT_MESSAGES", 3)
        letters = [replace(LETTER, stream_seq=n) for n in range(5)]
        ids, _ = await dead_messages.keep(database, letters)
        await keep(database)
        assert len(ids) == 5
        assert [one.id for one in await dead_messages.read_dead(database, ids)] == ids[3:]

    async def test_a_message_that_cannot_be_kept_fails_no_other(self, database: Database) -> None:
        numbers = [1, 2**70, 3, 4]
        letters = [replace(LETTER, stream_seq=n) for n in numbers]
        ids, refused = await dead_messages.keep(database, letters)
        assert [letter for letter, _ in refused] == [letters[1]]
        assert [row["stream_seq"] for row in await dead_messages.list_dead(database, limit=9)] == [4, 3, 1]
        assert len(ids) == 3


class TestListing:
    async def test_jobs_newest_first_by_status_and_kind(self, database: Database, sql: Sql) -> None:
        queued, done, other = (
            insert_job(sql),
            insert_job(sql, "completed"),
            insert_job(sql, "completed", kind="other-kind"),
        )

        async def found(status: str | None = None, kind: str | None = None) -> list[UUID]:
            page = await listing.list_jobs(database, status=status, kind=kind)
            assert page.after is None
            return [job["id"] for job in page.jobs]

        assert await found() == [other, done, queued]
        assert await found(status="completed") == [other, done]
        assert await found(kind=KIND) == [done, queued]
        assert await found(status="queued", kind="other-kind") == []
        (job,) = (await listing.list_jobs(database, limit=1)).jobs
        assert job["id"] == other
        assert not {"payload", "result"} & job.keys()

    async def test_one_job_and_its_timeline(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, payload='{"path": "a"}')
        await control.cancel(database, [job_id])
        job = await listing.get_job(database, job_id)
        assert (job["payload"], job["status"]) == ({"path": "a"}, "cancelled")
        (event,) = await listing.timeline(database, job_id)
        assert (event["event"], event["worker_id"], event["error"]) == ("cancelled", None, None)
        with pytest.raises(JobNotFound):
            await listing.get_job(database, new_job_id())
        assert await listing.timeline(database, new_job_id()) == []

    async def test_what_a_filter_means(self, database: Database, sql: Sql) -> None:
        failed = insert_job(sql, "failed")
        silent = insert_job(sql, "processing", last_activity_at=ago(60), fencing_token=4)
        fresh = insert_job(sql, "processing", kind="other-kind")

        async def matching(statuses: tuple[str, ...], **limits: Any) -> list[tuple[UUID, int]]:
            pages = [page async for page in listing.matching(database, Selection(statuses, **limits))]
            return [job for page in pages for job in page]

        assert await matching(("failed", "processing")) == [(fresh, 1), (silent, 4), (failed, 1)]
        assert await matching(("processing",), kind="other-kind") == [(fresh, 1)]
        assert await matching(("processing",), age=RunAge(stale_for=30.0)) == [(silent, 4)]
        assert await matching(("queued", "scheduled")) == []

    @pytest.mark.parametrize("meant", ["stale_for", "running_for", "no_progress_for"])
    async def test_running_jobs_are_found_by_their_age_the_oldest_first(
        self, database: Database, sql: Sql, meant: str
    ) -> None:
        young: dict[str, Any] = {"last_activity_at": NOW, "claimed_at": ago(500), "progress_at": NOW}
        ages: dict[str, dict[str, Any]] = {
            "stale_for": {"last_activity_at": ago(100)},
            "running_for": {"claimed_at": ago(1000)},
            "no_progress_for": {"progress_at": None},
        }
        old = ages[meant]
        insert_job(sql, "processing", **young)
        insert_job(sql, "queued")
        late = insert_job(sql, "processing", **young | old)
        other = insert_job(sql, "processing", **young | old, kind="other-kind")
        latest = insert_job(
            sql,
            "processing",
            **young | {"last_activity_at": ago(200), "claimed_at": ago(2000), "progress_at": ago(1500)},
        )
        limit = {"stale_for": 60.0, "running_for": 900.0, "no_progress_for": 300.0}[meant]
        age = RunAge(**{meant: limit})
        pages = [page async for page in listing.matching(database, Selection(("processing",), age=age))]
        assert {job_id for page in pages for job_id, _ in page} == {late, other, latest}

        async def listed(**options: Any) -> list[UUID]:
            return [job["id"] for job in (await listing.list_jobs(database, age=age, **options)).jobs]

        assert await listed() == [latest, late, other]
        assert await listed(kind="other-kind") == [other]
        first = await listing.list_jobs(database, age=age, limit=1)
        assert ([job["id"] for job in first.jobs], first.after) == ([latest], latest)
        assert await listed(after=latest) == [late, other]

    async def test_progress_of_an_earlier_run_is_none_of_this_one(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", claimed_at=NOW, progress_at=ago(5000))
        hung = RunAge(no_progress_for=60.0)
        assert (await listing.list_jobs(database, age=hung)).jobs == []
        change_job(sql, job_id, claimed_at=ago(70))
        assert [job["id"] for job in (await listing.list_jobs(database, age=hung)).jobs] == [job_id]

    async def test_jobs_as_they_are_now(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing", fencing_token=4)
        found = await listing.look_up(database, [job_id, new_job_id()])
        assert found == {job_id: SeenJob(job_id, "processing", 4)}


async def test_a_list_of_running_jobs_goes_on_behind_one_that_has_ended(database: Database, sql: Sql) -> None:
    first, rare, last, _ = (insert_job(sql, "processing", kind=kind) for kind in ("k", "rare", "k", "k"))
    page = await listing.list_jobs(database, status="processing", kind="k", limit=2)
    assert page.after == last
    ended = {"status": "completed", "worker_id": None, "last_activity_at": None, "finished_at": NOW}
    change_job(sql, last, **ended)
    page = await listing.list_jobs(database, status="processing", limit=2, after=page.after)
    assert [job["id"] for job in page.jobs] == [rare, first]


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_that_lists_nothing_is_refused(database: Database, limit: int) -> None:
    with pytest.raises(ValueError, match=rf"^limit {limit} must be 1 or more$"):
        await listing.list_jobs(database, limit=limit)
