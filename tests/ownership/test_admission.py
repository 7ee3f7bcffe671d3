"""Admission: never more of a key than its limit says, whoever comes at once, and nobody's turn is lost."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, TextClause, make_url, text

from jsworker.ownership.database import Database
from jsworker.ownership.queries import job_report
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import admission, claim, clock_ahead, limits
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.limits import Numbers
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.settle import Settled

from .calls import complete, reset_stale, suspect
from .polling import eventually
from .rows import (
    HELD,
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

KEY = "tenant-7"
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


_OLDER = """
CREATE SCHEMA older;
CREATE FUNCTION older.minus(timestamptz, timestamptz) RETURNS interval LANGUAGE plpgsql AS $$
BEGIN
  IF NOT (isfinite($1) AND isfinite($2)) THEN
    RAISE datetime_field_overflow;
  END IF;
  RETURN $1 OPERATOR(pg_catalog.-) $2;
END $$;
CREATE OPERATOR older.- (FUNCTION = older.minus, LEFTARG = timestamptz, RIGHTARG = timestamptz);
"""


@pytest.fixture
async def older(database_url: str, sql: Sql) -> AsyncIterator[Database]:
    """A database that, as PostgreSQL before 17, cannot subtract infinite times."""
    sql.execute(_OLDER)
    options = {"options": "-c search_path=older,pg_catalog"}
    url = make_url(database_url).update_query_dict(options)
    opened = Database(url.render_as_string(hide_password=False), statement_timeout=10.0)
    yield opened
    await opened.close()
    sql.execute("DROP SCHEMA older CASCADE")


async def limited(database: Database, *numbers: Any, key: str = "") -> None:
    await limits.set_numbers(database, KIND, key, Numbers(*numbers))


def queued(sql: Sql, number: int, *, key: str | None = KEY, **columns: Any) -> list[UUID]:
    """Insert queued jobs, the first one queued first."""
    return [
        insert_job(sql, **{"limit_key": key, "queued_at": BEGINNING + timedelta(seconds=n)} | columns)
        for n in range(number)
    ]


async def gives_a_token_after(seconds: float, database: Database, sql: Sql) -> None:
    """Check that the one key with held jobs has no token, and then, as if so much time had passed, one."""
    [key] = await admission.waiting_keys(database)
    assert key.jobs == 0
    assert key.seconds is not None
    assert key.seconds <= seconds
    sql.execute("UPDATE jsworker.limits SET full_at = full_at - make_interval(secs => %s)", [seconds])
    [key] = await admission.waiting_keys(database)
    assert key.jobs == 1


def held(sql: Sql, number: int, *, key: str = KEY, **columns: Any) -> list[UUID]:
    return [
        insert_job(
            sql,
            "scheduled",
            **HELD
            | {"limit_key": key, "dispatch": 1, "queued_at": BEGINNING - timedelta(seconds=60 - n)}
            | columns,
        )
        for n in range(number)
    ]


async def admit(database: Database, ids: Sequence[UUID] = (), **more: Any) -> list[ClaimedJob]:
    values: dict[str, Any] = {"worker_id": WORKER, "kind": KIND, "limits": LIMITS, "ids": ids} | more
    return (await admission.admit(database, **values)).claimed


async def admitted(database: Database, ids: Sequence[UUID] = (), **more: Any) -> list[UUID]:
    return [job.id for job in await admit(database, ids, **more)]


def statuses(sql: Sql, ids: Sequence[UUID]) -> list[tuple[str, str | None]]:
    return [(row["status"], row["held_by"]) for row in (read_job(sql, job_id) for job_id in ids)]


RUNNING = ("processing", None)


async def test_what_fits_is_claimed_in_order_and_the_rest_is_held(database: Database, sql: Sql) -> None:
    await limited(database, 2)
    ids = queued(sql, 4)
    found = await admit(database, [*reversed(ids)])
    assert {job.id for job in found} == set(ids[:2])
    assert {job.limit_key for job in found} == {KEY}
    assert statuses(sql, ids) == [RUNNING] * 2 + [("scheduled", "limit")] * 2
    kept = read_job(sql, ids[2])
    assert (kept["queued_at"], kept["run_at"], kept["dispatch"]) == (
        BEGINNING + timedelta(seconds=2),
        None,
        1,
    )
    [told] = read_events(sql, ids[3])
    assert (told["event"], told["detail"]) == ("held", {"held_by": "limit", "key": KEY})


async def test_the_highest_priority_of_a_key_comes_first_however_long_the_others_have_waited(
    database: Database, sql: Sql
) -> None:
    await limited(database, 1)
    low, normal, high = (held(sql, 1, priority=priority)[0] for priority in (2, 1, 0))
    change_job(sql, low, queued_at=ago(9999))
    [new] = queued(sql, 1, priority=0)
    assert await admitted(database, [new]) == [high]
    assert statuses(sql, [low, normal, new]) == [("scheduled", "limit")] * 3


async def test_the_owned_row_is_the_slot(database: Database, sql: Sql) -> None:
    """Whatever ends processing frees it; nothing is counted up or down."""
    await limited(database, 1)
    first, second = queued(sql, 2)
    assert await admitted(database, [first, second]) == [first]
    for away in ({"status": "completed", "finished_at": ago(0)}, {"status": "queued", "attempts": 0}):
        with sql.transaction(force_rollback=True):
            change_job(sql, first, worker_id=None, last_activity_at=None, **away)
    assert await admitted(database, keys=[KEY], most=5) == []
    change_job(sql, first, worker_id=None, last_activity_at=None, status="completed", finished_at=ago(0))
    assert await admitted(database, keys=[KEY], most=5) == [second]
    row = read_job(sql, second)
    assert (row["status"], row["held_by"], row["held_at"], row["fencing_token"]) == (
        "processing",
        None,
        None,
        1,
    )


async def test_a_zombie_gives_back_no_slot(database: Database, sql: Sql) -> None:
    await limited(database, 1)
    first, second = queued(sql, 2)
    assert await admitted(database, [first, second]) == [first]
    change_job(sql, first, last_activity_at=ago(60))
    await reset_stale(database, suspect(sql, first))
    assert await admitted(database, [first]) == [second]
    assert await complete(database, first, token=1) is Settled.LOST
    assert await admitted(database, keys=[KEY], most=5) == []
    assert statuses(sql, [first, second]) == [("scheduled", "limit"), RUNNING]


async def test_keys_and_kinds_are_counted_apart(database: Database, sql: Sql) -> None:
    await limited(database, 1)
    one, other = queued(sql, 2), queued(sql, 2, key="other")
    elsewhere = insert_job(sql, "processing", kind="other-kind", limit_key=KEY)
    assert set(await admitted(database, [*one, *other])) == {one[0], other[0]}
    assert read_job(sql, elsewhere)["status"] == "processing"


async def test_jobs_without_a_key_are_counted_for_their_kind(database: Database, sql: Sql) -> None:
    await limited(database, 1)
    ids = queued(sql, 2, key=None)
    assert await admitted(database, ids) == ids[:1]
    assert [read_job(sql, job_id)["limit_key"] for job_id in ids] == ["", ""]


async def test_runs_from_before_the_limit_take_slots(database: Database, sql: Sql) -> None:
    insert_job(sql, "processing")
    await limited(database, 2)
    ids = queued(sql, 2, key=None)
    assert await admitted(database, ids) == ids[:1]


async def test_a_key_may_have_numbers_of_its_own(database: Database, sql: Sql) -> None:
    await limited(database, 1)
    await limited(database, 3, key=KEY)
    ids = queued(sql, 4)
    assert len(await admitted(database, ids)) == 3
    await limits.reset_numbers(database, KIND, KEY)
    assert statuses(sql, ids[3:]) == [("scheduled", "limit")]


async def test_what_is_held_comes_before_what_came_later(database: Database, sql: Sql) -> None:
    await limited(database, 2)
    waiting, new = held(sql, 1), queued(sql, 2)
    assert set(await admitted(database, new)) == {waiting[0], new[0]}
    assert statuses(sql, new[1:]) == [("scheduled", "limit")]


async def test_no_more_are_taken_than_asked_for(database: Database, sql: Sql) -> None:
    await limited(database, 100)
    waiting, new = held(sql, 3), queued(sql, 1)
    assert await admitted(database, new) == waiting[:1]
    assert statuses(sql, new) == [("queued", None)]  # its message asks again
    assert await admitted(database, keys=[KEY], most=1, besides=waiting[1:2]) == waiting[2:]


async def test_a_kind_without_numbers_admits_all(database: Database, sql: Sql) -> None:
    """An operator has taken the limit away, or a job was given a key that nobody counts."""
    ids = [*held(sql, 2), *queued(sql, 2)]
    assert len(await admitted(database, ids[2:], most=10)) == 4


async def test_a_lowered_limit_holds_for_new_claims(database: Database, sql: Sql) -> None:
    await limited(database, 3)
    ids = queued(sql, 4)
    assert len(await admitted(database, ids[:3])) == 3
    await limited(database, 1)
    assert await admitted(database, ids[3:]) == []
    assert statuses(sql, ids)[:3] == [RUNNING] * 3


class TestAtOnce:
    """A1: at every commit, no more run than the limit says."""

    async def test_of_many_claimers_as_many_as_fit_get_through(self, database: Database, sql: Sql) -> None:
        await limited(database, 3)
        ids = queued(sql, 40)
        found = await asyncio.gather(*(admitted(database, [job_id]) for job_id in ids))
        assert sum(map(len, found)) == 3
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs WHERE status = 'processing'") == 3
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs WHERE held_by = 'limit'") == 37

    async def test_who_waited_for_the_lock_counts_what_its_holder_claimed(
        self, database: Database, sql: Sql, observer: Sql
    ) -> None:
        await limited(database, 1)
        first, second = queued(sql, 2)
        with observer.transaction():
            observer.execute(
                "INSERT INTO jsworker.limits (kind, key) VALUES (%s, %s)"
                " ON CONFLICT (kind, key) DO UPDATE SET used_at = now()",
                [KIND, KEY],
            )
            late = asyncio.create_task(admitted(database, [second]))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            await eventually(lambda: read_value(sql, waits) == 1, "the claim waits")
            change_job(
                observer,
                first,
                status="processing",
                worker_id=OTHER_WORKER,
                last_activity_at=ago(0),
                attempts=1,
                fencing_token=1,
            )
        assert await late == []
        assert statuses(sql, [second]) == [("scheduled", "limit")]

    async def test_a_key_that_was_not_locked_first_admits_nothing(self, engine: Engine, sql: Sql) -> None:
        """Its job was committed between the two statements, say."""
        sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, %s)", [KIND, KEY])
        [job_id] = queued(sql, 1)
        values = VALUES | {"ids": [job_id]}
        with engine.begin() as connection:
            assert connection.execute(admission.ADMIT, values).all() == []
        assert statuses(sql, [job_id]) == [("queued", None)]
        mutant = without(admission.ADMIT, r"CAST\(pg_current_xact_id\(\) AS xid\) IN \(l\.xmin, l\.xmax\)")
        with engine.begin() as connection:
            assert len(connection.execute(mutant, values).all()) == 1

    async def test_a_locked_row_is_passed_over(self, database: Database, sql: Sql, observer: Sql) -> None:
        await limited(database, 2)
        waiting, new = held(sql, 2), queued(sql, 2)
        with observer.transaction():
            observer.execute(
                "SELECT FROM jsworker.jobs WHERE id = ANY(%s) FOR UPDATE", [[waiting[0], new[0]]]
            )
            assert set(await admitted(database, new)) == {waiting[1], new[1]}
        assert statuses(sql, [waiting[0], new[0]]) == [("scheduled", "limit"), ("queued", None)]


VALUES: dict[str, Any] = {
    "worker_id": WORKER,
    "kind": KIND,
    "ids": [],
    "keys": [],
    "besides": [],
    "most": 5,
    "most_held": 5,
    "only": None,
    "stale_after": 30.0,
    "crash_after": 15.0,
    "timeout": None,
    "max_attempts": 3,
    "max_stalls": 3,
}


def run(
    engine: Engine, statement: TextClause, lock: TextClause = admission.LOCK, **values: Any
) -> list[UUID]:
    """Run both statements in one transaction, and return the jobs of the second's answer."""
    with engine.begin() as connection:
        connection.execute(lock, VALUES | values)
        return [row.id for row in connection.execute(statement, VALUES | values)]


