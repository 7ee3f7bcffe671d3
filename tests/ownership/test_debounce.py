"""Debounce: the job of a key that waits takes the last payload, and is moved back, at most so far."""

import asyncio
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import admission, publish, steps
from jsworker.ownership.transitions.enqueue import Enqueued, JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import DEBOUNCE, enqueue_many, enqueue_one, statement_for

from .calls import claimed, fail
from .rows import (
    HELD,
    KIND,
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    insert_job,
    read_job,
    read_value,
)
from .transitions import without
from .winner import Winner

KEY = "order:12"


def new(n: int = 1, *, debounce: float = 60.0, most: float | None = 600.0, **terms: Any) -> NewJob:
    terms_of_job = JobTerms(scope="debounce", debounce=debounce, debounce_max=most, **terms)
    return NewJob(new_job_id(), f'{{"n": {n}}}', KEY, terms=terms_of_job)


async def enqueue(database: Database, job: NewJob | None = None) -> Enqueued:
    return await enqueue_one(database, KIND, job or new(), publish_after=0.0)


def seconds_ahead(sql: Sql, instant: datetime) -> float:
    return float(read_value(sql, "SELECT extract(epoch FROM %s - clock_timestamp())", instant))


def jobs(sql: Sql) -> int:
    return int(read_value(sql, "SELECT count(*) FROM jsworker.jobs"))


async def test_each_repetition_moves_it_back_with_its_payload(database: Database, sql: Sql) -> None:
    first = await enqueue(database)
    assert first.created
    row = read_job(sql, first.id)
    assert (row["status"], row["waiting_key"], row["unique_key"], row["dispatch"]) == (
        "scheduled",
        KEY,
        None,
        0,
    )
    assert 50 < seconds_ahead(sql, row["run_at"]) <= 60
    assert 590 < seconds_ahead(sql, row["debounce_until"]) <= 600
    change_job(sql, first.id, run_at=ago(-30))
    assert await enqueue(database, new(2)) == Enqueued(first.id, created=False)
    row = read_job(sql, first.id)
    assert row["payload"] == {"n": 2}
    assert 50 < seconds_ahead(sql, row["run_at"]) <= 60
    assert jobs(sql) == 1


async def test_no_further_than_its_maximum(database: Database, sql: Sql) -> None:
    first = (await enqueue(database)).id
    change_job(sql, first, run_at=ago(-10), debounce_until=ago(-20))
    until = read_job(sql, first)["debounce_until"]
    for n in (2, 3):
        await enqueue(database, new(n, most=9999.0))
        row = read_job(sql, first)
        assert (row["run_at"], row["debounce_until"], row["payload"]) == (until, until, {"n": n})


async def test_without_a_maximum_for_ever(database: Database, sql: Sql) -> None:
    first = (await enqueue(database, new(most=None))).id
    change_job(sql, first, created_at=ago(9999), run_at=ago(-1))
    await enqueue(database, new(most=None))
    row = read_job(sql, first)
    assert row["debounce_until"] is None
    assert 50 < seconds_ahead(sql, row["run_at"]) <= 60


async def test_it_is_never_moved_forward(database: Database, sql: Sql) -> None:
    first = (await enqueue(database)).id
    before = read_job(sql, first)["run_at"]
    await enqueue(database, new(2, debounce=1.0))
    assert read_job(sql, first)["run_at"] == before


async def test_what_is_due_takes_the_payload_and_keeps_its_place(database: Database, sql: Sql) -> None:
    first = (await enqueue(database)).id
    change_job(sql, first, run_at=ago(1))
    await publish.promote(database, limit=10)
    before = read_job(sql, first)
    assert await enqueue(database, new(2)) == Enqueued(first, created=False)
    after = read_job(sql, first)
    assert after == before | {"payload": {"n": 2}}
    [job] = await claimed(database, first)
    assert job.payload == '{"n": 2}'


async def test_beside_one_that_runs_another_waits(database: Database, sql: Sql) -> None:
    running = insert_job(sql, "processing", waiting_key=KEY)
    second = await enqueue(database)
    assert second.created
    assert await enqueue(database, new(2)) == Enqueued(second.id, created=False)
    assert read_job(sql, running)["payload"] == {}


