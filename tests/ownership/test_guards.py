"""Each predicate of each guard, flipped alone: zero rows, an unchanged row. And each one is needed.

The constraints and the trigger are taken away first. They are the net below the guards: with them in place
a row could not be flipped in one column alone, and a missing predicate would hide behind a refused write.
"""

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, TextClause

from .guards import TRANSITIONS, flips
from .rows import Sql, change_job, event_names, insert_job, read_job
from .transitions import Flip, Transition, without

FLIPS = [pytest.param(t, f, id=f"{t.name}: {f.predicate}") for t, f in flips()]
EACH = pytest.mark.parametrize("transition", [pytest.param(t, id=t.name) for t in TRANSITIONS])


@pytest.fixture(scope="module", autouse=True)
def without_net(observer: Sql) -> None:
    checks = observer.execute(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'jsworker.jobs'::regclass AND contype = 'c'"
    )
    for check in checks.fetchall():
        observer.execute(f"ALTER TABLE jsworker.jobs DROP CONSTRAINT {check['conname']}")
    observer.execute("DROP TRIGGER jobs_guard ON jsworker.jobs")


@pytest.fixture(scope="module")
def connection(engine: Engine, without_net: None) -> Iterator[Connection]:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as opened:
        yield opened


def prepared(sql: Sql, transition: Transition) -> tuple[UUID, dict[str, Any]]:
    """Insert a row that fulfils the guard; return its id and the statement's values for it."""
    job_id = insert_job(sql, transition.status, **transition.columns)
    return job_id, transition.parameters(read_job(sql, job_id))


def flipped(sql: Sql, transition: Transition, flip: Flip) -> tuple[UUID, dict[str, Any]]:
    """Do the same, and make one predicate false."""
    job_id, parameters = prepared(sql, transition)
    parameters |= flip.parameters(read_job(sql, job_id))
    if flip.columns:
        change_job(sql, job_id, **flip.columns)
    return job_id, parameters


def taken(
    connection: Connection,
    transition: Transition,
    parameters: dict[str, Any],
    statement: TextClause | None = None,
) -> list[UUID]:
    """Execute a transition, or a mutant of it, and return the ids of the rows that it took."""
    asked = transition.statement if statement is None else statement
    rows = connection.execute(asked, parameters).all()
    if transition.counts:
        (answer,) = rows
        return list(parameters["ids"][: answer[0]])
    return [row.id for row in rows if getattr(row, "is_written", True)]


@EACH
def test_a_row_that_fulfils_the_guard_is_taken(
    transition: Transition, connection: Connection, sql: Sql
) -> None:
    job_id, parameters = prepared(sql, transition)
    before = read_job(sql, job_id)
    assert taken(connection, transition, parameters) == [job_id]
    assert (read_job(sql, job_id) != before) is transition.writes


@pytest.mark.parametrize("transition", [pytest.param(t, id=t.name) for t in TRANSITIONS if t.names_rows])
def test_only_the_named_rows_are_taken(transition: Transition, connection: Connection, sql: Sql) -> None:
    job_id, parameters = prepared(sql, transition)
    neighbour, _ = prepared(sql, transition)
    before = read_job(sql, neighbour)
    assert taken(connection, transition, parameters) == [job_id]
    assert read_job(sql, neighbour) == before


@pytest.mark.parametrize(("transition", "flip"), FLIPS)
def test_one_false_predicate_is_enough_to_refuse(
    transition: Transition, flip: Flip, connection: Connection, sql: Sql
) -> None:
    job_id, parameters = flipped(sql, transition, flip)
    before = read_job(sql, job_id)
    assert taken(connection, transition, parameters) == []
    assert read_job(sql, job_id) == before
    logged = transition.tells if flip.tells and before["status"] != "completed" else None
    assert event_names(sql, job_id) == ([logged] if logged else [])


@pytest.mark.parametrize(("transition", "flip"), FLIPS)
def test_no_predicate_can_be_left_out(
    transition: Transition, flip: Flip, connection: Connection, sql: Sql
) -> None:
    job_id, parameters = flipped(sql, transition, flip)
    mutant = without(transition.statement, flip.guard)
    assert taken(connection, transition, parameters, mutant) == [job_id]
