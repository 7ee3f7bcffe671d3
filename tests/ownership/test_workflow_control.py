"""Retrying and cancelling members and whole workflows, and members that add members under their fence."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, LiteralString
from uuid import UUID

import pytest
from sqlalchemy import Engine, TextClause, text

from jsworker.core.errors import LockTimeout, OwnershipLost, TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.statements import waiting
from jsworker.ownership.transitions import control, reopen, workflow_control, workflows
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.workflow_control import (
    add_members,
    cancel_left,
    cancel_workflow,
    retry_workflow,
)
from jsworker.ownership.transitions.workflows import Advanced, advance, left_undone

from .calls import claimed, opened, retry
from .flows import Stored, change, stored, sweep
from .rows import (
    KIND,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    event_names,
    insert_job,
    read_job,
    slow_rows,
)
from .transitions import without
from .winner import Winner

CHAIN = (("a", 2, ()), ("b", 2, ("a",)), ("c", 1, ("b",)), ("other", 1, ()))


@pytest.fixture
async def failed(database: Database, sql: Sql) -> Stored:
    """A workflow whose first batch has failed, which cancelled the next two."""
    flow = await stored(database, sql, *CHAIN)
    await flow.fail(flow.member("a"))
    await flow.complete(flow.members("a")[1])
    await advance(database, [flow.batch("a")])
    assert [flow.outcome(name) for name in "abc"] == ["failed", "cancelled", "cancelled"]
    return flow


# --- RETRY ---


async def test_a_retried_member_opens_its_batch_and_what_was_cancelled_for_it_is_held_again(
    database: Database, sql: Sql, failed: Stored
) -> None:
    await retry(database, failed.member("a"))
    job = read_job(sql, failed.member("a"))
    assert (job["status"], job["dispatch"], job["errors"], job["needs_publish"]) == ("queued", 2, 0, True)
    assert [failed.outcome(name) for name in "abc"] == [None, None, None]
    assert failed.statuses("b") == ["scheduled", "scheduled"]
    assert failed.statuses("a") == ["queued", "completed"]
    held = read_job(sql, failed.member("c"))
    assert (held["held_by"], held["finished_at"], held["failure_reason"]) == ("needs", None, None)
    assert event_names(sql, failed.member("b")) == ["cancelled", "held"]
    assert await sweep(database) == Advanced()
    await failed.complete(failed.member("a"))
    assert (await advance(database, [failed.batch("a")])).woken == 2
    assert (failed.outcome("a"), failed.statuses("b"), failed.status("c")) == (
        "completed",
        ["queued", "queued"],
        "scheduled",
    )


async def test_a_second_failure_cancels_again(database: Database, failed: Stored) -> None:
    await retry(database, failed.member("a"))
    await failed.fail(failed.member("a"))
    assert (await advance(database, [failed.batch("a")])).cancelled == 3
    assert failed.outcome("c") == "cancelled"


async def test_what_was_cancelled_for_another_need_is_cancelled_again(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ()), ("both", 1, ("a", "b")))
    await flow.fail(flow.member("a"), flow.member("b"))
    await advance(database, [flow.batch("a"), flow.batch("b")])
    await retry(database, flow.member("a"))
    assert flow.status("both") == "scheduled"
    await flow.complete(flow.member("a"))
    await advance(database, [flow.batch("a")])
    assert flow.status("both") == "cancelled"


async def test_what_an_operator_has_cancelled_stays(database: Database, failed: Stored) -> None:
    await retry(database, failed.member("a"))
    await control.cancel(database, [failed.member("c")])
    await failed.fail(failed.member("a"))
    await advance(database, [failed.batch("a")])
    await retry(database, failed.member("a"))
    assert failed.statuses("b") == ["scheduled", "scheduled"]
    assert (failed.status("c"), failed.outcome("c")) == ("cancelled", "cancelled")


async def test_what_ran_after_a_failure_is_not_held_again(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("tidy", 1, ("a",)), on_failure={"tidy": "run"})
    await flow.fail(flow.member("a"))
    await advance(database, [flow.batch("a")])
    await retry(database, flow.member("a"))
    assert flow.status("tidy") == "queued"


async def test_a_member_is_held_while_a_need_of_its_batch_runs_again(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)), on_failure={"b": "run"})
    await flow.fail(flow.member("a"))
    await advance(database, [flow.batch("a")])
    await flow.fail(flow.member("b"))
    await advance(database, [flow.batch("b")])
    assert flow.workflow_row()["outcome"] == "failed"
    assert await retry_workflow(database, flow.id) == 2
    assert flow.workflow_row()["finished_at"] is None
    assert (flow.status("a"), flow.status("b")) == ("queued", "scheduled")
    await flow.complete(flow.member("a"))
    await advance(database, [flow.batch("a")])
    await flow.complete(flow.member("b"))
    await advance(database, [flow.batch("b")])
    assert flow.workflow_row()["outcome"] == "completed"


@contextmanager
def refusing(sql: Sql, job_id: UUID, status: str) -> Iterator[None]:
    """Let the table refuse one status of one job meanwhile."""
    sql.execute(
        f"ALTER TABLE jsworker.jobs ADD CONSTRAINT not_me CHECK (id <> '{job_id}' OR status <> '{status}')"
    )
    try:
        yield
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT not_me")


async def test_a_refused_member_is_named_and_the_others_are_retried(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 3, ()))
    for member in flow.members("a"):
        await flow.fail(member)
    await advance(database, [flow.batch("a")])
    bad = flow.members("a")[1]
    expected = rf"^2 jobs were retried, 1 were not; the first one: job {bad}: "
    with refusing(sql, bad, "queued"), pytest.raises(TransitionRefused, match=expected):
        await retry_workflow(database, flow.id)
    assert [read_job(sql, each)["status"] for each in flow.members("a")] == ["queued", "failed", "queued"]
    assert await retry_workflow(database, flow.id) == 1


async def test_a_refused_member_is_named_and_the_others_are_cancelled(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 3, ()), ("b", 1, ("a",)))
    bad = flow.members("a")[1]
    await claimed(database, flow.member("a"))
    expected = rf"^3 jobs were cancelled, 1 were not; the first one: job {bad} cannot be cancelled: "
    with refusing(sql, bad, "cancelled"), pytest.raises(TransitionRefused, match=expected):
        await cancel_workflow(database, flow.id)
    assert [read_job(sql, each)["status"] for each in (*flow.members("a"), flow.member("b"))] == [
        *("processing", "queued", "cancelled", "cancelled")
    ]
    assert read_job(sql, flow.member("a"))["cancel_requested"]


async def test_a_cancelled_workflow_refuses_its_retry_as_a_whole(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 3, ()))
    for member in flow.members("a"):
        await flow.fail(member)
    change(sql, "workflows", "cancelled_at = now()", flow.id)
    with pytest.raises(TransitionRefused, match=rf"^workflow {flow.id} was cancelled$"):
        await retry_workflow(database, flow.id)
    done = await control.retry_all(database, flow.members("a"))
    assert done.refused == {
        each: f"job {each} cannot be retried: workflow {flow.id} was cancelled" for each in flow.members("a")
    }


async def test_a_member_that_is_retried_after_its_needs_were_propagated_is_never_forgotten(
    database: Database, sql: Sql
) -> None:
    """Held again beside a need that finishes this very moment: the need is looked at once more."""
    flow = await stored(database, sql, ("a", 1, ()), ("b", 2, ("a",)))
    await flow.complete(flow.member("a"))
    await advance(database, [flow.batch("a")])
    await flow.fail(flow.member("b"))
    assert flow.row("a")["propagated"]
    await retry(database, flow.member("b"))
    assert not flow.row("a")["propagated"]
    change_job(
        sql,
        flow.members("b")[1],
        status="scheduled",
        held_by="needs",
        held_at="2030-01-01Z",
        run_at=None,
        needs_publish=False,
    )
    assert (await sweep(database)).woken == 1


async def test_a_retry_that_is_refused_changes_nothing(database: Database, sql: Sql, failed: Stored) -> None:
    with pytest.raises(TransitionRefused, match="only a failed or cancelled job can be retried"):
        await retry(database, failed.members("a")[1])
    with pytest.raises(TransitionRefused, match="it was cancelled because of what it needs: retry that"):
        await retry(database, failed.member("b"))
    assert failed.outcome("a") == "failed"
    change(sql, "workflows", "cancelled_at = clock_timestamp()", failed.id)
    with pytest.raises(TransitionRefused, match=f"workflow {failed.id} was cancelled"):
        await retry(database, failed.member("a"))
    sql.execute("DELETE FROM jsworker.workflows")
    with pytest.raises(TransitionRefused, match="its workflow is gone"):
        await retry(database, failed.member("a"))


async def test_what_was_retried_is_told_where_the_batch_is_locked_then(
    database: Database, sql: Sql, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a job that adds to its batch in a transaction of its own."""
    flow = await stored(database, sql, ("a", 2, ()))
    for member in flow.members("a"):
        await flow.fail(member)
    locked, other = flow.members("a")
    retry_members = reopen.retry_members
    with engine.connect() as connection:
        connection.execute(text("SELECT FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": locked})

        async def retry_and_lock(*given: Any, **named: Any) -> Any:
            rows = await retry_members(*given, **named)
            connection.execute(text("UPDATE jsworker.batches SET generation = generation + 1"))
            return rows

        monkeypatch.setattr(reopen, "retry_members", retry_and_lock)
        done = await control.retry_all(database, [locked, other])
    assert done.changed == [other]
    why = f"batch {flow.batch('a')}, or what needs it, is locked by another transaction: try again"
    assert done.refused == {locked: f"job {locked} cannot be retried: {why}"}


