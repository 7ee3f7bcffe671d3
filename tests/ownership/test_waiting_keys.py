"""Of a key one job waits and one runs; who comes back to the queue while another waits is superseded."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from psycopg.errors import CheckViolation, UniqueViolation
from sqlalchemy import Engine, TextClause, exc, text

from jsworker.core.errors import TransitionRefused
from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import claim, control, publish, reset, settle, snooze
from jsworker.ownership.transitions.claim import look_at_refused
from jsworker.ownership.transitions.enqueue import Enqueued, JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.enqueue_terms import enqueue_many, enqueue_one, statement_for
from jsworker.ownership.transitions.settle import Settled
from jsworker.ownership.transitions.waiting_keys import DEFER, WAKE, defer, wake

from .calls import claimed, complete, fail, release, reschedule, reset_stale, retry, suspect
from .rows import (
    KIND,
    LIMITS,
    OTHER_WORKER,
    WORKER,
    Sql,
    ago,
    change_job,
    event_names,
    insert_job,
    read_events,
    read_job,
    read_value,
)
from .transitions import without
from .winner import Winner

WAITING = JobTerms(scope="waiting")
KEY = "order:12"


def new(key: str = KEY, **changes: Any) -> NewJob:
    return NewJob(new_job_id(), "{}", key, **changes, terms=WAITING)


async def enqueue(database: Database, job: NewJob | None = None) -> Enqueued:
    return await enqueue_one(database, KIND, job or new(), publish_after=0.0)


def running(sql: Sql, **columns: Any) -> UUID:
    return insert_job(sql, "processing", waiting_key=KEY, last_activity_at=ago(60), **columns)


# --- Enqueue ---


@pytest.mark.parametrize("state", ["scheduled", "queued"])
async def test_a_job_that_waits_holds_the_key(database: Database, sql: Sql, state: str) -> None:
    holder = insert_job(sql, state, waiting_key=KEY)
    assert await enqueue(database) == Enqueued(holder, created=False)
    assert (await enqueue(database, new("another"))).created
    assert (await enqueue_one(database, "other-kind", new(), publish_after=0.0)).created


@pytest.mark.parametrize("state", ["processing", "completed", "failed", "cancelled"])
async def test_no_other_does(database: Database, sql: Sql, state: str) -> None:
    insert_job(sql, state, waiting_key=KEY)
    first = await enqueue(database)
    assert first.created
    row = read_job(sql, first.id)
    assert (row["waiting_key"], row["unique_key"], row["status"]) == (KEY, None, "queued")
    assert await enqueue(database) == Enqueued(first.id, created=False)


async def test_many(database: Database, sql: Sql) -> None:
    running(sql)
    jobs = [new(), new("b", delay=60.0), new(), NewJob(new_job_id(), "{}")]
    answers = await enqueue_many(database, KIND, jobs)
    assert [answer.created for answer in answers] == [True, True, False, True]
    assert answers[2].id == answers[0].id == jobs[0].id
    assert read_job(sql, jobs[1].id)["status"] == "scheduled"


async def test_twins_at_once_create_one_job(database: Database, sql: Sql) -> None:
    answers = await asyncio.gather(*(enqueue(database) for _ in range(20)))
    assert sum(answer.created for answer in answers) == 1
    assert len({answer.id for answer in answers}) == 1
    assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 1


async def test_an_uncommitted_twin_is_waited_for(database: Database, engine: Engine, winner: Winner) -> None:
    twin = new()
    winner.run(statement_for(KIND, twin))
    second = asyncio.create_task(enqueue(database))
    await winner.blocks()
    winner.commit()
    assert await second == Enqueued(twin.id, created=False)


@pytest.mark.parametrize("columns", [{"waiting_key": ""}, {"waiting_key": "x" * 256}, {"waiting_key": "a\n"}])
def test_keys_that_no_row_has(sql: Sql, columns: dict[str, str]) -> None:
    with pytest.raises(CheckViolation, match="jobs_waiting_key"):
        insert_job(sql, **columns)


def test_a_row_has_a_key_of_one_scope(sql: Sql) -> None:
    insert_job(sql, waiting_key="x" * 255)
    with pytest.raises(CheckViolation, match="jobs_waiting_key"):
        insert_job(sql, unique_key="a", waiting_key="a")


# --- Claim, defer, wake ---


async def test_the_one_that_waits_is_claimed_when_the_other_has_ended(database: Database, sql: Sql) -> None:
    first = running(sql)
    second = (await enqueue(database)).id
    assert await claimed(database, second) == []
    assert (await look_at_refused(database, kind=KIND, ids=[second]))[second].status == "behind"
    assert await defer(database, [second]) == {second}
    row = read_job(sql, second)
    assert (row["status"], row["behind"], row["needs_publish"]) == ("scheduled", first, False)
    assert await wake(database, [first]) == 1  # however it ended
    row = read_job(sql, second)
    assert (row["status"], row["behind"], row["dispatch"], row["needs_publish"]) == ("queued", None, 2, True)
    assert await complete(database, first) is Settled.COMPLETED
    [job] = await claimed(database, second)
    assert (job.id, job.waiting_key) == (second, KEY)
    assert event_names(sql, second) == ["deferred"]


async def test_a_lost_wake_is_made_good_by_promote(database: Database, sql: Sql) -> None:
    first = running(sql)
    second = (await enqueue(database)).id
    await defer(database, [second])
    await complete(database, first)  # and its worker dies
    assert 5 < (read_job(sql, second)["run_at"] - read_job(sql, first)["finished_at"]).total_seconds() < 15
    change_job(sql, second, run_at=ago(1))
    assert await publish.promote(database, limit=10) == 1
    assert [job.id for job in await claimed(database, second)] == [second]
    assert read_job(sql, second)["behind"] is None


async def test_one_that_is_rescheduled_waits_for_its_time_and_no_longer_behind_another(
    database: Database, sql: Sql
) -> None:
    first = running(sql)
    waiting = (await enqueue(database)).id
    assert await defer(database, [waiting]) == {waiting}
    later = datetime(2100, 1, 1, tzinfo=UTC)
    await reschedule(database, waiting, later)
    await complete(database, first)
    assert await wake(database, [first]) == 0
    row = read_job(sql, waiting)
    assert (row["status"], row["run_at"]) == ("scheduled", later)
    await reschedule(database, waiting, datetime(2026, 1, 1, tzinfo=UTC))
    assert await publish.promote(database, limit=10) == 1
    assert await claimed(database, waiting)


async def test_the_one_that_waits_keeps_its_place_in_the_queue(database: Database, sql: Sql) -> None:
    first, queued_at = running(sql), datetime(2026, 1, 1, tzinfo=UTC)
    second = insert_job(sql, waiting_key=KEY, queued_at=queued_at)
    await defer(database, [second])
    change_job(sql, second, run_at=ago(1))
    await publish.promote(database, limit=10)
    assert read_job(sql, second)["queued_at"] == queued_at
    await defer(database, [second])
    await wake(database, [first])
    assert read_job(sql, second)["queued_at"] == queued_at


async def test_a_long_wait_is_one_entry_in_the_timeline(database: Database, sql: Sql) -> None:
    running(sql)
    second = (await enqueue(database)).id
    for _ in range(3):
        assert await defer(database, [second]) == {second}
        assert await defer(database, [second]) == set()  # twice, or late
        change_job(sql, second, run_at=ago(1))
        await publish.promote(database, limit=10)
    assert event_names(sql, second) == ["deferred"]


async def test_other_jobs_are_neither_deferred_nor_woken(database: Database, sql: Sql) -> None:
    first = running(sql)
    plain, other = insert_job(sql), insert_job(sql, waiting_key="another")
    delayed = insert_job(sql, "scheduled", waiting_key=KEY, run_at=ago(-3600))
    assert await defer(database, [plain, other, delayed, first]) == set()
    assert await wake(database, [first, plain]) == 0
    assert read_job(sql, delayed)["status"] == "scheduled"


def _place(sql: Sql, statement: TextClause) -> tuple[UUID, dict[str, Any]]:
    first = running(sql)
    behind = None if statement is DEFER else first
    second = insert_job(sql, "queued" if behind is None else "scheduled", waiting_key=KEY, behind=behind)
    return second, {"ids": [second if statement is DEFER else first]}


GUARDS: list[Any] = [
    pytest.param(DEFER, r"j\.status = 'queued'", {"status": "scheduled", "run_at": ago(-5)}, id="queued"),
    pytest.param(DEFER, r"o\.waiting_key = j\.waiting_key", {"waiting_key": "b"}, id="key"),
    pytest.param(DEFER, r"o\.kind = j\.kind", {"kind": "other-kind"}, id="kind"),
    pytest.param(WAKE, r"j\.status = 'scheduled'", {"status": "queued", "queued_at": ago(0)}, id="scheduled"),
    pytest.param(WAKE, r"o\.waiting_key = j\.waiting_key", {"waiting_key": "b"}, id="woken key"),
    pytest.param(WAKE, r"o\.kind = j\.kind", {"kind": "other-kind"}, id="woken kind"),
    pytest.param(WAKE, r"j\.behind = o\.id", {"behind": UUID(int=1)}, id="behind it"),
    pytest.param(WAKE, r"j\.behind = o\.id", {"behind": None}, id="delayed"),
]


@pytest.mark.parametrize(("statement", "guard", "columns"), GUARDS)
def test_each_predicate_refuses_alone_and_is_needed(
    sql: Sql, engine: Engine, statement: TextClause, guard: str, columns: dict[str, Any]
) -> None:
    job_id, values = _place(sql, statement)
    with engine.begin() as connection:
        assert [row.id for row in connection.execute(statement, values)] == [job_id]
        connection.rollback()
    change_job(sql, job_id, **columns)
    before = read_job(sql, job_id)
    with engine.begin() as connection:
        assert connection.execute(statement, values).all() == []
    assert read_job(sql, job_id) == before
    with engine.begin() as connection:
        assert [row.id for row in connection.execute(without(statement, guard), values)] == [job_id]


def test_only_behind_a_job_that_runs(sql: Sql, engine: Engine) -> None:
    ended = insert_job(sql, "completed", waiting_key=KEY)
    job_id = insert_job(sql, waiting_key=KEY)
    values = {"ids": [job_id]}
    with engine.begin() as connection:
        assert connection.execute(DEFER, values).all() == []
        mutant = without(DEFER, r"o\.status = 'processing'")
        connection.execute(mutant, values)
    assert read_job(sql, job_id)["behind"] in (ended, job_id)


async def test_what_is_held_for_a_slot_is_not_woken_by_its_key(database: Database, sql: Sql) -> None:
    """The table would refuse the row, and with it all the others of the statement."""
    ended, other_ended = (insert_job(sql, "completed", waiting_key=key) for key in (KEY, "another"))
    held = insert_job(
        sql,
        "scheduled",
        waiting_key=KEY,
        behind=ended,
        run_at=None,
        held_by="limit",
        held_at=ago(1),
        limit_key="",
    )
    waits = insert_job(sql, "scheduled", waiting_key="another", behind=other_ended)
    rows = await database.run(WAKE, {"ids": [ended, other_ended]})
    assert [row.id for row in rows] == [waits]
    assert read_job(sql, held)["status"] == "scheduled"


def test_without_its_guard_claim_is_stopped_by_the_index(sql: Sql, engine: Engine) -> None:
    """Two runs of a key never are, whoever sends what."""
    running(sql)
    job_id = insert_job(sql, waiting_key=KEY)
    values: dict[str, Any] = {"worker_id": OTHER_WORKER, "kind": KIND, "ids": [job_id], "timeout": None}
    values |= {"stale_after": 30.0, "crash_after": 15.0, "max_attempts": 3, "max_stalls": 3}
    with engine.begin() as connection:
        assert connection.execute(claim.CLAIM, values).all() == []
    mutant = without(claim.CLAIM, predicates.none_of_its_key_runs)
    with engine.begin() as connection, pytest.raises(exc.IntegrityError, match="jobs_unique_running"):
        connection.execute(mutant, values)


# --- Coming back ---

Back = Callable[[Database, Sql, UUID], Awaitable[Any]]


async def _operator(database: Database, _: Sql, job_id: UUID) -> Any:
    return await reset.reset_by_operator(database, seen=[(job_id, 1)], reason="by hand")


async def _dead(database: Database, _: Sql, job_id: UUID) -> Any:
    return await reset.reset_dead(database, worker_id=OTHER_WORKER, owner=WORKER, reason="killed")


async def _crashed(database: Database, sql: Sql, job_id: UUID) -> Any:
    crashed = [suspect(sql, job_id)]
    return await reset.reset_crashed(database, worker_id=OTHER_WORKER, crashed=crashed, reason="silent")


async def _stall_in_quarantine(database: Database, _: Sql, job_id: UUID) -> Any:
    runs = [settle.Failure(job_id, 1, "crashed", None, 1.0, stalled=True)]
    return await settle.fail(database, worker_id=WORKER, runs=runs)


async def _server_fault(database: Database, _: Sql, job_id: UUID) -> Any:
    runs = [settle.Return(job_id, 1, "PostgreSQL was away", 5.0)]
    return await settle.release(database, worker_id=WORKER, runs=runs)


async def _snooze(database: Database, _: Sql, job_id: UUID) -> Any:
    runs = [settle.Snoozing(job_id, 1, "not yet", 60.0, 1000, "too often")]
    return await snooze.snooze(database, worker_id=WORKER, runs=runs)


BACK: dict[str, tuple[Back, str]] = {
    "an error": (lambda database, _, job_id: fail(database, job_id), "scheduled"),
    "a crash in quarantine": (_stall_in_quarantine, "scheduled"),
    "a release": (lambda database, _, job_id: release(database, job_id), "queued"),
    "a server's fault": (_server_fault, "scheduled"),
    "a snooze": (_snooze, "scheduled"),
    "a stall": (lambda database, sql, job_id: reset_stale(database, suspect(sql, job_id)), "queued"),
    "a stall without a count": (
        lambda database, sql, job_id: reset_stale(database, suspect(sql, job_id), counted=False),
        "queued",
    ),
    "a crash": (_crashed, "queued"),
    "a death": (_dead, "queued"),
    "an operator": (_operator, "queued"),
}
"""Every way from a run to the queue, and where it leads when nobody waits."""
SETTLED = ("an error", "a crash in quarantine", "a release", "a server's fault", "a snooze")


@pytest.mark.parametrize("way", BACK)
async def test_who_comes_back_while_another_waits_is_superseded(
    database: Database, sql: Sql, way: str
) -> None:
    back, without_another = BACK[way]
    first = running(sql)
    await back(database, sql, first)
    row = read_job(sql, first)
    assert (row["status"], row["failure_reason"]) == (without_another, None)
    assert await enqueue(database) == Enqueued(first, created=False)  # it waits, and has the key
    change_job(sql, first, waiting_key=None)

    second = running(sql)
    third = (await enqueue(database)).id
    await back(database, sql, second)
    row = read_job(sql, second)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "superseded")
    assert (row["needs_publish"], row["worker_id"], row["finished_at"] is None) == (False, None, False)
    assert row["attempts"] == row["errors"] + row["stalls"]
    assert read_events(sql, second)[-1]["event"] in ("cancelled", "reset")
    assert [job.id for job in await claimed(database, third)] == [third]


@pytest.mark.parametrize("way", BACK)
async def test_who_comes_back_beside_one_that_has_expired_takes_its_place(
    database: Database, sql: Sql, way: str
) -> None:
    """Else neither would run: the one that expired is refused by CLAIM."""
    back, leads_to = BACK[way]
    comes_back, neighbour = running(sql), insert_job(sql, "processing")
    expired = insert_job(sql, waiting_key=KEY, expires_at=ago(1))
    await back(database, sql, comes_back)
    row = read_job(sql, comes_back)
    assert (row["status"], row["failure_reason"]) == (leads_to, None)
    row = read_job(sql, expired)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "expired")
    assert read_job(sql, neighbour)["status"] in ("processing", leads_to)  # one of the same dead owner's


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        ("queued", {"kind": "other-kind"}),
        ("queued", {"waiting_key": "another"}),
        ("queued", {"waiting_key": None, "unique_key": KEY}),
        ("completed", {}),
        ("cancelled", {}),
    ],
)
@pytest.mark.parametrize("way", BACK)
async def test_other_jobs_supersede_nobody(
    database: Database, sql: Sql, way: str, state: str, columns: dict[str, Any]
) -> None:
    back, without_another = BACK[way]
    insert_job(sql, state, **{"waiting_key": KEY, **columns})
    first = running(sql)
    await back(database, sql, first)
    assert read_job(sql, first)["status"] == without_another


@pytest.mark.parametrize("way", [way for way, (_, status) in BACK.items() if way in SETTLED])
async def test_one_that_is_enqueued_meanwhile_supersedes_too(
    database: Database, sql: Sql, winner: Winner, way: str
) -> None:
    """The statement began before the other job was committed: the index refuses it, the next one knows."""
    first = running(sql)
    winner.run(statement_for(KIND, new()))
    coming_back = asyncio.ensure_future(BACK[way][0](database, sql, first))
    await winner.blocks()
    winner.commit()
    await coming_back
    row = read_job(sql, first)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "superseded")


RESETS: dict[str, Callable[[Database, Sql, list[UUID]], Awaitable[reset.TakenBack]]] = {
    "stale": lambda database, sql, ids: reset.reset_stale(
        database,
        worker_id=OTHER_WORKER,
        stale=[suspect(sql, job_id) for job_id in ids],
        reason="silent",
        counted=True,
    ),
    "crashed": lambda database, sql, ids: reset.reset_crashed(
        database,
        worker_id=OTHER_WORKER,
        crashed=[suspect(sql, job_id) for job_id in ids],
        reason="silent",
    ),
    "dead": lambda database, _, __: reset.reset_dead(
        database, worker_id=OTHER_WORKER, owner=WORKER, reason="killed"
    ),
    "operator": lambda database, _, ids: reset.reset_by_operator(
        database, seen=[(job_id, 1) for job_id in ids], reason="by hand"
    ),
}


@pytest.mark.parametrize("cause", RESETS)
async def test_a_producers_open_transaction_holds_up_the_recovery_of_no_other_job(
    database: Database, sql: Sql, winner: Winner, cause: str
) -> None:
    """The one whose key it is taking is refused, set aside by the caller, and taken back later."""
    ids = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(6)]
    keyed = running(sql)
    winner.run(statement_for(KIND, new()))
    taken = await RESETS[cause](database, sql, [*ids[:3], keyed, *ids[3:]])
    assert {each.id for each in taken.resets} == set(ids)
    assert {job_id: error.sqlstate for job_id, error in taken.refused.items()} == {keyed: "55P03"}
    assert read_job(sql, keyed)["status"] == "processing"
    winner.commit()
    taken = await RESETS[cause](database, sql, [keyed])
    assert [(each.id, each.status) for each in taken.resets] == [(keyed, "cancelled")]
    assert read_job(sql, keyed)["failure_reason"] == "superseded"
    [setting] = await database.run(text("SELECT current_setting('lock_timeout') AS left"))
    assert setting.left == "0"


@pytest.mark.parametrize("cause", RESETS)
async def test_a_lock_on_one_that_has_expired_holds_up_the_recovery_of_no_other_job(
    database: Database, sql: Sql, engine: Engine, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    ids = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(6)]
    keyed = running(sql)
    expired = insert_job(sql, waiting_key=KEY, expires_at=ago(1))
    statements, run = [], database.run

    async def counted(statement: TextClause, *positional: Any, **options: Any) -> Any:
        statements.append(statement)
        return await run(statement, *positional, **options)

    monkeypatch.setattr(database, "run", counted)
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": expired})
        taken = await RESETS[cause](database, sql, [*ids[:3], keyed, *ids[3:]])
        assert {each.id for each in taken.resets} == set(ids)
        assert {job_id: error.sqlstate for job_id, error in taken.refused.items()} == {keyed: "55P03"}
        assert await fail(database, keyed) is Settled.REFUSED
    assert len(statements) < (90 if cause == "operator" else 30)  # an operator's reset is tried several times
    assert read_job(sql, keyed)["status"] == "processing"
    assert await fail(database, keyed) is Settled.SCHEDULED
    assert read_job(sql, expired)["failure_reason"] == "expired"


async def test_one_whose_enqueue_is_undone_supersedes_nobody(
    database: Database, sql: Sql, winner: Winner
) -> None:
    first = running(sql)
    winner.run(statement_for(KIND, new()))
    failing = asyncio.create_task(fail(database, first))
    await winner.blocks()
    winner.rollback()
    assert await failing is Settled.SCHEDULED
    assert (await enqueue(database)).id == first


async def test_neighbours_of_a_superseded_job_are_settled_in_the_same_batch(
    database: Database, sql: Sql, winner: Winner
) -> None:
    ids = [insert_job(sql, "processing") for _ in range(4)]
    keyed = running(sql)
    winner.run(statement_for(KIND, new()))
    runs = [settle.Failure(job_id, 1, "broken", None, 60.0) for job_id in (*ids[:2], keyed, *ids[2:])]
    failing = asyncio.create_task(settle.fail(database, worker_id=WORKER, runs=runs))
    await winner.blocks()
    winner.commit()
    settled = await failing
    assert settled == [*[Settled.SCHEDULED] * 2, Settled.CANCELLED, *[Settled.SCHEDULED] * 2]


async def test_a_lost_answer_is_answered_again(database: Database, sql: Sql) -> None:
    first = running(sql)
    await enqueue(database)
    assert await fail(database, first) is Settled.CANCELLED
    assert await fail(database, first) is Settled.CANCELLED


async def test_a_failure_for_good_is_no_way_back(database: Database, sql: Sql) -> None:
    first = running(sql)
    await enqueue(database)
    assert await fail(database, first, permanent="permanent") is Settled.FAILED
    assert read_job(sql, first)["failure_reason"] == "permanent"


async def test_a_cancel_goes_before(database: Database, sql: Sql) -> None:
    first = running(sql, cancel_requested=True)
    await enqueue(database)
    assert await fail(database, first) is Settled.CANCELLED
    assert read_job(sql, first)["failure_reason"] is None


async def test_a_failed_job_is_not_retried_while_another_waits(database: Database, sql: Sql) -> None:
    """It has ended: what is final stays so, and its error is kept for people."""
    failed = insert_job(sql, "failed", waiting_key=KEY)
    waits = (await enqueue(database)).id
    with pytest.raises(TransitionRefused, match=r"cannot be retried: a live job holds its unique key$"):
        await retry(database, failed)
    await control.cancel(database, [waits])
    await retry(database, failed)
    assert read_job(sql, failed)["status"] == "queued"


@pytest.mark.parametrize("columns", [{"waiting_key": KEY}, {"unique_key": KEY}])
async def test_a_failed_job_is_retried_beside_one_that_has_expired(
    database: Database, sql: Sql, columns: dict[str, str]
) -> None:
    failed = insert_job(sql, "failed", **columns)
    expired = insert_job(sql, **columns, expires_at=ago(1))
    await retry(database, failed)
    assert read_job(sql, failed)["status"] == "queued"
    assert read_job(sql, expired)["failure_reason"] == "expired"


async def test_a_stale_owners_job_is_claimed_at_once_beside_one_that_waits(
    database: Database, sql: Sql
) -> None:
    first = running(sql)
    second = (await enqueue(database)).id
    late = [suspect(sql, first)]
    taken = await claim.claim_stale(database, worker_id=OTHER_WORKER, kind=KIND, seen=late, limits=LIMITS)
    assert [job.id for job in taken.claimed] == [first]
    assert await claimed(database, second) == []


def test_two_that_run_are_refused_by_the_table(sql: Sql) -> None:
    running(sql)
    with pytest.raises(UniqueViolation, match="jobs_unique_running"):
        running(sql)
