"""FINISH and NEEDS: each batch finishes once, after its last member; what needs it is woken or cancelled."""

import asyncio
from typing import Any, LiteralString
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from jsworker.core import fault_points
from jsworker.core.errors import DatabaseTimeout, DatabaseUnavailable
from jsworker.ownership import statements
from jsworker.ownership.database import Database, MostRows
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import control, workflows
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.workflow_enqueue import NewBatch, enqueue_workflow
from jsworker.ownership.transitions.workflows import Advanced, advance, left_undone

from .calls import claimed, complete, opened
from .flows import Stored, change, stored, sweep
from .rows import KIND, Sql, change_job, delete_rows, event_names, insert_job, read_job, read_value, slow_rows
from .transitions import without
from .winner import Winner

DIAMOND = (("left", 2, ()), ("right", 1, ()), ("merge", 1, ("left", "right")))


async def look(database: Database, flow: Stored, *names: str, **how: Any) -> Advanced:
    return await advance(database, [flow.batch(name) for name in names], **how)


# --- Enqueue ---


async def test_all_is_stored_at_once_and_what_has_needs_is_held(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, *DIAMOND)
    first = read_job(sql, flow.member("left"))
    assert (first["status"], first["dispatch"], first["needs_publish"]) == ("queued", 1, True)
    assert (first["kind"], first["payload"], first["batch_id"]) == (KIND, {"n": 0}, flow.batch("left"))
    held = read_job(sql, flow.member("merge"))
    assert (held["status"], held["held_by"], held["run_at"]) == ("scheduled", "needs", None)
    assert (held["dispatch"], held["needs_publish"]) == (0, False)
    assert flow.row("merge")["place"] == 2
    assert flow.workflow_row()["name"] == "nightly"
    assert read_value(sql, "SELECT count(*) FROM jsworker.batch_needs") == 2


async def test_a_workflow_of_many_needs_is_given_time_for_them(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = database.in_transaction, list[float]()

    async def noting(write: Any, *, size: int) -> Any:
        given.append(database.seconds_for(size))
        return await run(write, size=size)

    monkeypatch.setattr(database, "in_transaction", noting)
    for of_second in (0, 100):
        first = [NewBatch(new_job_id(), f"a{n}", KIND, "cancel", [], []) for n in range(100)]
        needs = [each.id for each in first]
        second = [NewBatch(new_job_id(), f"b{n}", KIND, "cancel", needs[:of_second], []) for n in range(100)]
        await enqueue_workflow(database, workflow=new_job_id(), name="wide", batches=[*first, *second])
    assert given[1] - given[0] > 100 * 100 * 50e-6


async def test_what_is_refused_leaves_nothing(database: Database, sql: Sql) -> None:
    good = NewBatch(new_job_id(), "good", KIND, "cancel", [], [NewJob(new_job_id(), "{}")])
    bad = NewBatch(new_job_id(), "bad", KIND, "cancel", [], [NewJob(new_job_id(), "{}", max_attempts=0)])
    with pytest.raises(RowRefused, match="jobs_limits"):
        await enqueue_workflow(database, workflow=new_job_id(), name="nightly", batches=[good, bad])
    assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 0
    assert read_value(sql, "SELECT count(*) FROM jsworker.workflows") == 0


# --- FINISH ---


async def test_a_batch_finishes_after_its_last_member_and_once(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("parts", 3, ()))
    first, second, last = flow.members("parts")
    await flow.complete(first, second)
    assert (await look(database, flow, "parts")).batches == []
    await claimed(database, last)
    assert (await look(database, flow, "parts")).batches == []
    await flow.complete(last)
    [finished] = (await look(database, flow, "parts")).batches
    assert (finished.id, finished.outcome, finished.propagated) == (flow.batch("parts"), "completed", True)
    assert await look(database, flow, "parts") == Advanced()
    assert await sweep(database) == Advanced()


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        (("completed", "failed", "cancelled"), "failed"),
        (("completed", "cancelled", "completed"), "cancelled"),
        (("completed", "completed", "completed"), "completed"),
    ],
)
async def test_outcomes(database: Database, sql: Sql, ends: tuple[str, ...], outcome: str) -> None:
    flow = await stored(database, sql, ("parts", 3, ()))
    for job_id, end in zip(flow.members("parts"), ends, strict=True):
        await end_as(database, flow, job_id, end)
    done = await look(database, flow, "parts")
    # A cancel looks after its batches itself.
    assert flow.outcome("parts") == outcome
    assert flow.workflow_row()["outcome"] == outcome
    assert done.refused == []