async def test_what_was_retried_of_a_workflow_that_is_cancelled_then_is_told(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ()))
    for name in ("a", "b"):
        await flow.fail(flow.member(name))
    retry_members = reopen.retry_members

    async def retry_and_cancel(*given: Any, **named: Any) -> Any:
        rows = await retry_members(*given, **named)
        change(sql, "workflows", "cancelled_at = now()", flow.id)
        return rows

    monkeypatch.setattr(reopen, "retry_members", retry_and_cancel)
    monkeypatch.setattr(workflow_control, "_PAGE", 1)
    expected = rf"^1 jobs were retried, the others were not: workflow {flow.id} was cancelled$"
    with pytest.raises(TransitionRefused, match=expected):
        await retry_workflow(database, flow.id)


async def test_a_member_that_an_operator_has_cancelled_is_retried_and_waits(
    database: Database, sql: Sql
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 2, ("a",)), ("c", 1, ("b",)))
    await control.cancel(database, [flow.members("b")[0]])
    await retry(database, flow.members("b")[0])
    assert flow.statuses("b") == ["scheduled", "scheduled"]
    await flow.complete(flow.member("a"))
    await advance(database, [flow.batch("a")])
    await control.cancel(database, flow.members("b"))
    assert (flow.outcome("b"), flow.status("c")) == ("cancelled", "cancelled")
    await retry(database, flow.members("b")[0])
    assert (flow.statuses("b"), flow.outcome("b")) == (["queued", "cancelled"], None)
    assert flow.status("c") == "scheduled"