_IN = r"j\.held_by IN \('limit', 'rate', 'paused'\)"
ADMIT_GUARD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "queued": (r"j\.status = 'queued'", "asked", {"status": "scheduled", "run_at": ago(0)}),
    "kind of asked": (r"j\.kind = :kind", "asked", {"kind": "other-kind"}),
    "held by": (_IN, "held", {"held_by": "needs"}),
    "kind of held": (r"j\.kind = :kind", "held", {"kind": "other-kind"}),
    "key of held": (r"j\.limit_key = state\.key", "held", {"key": "other"}),
}


@pytest.mark.parametrize("name", ADMIT_GUARD)
def test_each_predicate_of_admission_refuses_alone_and_is_needed(sql: Sql, engine: Engine, name: str) -> None:
    guard, how, columns = ADMIT_GUARD[name]
    [job_id] = (queued if how == "asked" else held)(sql, 1, **columns)
    given: dict[str, Any] = {"ids": [job_id]} if how == "asked" else {"keys": [KEY]}
    before = read_job(sql, job_id)
    assert run(engine, admission.ADMIT, **given) == []
    assert read_job(sql, job_id) == before
    sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, %s) ON CONFLICT DO NOTHING", [KIND, KEY])
    mutant = without(admission.ADMIT, guard)
    if name == "kind of asked":  # its key is not locked for this kind
        mutant = without(mutant, r"CAST\(pg_current_xact_id\(\) AS xid\) IN \(l\.xmin, l\.xmax\)")
    assert run(engine, mutant, **given) == [job_id]