async def end_as(database: Database, flow: Stored, job_id: Any, end: str) -> None:
    match end:
        case "completed":
            await flow.complete(job_id)
        case "failed":
            await flow.fail(job_id)
        case _:
            await control.cancel(database, [job_id])


async def test_a_batch_whose_members_were_deleted_still_finishes(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("parts", 2, ()), ("merge", 1, ("parts",)))
    await flow.complete(*flow.members("parts"))
    delete_rows(sql, "jobs", "status = 'completed'")
    await sweep(database)
    assert flow.outcome("parts") == "completed"
    assert flow.status("merge") == "queued"


async def test_two_last_members_that_settle_at_once(database: Database, sql: Sql) -> None:
    for _ in range(20):
        flow = await stored(database, sql, ("parts", 2, ()), ("merge", 1, ("parts",)))

        async def settle(job_id: Any, flow: Stored = flow) -> list[Any]:
            await flow.complete(job_id)
            return (await look(database, flow, "parts")).batches

        answers = await asyncio.gather(*map(settle, flow.members("parts")))
        assert sum(map(len, answers)) == 1
        assert (flow.status("merge"), read_job(sql, flow.member("merge"))["dispatch"]) == ("queued", 1)


async def test_of_two_last_members_the_one_that_commits_last_finishes_it(
    database: Database, sql: Sql, winner: Winner
) -> None:
    """To each of them the other still looks live."""
    flow = await stored(database, sql, ("parts", 2, ()))
    first, second = flow.members("parts")
    await claimed(database, first, second)
    winner.completes(first)
    await complete(database, second)
    await look(database, flow, "parts")
    assert flow.outcome("parts") is None
    winner.commit()
    await look(database, flow, "parts")
    assert flow.outcome("parts") == "completed"


async def test_of_many_that_look_at_once_one_finishes_it(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("parts", 1, ()), ("merge", 1, ("parts",)))
    await flow.complete(flow.member("parts"))
    answers = await asyncio.gather(*(look(database, flow, "parts") for _ in range(30)))
    assert sum(len(answer.batches) for answer in answers) == 1
    assert sum(answer.woken for answer in answers) == 1
    await sweep(database)
    assert read_job(sql, flow.member("merge"))["dispatch"] == 1


ADD = text(
    "UPDATE jsworker.batches SET generation = generation + 1"
    " WHERE id = :id AND finished_at IS NULL RETURNING id"
)


class TestFinishBehindALock:
    """A member is added in a transaction that is still open when FINISH looks."""

    async def test_what_was_added_meanwhile_keeps_it_open(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        flow = await stored(database, sql, ("parts", 1, ()))
        await flow.complete(flow.member("parts"))
        winner.run(ADD, {"id": flow.batch("parts")})
        finish = statements.waiting(
            workflows.FINISH
        )  # as one that looks before that commit and locks after it
        loser = asyncio.create_task(database.run(finish, {"ids": uuid_array([flow.batch("parts")])}))
        await winner.blocks()
        insert_job(sql, batch_id=flow.batch("parts"))  # as if it were of that transaction
        winner.commit()
        await loser
        assert (flow.outcome("parts"), flow.statuses("parts")) == (None, ["completed", "queued"])

    async def test_nobody_waits_and_the_sweep_comes_back(
        self, database: Database, sql: Sql, winner: Winner
    ) -> None:
        flow = await stored(database, sql, ("parts", 1, ()))
        await flow.complete(flow.member("parts"))
        winner.run(ADD, {"id": flow.batch("parts")})
        assert await look(database, flow, "parts") == Advanced()
        winner.rollback()
        assert len((await sweep(database)).batches) == 1


# --- NEEDS ---


async def test_the_last_of_the_needs_wakes(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, *DIAMOND)
    await flow.complete(flow.member("right"))
    assert (await look(database, flow, "right")).woken == 0
    assert flow.row("right")["propagated"]
    await flow.complete(*flow.members("left"))
    assert (await look(database, flow, "left")).woken == 1
    merge = read_job(sql, flow.member("merge"))
    assert (merge["status"], merge["dispatch"], merge["needs_publish"]) == ("queued", 1, True)
    assert (merge["held_by"], merge["held_at"]) == (None, None)
    await flow.complete(flow.member("merge"))
    done = await look(database, flow, "merge")
    assert [(each.id, each.outcome, each.batches) for each in done.workflows] == [(flow.id, "completed", 3)]


async def test_two_needs_that_finish_at_once_wake_their_dependant_once(database: Database, sql: Sql) -> None:
    for _ in range(30):
        flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ()), ("both", 3, ("a", "b")))
        await flow.complete(flow.member("a"), flow.member("b"))
        answers = await asyncio.gather(look(database, flow, "a"), look(database, flow, "b"))
        assert sum(answer.woken for answer in answers) == 3
        assert {read_job(sql, each)["dispatch"] for each in flow.members("both")} == {1}