async def test_a_member_that_an_operator_has_cancelled_never_runs_without_its_needs(
    database: Database, sql: Sql
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 2, ("a",)))
    await control.cancel(database, [flow.members("b")[0]])
    await flow.fail(flow.member("a"))
    await advance(database, [flow.batch("a")])
    await retry(database, flow.members("b")[0])
    assert flow.statuses("b") == ["scheduled", "scheduled"]
    await sweep(database)
    assert flow.statuses("b") == ["cancelled", "cancelled"]
    await retry(database, flow.member("a"))
    assert flow.statuses("b") == ["scheduled", "scheduled"]


async def test_the_plain_retry_takes_no_member(database: Database, engine: Engine, failed: Stored) -> None:
    values = {"ids": [failed.member("a")]}
    assert await database.run(control.RETRY, values) == []
    with engine.begin() as connection:
        assert connection.execute(without(control.RETRY, r"j\.batch_id IS NULL"), values).all()


def retries(winner: Winner, flow: Stored, name: str) -> None:
    """Retry the members of a batch, and leave it open."""
    ids = uuid_array(flow.members(name))
    winner.run(reopen.MOVE_ON, {"batch": flow.batch(name)})
    opened = winner.run(reopen.REOPEN, {"ids": ids, "workflow": flow.id})
    winner.run(reopen.RETRY_MEMBERS, {"ids": ids, "batches": uuid_array(row.id for row in opened)})


async def behind(winner: Winner, database: Database, statement: TextClause, **values: Any) -> Any:
    """Run a statement that looks before the winner commits and locks after it."""
    loser = asyncio.create_task(database.run(waiting(statement), values))
    await winner.blocks()
    winner.commit()
    return await loser


