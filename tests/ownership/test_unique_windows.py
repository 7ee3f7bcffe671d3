"""Of a key at most one job in a window, however it has ended, pruned or not."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from psycopg.errors import CheckViolation
from sqlalchemy import Engine, text

from jsworker.ownership.database import Database
from jsworker.ownership.transitions.enqueue import Enqueued, JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import (
    ENQUEUE_WINDOW,
    FIRST_WINDOW,
    FORGET_WINDOWS,
    enqueue_many,
    enqueue_one,
    forget_windows,
    statement_for,
)

from .rows import KIND, Sql, ago, change_job, delete_rows, insert_job, read_job, read_value
from .transitions import without
from .winner import Winner

HOUR = JobTerms(scope="window", unique_for=3600.0)
KEY = "order:12"
LIVES = r"EXISTS \(SELECT FROM jsworker\.jobs AS j WHERE j\.id = w\.job_id AND .+?clock_timestamp\(\)\)\)"


def new(key: str = KEY, **changes: Any) -> NewJob:
    return NewJob(new_job_id(), "{}", key, **changes, terms=HOUR)


async def enqueue(database: Database, job: NewJob | None = None, kind: str = KIND) -> Enqueued:
    return await enqueue_one(database, kind, job or new(), publish_after=0.0)


def end(sql: Sql, job_id: UUID, status: str) -> None:
    change_job(sql, job_id, status=status, finished_at=ago(0), needs_publish=False)


def age_window(sql: Sql) -> None:
    sql.execute("UPDATE jsworker.unique_windows SET until = clock_timestamp() - interval '1 s'")


def jobs(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.jobs"))


@pytest.mark.parametrize("fate", ["waits", "has ended", "is pruned"])
async def test_one_in_a_window(database: Database, sql: Sql, fate: str) -> None:
    first = await enqueue(database)
    assert first.created
    row = read_job(sql, first.id)
    assert (row["status"], row["unique_key"], row["waiting_key"]) == ("queued", None, None)
    if fate != "waits":
        end(sql, first.id, "cancelled")
    if fate == "is pruned":
        delete_rows(sql, "jobs")
    assert await enqueue(database) == Enqueued(first.id, created=False)
    assert (await enqueue(database, new("another"))).created
    assert (await enqueue(database, kind="other-kind")).created


async def test_a_new_one_when_the_window_is_over(database: Database, sql: Sql) -> None:
    first = await enqueue(database)
    end(sql, first.id, "cancelled")
    age_window(sql)
    second = await enqueue(database)
    assert second.created
    assert await enqueue(database) == Enqueued(second.id, created=False)
    until = "SELECT extract(epoch FROM until - clock_timestamp()) FROM jsworker.unique_windows"
    assert 3590 < read_value(sql, until) <= 3600


async def test_none_while_the_one_of_the_window_lives(database: Database, sql: Sql) -> None:
    first = await enqueue(database, new(delay=7200.0))
    age_window(sql)
    assert await enqueue(database) == Enqueued(first.id, created=False)


async def test_many(database: Database, sql: Sql) -> None:
    new_jobs = [new(), new("b"), new(), NewJob(new_job_id(), "{}")]
    answers = await enqueue_many(database, KIND, new_jobs)
    assert [answer.created for answer in answers] == [True, True, False, True]
    assert answers[2].id == answers[0].id
    assert jobs(sql) == 3


async def test_twins_at_once_create_one_job(database: Database, sql: Sql) -> None:
    for _ in range(2):  # without a window, and with one that is over
        answers = await asyncio.gather(*(enqueue(database) for _ in range(20)))
        assert sum(answer.created for answer in answers) == 1
        assert len({answer.id for answer in answers}) == 1
        end(sql, answers[0].id, "cancelled")
        age_window(sql)
    assert jobs(sql) == 2


@pytest.mark.parametrize("outlasts", [False, True])
@pytest.mark.parametrize("is_over", [False, True])
async def test_an_uncommitted_twin_is_waited_for(
    database: Database, sql: Sql, winner: Winner, *, is_over: bool, outlasts: bool
) -> None:
    """Its end counts, not the row that this statement has seen, even if it outlasts its window."""
    if is_over:
        end(sql, (await enqueue(database)).id, "cancelled")
        age_window(sql)
    twin = new()
    winner.run(statement_for(KIND, twin))
    if outlasts:
        winner.run(text("UPDATE jsworker.unique_windows SET until = now() - interval '1 s' RETURNING key"))
    second = asyncio.create_task(enqueue(database))
    await winner.blocks()
    winner.commit()
    assert await second == Enqueued(twin.id, created=False)


async def test_a_twin_that_is_undone_leaves_the_window(database: Database, sql: Sql, winner: Winner) -> None:
    winner.run(statement_for(KIND, new()))
    second = asyncio.create_task(enqueue(database))
    await winner.blocks()
    winner.rollback()
    assert (await second).created
    assert jobs(sql) == 1


async def test_a_window_begins_after_the_wait_for_a_twin_that_is_undone(
    database: Database, sql: Sql, winner: Winner
) -> None:
    end(sql, (await enqueue(database)).id, "cancelled")
    age_window(sql)
    winner.run(statement_for(KIND, new()))
    second = asyncio.create_task(enqueue(database))
    await winner.blocks()
    waited = read_value(sql, "SELECT clock_timestamp()")
    winner.rollback()
    assert (await second).created
    begun = read_value(sql, "SELECT until - interval '1 h' FROM jsworker.unique_windows")
    assert begun >= waited


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_statement_that_was_committed_takes_no_further_window(
    database: Database, sql: Sql, engine: Engine, *, forgotten: bool
) -> None:
    job = new()
    statement = statement_for(KIND, job)

    def execute() -> list[tuple[Any, ...]]:
        with engine.begin() as connection:
            return [tuple(row) for row in connection.execute(statement)]

    assert execute() == [(job.id, True, 1)]
    assert execute() == [(job.id, False, 0)]
    end(sql, job.id, "cancelled")
    age_window(sql)
    if forgotten:
        assert await forget_windows(database, limit=10) == (1, None)
    assert execute() == []
    assert (await enqueue(database)).created


async def test_a_job_that_is_refused_leaves_no_window(database: Database, sql: Sql) -> None:
    from jsworker.ownership.refusals import RowRefused  # noqa: PLC0415 -- of this test alone

    with pytest.raises(RowRefused):
        await enqueue(database, new()._replace(payload="{"))
    assert read_value(sql, "SELECT count(*) FROM jsworker.unique_windows") == 0


# --- Forgetting ---

GIVEN: Any = {"kinds": [KIND], "keys": [KEY]}


async def test_windows_that_are_over_are_forgotten(database: Database, sql: Sql) -> None:
    over, lives = await enqueue(database), await enqueue(database, new("lives"))
    pruned = await enqueue(database, new("pruned"))
    end(sql, over.id, "cancelled")
    sql.execute(
        "UPDATE jsworker.unique_windows SET job_id = gen_random_uuid() WHERE job_id = %s", [pruned.id]
    )
    age_window(sql)
    await enqueue(database, new("open"))
    deleted, behind = 0, FIRST_WINDOW
    for last in (False, False, False, True):  # a page of one window each, and an empty one
        some, place = await forget_windows(database, behind=behind, limit=1)
        deleted, behind = deleted + some, place or FIRST_WINDOW
        assert (place is None) is last
    assert deleted == 2
    assert await forget_windows(database, limit=10) == (0, None)
    keys = sql.execute("SELECT key FROM jsworker.unique_windows ORDER BY key").fetchall()
    assert [row["key"] for row in keys] == ["lives", "open"]
    assert await enqueue(database, new("lives")) == Enqueued(lives.id, created=False)


async def test_one_that_is_taken_again_is_not_forgotten(database: Database, sql: Sql, winner: Winner) -> None:
    end(sql, (await enqueue(database)).id, "cancelled")
    age_window(sql)
    second = new()
    winner.run(statement_for(KIND, second))
    assert await forget_windows(database, limit=10) == (0, None)
    winner.commit()
    assert await forget_windows(database, limit=10) == (0, None)
    assert await enqueue(database) == Enqueued(second.id, created=False)


async def test_one_that_is_being_forgotten_is_taken(database: Database, sql: Sql, winner: Winner) -> None:
    end(sql, (await enqueue(database)).id, "cancelled")
    age_window(sql)
    winner.run(FORGET_WINDOWS, GIVEN)
    second = asyncio.create_task(enqueue(database))
    await winner.blocks()
    winner.commit()
    assert (await second).created
    assert read_value(sql, "SELECT count(*) FROM jsworker.unique_windows") == 1


# --- Each predicate refuses alone, and is needed ---


def window(sql: Sql, *, is_over: bool, lives: bool) -> UUID:
    job_id = insert_job(sql, "queued" if lives else "cancelled")
    sql.execute(
        "INSERT INTO jsworker.unique_windows VALUES (%s, %s, %s, clock_timestamp() + %s * interval '1 h')",
        [KIND, KEY, job_id, -1 if is_over else 1],
    )
    return job_id


CASES = [
    pytest.param({"is_over": False, "lives": False}, r"w\.until <= clock_timestamp\(\)", id="over"),
    pytest.param({"is_over": True, "lives": True}, LIVES.join(["NOT ", ""]), id="ended"),
]


@pytest.mark.parametrize(("state", "guard"), CASES)
def test_enqueue(sql: Sql, engine: Engine, state: dict[str, bool], guard: str) -> None:
    holder = window(sql, **state)
    job = new()
    statement = statement_for(KIND, job)
    with engine.begin() as connection:
        assert [tuple(row)[:2] for row in connection.execute(statement)] == [(holder, False)]
    values = statement.compile().params
    mutant = without(ENQUEUE_WINDOW, guard)
    with engine.begin() as connection:
        assert [tuple(row)[:2] for row in connection.execute(mutant, values)] == [(job.id, True)]


@pytest.mark.parametrize(("state", "guard"), CASES)
def test_forget(sql: Sql, engine: Engine, state: dict[str, bool], guard: str) -> None:
    window(sql, **state)
    guard = guard.replace("clock_timestamp", "(clock|statement)_timestamp")
    with engine.begin() as connection:
        assert connection.execute(FORGET_WINDOWS, GIVEN).all() == []
        assert len(connection.execute(without(FORGET_WINDOWS, guard), GIVEN).all()) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("unique_windows_key", ("a", "x" * 256, "now()")),
        ("unique_windows_key", ("a", "", "now()")),
        ("unique_windows_key", ("a", "b\n", "now()")),
        ("unique_windows_kind", ("No Kind", "a", "now()")),
        ("unique_windows_until", ("a", "a", "'infinity'")),
    ],
)
def test_rows_that_there_are_not(sql: Sql, name: str, values: tuple[str, str, str]) -> None:
    kind, key, until = values
    with pytest.raises(CheckViolation, match=name):
        sql.execute(
            f"INSERT INTO jsworker.unique_windows VALUES (%s, %s, gen_random_uuid(), {until})".encode(),  # noqa: S608 -- a constant
            [kind, key],
        )
