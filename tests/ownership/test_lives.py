"""Other lives of a host, a pod, a name; and whose row may be forgotten."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from psycopg.sql import SQL, Identifier, Placeholder

from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.workers import EarlierLife, WorkerRow

from .rows import Sql, ago, insert_job, read_value
from .test_registry import ROW
from .transitions import without

ME = replace(ROW, id="alpha-9-ffffffff")


async def register(database: Database, sql: Sql, worker_id: str, /, **changes: Any) -> WorkerRow:
    """Register another worker, with some columns of its row set afterwards."""
    columns = {name: changes.pop(name) for name in ("last_seen_at", "started_at") if name in changes}
    state = changes.pop("state", "running")
    worker = replace(ROW, id=worker_id, **changes)
    await workers.seen(database, worker, state=state)
    for name, value in columns.items():
        statement = SQL("UPDATE jsworker.workers SET {} = {} WHERE id = {}")
        sql.execute(statement.format(Identifier(name), value, Placeholder()), [worker_id])
    return worker


async def lives(database: Database, me: WorkerRow = ME) -> set[str]:
    return {life.id for life in await workers.earlier_lives(database, worker=me)}


async def duplicates(database: Database, name: str) -> set[str]:
    return {life.id for life in await workers.duplicates(database, worker=ME, name=name)}


class TestEarlierLives:
    async def test_everything_that_can_prove_an_end(self, database: Database, sql: Sql) -> None:
        await workers.seen(database, ME, state="running")
        other = await register(database, sql, "alpha-1-aaaaaaaa", last_seen_at=ago(60), started_at=ago(900))
        for status in ("processing", "processing", "queued"):
            insert_job(sql, status, **({"worker_id": other.id} if status == "processing" else {}))
        (life,) = await workers.earlier_lives(database, worker=ME)
        assert isinstance(life, EarlierLife)
        assert replace(life, kinds=list(life.kinds)) == EarlierLife(
            **{name: getattr(other, name) for name in WorkerRow.__slots__},
            state="running",
            last_seen_at=life.last_seen_at,
            seconds_silent=life.seconds_silent,
            started_before=True,
            holds=2,
        )
        assert 60 <= life.seconds_silent < 160
        query = "SELECT last_seen_at FROM jsworker.workers WHERE id = %s"
        assert life.last_seen_at == read_value(sql, query, other.id)

    async def test_by_equality_of_the_hostname(self, database: Database, sql: Sql) -> None:
        me = replace(ME, hostname="worker_1", pod_uid=None)
        await register(database, sql, "same", hostname="worker_1", pod_uid=None)
        for place, hostname in enumerate(["worker_10", "worker-1", "workerx1", "Worker_1", "%", "worker_"]):
            await register(database, sql, f"other-{place}", hostname=hostname, pod_uid=None)
        assert await lives(database, me) == {"same"}

    async def test_of_the_same_pod_under_another_hostname(self, database: Database, sql: Sql) -> None:
        await register(database, sql, "same-pod", hostname="other", pod_uid=ME.pod_uid)
        await register(database, sql, "other-pod", hostname="other", pod_uid="another")
        await register(database, sql, "no-pod", hostname="other", pod_uid=None)
        assert await lives(database) == {"same-pod"}
        assert await lives(database, replace(ME, pod_uid=None)) == set()

    async def test_not_itself(self, database: Database) -> None:
        await workers.seen(database, ME, state="running")
        assert await lives(database) == set()

    async def test_what_stopped_in_order_only_while_it_holds_jobs(self, database: Database, sql: Sql) -> None:
        for state in ("running", "draining", "stopped"):
            await register(database, sql, state, state=state)
        await register(database, sql, "holding", state="stopped")
        insert_job(sql, "processing", worker_id="holding")
        assert await lives(database) == {"running", "draining", "holding"}

    async def test_who_came_first(self, database: Database, sql: Sql) -> None:
        await register(database, sql, "before", started_at=ago(60))
        await register(database, sql, "after", started_at=ago(-60))
        everyone = await workers.earlier_lives(database, worker=ME)
        assert {life.id: life.started_before for life in everyone} == {"before": True, "after": True}
        await workers.seen(database, ME, state="running")
        everyone = await workers.earlier_lives(database, worker=ME)
        assert {life.id: life.started_before for life in everyone} == {"before": True, "after": False}

    async def test_of_two_that_start_at_once_exactly_one_came_first(
        self, database: Database, sql: Sql
    ) -> None:
        other = await register(database, sql, "alpha-8-eeeeeeee")
        await workers.seen(database, ME, state="running")
        sql.execute("UPDATE jsworker.workers SET started_at = '2026-01-01Z'")
        (mine,) = await workers.earlier_lives(database, worker=ME)
        (its,) = await workers.earlier_lives(database, worker=other)
        assert (mine.started_before, its.started_before) == (True, False)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        (r"w\.id <> :id", {"id": ME.id}),
        (r"\(w\.hostname = :hostname OR [^\n]+\)(?=\))", {"hostname": "other", "pod_uid": "another"}),
        (r"state <> 'stopped' OR holds > 0", {"state": "stopped"}),
    ],
    ids=["not itself", "same host or pod", "not stopped"],
)
async def test_no_predicate_of_earlier_lives_can_be_left_out(
    database: Database, sql: Sql, pattern: str, changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    await register(database, sql, changes.pop("id", "another-life"), **changes)
    values = {"id": ME.id, "hostname": ME.hostname, "pod_uid": ME.pod_uid}
    assert await database.run(workers.EARLIER_LIVES, values) == []
    assert len(await database.run(without(workers.EARLIER_LIVES, pattern), values)) == 1


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        (r"w\.id <> :id", {"id": ME.id}),
        (r"w\.id = CAST\(:name AS text\) [^\n]+?8\)", {"id": "alpha-10-aaaaaaaa"}),
        (r"w\.state <> 'stopped'", {"state": "stopped"}),
    ],
    ids=["not itself", "same name", "not stopped"],
)
async def test_no_predicate_of_namesakes_can_be_left_out(
    database: Database, sql: Sql, pattern: str, changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    await register(database, sql, changes.pop("id", "alpha-9-aaaaaaaa"), **changes)
    values = {"id": ME.id, "name": "alpha-9"}
    assert await database.run(workers.DUPLICATES, values) == []
    assert len(await database.run(without(workers.DUPLICATES, pattern), values)) == 1


class TestNamesakes:
    @pytest.mark.parametrize(
        "other",
        [
            "worker_1-0-aaaaaaaa",  # a child of it
            "worker_10-aaaaaaaa",
            "worker-1-aaaaaaaa",
            "workerx1-aaaaaaaa",
            "xworker_1-aaaaaaaa",
            "worker_1-aaaaaaa",
            "worker_1-aaaaaaaaa",
            "worker_1_aaaaaaaa",
            "worker_1",
            "w",
        ],
    )
    async def test_by_equality_of_the_name(self, database: Database, sql: Sql, other: str) -> None:
        await register(database, sql, "worker_1-aaaaaaaa", hostname="elsewhere")
        await register(database, sql, other)
        assert await duplicates(database, "worker_1") == {"worker_1-aaaaaaaa"}

    @pytest.mark.parametrize("pattern", ["%", "worker__", "_______%"])
    async def test_no_name_is_a_pattern(self, database: Database, sql: Sql, pattern: str) -> None:
        await register(database, sql, "worker_1-aaaaaaaa")
        assert await duplicates(database, pattern) == set()

    async def test_not_itself_and_not_what_stopped(self, database: Database, sql: Sql) -> None:
        await workers.seen(database, ME, state="running")
        await register(database, sql, "alpha-9-aaaaaaaa", state="stopped")
        await register(database, sql, "alpha-9-bbbbbbbb", state="draining")
        assert await duplicates(database, "alpha-9") == {"alpha-9-bbbbbbbb"}


class TestEndOfARow:
    async def test_the_buried_have_stopped(self, database: Database, sql: Sql) -> None:
        for worker_id in ("one", "two", "three"):
            await register(database, sql, worker_id)
        for worker_id in ("three", "one", "nobody"):
            await workers.mark_stopped(database, worker_id=worker_id)
        states = {row["id"]: row["state"] for row in sql.execute("SELECT id, state FROM jsworker.workers")}
        assert states == {"one": "stopped", "two": "running", "three": "stopped"}

    async def test_the_silent_are_forgotten(self, database: Database, sql: Sql) -> None:
        await register(database, sql, "silent", last_seen_at=ago(90))
        await register(database, sql, "stopped", last_seen_at=ago(90), state="stopped")
        await register(database, sql, "seen", last_seen_at=ago(30))
        await register(database, sql, "holding", last_seen_at=ago(90))
        insert_job(sql, "processing", worker_id="holding")
        assert await workers.forget_workers(database, silent_for=60.0) == 2
        left = sql.execute("SELECT id FROM jsworker.workers ORDER BY id").fetchall()
        assert [row["id"] for row in left] == ["holding", "seen"]

    async def test_a_row_that_is_refused_keeps_no_other(self, database: Database, sql: Sql) -> None:
        for worker_id in ("one", "two", "three"):
            await register(database, sql, worker_id, last_seen_at=ago(90))
        sql.execute("CREATE TABLE theirs (worker_id text REFERENCES jsworker.workers)")
        sql.execute("INSERT INTO theirs VALUES ('two')")
        sql.execute(
            "ALTER TABLE jsworker.workers ADD CONSTRAINT theirs CHECK (id <> 'two' OR state <> 'stopped')"
        )
        try:
            with pytest.raises(RowRefused, match="theirs"):
                await workers.mark_stopped(database, worker_id="two")
            assert await workers.forget_workers(database, silent_for=60.0) == 2
            assert read_value(sql, "SELECT id FROM jsworker.workers") == "two"
        finally:
            sql.execute("ALTER TABLE jsworker.workers DROP CONSTRAINT theirs")
            sql.execute("DROP TABLE theirs")

    @pytest.mark.parametrize(
        ("worker_id", "pattern"),
        [("seen", r"w\.last_seen_at < [^\n]+"), ("holding", r"NOT EXISTS \([^\n]+\)")],
    )
    async def test_no_predicate_of_it_can_be_left_out(
        self, database: Database, sql: Sql, worker_id: str, pattern: str
    ) -> None:
        silence = {"seen": 30.0, "holding": 90.0}[worker_id]
        await register(database, sql, worker_id, last_seen_at=ago(silence))
        if worker_id == "holding":
            insert_job(sql, "processing", worker_id=worker_id)
        values = {"silent_for": 60.0, "ids": [worker_id]}
        assert await database.run(workers.FORGET, values) == []
        (row,) = await database.run(without(workers.FORGET, pattern), values)
        assert row.id == worker_id

    async def test_many_forget_at_once(self, database: Database, sql: Sql) -> None:
        for place in range(50):
            await register(database, sql, f"silent-{place}", last_seen_at=ago(90))
        calls = (workers.forget_workers(database, silent_for=60.0) for _ in range(8))
        forgotten = sum(await asyncio.gather(*calls))
        assert forgotten + await workers.forget_workers(database, silent_for=60.0) == 50
        assert read_value(sql, "SELECT count(*) FROM jsworker.workers") == 0

    async def test_a_forgotten_worker_that_lives_comes_back(self, database: Database, sql: Sql) -> None:
        worker = await register(database, sql, "silent", last_seen_at=ago(90))
        assert await workers.forget_workers(database, silent_for=60.0) == 1
        await workers.seen(database, worker, state="running", answers=True)
        assert read_value(sql, "SELECT answers FROM jsworker.workers WHERE id = 'silent'") is True