async def test_finish_behind_a_retry_finishes_nothing(database: Database, winner: Winner, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await flow.fail(flow.member("a"))
    retries(winner, flow, "a")
    assert await behind(winner, database, workflows.FINISH, ids=uuid_array([flow.batch("a")])) == []
    assert flow.outcome("a") is None


async def test_a_workflow_behind_a_retry_does_not_end(database: Database, winner: Winner, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await flow.fail(flow.member("a"))
    await database.run(workflows.FINISH, {"ids": uuid_array([flow.batch("a")])})
    retries(winner, flow, "a")
    assert await behind(winner, database, workflows.FINISH_WORKFLOW, ids=uuid_array([flow.id])) == []
    assert flow.workflow_row()["outcome"] is None


async def test_what_a_retry_holds_beside_the_end_of_its_need_is_found_by_the_sweep(
    database: Database, winner: Winner, sql: Sql
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)), on_failure={"b": "run"})
    for name in "ab":
        await flow.fail(flow.member(name))
        await advance(database, [flow.batch(name)])
    await retry(database, flow.member("a"))
    await flow.complete(flow.member("a"))
    retries(winner, flow, "b")
    [a] = await database.run(workflows.FINISH, {"ids": uuid_array([flow.batch("a")])})
    seen = {"ids": uuid_array([a.id]), "generations": [a.generation]}
    assert await behind(winner, database, workflows.PROPAGATED, **seen) == []
    assert flow.status("b") == "scheduled"
    await sweep(database)
    assert flow.status("b") == "queued"


async def test_a_retried_member_has_all_its_snoozes_again(
    database: Database, sql: Sql, failed: Stored
) -> None:
    change_job(sql, failed.member("a"), snoozes=1000)
    await retry(database, failed.member("a"))
    assert read_job(sql, failed.member("a"))["snoozes"] == 0


async def test_a_retry_that_comes_late_leaves_a_finished_workflow_finished(
    database: Database, sql: Sql
) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await flow.fail(flow.member("a"))
    await advance(database, [flow.batch("a")])
    ids = flow.members("a")
    assert [row.id for row in await reopen.retry_members(database, flow.batch("a"), ids, done=set())] == ids
    await flow.complete(flow.member("a"))
    finished = await advance(database, [flow.batch("a")])
    assert [each.outcome for each in finished.workflows] == ["completed"]
    before = sql.execute("SELECT * FROM jsworker.workflows").fetchall()
    assert await reopen.retry_members(database, flow.batch("a"), ids, done=set()) == []
    assert sql.execute("SELECT * FROM jsworker.workflows").fetchall() == before


async def test_two_retries_at_once_put_it_back_once(database: Database, sql: Sql, failed: Stored) -> None:
    calls = (retry(database, failed.member("a")) for _ in range(10))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [answer for answer in answers if not isinstance(answer, TransitionRefused)] == [None]
    assert read_job(sql, failed.member("a"))["dispatch"] == 2


@pytest.mark.parametrize("seed", range(10))
async def test_retries_beside_settles_leave_nobody_behind(database: Database, sql: Sql, seed: int) -> None:
    """Whatever comes first: in the end every job has run."""
    flow = await stored(database, sql, ("a", 3, ()), ("b", 2, ("a",)), ("c", 1, ("b",)))
    await flow.fail(*flow.members("a"))

    async def retried(job_id: Any) -> None:
        await asyncio.sleep(0.002 * (seed % 4))
        await retry(database, job_id)

    await asyncio.gather(
        advance(database, [flow.batch("a")]), *map(retried, flow.members("a")), sweep(database)
    )
    await flow.complete(*flow.members("a"))
    await advance(database, [flow.batch("a")])
    await sweep(database)
    assert (flow.outcome("a"), flow.statuses("b")) == ("completed", ["queued", "queued"])
    await flow.complete(*flow.members("b"))
    await advance(database, [flow.batch("b")])
    await flow.complete(flow.member("c"))
    await sweep(database)
    assert flow.workflow_row()["outcome"] == "completed"


REOPENING: dict[str, Any] = {
    "MOVE_ON": r"w\.cancelled_at IS NULL",
    "REOPEN": r"j\.status = 'failed'",
    "RETRY_MEMBERS": r"j\.status = 'failed'",
    "HOLD_AGAIN": r"j\.failure_reason = 'needs'",
}