async def test_one_that_came_back_does_the_new_work_in_its_own_time(database: Database, sql: Sql) -> None:
    """Nothing of the last payload is lost; what the run before has saved is not the new one's."""
    job_id = insert_job(sql, "processing", waiting_key=KEY, checkpoint="[1]", expires_at=ago(-50))
    await fail(database, job_id)
    before = read_job(sql, job_id)
    assert await enqueue(database, new(2, expires_in=3600.0)) == Enqueued(job_id, created=False)
    changes = {"payload": {"n": 2}, "checkpoint": None}
    after = read_job(sql, job_id)
    assert after.pop("debounce_until") is not None
    assert after == {k: v for k, v in (before | changes).items() if k != "debounce_until"}


async def test_what_has_expired_and_was_not_swept_lives_again(database: Database, sql: Sql) -> None:
    first = (await enqueue(database, new(expires_in=3600.0))).id
    change_job(sql, first, expires_at=ago(1))
    await enqueue(database, new(2, expires_in=3600.0))
    assert seconds_ahead(sql, read_job(sql, first)["expires_at"]) > 3590


async def test_many(database: Database, sql: Sql) -> None:
    answers = await enqueue_many(database, KIND, [new(n) for n in range(5)])
    assert [answer.created for answer in answers] == [True, *[False] * 4]
    assert len({answer.id for answer in answers}) == 1
    assert read_job(sql, answers[0].id)["payload"] == {"n": 4}


async def test_twins_at_once_create_one_job(database: Database, sql: Sql) -> None:
    answers = await asyncio.gather(*(enqueue(database, new(n)) for n in range(30)))
    assert sum(answer.created for answer in answers) == 1
    assert len({answer.id for answer in answers}) == 1
    assert jobs(sql) == 1


@pytest.mark.parametrize("committed", [True, False])
async def test_an_uncommitted_twin_is_waited_for(
    database: Database, sql: Sql, winner: Winner, *, committed: bool
) -> None:
    twin = new()
    winner.run(statement_for(KIND, twin))
    second = asyncio.create_task(enqueue(database, new(2)))
    await winner.blocks()
    if committed:
        winner.commit()
    else:
        winner.rollback()
    answer = await second
    assert answer.created is not committed
    assert (answer.id == twin.id) is committed
    assert read_job(sql, answer.id)["payload"] == {"n": 2}


@pytest.mark.parametrize("committed", [True, False])
async def test_a_claim_that_is_faster(
    database: Database, sql: Sql, winner: Winner, *, committed: bool
) -> None:
    """The run has the payload before; the new one is of the job after."""
    first = insert_job(sql, waiting_key=KEY)
    winner.claims(first, OTHER_WORKER)
    second = asyncio.create_task(enqueue(database, new(2)))
    await winner.blocks()
    if committed:
        winner.commit()
    else:
        winner.rollback()
    answer = await second
    assert answer.created is committed
    assert read_job(sql, answer.id)["payload"] == {"n": 2}
    assert read_job(sql, first)["payload"] == ({} if committed else {"n": 2})


async def test_a_producers_open_transaction_holds_up_no_claim_and_no_relay(
    database: Database, sql: Sql, winner: Winner
) -> None:
    queued, other = insert_job(sql, waiting_key=KEY), insert_job(sql)
    due = insert_job(sql, "scheduled", run_at=ago(1))
    winner.run(statement_for(KIND, new(2)))
    assert [job.id for job in await claimed(database, queued, other)] == [other]
    assert await publish.promote(database, limit=10) == 1
    assert read_job(sql, due)["status"] == "queued"
    winner.commit()
    assert [job.payload for job in await claimed(database, queued)] == ['{"n": 2}']


@pytest.mark.parametrize("successor", [False, True])
async def test_a_statement_that_was_committed_changes_nothing(
    database: Database, sql: Sql, engine: Engine, *, successor: bool
) -> None:
    job = new(1)
    statement = statement_for(KIND, job)

    def execute() -> list[tuple[Any, ...]]:
        with engine.begin() as connection:
            return [tuple(row) for row in connection.execute(statement)]

    assert execute() == [(job.id, True, 0)]
    await enqueue(database, new(2))
    before = read_job(sql, job.id)
    assert execute() == [(job.id, False, 0)]
    assert read_job(sql, job.id) == before
    change_job(sql, job.id, status="cancelled", finished_at=ago(0))
    last = await enqueue(database, new(3)) if successor else None
    assert execute() == []
    assert jobs(sql) == 1 + successor
    assert last is None or read_job(sql, last.id)["payload"] == {"n": 3}


async def keep_step(database: Database, job_id: UUID) -> None:
    await steps.keep_step(database, worker_id=WORKER, held=(job_id, 1), name="charge", result='"A"')