CANNOT_BEGIN: dict[str, dict[str, Any]] = {
    "it has expired": {"expires_at": ago(1)},
    "another of its key runs": {"waiting_key": "order:12"},
}


@pytest.mark.parametrize("why", CANNOT_BEGIN)
@pytest.mark.parametrize("how", ["asked", "held"])
async def test_what_cannot_begin_is_not_held_and_takes_nobodys_slot(
    database: Database, sql: Sql, how: str, why: str
) -> None:
    insert_job(sql, "processing", waiting_key="order:12")
    await limited(database, 1)
    [waits] = (queued if how == "asked" else held)(sql, 1, **CANNOT_BEGIN[why])
    [other] = queued(sql, 1, queued_at=BEGINNING + timedelta(seconds=9))
    before = read_job(sql, waits)
    assert await admitted(database, [waits, other]) == [other]
    assert read_job(sql, waits) == before


async def test_a_claim_uses_the_tokens_of_its_own_key(database: Database, sql: Sql) -> None:
    await limited(database, None, 5, 3600.0)
    await limited(database, None, 5, 3600.0, key=KEY)
    await limits.set_numbers(database, "other-kind", KEY, Numbers(None, 5, 3600.0))
    assert len(await admitted(database, queued(sql, 1))) == 1
    spent = sql.execute("SELECT kind, key FROM jsworker.limits WHERE full_at IS NOT NULL").fetchall()
    assert [(row["kind"], row["key"]) for row in spent] == [(KIND, KEY)]