async def test_of_two_needs_the_one_that_commits_last_wakes(
    database: Database, sql: Sql, winner: Winner
) -> None:
    """To each of them the other still looks unfinished."""
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ()), ("both", 2, ("a", "b")))
    await flow.complete(flow.member("a"), flow.member("b"))
    [a] = winner.run(workflows.FINISH, {"ids": [flow.batch("a")]})
    await look(database, flow, "b")
    assert flow.statuses("both") == ["scheduled", "scheduled"]
    winner.commit()
    await advance(database, [], needs={} if a.propagated else {a.id: a.generation})
    assert flow.statuses("both") == ["queued", "queued"]


async def test_more_members_than_one_statement_moves(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "_MEMBERS", 3)
    flow = await stored(database, sql, ("a", 1, ()), ("many", 10, ("a",)))
    await flow.complete(flow.member("a"))
    assert (await look(database, flow, "a")).woken == 10


async def test_a_failure_cancels_what_needs_it_and_what_needs_that(database: Database, sql: Sql) -> None:
    flow = await stored(
        database,
        sql,
        ("a", 2, ()),
        ("b", 2, ("a",)),
        ("c", 1, ("b",)),
        ("tidy", 1, ("c",)),
        ("report", 1, ("tidy",)),
        on_failure={"tidy": "run"},
    )
    await flow.fail(flow.member("a"))
    await flow.complete(flow.members("a")[1])
    done = await look(database, flow, "a")
    assert (done.cancelled, done.woken) == (3, 1)
    assert flow.statuses("b") == ["cancelled", "cancelled"]
    assert (flow.outcome("b"), flow.outcome("c"), flow.status("tidy")) == ("cancelled", "cancelled", "queued")
    job = read_job(sql, flow.member("b"))
    assert (job["failure_reason"], job["held_by"], job["attempts"]) == ("needs", None, 0)
    assert event_names(sql, flow.member("b")) == ["cancelled"]
    await flow.complete(flow.member("tidy"))
    assert (await look(database, flow, "tidy")).woken == 1
    await flow.complete(flow.member("report"))
    [end] = (await look(database, flow, "report")).workflows
    assert end.outcome == "failed"


class Died(Exception):
    pass


@pytest.mark.parametrize("point", ["after_finish_before_needs", "after_needs_before_propagated"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_process_that_dies_in_between_leaves_it_to_the_sweep(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch, point: str, *, fails: bool
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)), ("c", 1, ("b",)))
    await (flow.fail if fails else flow.complete)(flow.member("a"))

    async def die() -> None:
        raise Died

    monkeypatch.setitem(fault_points._installed, point, die)
    with pytest.raises(Died):
        await look(database, flow, "a")
    monkeypatch.delitem(fault_points._installed, point)
    assert flow.outcome("a") is not None
    assert not flow.row("a")["propagated"]
    await sweep(database)
    assert flow.status("b") == ("cancelled" if fails else "queued")
    assert flow.status("c") == ("cancelled" if fails else "scheduled")
    assert flow.row("a")["propagated"]
    assert await sweep(database) == Advanced()


async def test_a_process_that_dies_after_the_settle_leaves_it_to_the_sweep(
    database: Database, sql: Sql
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)))
    await flow.complete(flow.member("a"))
    assert (await sweep(database)).woken == 1


async def test_a_locked_member_keeps_its_needs_unpropagated(
    database: Database, sql: Sql, winner: Winner
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 2, ("a",)))
    await flow.complete(flow.member("a"))
    winner.cancels(flow.member("b"))
    assert (await look(database, flow, "a")).woken == 1
    assert not flow.row("a")["propagated"]
    winner.rollback()
    assert (await sweep(database)).woken == 1
    assert flow.row("a")["propagated"]


