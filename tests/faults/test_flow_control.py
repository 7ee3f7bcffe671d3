"""What the SQL of A1 to A3 and L6 finds, in rows that no statement of the protocol writes."""

from collections.abc import Callable, Iterator
from typing import LiteralString
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from jsworker.ownership.transitions.enqueue import new_job_id
from tests.faults.flow_control import ALWAYS, BATCHES, IDLE, IN_THE_END, INSTANTS, OVER_LIMIT, PLACES
from tests.faults.test_walk import new_database
from tests.ownership.rows import HELD, Sql, change_job, insert_job
from tests.support.servers import TestServers

RUNS = {"status": "processing", "worker_id": "w", "attempts": 1, "fencing_token": 1}


@pytest.fixture(scope="module")
def database(servers: TestServers) -> Iterator[Sql]:
    with psycopg.connect(new_database(servers), autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def sql(database: Sql) -> Iterator[Sql]:
    with database.transaction(force_rollback=True):
        yield database


def begin(sql: Sql, job_id: UUID) -> None:
    now = psycopg.sql.SQL("clock_timestamp()")
    change_job(sql, job_id, last_activity_at=now, **RUNS)


def limit(sql: Sql, key: str, most: int) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, max_running, set_by) VALUES ('count-lines', %s, %s, 'code')",
        [key, most],
    )


def flow(sql: Sql, *nodes: tuple[str, LiteralString]) -> list[UUID]:
    """Insert a workflow of batches in a chain, each with what its row says besides."""
    workflow = new_job_id()
    sql.execute("INSERT INTO jsworker.workflows (id, name) VALUES (%s, 'flow')", [workflow])
    batches: list[UUID] = []
    for place, (name, what) in enumerate(nodes):
        batch = new_job_id()
        sql.execute(
            "INSERT INTO jsworker.batches (id, workflow, name, kind, place, on_failure)"
            " VALUES (%s, %s, %s, 'count-lines', %s, 'cancel')",
            [batch, workflow, name, place],
        )
        sql.execute(
            psycopg.sql.SQL("UPDATE jsworker.batches SET {} WHERE id = %s").format(psycopg.sql.SQL(what)),
            [batch],
        )
        if batches:
            sql.execute(
                "INSERT INTO jsworker.batch_needs (batch, needs) VALUES (%s, %s)", [batch, batches[-1]]
            )
        batches.append(batch)
    return batches


FINISHED: LiteralString = "finished_at = clock_timestamp(), outcome = 'completed', propagated = true"
OPEN: LiteralString = "sealed = true"


def more_runs_than_the_limit(sql: Sql) -> None:
    limit(sql, "", 1)
    for _ in range(2):
        begin(sql, insert_job(sql, limit_key="tenant"))
    sql.execute("SET CONSTRAINTS ALL IMMEDIATE")


def more_runs_than_a_key_may_have(sql: Sql) -> None:
    limit(sql, "", 9)
    limit(sql, "tenant", 1)
    for _ in range(2):
        begin(sql, insert_job(sql, limit_key="tenant"))
    sql.execute("SET CONSTRAINTS ALL IMMEDIATE")


def an_instant_twice(sql: Sql) -> None:
    for _ in range(2):
        insert_job(sql, schedule="nightly", scheduled_for="2026-01-01T03:00:00Z")


def a_batch_that_finishes_twice(sql: Sql) -> None:
    [batch] = flow(sql, ("parts", FINISHED))
    sql.execute("UPDATE jsworker.batches SET finished_at = NULL, outcome = NULL WHERE id = %s", [batch])
    sql.execute(
        "UPDATE jsworker.batches SET finished_at = clock_timestamp(), outcome = 'completed' WHERE id = %s",
        [batch],
    )


def a_live_member_of_a_finished_batch(sql: Sql) -> None:
    [batch] = flow(sql, ("parts", FINISHED))
    insert_job(sql, batch_id=batch)


def a_place_lost_when_it_is_woken(sql: Sql) -> None:
    job_id = insert_job(sql, "scheduled", **HELD, queued_at="2026-01-01T03:00:00Z")
    change_job(sql, job_id, status="queued", held_by=None, held_at=None, queued_at="2026-01-01T04:00:00Z")


def a_place_lost_when_it_is_held(sql: Sql) -> None:
    change_job(sql, insert_job(sql), status="scheduled", queued_at="2026-01-01T04:00:00Z", **HELD)


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        (OVER_LIMIT, more_runs_than_the_limit),
        (OVER_LIMIT, more_runs_than_a_key_may_have),
        (INSTANTS, an_instant_twice),
        (BATCHES, a_batch_that_finishes_twice),
        (BATCHES, a_live_member_of_a_finished_batch),
        (PLACES, a_place_lost_when_it_is_woken),
        (PLACES, a_place_lost_when_it_is_held),
    ],
)
def test_what_must_never_be(sql: Sql, rule: str, breaks: Callable[[Sql], None]) -> None:
    assert sql.execute(ALWAYS).fetchall() == []
    breaks(sql)
    assert {row["rule"] for row in sql.execute(ALWAYS)} == {rule}