HELD_OF_KEYS_GUARD: dict[str, tuple[str, dict[str, Any]]] = {
    "held by": (_IN, {"held_by": "needs"}),
    "kind": (r"j\.kind = :kind", {"kind": "other-kind"}),
    "key": (r"j\.limit_key = k\.key", {"limit_key": "other"}),
    "not aside": (re.escape(admission._NOT_ASIDE), {}),
}


@pytest.mark.parametrize("name", HELD_OF_KEYS_GUARD)
def test_each_predicate_of_what_is_woken_one_by_one_is_needed(sql: Sql, engine: Engine, name: str) -> None:
    guard, columns = HELD_OF_KEYS_GUARD[name]
    [job_id] = held(sql, 1, **columns)
    if name == "not aside":
        set_aside(sql, job_id)
    given = {"kind": KIND, "keys": [KEY]}
    with engine.connect() as connection:
        assert connection.execute(admission.HELD_OF_KEYS, given).all() == []
        mutant = without(admission.HELD_OF_KEYS, guard)
        used = {each: value for each, value in given.items() if f":{each}" in mutant.text}
        assert [row.id for row in connection.execute(mutant, used)] == [job_id]


def set_aside(sql: Sql, job_id: UUID) -> None:
    sql.execute(
        "INSERT INTO jsworker.refused_rows"
        " (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, retry_at)"
        " SELECT id, 'wake', kind, status, fencing_token, dispatch, '23514', now() + interval '1 h'"
        " FROM jsworker.jobs WHERE id = %s",
        [job_id],
    )


READ_BACK_GUARD: dict[str, tuple[str, dict[str, Any]]] = {
    "worker": (r"j\.worker_id = :worker_id", {"worker_id": OTHER_WORKER}),
    "kind": (r"j\.kind = :kind", {"kind": "other-kind"}),
    "key": (r"j\.limit_key IS NOT NULL", {"limit_key": None}),
    "in hand": (r"j\.id != ALL \(CAST\(:besides AS UUID\[\]\)\)", {}),
}


