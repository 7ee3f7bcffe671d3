"""Operators' statements about many jobs beside a row, or a key, that another transaction keeps locked."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import control, heartbeat, priorities, reopen, reset
from jsworker.ownership.transitions.audit import run_noted
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import statement_for
from jsworker.ownership.transitions.reschedule import reschedule_all
from jsworker.ownership.transitions.workflow_control import cancel_workflow, retry_workflow

from .flows import stored
from .rows import KIND, WORKER, Sql, ago, insert_job
from .winner import Winner

REASON = "locked by another transaction: try again"
LATER = datetime(2030, 1, 1, tzinfo=UTC)
LOCK = text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE")

Result = tuple[set[UUID], dict[UUID, str]]


@pytest.fixture
def gives_up(winner: Winner, monkeypatch: pytest.MonkeyPatch) -> Winner:
    """The other transaction, in tests that wait for the refusal."""
    monkeypatch.setattr("jsworker.ownership.refusals._PAUSES", (0.02,))
    return winner


async def cancel(database: Database, ids: list[UUID]) -> Result:
    done = await control.cancel(database, ids)
    assert (done.final, done.unknown, done.other) == ({}, [], {})
    return {*done.cancelled, *done.requested}, done.refused


async def retry(database: Database, ids: list[UUID]) -> Result:
    done = await control.retry_all(database, ids)
    return set(done.changed), done.refused


async def set_priority(database: Database, ids: list[UUID]) -> Result:
    done = await priorities.set_priorities(database, ids, 0)
    return set(done.changed), done.refused


async def reschedule(database: Database, ids: list[UUID]) -> Result:
    done = await reschedule_all(database, ids, LATER)
    return set(done.changed), done.refused


async def clear(database: Database, ids: list[UUID]) -> Result:
    taken = await reset.reset_by_operator(database, seen=[(job_id, 1) for job_id in ids], reason="by hand")
    assert all(error.sqlstate == "55P03" for error in taken.refused.values())
    return {each.id for each in taken.resets}, {each: str(error) for each, error in taken.refused.items()}


ACTIONS: dict[str, tuple[Callable[[Database, list[UUID]], Coroutine[Any, Any, Result]], str, str]] = {
    "cancel": (cancel, "processing", "job {id} cannot be cancelled: "),
    "retry": (retry, "failed", "job {id} cannot be retried: "),
    "set priority": (set_priority, "queued", "the priority of job {id} cannot be set: "),
    "reschedule": (reschedule, "scheduled", "job {id} cannot be rescheduled: "),
    "clear": (clear, "processing", ""),
}


@pytest.mark.parametrize("action", ACTIONS)
async def test_all_jobs_but_the_locked_one_are_changed(
    database: Database, sql: Sql, gives_up: Winner, action: str
) -> None:
    act, status, prefix = ACTIONS[action]
    ids = [insert_job(sql, status) for _ in range(20)]
    locked = ids[7]
    gives_up.run(LOCK, {"id": locked})
    done, refused = await act(database, ids)
    assert done == {*ids} - {locked}
    assert refused == {locked: prefix.format(id=locked) + REASON}
    gives_up.rollback()
    assert await act(database, [locked]) == ({locked}, {})


@pytest.mark.parametrize("action", ["cancel", "clear"])
async def test_heartbeats_of_the_other_jobs_go_on(
    database: Database, sql: Sql, winner: Winner, action: str
) -> None:
    others = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(20)]
    locked = others.pop()
    winner.run(LOCK, {"id": locked})
    acting = asyncio.create_task(ACTIONS[action][0](database, [*others[:5], locked]))
    await winner.is_passed_over()
    assert not acting.done()
    await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(job_id, 1) for job_id in others])
    renewed = (
        "SELECT id FROM jsworker.jobs WHERE status = 'processing'"
        " AND last_activity_at > clock_timestamp() - interval '50 s'"
    )
    alive = {row["id"] for row in sql.execute(renewed).fetchall()}
    assert alive == {*others[5:], *(others[:5] if action == "cancel" else ())}
    winner.commit()
    assert await acting == ({*others[:5], locked}, {})


async def test_a_key_that_is_being_taken_keeps_only_its_own_job_from_being_retried(
    database: Database, sql: Sql, gives_up: Winner
) -> None:
    ids = [insert_job(sql, "failed", unique_key=f"k-{n}") for n in range(20)]
    gives_up.run(statement_for(KIND, NewJob(new_job_id(), "{}", unique_key="k-7")))
    done, refused = await retry(database, ids)
    assert done == {*ids} - {ids[7]}
    assert refused == {ids[7]: f"job {ids[7]} cannot be retried: {REASON}"}
    gives_up.commit()
    refused = (await retry(database, [ids[7]]))[1]
    assert refused == {ids[7]: f"job {ids[7]} cannot be retried: a live job holds its unique key"}


async def test_many_keys_that_are_being_taken_do_not_keep_a_retry_for_ever(
    monkeypatch: pytest.MonkeyPatch, database: Database, sql: Sql, gives_up: Winner
) -> None:
    monkeypatch.setattr("jsworker.ownership.refusals._MOST_TIMEOUTS", 3)
    ids = [insert_job(sql, "failed", unique_key=f"k-{n}") for n in range(20)]
    for n in range(20):
        gives_up.run(statement_for(KIND, NewJob(new_job_id(), "{}", unique_key=f"k-{n}")))
    tried: list[object] = []

    async def counted(*arguments: Any) -> Any:
        tried.append(arguments)
        return await run_noted(*arguments)

    monkeypatch.setattr(control, "run_noted", counted)
    done, refused = await retry(database, ids)
    assert done == set()
    assert refused == {each: f"job {each} cannot be retried: {REASON}" for each in ids}
    assert len(tried) == 3


async def test_members_beside_a_locked_one_are_retried_and_cancelled(
    database: Database, sql: Sql, gives_up: Winner
) -> None:
    flow = await stored(database, sql, ("a", 5, ()))
    members = flow.members("a")
    await flow.fail(*members)
    gives_up.run(LOCK, {"id": members[2]})
    assert await retry(database, members) == (
        {*members} - {members[2]},
        {members[2]: f"job {members[2]} cannot be retried: {REASON}"},
    )
    said = f"4 jobs were cancelled, 1 were not; the first one: job {members[2]} cannot be cancelled: {REASON}"
    gives_up.rollback()
    await retry(database, [members[2]])
    gives_up.run(LOCK, {"id": members[2]})
    with pytest.raises(TransitionRefused, match=f"^{said}$"):
        await cancel_workflow(database, flow.id)


async def test_a_retry_of_a_workflow_names_the_locked_one(
    database: Database, sql: Sql, gives_up: Winner
) -> None:
    flow = await stored(database, sql, ("a", 5, ()))
    await flow.fail(*flow.members("a"))
    locked = flow.members("a")[2]
    gives_up.run(LOCK, {"id": locked})
    said = f"4 jobs were retried, 1 were not; the first one: job {locked}: {REASON}"
    with pytest.raises(TransitionRefused, match=f"^{said}$"):
        await retry_workflow(database, flow.id)


async def test_all_members_are_locked_and_their_batch_stays_as_it_is(
    database: Database, sql: Sql, gives_up: Winner
) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await flow.fail(flow.member("a"))
    before = flow.row("a")
    gives_up.run(LOCK, {"id": flow.member("a")})
    assert await reopen.retry_members(database, flow.batch("a"), flow.members("a"), done=set()) == []
    assert flow.row("a") == before


@pytest.mark.parametrize("locks", ["batch", "held again"])
async def test_what_a_retry_of_members_needs_is_waited_for_only_briefly(
    database: Database, sql: Sql, engine: Engine, locks: str
) -> None:
    """For example, a running member adds to the batch in its own transaction."""
    flow = await stored(database, sql, ("a", 2, ()), ("b", 1, ("a",)))
    ids = flow.members("a")
    await flow.fail(*ids)
    sql.execute(
        "UPDATE jsworker.jobs SET status = 'cancelled', failure_reason = 'needs', held_by = NULL,"
        " held_at = NULL, finished_at = clock_timestamp() WHERE id = %s",
        [flow.member("b")],
    )
    table, row = ("batches", flow.batch("a")) if locks == "batch" else ("jobs", flow.member("b"))
    with engine.begin() as connection:
        connection.execute(text(f"SELECT FROM jsworker.{table} WHERE id = :id FOR UPDATE"), {"id": row})
        done, refused = await retry(database, ids)
    why = f"batch {flow.batch('a')}, or what needs it, is {REASON}"
    assert (done, refused) == (set(), {each: f"job {each} cannot be retried: {why}" for each in ids})
    assert await retry(database, ids) == ({*ids}, {})
    assert flow.status("b") == "scheduled"