async def test_a_refused_member_stops_no_other(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 3, ("a",)))
    await flow.complete(flow.member("a"))
    told: list[Any] = []
    refused = RefusedRows(database, worker_id=None, tell=told.append)
    bad = flow.members("b")[1]
    sql.execute(
        f"ALTER TABLE jsworker.jobs ADD CONSTRAINT not_me CHECK (id <> '{bad}' OR status <> 'queued')"
    )
    try:
        assert (await look(database, flow, "a", refused_rows=refused)).woken == 2
        assert [each.job_id for each in told] == [bad]
        assert not flow.row("a")["propagated"]
        left = await left_undone(database)
        assert (await advance(database, [], needs=left.needs, refused_rows=refused)).woken == 0
        assert read_value(sql, "SELECT tries FROM jsworker.refused_rows") == 1  # it was set aside
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT not_me")
    sql.execute("DELETE FROM jsworker.refused_rows")
    assert (await sweep(database)).woken == 1


async def test_where_many_members_take_too_long_fewer_are_woken_at_once(
    database: Database, database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what waits beside them is woken, too."""
    monkeypatch.setattr(workflows, "_MEMBERS", 48)
    flow = await stored(database, sql, ("a", 1, ()), ("b", 60, ("a",)), ("x", 1, ()), ("y", 1, ("x",)))
    for name in "ax":
        await flow.complete(flow.member(name))
    with slow_rows(sql, "UPDATE", "jobs", 0.1):
        async with opened(database_url, 2.0) as door:
            assert (await sweep(door)).woken == 61
    assert set(flow.statuses("b")) == {flow.status("y")} == {"queued"}


@pytest.mark.parametrize(("answers", "tries"), [(True, [4, 2, 1]), (False, [4])])
async def test_a_row_that_alone_takes_too_long_is_reported_and_so_is_an_outage(
    database: Database, monkeypatch: pytest.MonkeyPatch, *, answers: bool, tries: list[int]
) -> None:
    async def ping() -> None:
        if not answers:
            raise DatabaseUnavailable("PostgreSQL is not available")

    async def too_slow(most: int) -> None:
        tried.append(most)
        raise DatabaseTimeout("PostgreSQL did not answer within 3 s")

    tried: list[int] = []
    monkeypatch.setattr(database, "ping", ping)
    with pytest.raises(DatabaseUnavailable):
        await MostRows(database, 4).write(too_slow)
    assert tried == tries


async def test_who_tries_again_waits_for_the_end_of_what_was_given_up(database: Database) -> None:
    """Until then the rows that it locks are passed over."""

    async def cancelled_slowly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.5)
            ended.append(True)

    ended: list[bool] = []
    with pytest.raises(DatabaseTimeout):
        await database.call(cancelled_slowly, 0.1)
    assert not ended
    await database.end_given_up()
    assert ended


async def test_a_refused_batch_keeps_no_other_from_being_propagated(database: Database, sql: Sql) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ()), ("c", 1, ("a", "b")))
    for name in "ab":
        await flow.complete(flow.member(name))
    sql.execute(
        "ALTER TABLE jsworker.batches ADD CONSTRAINT not_me"
        f" CHECK (id <> '{flow.batch('a')}' OR NOT propagated)"
    )
    try:
        done = await advance(database, [flow.batch("a"), flow.batch("b")])
    finally:
        sql.execute("ALTER TABLE jsworker.batches DROP CONSTRAINT not_me")
    assert [each for each, _ in done.refused] == [flow.batch("a")]
    assert (flow.row("a")["propagated"], flow.row("b")["propagated"]) == (False, True)
    assert flow.status("c") == "queued"
    assert (await sweep(database)).woken == 0
    assert flow.row("a")["propagated"]


REOPEN = text("UPDATE jsworker.workflows SET revision = revision + 1 WHERE id = :id RETURNING id")


class TestNeedsBehindALock:
    """A batch is opened again in a transaction that is still open when NEEDS looks."""

    @staticmethod
    async def cancels(database: Database, flow: Stored, winner: Winner, statement: Any) -> Any:
        winner.run(REOPEN, {"id": flow.id})
        winner.run(
            text(
                "UPDATE jsworker.batches SET finished_at = NULL, outcome = NULL WHERE id = :id RETURNING id"
            ),
            {"id": flow.batch("a")},
        )
        values = {"batches": uuid_array([flow.batch("a")]), "limit": 100}
        loser = asyncio.create_task(database.run(statement, values))
        await winner.blocks()
        winner.commit()
        return await loser

    @pytest.fixture
    async def flow(self, database: Database, sql: Sql) -> Stored:
        flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)))
        await flow.fail(flow.member("a"))
        await database.run(workflows.FINISH, {"ids": uuid_array([flow.batch("a")])})
        return flow

    async def test_nothing_is_cancelled_for_what_runs_again(
        self, database: Database, winner: Winner, flow: Stored
    ) -> None:
        waiting = text(workflows.NEEDS.text.replace("FOR SHARE OF w SKIP LOCKED", "FOR SHARE OF w"))
        assert await self.cancels(database, flow, winner, waiting) == []
        assert flow.status("b") == "scheduled"

    async def test_without_the_revision_it_would_be(
        self, database: Database, winner: Winner, flow: Stored
    ) -> None:
        waiting = text(workflows.NEEDS.text.replace("FOR SHARE OF w SKIP LOCKED", "FOR SHARE OF w"))
        mutant = without(waiting, r"w\.revision = seen\.revision")
        assert len(await self.cancels(database, flow, winner, mutant)) == 1

    async def test_nobody_waits(self, database: Database, winner: Winner, flow: Stored) -> None:
        winner.run(REOPEN, {"id": flow.id})
        assert (await look(database, flow, "a")).cancelled == 0
        winner.rollback()
        assert (await sweep(database)).cancelled == 1


# --- Each predicate of the guards ---


async def test_jobs_without_a_batch_have_none(database: Database, sql: Sql) -> None:
    assert await workflows.batches_of(database, [insert_job(sql, "failed")]) == []


FINISH_GUARD: dict[str, LiteralString] = {
    r"\bb\.sealed": "sealed = false",
    r"b\.finished_at IS NULL": "finished_at = clock_timestamp(), outcome = 'failed'",
}


@pytest.mark.parametrize("guard", FINISH_GUARD)
async def test_finish_needs_each_predicate(database: Database, sql: Sql, engine: Engine, guard: str) -> None:
    flow = await stored(database, sql, ("a", 1, ()))
    await flow.complete(flow.member("a"))
    change(sql, "batches", FINISH_GUARD[guard], flow.batch("a"))
    before = flow.row("a")
    values = {"ids": uuid_array([flow.batch("a")])}
    assert await database.run(workflows.FINISH, values) == []
    assert flow.row("a") == before
    with engine.begin() as connection:
        assert len(connection.execute(without(workflows.FINISH, guard), values).all()) == 1


@pytest.mark.parametrize("status", ["scheduled", "queued", "processing"])
async def test_a_live_member_of_any_status_keeps_a_batch_open(
    database: Database, sql: Sql, engine: Engine, status: str
) -> None:
    flow = await stored(database, sql, ("a", 2, ()))
    await flow.complete(flow.member("a"))
    delete_rows(sql, "jobs", "status = 'queued'")
    insert_job(sql, status, batch_id=flow.batch("a"))
    values = {"ids": uuid_array([flow.batch("a")])}
    assert await database.run(workflows.FINISH, values) == []
    with engine.begin() as connection:
        mutant = text(workflows.FINISH.text.replace(f"(b.id, '{status}'", "(b.id, 'none'"))
        assert len(connection.execute(mutant, values).all()) == 1


async def ready(database: Database, sql: Sql) -> Stored:
    """Return a workflow whose first batch has finished, and whose second one waits to be woken."""
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ("a",)))
    await flow.complete(flow.member("a"))
    await database.run(workflows.FINISH, {"ids": uuid_array([flow.batch("a")])})
    return flow


async def test_needs_wakes_nothing_before_all_needs_have_finished(
    database: Database, sql: Sql, engine: Engine
) -> None:
    flow = await ready(database, sql)
    change(sql, "batches", "finished_at = NULL, outcome = NULL", flow.batch("a"))
    values = {"batches": uuid_array([flow.batch("a")]), "limit": 10}
    assert await database.run(workflows.NEEDS, values) == []
    with engine.begin() as connection:
        mutant = without(workflows.NEEDS, r"b\.finished_at IS NULL")
        assert connection.execute(mutant, values).all() == []  # "true": none of them is unfinished
        mutant = text(
            workflows.NEEDS.text.replace("WHERE n.batch = d.id AND b.finished_at IS NULL", "WHERE false")
        )
        assert len(connection.execute(mutant, values).all()) == 1


@pytest.mark.parametrize("held_by", ["limit", "rate", "paused", None])
async def test_needs_moves_only_what_is_held_by_needs(
    database: Database, sql: Sql, engine: Engine, held_by: str | None
) -> None:
    flow = await ready(database, sql)
    if held_by is None:
        change_job(sql, flow.member("b"), held_by=None, held_at=None, run_at="2090-01-01Z")
    else:
        change_job(sql, flow.member("b"), held_by=held_by)
    before = read_job(sql, flow.member("b"))
    values = {"batches": uuid_array([flow.batch("a")]), "limit": 10}
    assert await database.run(workflows.NEEDS, values) == []
    assert read_job(sql, flow.member("b")) == before
    with engine.begin() as connection:
        mutant = without(workflows.NEEDS, r"j\.held_by = 'needs'")
        assert len(connection.execute(mutant, values).all()) == 1


PROPAGATED_GUARD: dict[str, LiteralString] = {
    r"b\.generation = seen\.generation": "generation = 1",
    r"b\.finished_at IS NOT NULL": "finished_at = NULL, outcome = NULL",
}


@pytest.mark.parametrize("guard", PROPAGATED_GUARD)
async def test_propagated_needs_each_predicate(
    database: Database, sql: Sql, engine: Engine, guard: str
) -> None:
    flow = await ready(database, sql)
    seen = {"ids": uuid_array([flow.batch("a")]), "generations": [0]}
    await database.run(workflows.NEEDS, {"batches": seen["ids"], "limit": 10})
    change(sql, "batches", PROPAGATED_GUARD[guard], flow.batch("a"))
    assert await database.run(workflows.PROPAGATED, seen) == []
    with engine.begin() as connection:
        assert len(connection.execute(without(workflows.PROPAGATED, guard), seen).all()) == 1


async def test_what_holds_members_that_could_run_is_not_propagated(
    database: Database, sql: Sql, engine: Engine
) -> None:
    flow = await ready(database, sql)
    await stored(database, sql, ("of another", 1, ()), ("waits", 1, ("of another",)))
    seen = {"ids": uuid_array([flow.batch("a")]), "generations": [0]}
    assert await database.run(workflows.PROPAGATED, seen) == []
    with engine.begin() as connection:
        mutant = without(workflows.PROPAGATED, r"of_mine\.needs = b\.id")
        mutant = text(mutant.text.replace("WHERE true", "WHERE false"))
        assert len(connection.execute(mutant, seen).all()) == 1


LEFT_GUARD: dict[str, tuple[str, LiteralString | None]] = {
    r"\bb\.sealed": ("ended", "sealed = false"),
    r"b\.finished_at IS NULL": ("finished", None),
    r"b\.finished_at IS NOT NULL": ("live", None),
    r"NOT b\.propagated": ("finished", None),
    r"w\.finished_at IS NULL": ("finished", None),
    r"NOT w\.cancelled_at IS NULL": ("live", None),
    r"NOT EXISTS \(SELECT FROM jsworker\.batches AS b WHERE b\.workflow = w\.id.*?\)": ("live", None),
}


@pytest.mark.parametrize("guard", LEFT_GUARD)
async def test_a_scan_finds_nothing_where_nothing_was_left(
    database: Database, sql: Sql, engine: Engine, guard: str
) -> None:
    state, columns = LEFT_GUARD[guard]
    flow = await stored(database, sql, ("a", 1, ()))
    if state != "live":
        await flow.complete(flow.member("a"))
    if state == "finished":
        await look(database, flow, "a")
    if columns is not None:
        change(sql, "batches", columns, flow.batch("a"))
    assert not any(await left_undone(database))
    first = {"limit": 10, "after": UUID(int=0)}
    with engine.connect() as connection:
        assert connection.execute(without(workflows.LEFT, guard), first).all()


async def test_the_workflow_ends_with_its_last_batch_and_once(
    database: Database, sql: Sql, engine: Engine
) -> None:
    flow = await stored(database, sql, ("a", 1, ()), ("b", 1, ()))
    values = {"ids": uuid_array([flow.id])}
    await flow.complete(flow.member("a"))
    assert (await look(database, flow, "a")).workflows == []
    with engine.connect() as connection:
        mutant = without(workflows.FINISH_WORKFLOW, r"b\.finished_at IS NULL")
        mutant = text(mutant.text.replace("b.workflow = w.id AND true", "false"))
        assert len(connection.execute(mutant, values).all()) == 1
        connection.rollback()
    await flow.complete(flow.member("b"))
    assert len((await look(database, flow, "b")).workflows) == 1
    before = flow.workflow_row()
    assert await database.run(workflows.FINISH_WORKFLOW, values) == []
    assert flow.workflow_row() == before
    with engine.begin() as connection:
        mutant = without(workflows.FINISH_WORKFLOW, r"w\.finished_at IS NULL")
        assert len(connection.execute(mutant, values).all()) == 1