@pytest.mark.parametrize("name", READ_BACK_GUARD)
def test_what_was_admitted_and_not_answered_is_read_back(sql: Sql, engine: Engine, name: str) -> None:
    guard, columns = READ_BACK_GUARD[name]
    mine = insert_job(sql, "processing", limit_key=KEY)
    other = insert_job(sql, "processing", **{"limit_key": KEY} | columns)
    given = {"worker_id": WORKER, "kind": KIND, "besides": [other] if name == "in hand" else []}
    with engine.begin() as connection:
        assert [row.id for row in connection.execute(claim.READ_BACK_ADMITTED, given)] == [mine]
        mutant = without(claim.READ_BACK_ADMITTED, guard)
        used = {each: value for each, value in given.items() if f":{each}" in mutant.text}
        assert {row.id for row in connection.execute(mutant, used)} == {mine, other}


def test_what_is_in_hand_is_left_out(sql: Sql, engine: Engine) -> None:
    [job_id] = held(sql, 1)
    given: dict[str, Any] = {"keys": [KEY], "besides": [job_id]}
    assert run(engine, admission.ADMIT, **given) == []
    assert run(
        engine, without(admission.ADMIT, r"j\.id <> ALL\(CAST\(:besides AS uuid\[\]\)\)"), **given
    ) == [job_id]


WAKE_GUARD: dict[str, tuple[str, dict[str, Any]]] = {
    "held by": (_IN, {"held_by": "needs"}),
    "kind": (r"j\.kind = :kind", {"kind": "other-kind"}),
    "key": (r"j\.limit_key = state\.key", {"key": "other"}),
    "lock": (r"CAST\(pg_current_xact_id\(\) AS xid\) IN \(l\.xmin, l\.xmax\)", {}),
    "not aside": (re.escape(admission._NOT_ASIDE), {}),
}


@pytest.mark.parametrize("name", WAKE_GUARD)
def test_each_predicate_of_wake_refuses_alone_and_is_needed(sql: Sql, engine: Engine, name: str) -> None:
    guard, columns = WAKE_GUARD[name]
    [job_id] = held(sql, 1, **columns)
    if name == "not aside":
        set_aside(sql, job_id)
    sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, %s)", [KIND, KEY])
    lock = text("SELECT 1") if name == "lock" else admission.LOCK_KEYS
    assert run(engine, admission.WAKE, lock, keys=[KEY]) == []
    assert read_job(sql, job_id)["status"] == "scheduled"
    assert run(engine, without(admission.WAKE, guard), lock, keys=[KEY]) == [job_id]


GUARD: dict[str, dict[str, Any]] = {
    "cancelled": {"status": "cancelled", "finished_at": ago(0)},
    "scheduled for a time": {"status": "scheduled", "run_at": ago(0)},
    "other kind": {"kind": "other-kind"},
}


@pytest.mark.parametrize("change", GUARD)
async def test_what_is_not_queued_or_of_another_kind_is_left_alone(
    database: Database, sql: Sql, change: str
) -> None:
    await limited(database, 5)
    [job_id] = queued(sql, 1, **GUARD[change])
    before = read_job(sql, job_id)
    assert await admitted(database, [job_id]) == []
    assert read_job(sql, job_id) == before


async def test_jobs_held_by_needs_are_not_admitted(database: Database, sql: Sql) -> None:
    held(sql, 1, held_by="needs")
    assert await admitted(database, keys=[KEY], most=5) == []
    assert await admission.wake(database, worker_id=WORKER, kind=KIND, keys=[KEY]) == 0


async def test_a_claim_without_admission_takes_no_job_with_a_key(database: Database, sql: Sql) -> None:
    """Also where a worker has not learned of the limit yet."""
    [job_id] = queued(sql, 1)
    taken = await claim.claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
    assert taken.claimed == []
    seen = await claim.look_at_refused(database, kind=KIND, ids=[job_id])
    assert (seen[job_id].status, seen[job_id].limit_key) == ("queued", KEY)