def test_what_is_in_order(sql: Sql) -> None:
    limit(sql, "", 1)
    for key in ("one", "other"):
        begin(sql, insert_job(sql, limit_key=key))
    for second in (1, 2):
        insert_job(sql, schedule="nightly", scheduled_for=f"2026-01-01T03:00:0{second}Z")
    [batch] = flow(sql, ("parts", FINISHED))
    sql.execute("UPDATE jsworker.batches SET finished_at = NULL, outcome = NULL, generation = 1")
    insert_job(sql, batch_id=batch)
    job_id = insert_job(sql, "scheduled", **HELD, queued_at="2026-01-01T03:00:00Z")
    change_job(sql, job_id, status="queued", held_by=None, held_at=None)
    sql.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert sql.execute(ALWAYS).fetchall() == []


def never_finished(sql: Sql) -> None:
    flow(sql, ("parts", OPEN))


def not_propagated(sql: Sql) -> None:
    flow(sql, ("parts", "finished_at = clock_timestamp(), outcome = 'completed', propagated = false"))


def finished_too_early(sql: Sql) -> None:
    [batch] = flow(sql, ("parts", FINISHED))
    insert_job(sql, "completed", batch_id=batch)


def began_too_early(sql: Sql) -> None:
    _, batch = flow(sql, ("parts", FINISHED), ("merge", FINISHED))
    insert_job(
        sql,
        "completed",
        batch_id=batch,
        started_at="2026-01-01T03:00:00Z",
        finished_at="2026-01-01T03:00:00Z",
    )


def cancelled_for_nothing(sql: Sql) -> None:
    _, batch = flow(sql, ("parts", FINISHED), ("merge", FINISHED))
    early = "2026-01-01T03:00:00Z"
    insert_job(sql, "cancelled", batch_id=batch, failure_reason="needs", finished_at=early)


def not_cancelled(sql: Sql) -> None:
    failed: LiteralString = "finished_at = clock_timestamp(), outcome = 'failed', propagated = true"
    _, batch = flow(sql, ("parts", failed), ("merge", FINISHED))
    insert_job(sql, "completed", batch_id=batch, finished_at="2026-01-01T03:00:00Z")


def an_instant_without_a_job(sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.schedules (name, kind, payload, rule, tz, missed, overlap, next_at, set_by)"
        " VALUES ('nightly', 'count-lines', '{}', 'every 1 s', 'UTC', 'coalesce', 'allow', '2090-01-01Z',"
        " 'code')"
    )
    for second in (1, 3):
        insert_job(sql, schedule="nightly", scheduled_for=f"2026-01-01T03:00:0{second}Z")


@pytest.mark.parametrize(
    ("told", "leaves"),
    [
        ("parts never finished", never_finished),
        ("parts was not propagated", not_propagated),
        ("parts finished before its last member", finished_too_early),
        ("began before a need of its batch had finished", began_too_early),
        ("was cancelled for its needs, all of which were completed", cancelled_for_nothing),
        ("was not cancelled, although a need was not completed", not_cancelled),
        ("no job", an_instant_without_a_job),
    ],
)
def test_what_must_not_be_in_the_end(sql: Sql, told: str, leaves: Callable[[Sql], None]) -> None:
    leaves(sql)
    sql.execute("UPDATE jsworker.workflows SET finished_at = clock_timestamp(), outcome = 'completed'")
    assert {row["found"] for row in sql.execute(IN_THE_END)} == {told}
    sql.execute("UPDATE jsworker.workflows SET finished_at = NULL, outcome = NULL")
    assert (
        "flow never finished" in {row["found"] for row in sql.execute(IN_THE_END)}
        or "instant" in leaves.__name__
    )


def idle(sql: Sql) -> list[str]:
    return [row["what"].split(" ")[0] for row in sql.execute(IDLE)]


def test_what_somebody_should_look_after(sql: Sql) -> None:
    limit(sql, "", 1)
    job_id = insert_job(sql, limit_key="tenant")
    begin(sql, job_id)
    insert_job(sql, "scheduled", **HELD, limit_key="tenant")
    assert idle(sql) == []  # its slot is taken
    change_job(
        sql,
        job_id,
        status="completed",
        worker_id=None,
        last_activity_at=None,
        finished_at="2026-01-01T03:00:00Z",
    )
    assert idle(sql) == ["key"]
    sql.execute("UPDATE jsworker.limits SET paused_at = clock_timestamp(), paused_by = 'me'")
    assert idle(sql) == []
    sql.execute("UPDATE jsworker.limits SET paused_at = NULL, paused_by = NULL, rate = 1, per = 3600")
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, full_at) VALUES"
        " ('count-lines', 'tenant', clock_timestamp() + interval '1 hour')"
    )
    assert idle(sql) == []  # its token is spent
    sql.execute("UPDATE jsworker.limits SET full_at = NULL")
    assert idle(sql) == ["key"]
    waits = insert_job(sql, queued_at="2026-01-01T03:00:00Z")
    assert idle(sql) == []  # nobody has room
    change_job(sql, waits, status="cancelled", finished_at="2026-01-01T03:00:00Z")

    parts, merge = flow(sql, ("parts", OPEN), ("merge", OPEN))
    member = insert_job(sql, batch_id=parts)
    insert_job(sql, "scheduled", **HELD | {"held_by": "needs"}, batch_id=merge)
    assert idle(sql) == ["key"]
    change_job(sql, member, status="cancelled", finished_at="2026-01-01T03:00:00Z")
    assert idle(sql) == ["key", "end"]
    sql.execute(
        "UPDATE jsworker.batches SET finished_at = clock_timestamp(), outcome = 'cancelled' WHERE id = %s",
        [parts],
    )
    assert idle(sql) == ["key", "needs"]