@pytest.mark.parametrize("name", REOPENING)
async def test_each_predicate_of_a_retry_refuses_alone_and_is_needed(
    database: Database, sql: Sql, engine: Engine, failed: Stored, name: str
) -> None:
    statement = getattr(reopen, name)
    job_id = failed.member("a")
    if name == "MOVE_ON":
        change(sql, "workflows", "cancelled_at = clock_timestamp()", failed.id)
    elif name == "HOLD_AGAIN":  # an operator has cancelled it
        job_id = insert_job(sql, "cancelled", batch_id=failed.batch("a"))
    else:
        job_id = insert_job(sql, "completed", batch_id=failed.batch("other"))
    values = {
        "batch": failed.batch("a"),
        "workflow": failed.id,
        "ids": uuid_array([job_id]),
        "batches": uuid_array([failed.batch("a"), failed.batch("other")]),
    }
    with engine.connect() as connection:
        connection.exec_driver_sql("SET session_replication_role = replica")
        connection.exec_driver_sql("ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_conservation")
        assert connection.execute(statement, values).all() == []
        assert len(connection.execute(without(statement, REOPENING[name]), values).all()) >= 1
        connection.rollback()


async def test_members_of_another_workflow_are_not_retried_with_it(
    database: Database, sql: Sql, failed: Stored
) -> None:
    other = await stored(database, sql, ("a", 1, ()))
    await other.fail(other.member("a"))
    ids = [failed.member("a"), other.member("a")]
    assert [
        row.id for row in await reopen.retry_members(database, failed.batch("a"), ids, done=set())
    ] == ids[:1]
    assert (other.status("a"), other.row("a")["generation"]) == ("failed", 0)


async def test_only_an_open_workflow_is_cancelled(
    database: Database, engine: Engine, sql: Sql, failed: Stored
) -> None:
    change(sql, "workflows", "finished_at = clock_timestamp(), outcome = 'failed'", failed.id)
    values = {"id": failed.id}
    assert await database.run(workflow_control.CANCEL_WORKFLOW, values) == []
    with engine.begin() as connection:
        mutant = without(workflow_control.CANCEL_WORKFLOW, r"w\.finished_at IS NULL")
        assert len(connection.execute(mutant, values).all()) == 1


# --- Cancelling a workflow ---


async def test_a_cancelled_workflow_ends(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, *CHAIN)
    await claimed(database, flow.member("a"))
    await control.cancel(database, flow.members("other"))
    done = await cancel_workflow(database, flow.id)
    assert (done.cancelled, done.requested) == (4, 1)
    await workflow_control.cancel_left(database, flow.id)
    asked = "SELECT FROM jsworker.job_events WHERE job_id = %s AND event = 'cancel_requested'"
    assert sql.execute(asked, [flow.member("a")]).rowcount == 1  # it was asked before
    assert read_job(sql, flow.member("a"))["cancel_requested"]
    assert flow.outcome("other") == "cancelled"
    assert flow.workflow_row()["outcome"] is None
    await flow.complete(flow.member("a"))  # it was faster
    await advance(database, [flow.batch("a")])
    assert flow.workflow_row()["outcome"] == "cancelled"
    with pytest.raises(TransitionRefused, match="is cancelled; it cannot be cancelled"):
        await cancel_workflow(database, flow.id)
    with pytest.raises(TransitionRefused, match="there is no workflow"):
        await cancel_workflow(database, new_job_id())


async def test_an_operator_who_dies_half_way_leaves_it_to_the_sweep(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, *CHAIN)
    await database.run(workflow_control.CANCEL_WORKFLOW, {"id": flow.id})
    assert (await left_undone(database)).cancelled == [flow.id]
    await workflow_control.cancel_left(database, flow.id)
    assert flow.workflow_row()["outcome"] == "cancelled"
    assert (await left_undone(database)).cancelled == []


async def test_needs_of_a_cancelled_workflow_wakes_nobody(
    database: Database, sql: Sql, engine: Engine
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)))
    await flow.complete(flow.member("a"))
    await database.run(workflows.FINISH, {"ids": uuid_array([flow.batch("a")])})
    await database.run(workflow_control.CANCEL_WORKFLOW, {"id": flow.id})
    values = {"batches": uuid_array([flow.batch("a")]), "limit": 10}
    with engine.connect() as connection:
        [woken] = connection.execute(without(workflows.NEEDS, r"w\.cancelled_at IS NULL"), values).all()
        assert woken.status == "queued"
        connection.rollback()
    assert [row.status for row in await database.run(workflows.NEEDS, values)] == ["cancelled"]