class TestRates:
    async def test_after_a_rest_a_burst_and_then_no_more(self, database: Database, sql: Sql) -> None:
        await limited(database, None, 5, 3600.0)
        ids = queued(sql, 7)
        assert set(await admitted(database, ids)) == set(ids[:5])
        assert statuses(sql, ids[5:]) == [("scheduled", "rate")] * 2
        assert await admitted(database, keys=[KEY], most=5) == []
        [key] = await admission.waiting_keys(database)
        assert (key.kind, key.key, key.jobs) == (KIND, KEY, 0)
        assert key.seconds is not None
        assert 700 < key.seconds <= 720

    async def test_tokens_come_back_one_by_one(self, database: Database, sql: Sql) -> None:
        await limited(database, None, 5, 3600.0)
        ids = queued(sql, 8)
        await admit(database, ids)
        sql.execute("UPDATE jsworker.limits SET full_at = full_at - interval '721 s' WHERE key = %s", [KEY])
        assert await admitted(database, keys=[KEY], most=5) == [ids[5]]
        sql.execute("UPDATE jsworker.limits SET full_at = full_at - interval '1441 s' WHERE key = %s", [KEY])
        assert set(await admitted(database, keys=[KEY], most=5)) == set(ids[6:])

    async def test_the_instant_of_the_next_token_is_known_while_others_are_there(
        self, database: Database, sql: Sql
    ) -> None:
        await limited(database, None, 5, 3600.0)
        await admit(database, queued(sql, 2))
        sql.execute("UPDATE jsworker.limits SET full_at = full_at - interval '100 s' WHERE key = %s", [KEY])
        held(sql, 4)
        [key] = await admission.waiting_keys(database)
        assert key.jobs == 3
        assert key.seconds is not None
        assert 500 < key.seconds <= 620

    async def test_what_waits_for_a_slot_waits_for_no_token(self, database: Database, sql: Sql) -> None:
        await limited(database, 2, 100, 3600.0)
        await admit(database, queued(sql, 3))
        [key] = await admission.waiting_keys(database)
        assert (key.jobs, key.seconds) == (0, None)

    async def test_a_clock_that_went_back_costs_a_span_at_most(self, database: Database, sql: Sql) -> None:
        await limited(database, None, 5, 3600.0)
        await admit(database, queued(sql, 1))
        sql.execute("UPDATE jsworker.limits SET full_at = clock_timestamp() + interval '10 years'")
        held(sql, 1)
        await clock_ahead.bring_back_others(database, "limits")
        await gives_a_token_after(720, database, sql)

    @pytest.mark.parametrize("by", ["operator", "code"])
    async def test_a_shorter_period_holds_at_once(self, database: Database, sql: Sql, by: str) -> None:
        """The bucket was to be full again after the rest of the longer one."""

        async def limit(numbers: Numbers) -> None:
            if by == "operator":
                await limits.set_numbers(database, KIND, "", numbers)
            else:
                await limits.write_code(database, {KIND: numbers})

        await limit(Numbers(None, 5, 86_400.0))
        assert len(await admitted(database, queued(sql, 6))) == 5
        await limit(Numbers(None, 5, 60.0))
        await gives_a_token_after(12, database, sql)

    async def test_a_bucket_within_its_period_stays(self, database: Database, sql: Sql) -> None:
        await limited(database, None, 5, 3600.0)
        await admit(database, queued(sql, 5))
        before = sql.execute("SELECT key, full_at FROM jsworker.limits").fetchall()
        await clock_ahead.bring_back_others(database, "limits")
        assert sql.execute("SELECT key, full_at FROM jsworker.limits").fetchall() == before

    async def test_the_tighter_of_limit_and_rate_counts(self, database: Database, sql: Sql) -> None:
        await limited(database, 2, 100, 60.0)
        ids = queued(sql, 3)
        assert len(await admitted(database, ids)) == 2
        assert statuses(sql, ids[2:]) == [("scheduled", "limit")]
        await limited(database, 50, 3, 3600.0)
        more = queued(sql, 4, key="other")
        assert len(await admitted(database, more)) == 3
        assert {why for _, why in statuses(sql, more)} == {None, "rate"}