async def test_steps_of_the_payload_before_go_with_it(database: Database, sql: Sql) -> None:
    first = (await enqueue(database)).id
    change_job(sql, first, run_at=ago(1))
    await publish.promote(database, limit=10)
    other = insert_job(sql)
    await claimed(database, first, other)
    for job_id in (first, other):
        await keep_step(database, job_id)
    await fail(database, first)
    assert await enqueue(database, new(2)) == Enqueued(first, created=False)
    change_job(sql, first, run_at=ago(1))
    await publish.promote(database, limit=10)
    [job] = await claimed(database, first)
    found = await steps.find_step(database, worker_id=WORKER, held=(first, 2), name="charge")
    assert (job.payload, found.is_done, found.steps) == ('{"n": 2}', False, 0)
    assert len(await steps.steps_of(database, other)) == 1


@pytest.mark.parametrize("began", ["before the step", "before the run"])
async def test_a_step_that_the_snapshot_lacks_is_not_taken_for_the_new_payloads(
    database: Database, sql: Sql, winner: Winner, began: str
) -> None:
    """The statement begins before the step was kept, and waits until the run has failed."""
    if began == "before the step":
        job_id = insert_job(sql, "processing", waiting_key=KEY)
        token = 1
    else:
        job_id = insert_job(sql, "queued", waiting_key=KEY, fencing_token=1, attempts=1, errors=1)
        winner.claims(job_id, WORKER)
        token = 2
    step = """INSERT INTO jsworker.job_steps (job_id, name, fencing_token)
      VALUES (:id, 'charge', :token) RETURNING 1"""
    back = """UPDATE jsworker.jobs SET status = 'scheduled', run_at = clock_timestamp() + interval '1 minute',
      errors = attempts, worker_id = NULL, last_activity_at = NULL WHERE id = :id RETURNING 1"""
    winner.run(text(step), {"id": job_id, "token": token})
    winner.run(text(back), {"id": job_id})
    second = asyncio.create_task(enqueue(database, new(2)))
    await winner.blocks()
    winner.commit()
    assert await second == Enqueued(job_id, created=False)
    assert read_job(sql, job_id)["payload"] == {"n": 2}
    assert await steps.steps_of(database, job_id) == []


@pytest.mark.parametrize(("key", "held_key"), [("b", "b"), (None, "")])
async def test_the_limit_is_that_of_the_new_payload(
    database: Database, sql: Sql, key: str | None, held_key: str
) -> None:
    """What is held is found under its new key."""
    first = (await enqueue(database, new()._replace(limit_key="a"))).id
    await enqueue(database, new(2)._replace(limit_key=key))
    assert read_job(sql, first)["limit_key"] == key
    change_job(
        sql,
        first,
        status="scheduled",
        dispatch=1,
        queued_at=ago(9),
        limit_key="a",
        **HELD | {"held_by": "limit"},
    )
    await enqueue(database, new(3)._replace(limit_key=key))
    row = read_job(sql, first)
    assert (row["held_by"], row["limit_key"]) == ("limit", held_key)
    assert [(each.kind, each.key) for each in await admission.waiting_keys(database)] == [(KIND, held_key)]
    taken = await admission.admit(
        database, worker_id=WORKER, kind=KIND, limits=LIMITS, keys=[held_key], most=1
    )
    assert [(job.id, job.payload) for job in taken.claimed] == [(first, '{"n": 3}')]


MOVES: list[Any] = [
    pytest.param(r"j\.status = 'scheduled'", {"status": "queued", "queued_at": ago(0)}, id="scheduled"),
    pytest.param(r"j\.fencing_token = 0", {"fencing_token": 1}, id="never claimed"),
    pytest.param(r"j\.behind IS NULL", {"behind": UUID(int=1)}, id="not behind"),
]


@pytest.mark.parametrize(("guard", "columns"), MOVES)
def test_each_predicate_keeps_it_in_its_place_and_is_needed(
    sql: Sql, engine: Engine, guard: str, columns: dict[str, Any]
) -> None:
    job_id = insert_job(sql, "scheduled", waiting_key=KEY, run_at=ago(-5), dispatch=1)
    change_job(sql, job_id, **columns)
    before = read_job(sql, job_id)["run_at"]
    statement = statement_for(KIND, new())
    values = statement.compile().params
    with engine.begin() as connection:
        connection.execute(statement)
    assert read_job(sql, job_id)["run_at"] == before
    with engine.begin() as connection:
        connection.execute(without(DEBOUNCE, guard), values)
    assert read_job(sql, job_id)["run_at"] - before > timedelta(seconds=30)