async def test_a_workflow_without_failures_is_not_retried(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    with pytest.raises(TransitionRefused, match="none of its jobs has failed"):
        await retry_workflow(database, flow.id)
    with pytest.raises(TransitionRefused, match="there is no workflow"):
        await retry_workflow(database, new_job_id())


async def test_pages_of_members(database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow_control, "_PAGE", 2)
    flow = await stored(database, sql, ("a", 5, ()), ("b", 3, ()), ("c", 2, ("a",)))
    await flow.fail(*flow.members("a"), *flow.members("b")[:2])
    await advance(database, [flow.batch("a"), flow.batch("b")])
    assert await retry_workflow(database, flow.id) == 7
    assert (await cancel_workflow(database, flow.id)).cancelled == 10
    assert flow.workflow_row()["outcome"] == "cancelled"


@pytest.mark.parametrize("cancel", [cancel_workflow, cancel_left])
async def test_where_a_page_takes_too_long_fewer_jobs_are_cancelled_at_once(
    database: Database,
    database_url: str,
    sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
    cancel: Callable[[Database, UUID], Awaitable[object]],
) -> None:
    monkeypatch.setattr(workflow_control, "_PAGE", 48)
    flow = await stored(database, sql, ("a", 60, ()))
    with slow_rows(sql, "UPDATE", "jobs", 0.1):
        async with opened(database_url, 2.0) as door:
            await cancel(door, flow.id)
    assert set(flow.statuses("a")) == {"cancelled"}


# --- Members that add members ---


def new(number: int = 2) -> list[NewJob]:
    return [NewJob(new_job_id(), "{}") for _ in range(number)]


async def add(
    database: Database, flow: Stored, jobs: list[NewJob] | None = None, token: int = 1, tries: int = 0
) -> None:
    await add_members(
        database,
        worker_id=WORKER,
        held=(flow.member("a"), token),
        kind="other",
        new=jobs or new(),
        tries=tries,
    )


async def test_added_members_keep_the_batch_open(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)))
    await claimed(database, flow.member("a"))
    added = new()
    await add(database, flow, added)
    job = read_job(sql, added[0].id)
    assert (job["status"], job["kind"], job["batch_id"], job["needs_publish"]) == (
        "queued",
        "other",
        flow.batch("a"),
        True,
    )
    assert flow.row("a")["generation"] == 1
    await flow.complete(flow.member("a"))
    assert (await advance(database, [flow.batch("a")])).batches == []
    await claimed(database, added[0].id)
    sql.execute("UPDATE jsworker.jobs SET kind = %s WHERE batch_id = %s", [KIND, flow.batch("a")])
    await flow.complete(*(job.id for job in added))
    assert (await advance(database, [flow.batch("a")])).woken == 1


ADD_GUARD: dict[str, dict[str, Any]] = {
    r"j\.status = 'processing'": {"status": "completed"},
    r"j\.worker_id = :worker_id": {"worker_id": OTHER_WORKER},
    r"j\.fencing_token = :token": {"fencing_token": 2},
}


@pytest.mark.parametrize("guard", ADD_GUARD)
@pytest.mark.parametrize("statement", ["ADD_MEMBERS", "ADD_MEMBERS_UNLOCKED"])
async def test_who_lost_its_job_adds_nothing(
    database: Database, sql: Sql, engine: Engine, guard: str, statement: str
) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await claimed(database, flow.member("a"))
    changed = ADD_GUARD[guard]
    if "status" in changed:
        await flow.complete(flow.member("a"))
        changed = {}
    else:
        change_job(sql, flow.member("a"), **changed)
    with pytest.raises(OwnershipLost, match="adds nothing to its batch any more"):
        await add(database, flow)
    assert len(flow.statuses("a")) == 1
    adding = getattr(workflow_control, statement)
    values = workflow_control._values(WORKER, (flow.member("a"), 1), KIND, new())
    assert await database.run(adding, values) == []
    mutant = without(adding, guard)
    if "status" in ADD_GUARD[guard]:
        mutant = without(mutant, r"j\.worker_id = :worker_id")
    with engine.begin() as connection:
        assert len(connection.execute(mutant, values).all()) == 2