class TestPauses:
    async def test_a_paused_key_begins_nothing_from_its_commit_on(self, database: Database, sql: Sql) -> None:
        await limits.pause(database, KIND, KEY, seconds=None, paused_by="ann", reason="429")
        ids, others = queued(sql, 2), queued(sql, 1, key="other")
        assert await admitted(database, [*ids, *others]) == others
        assert statuses(sql, ids) == [("scheduled", "paused")] * 2
        assert await admission.wake(database, worker_id=WORKER, kind=KIND, keys=[KEY]) == 0
        [key] = await admission.waiting_keys(database)
        assert (key.jobs, key.seconds) == (0, None)
        await limits.resume(database, KIND, KEY)
        assert await admission.wake(database, worker_id=WORKER, kind=KIND, keys=[KEY]) == 2
        assert event_names(sql, ids[0]) == ["held", "woken"]

    async def test_a_pause_ends_by_itself(self, database: Database, sql: Sql) -> None:
        await limits.pause(database, KIND, KEY, seconds=3600, paused_by="ann", reason=None)
        ids = queued(sql, 1)
        assert await admitted(database, ids) == []
        [key] = await admission.waiting_keys(database)
        assert key.seconds is not None
        assert 3500 < key.seconds <= 3600
        sql.execute("UPDATE jsworker.limits SET paused_until = clock_timestamp()")
        assert await admitted(database, keys=[KEY], most=5) == ids

    async def test_a_paused_kind_pauses_its_keys(self, database: Database, sql: Sql) -> None:
        await limits.pause(database, KIND, "", seconds=None, paused_by="ann", reason=None)
        assert await admitted(database, queued(sql, 1)) == []

    async def test_one_written_by_hand_without_finite_times_keeps_no_other_key_waiting(
        self, older: Database, sql: Sql
    ) -> None:
        sql.execute(
            "INSERT INTO jsworker.limits (kind, key, paused_at, paused_until) "
            "VALUES (%(kind)s, %(key)s, '-infinity', 'infinity'), (%(kind)s, 'other', '-infinity', NULL)",
            {"kind": KIND, "key": KEY},
        )
        free = held(sql, 1, key="free")
        ids = [*queued(sql, 1), *queued(sql, 1, key="other")]
        assert await admitted(older, ids) == []
        assert statuses(sql, ids) == [("scheduled", "paused")] * 2
        found = await admission.waiting_keys(older)
        assert {key.key: (key.jobs > 0, key.seconds) for key in found if key.key != "free"} == {
            KEY: (False, None),
            "other": (False, None),
        }
        assert await admission.wake(older, worker_id=WORKER, kind=KIND, keys=[KEY, "free"]) == 1
        assert statuses(sql, free) == [("queued", None)]
        assert len(await limits.list_limits(older)) == 2
        report = await older.run(job_report.LIMITS, {"after_kind": "", "after_key": ""})
        assert [row.paused_for for row in report] == [math.inf] * 2


class TestWake:
    async def test_as_many_as_are_free_in_their_order(self, database: Database, sql: Sql) -> None:
        await limited(database, 2)
        insert_job(sql, "processing", limit_key=KEY)
        waiting = held(sql, 3)
        assert await admission.wake(database, worker_id=WORKER, kind=KIND, keys=[KEY]) == 1
        assert statuses(sql, waiting) == [("queued", None), *[("scheduled", "limit")] * 2]
        row = read_job(sql, waiting[0])
        assert (row["dispatch"], row["needs_publish"]) == (2, True)
        assert row["queued_at"] == BEGINNING - timedelta(seconds=60)
        assert read_events(sql, waiting[0])[0]["detail"] == {"held_by": "limit", "key": KEY}

    async def test_it_waits_for_a_hold_that_has_counted_and_not_committed(
        self, database: Database, sql: Sql, observer: Sql
    ) -> None:
        """Without the lock it would see no held job, and the freed slot would stay empty until a sweep."""
        await limited(database, 1)
        [job_id] = queued(sql, 1)
        with observer.transaction():
            observer.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, %s)", [KIND, KEY])
            change_job(observer, job_id, status="scheduled", **HELD)
            waking = asyncio.create_task(admission.wake(database, worker_id=WORKER, kind=KIND, keys=[KEY]))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            await eventually(lambda: waking.done() or read_value(sql, waits) == 1, "WAKE waits, or has ended")
        await waking
        assert statuses(sql, [job_id]) == [("queued", None)]

    async def test_what_its_owner_did_not_live_to_wake_is_found_by_a_scan(
        self, database: Database, sql: Sql
    ) -> None:
        await limited(database, 1)
        first, second = queued(sql, 2)
        assert await admitted(database, [first, second]) == [first]
        change_job(sql, first, last_activity_at=ago(60), max_stalls=1)
        await reset_stale(database, suspect(sql, first))
        assert statuses(sql, [first, second]) == [("failed", None), ("scheduled", "limit")]
        free = [key.key for key in await admission.waiting_keys(database) if key.jobs]
        await admission.wake(database, worker_id=OTHER_WORKER, kind=KIND, keys=free)
        assert statuses(sql, [second]) == [("queued", None)]


async def test_keys_are_found_page_by_page(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(admission.MOST_KEYS + 5):
        held(sql, 1, key=f"key-{n:04}")
    held(sql, 1, held_by="needs", key="needs")
    held(sql, 1, kind="zip", key="first")
    first = await admission.waiting_keys(database)
    assert len(first) == admission.MOST_KEYS
    rest = await admission.waiting_keys(database, after=(first[-1].kind, first[-1].key))
    assert [key.key for key in rest] == [*(f"key-{admission.MOST_KEYS + n:04}" for n in range(5)), "first"]
    assert all(key.jobs == 1_000_000 for key in rest)  # nobody limits them: all may begin


async def test_a_key_without_a_row_may_begin_what_its_kind_allows(database: Database, sql: Sql) -> None:
    await limited(database, 2)
    insert_job(sql, "processing", limit_key="one")
    for key in ("one", "two"):
        held(sql, 3, key=key)
    assert [(key.key, key.jobs) for key in await admission.waiting_keys(database)] == [("one", 1), ("two", 2)]


async def test_a_held_row_that_is_refused_holds_up_no_other(database: Database, sql: Sql) -> None:
    [bad] = held(sql, 1, max_attempts=77)
    new = queued(sql, 2)
    sql.execute(
        "ALTER TABLE jsworker.jobs ADD CONSTRAINT never CHECK (max_attempts <> 77 OR status <> 'processing')"
    )
    try:
        taken = await admission.admit(database, worker_id=WORKER, kind=KIND, limits=LIMITS, ids=new)
        assert {job.id for job in taken.claimed} == set(new)
        assert taken.refused_rows == {}
        with pytest.raises(RowRefused, match="never"):
            await admitted(database, keys=[KEY], most=5)
        assert await admission.wake(database, worker_id=WORKER, kind=KIND, keys=[KEY]) == 1
        taken = await admission.admit(database, worker_id=WORKER, kind=KIND, limits=LIMITS, ids=[bad])
        assert (taken.claimed, list(taken.refused_rows)) == ([], [bad])
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT never")


async def test_a_row_that_can_neither_be_claimed_nor_woken_is_set_aside(database: Database, sql: Sql) -> None:
    bad, good, last = held(sql, 3)
    change_job(sql, bad, max_attempts=77)
    sql.execute(
        "ALTER TABLE jsworker.jobs ADD CONSTRAINT never CHECK (max_attempts <> 77 OR held_by IS NOT NULL)"
    )
    try:
        refused_rows = RefusedRows(database, worker_id=WORKER)
        wake = partial(admission.wake, database, worker_id=WORKER, kind=KIND, keys=[KEY])
        with pytest.raises(RowRefused, match="never"):
            await wake()
        assert await wake(refused_rows=refused_rows) == 2
        assert statuses(sql, [bad, good, last]) == [("scheduled", "limit"), *[("queued", None)] * 2]
        assert await refused_rows.among("wake") == {bad}
        again = held(sql, 1, queued_at=BEGINNING)
        assert await admitted(database, keys=[KEY], most=5) == again
        sql.execute("UPDATE jsworker.refused_rows SET retry_at = now()")
    finally:
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT never")
    assert await wake(refused_rows=refused_rows) == 1


async def test_no_more_held_rows_are_locked_than_are_taken(
    database: Database, sql: Sql, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was resumed has no bound of its own: all that it holds could begin."""
    waiting = held(sql, 200)
    asked: list[dict[str, Any]] = []
    run_by_key = database.run_by_key

    async def noted(statement: TextClause, values: dict[str, Any], **more: Any) -> Any:
        asked.append(values)
        return await run_by_key(statement, values, **more)

    monkeypatch.setattr(database, "run_by_key", noted)
    assert [job.id for job in await admit(database, keys=[KEY], most=3)] == waiting[:3]
    plan = text(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) {admission.ADMIT.text}")
    with engine.connect() as connection:
        connection.execute(admission.LOCK, asked[0])
        lines = list(connection.execute(plan, asked[0]).scalars())
        connection.rollback()
    locks = [line for line in lines if "LockRows" in line and "rows=0" not in line and "never" not in line]
    assert len(locks) == 1
    assert "rows=3" in locks[0]