CLOSED: LiteralString = "finished_at = clock_timestamp(), outcome = 'completed'"


@pytest.mark.parametrize("statement", ["ADD_MEMBERS", "ADD_MEMBERS_UNLOCKED"])
async def test_nothing_is_added_to_a_finished_batch(
    database: Database, sql: Sql, engine: Engine, statement: str
) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await claimed(database, flow.member("a"))
    change(sql, "batches", CLOSED, flow.batch("a"))
    with pytest.raises(TransitionRefused, match=f"batch {flow.batch('a')} of job .* has finished"):
        await add(database, flow)
    values = workflow_control._values(WORKER, (flow.member("a"), 1), KIND, new())
    adding = getattr(workflow_control, statement)
    assert await database.run(adding, values) == []
    with engine.begin() as connection:
        mutant = without(adding, r"b\.finished_at IS NULL")
        assert len(connection.execute(mutant, values).all()) == 2


async def test_members_that_are_added_again_are_stored_once(database: Database, sql: Sql) -> None:
    """As after an answer that was lost."""
    flow = await stored(database, sql, ("a", 1, ()))
    await claimed(database, flow.member("a"))
    added = new()
    await add(database, flow, added)
    await add(database, flow, added)
    assert len(flow.statuses("a")) == 3


async def test_adding_does_not_wait_long_for_another_member_that_adds(
    database: Database, sql: Sql, winner: Winner
) -> None:
    """The row of the job is locked meanwhile, and heartbeats skip it."""
    flow = await stored(database, sql, ("a", 2, ()))
    await claimed(database, flow.member("a"))
    winner.run(text("UPDATE jsworker.batches SET generation = generation + 1 RETURNING id"))
    with pytest.raises(LockTimeout):
        await add(database, flow)
    winner.commit()
    await add(database, flow)
    assert len(flow.statuses("a")) == 4


async def test_many_small_members_get_more_time_with_each_try(
    database: Database, database_url: str, sql: Sql
) -> None:
    """What takes long is their rows, not their payloads."""
    flow = await stored(database, sql, ("a", 1, ()))
    await claimed(database, flow.member("a"))
    with slow_rows(sql, "INSERT", "jobs", 0.005):
        async with opened(database_url, 0.5) as door:
            await add(door, flow, new(400), tries=6)
    assert len(flow.statuses("a")) == 401


async def test_a_job_without_a_batch_adds_nothing(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    with pytest.raises(TransitionRefused, match="belongs to no batch"):
        await add_members(database, worker_id=WORKER, held=(job_id, 1), kind=KIND, new=new())


# As long as a test may take until the lock that it waits for is released.
ADD_MEMBERS = text(workflow_control.ADD_MEMBERS.text.replace("'200ms'", "'60s'"))


async def test_who_adds_waits_for_finish_and_is_refused(database: Database, sql: Sql, winner: Winner) -> None:
    """A zombie whose job was completed by another adds beside the FINISH of its batch."""
    flow = await stored(database, sql, ("a", 1, ()))
    await claimed(database, flow.member("a"))
    await flow.complete(flow.member("a"))
    winner.run(workflows.FINISH, {"ids": uuid_array([flow.batch("a")])})
    values = workflow_control._values(WORKER, (flow.member("a"), 1), KIND, new())
    zombie = without(without(ADD_MEMBERS, r"j\.status = 'processing'"), r"j\.worker_id = :worker_id")
    loser = asyncio.create_task(database.run(zombie, values))
    await winner.blocks()
    winner.commit()
    assert await loser == []


async def test_a_reset_behind_which_an_owner_adds_wins(
    database: Database, sql: Sql, winner: Winner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_control, "ADD_MEMBERS", ADD_MEMBERS)
    flow = await stored(database, sql, ("a", 1, ()))
    await claimed(database, flow.member("a"))
    change_job(sql, flow.member("a"), last_activity_at=ago(60))
    winner.resets(flow.member("a"))
    loser = asyncio.create_task(add(database, flow))
    await winner.blocks()
    winner.commit()
    with pytest.raises(OwnershipLost):
        await loser
    assert len(flow.statuses("a")) == 1
