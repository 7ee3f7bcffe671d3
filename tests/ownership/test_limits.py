"""How limits and pauses are written: what code may change, what operators may, and what is tidied away."""

import re
from typing import Any, LiteralString
from uuid import UUID

import pytest
from psycopg.errors import CheckViolation
from psycopg.sql import SQL
from sqlalchemy import Engine, TextClause, text

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.pool import ALONG_INDEX
from jsworker.ownership.transitions import admission, limits, looks
from jsworker.ownership.transitions.limits import Numbers

from .rows import HELD, KIND, OTHER_WORKER, WORKER, Sql, change_job, insert_job, read_job, read_value
from .transitions import without
from .winner import Winner

KEY = "tenant-7"


def row(sql: Sql, key: str = "") -> dict[str, Any]:
    [found] = sql.execute("SELECT * FROM jsworker.limits WHERE key = %s", [key]).fetchall()
    return dict(found)


def numbers(sql: Sql, key: str = "") -> tuple[Any, ...]:
    found = row(sql, key)
    return found["max_running"], found["rate"], found["per"], found["set_by"]


async def test_the_code_writes_changes_and_forgets_its_own(database: Database, sql: Sql) -> None:
    assert await limits.write_code(database, {KIND: Numbers(2), "other": None}) == [KIND]
    assert numbers(sql) == (2, None, None, "code")
    before = row(sql)
    assert await limits.write_code(database, {KIND: Numbers(2)}) == []
    assert row(sql) == before
    assert await limits.write_code(database, {KIND: Numbers(None, 5, 60.0)}) == [KIND]
    assert numbers(sql) == (None, 5, 60.0, "code")
    assert await limits.write_code(database, {KIND: None}) == [KIND]
    assert numbers(sql) == (None, None, None, None)


async def test_what_an_operator_has_set_stays_until_it_is_reset(database: Database, sql: Sql) -> None:
    await limits.set_numbers(database, KIND, "", Numbers(7))
    assert await limits.write_code(database, {KIND: Numbers(2)}) == []
    assert await limits.write_code(database, {KIND: None}) == []
    assert numbers(sql) == (7, None, None, "operator")
    await limits.reset_numbers(database, KIND, "")
    assert await limits.write_code(database, {KIND: Numbers(2)}) == [KIND]
    with pytest.raises(TransitionRefused, match=f"no operator has set a limit of kind {KIND}"):
        await limits.reset_numbers(database, KIND, "")


async def test_runs_that_were_claimed_before_are_counted(database: Database, sql: Sql) -> None:
    running, keyed = insert_job(sql, "processing"), insert_job(sql, "processing", limit_key=KEY)
    others = [insert_job(sql, "processing", kind="other-kind"), insert_job(sql)]
    await limits.write_code(database, {KIND: Numbers(2)})
    assert read_job(sql, running)["limit_key"] == ""
    assert read_job(sql, keyed)["limit_key"] == KEY
    assert [read_job(sql, job_id)["limit_key"] for job_id in others] == [None, None]


async def pause_for(database: Database, job_id: UUID, seconds: float, reason: str = "429") -> bool:
    return await limits.pause_for(
        database, KIND, KEY, seconds=seconds, worker_id=WORKER, held=(job_id, 1), reason=reason
    )


async def test_a_jobs_pause_neither_shortens_nor_replaces_another(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await pause_for(database, job_id, 3600)
    long = row(sql, KEY)
    assert long["paused_by"] == WORKER
    assert not await pause_for(database, job_id, 60, "later")
    assert row(sql, KEY) == long
    assert await pause_for(database, job_id, 7200, "longer")
    assert (row(sql, KEY)["reason"], row(sql, KEY)["paused_at"]) == ("longer", long["paused_at"])
    await limits.pause(database, KIND, KEY, seconds=None, paused_by="ann", reason=None)
    assert not await pause_for(database, job_id, 60, "never")
    assert (row(sql, KEY)["paused_by"], row(sql, KEY)["paused_until"]) == ("ann", None)
    await limits.resume(database, KIND, KEY)
    with pytest.raises(TransitionRefused, match=f"key '{KEY}' of kind {KIND} is not paused"):
        await limits.resume(database, KIND, KEY)
    assert await pause_for(database, job_id, 60, "again")
    assert row(sql, KEY)["reason"] == "again"


ENDED: dict[str, Any] = {"status": "queued", "worker_id": None, "last_activity_at": None, "attempts": 0}


@pytest.mark.parametrize(
    ("columns", "predicate"),
    [(ENDED, None), ({"worker_id": OTHER_WORKER}, "worker_id"), ({"fencing_token": 2}, "fencing_token")],
    ids=["ended", "of another worker", "claimed anew"],
)
async def test_a_run_that_has_lost_its_job_pauses_nothing(
    database: Database,
    sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
    columns: dict[str, Any],
    predicate: str | None,
) -> None:
    job_id = insert_job(sql, "processing")
    change_job(sql, job_id, **columns)
    assert not await pause_for(database, job_id, 3600)
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 0
    if predicate is not None:  # and needed
        monkeypatch.setattr(limits, "PAUSE_FOR", without(limits.PAUSE_FOR, rf"j\.{predicate} = :\w+"))
        assert await pause_for(database, job_id, 3600)


@pytest.mark.parametrize("by_a_job", [True, False])
async def test_a_pause_after_one_that_has_ended_begins_anew(
    database: Database, sql: Sql, *, by_a_job: bool
) -> None:
    await limits.pause(database, KIND, KEY, seconds=60, paused_by="ann", reason="x")
    sql.execute("UPDATE jsworker.limits SET paused_at = '2026-01-01', paused_until = '2026-01-02'")
    if by_a_job:
        await pause_for(database, insert_job(sql, "processing"), 3600)
    else:
        await limits.pause(database, KIND, KEY, seconds=3600, paused_by="bob", reason=None)
    assert read_value(sql, "SELECT clock_timestamp() - paused_at < interval '1 h' FROM jsworker.limits")


async def test_of_a_pause_that_has_ended_nothing_is_listed_while_its_kind_rests(
    database: Database, sql: Sql
) -> None:
    await limits.pause(database, KIND, KEY, seconds=60, paused_by="ann", reason="x")
    sql.execute("UPDATE jsworker.limits SET paused_until = clock_timestamp()")
    assert await limits.list_limits(database) == []
    await limits.pause(database, KIND, "", seconds=None, paused_by="bob", reason="y")
    of_kind, of_key = await limits.list_limits(database, all_keys=True)
    pause = ("paused_at", "paused_until", "paused_by", "reason")
    assert (of_kind["paused_by"], of_kind["reason"]) == ("bob", "y")
    assert [of_key[name] for name in pause] == [None] * 4


async def test_the_numbers_of_a_key_are_not_those_of_its_kind(database: Database, sql: Sql) -> None:
    await limits.set_numbers(database, KIND, KEY, Numbers(1))
    assert (await looks.due(database, [KIND])).limits == {}


async def test_pauses_that_have_ended_are_none(database: Database, sql: Sql) -> None:
    await limits.pause(database, KIND, "", seconds=60, paused_by="ann", reason="x")
    assert (await looks.due(database, [KIND])).limits[KIND].is_paused
    sql.execute("UPDATE jsworker.limits SET paused_until = clock_timestamp()")
    assert not (await looks.due(database, [KIND])).limits[KIND].is_paused
    [listed] = await limits.list_limits(database, all_keys=True)
    assert (listed["paused_at"], listed["reason"]) == (None, None)
    assert await limits.list_limits(database) == []


async def test_the_keys_that_are_listed_are_counted(database: Database, sql: Sql) -> None:
    await limits.set_numbers(database, KIND, "set", Numbers(1))
    await limits.pause(database, KIND, "paused", seconds=None, paused_by="ann", reason=None)
    await limits.pause(database, KIND, "was paused", seconds=60, paused_by="ann", reason=None)
    sql.execute("UPDATE jsworker.limits SET paused_until = clock_timestamp() WHERE key = 'was paused'")
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key) SELECT %s, unnest(CAST(%s AS text[]))",
        [KIND, ["held", "runs", "rests"]],
    )
    insert_job(sql, "scheduled", **HELD, kind=KIND, limit_key="held")
    insert_job(sql, "processing", kind=KIND, limit_key="runs")
    for numbers in (Numbers(None, 5, 60.0), Numbers(3)):
        await limits.set_numbers(database, KIND, "", numbers)
        listed = await limits.list_limits(database)
        of_keys = [each for each in listed if each["key"]]
        assert await limits.count_keys(database, [KIND, "other"]) == {KIND: len(of_keys), "other": 0}
        own = {each["kind"]: each for each in listed if not each["key"]}
        assert await limits.limits_of_kinds(database, [KIND, "other"]) == own
    assert len(of_keys) == 4


async def test_what_is_listed_is_what_is_not_at_rest_of_all_keys(database: Database, sql: Sql) -> None:
    for kind in ("a", "b", "c"):
        sql.execute(
            "INSERT INTO jsworker.limits (kind, key) SELECT %s, unnest(CAST(%s AS text[]))",
            [kind, ["", "held", "runs", "rests", "rests too"]],
        )
        await limits.pause(database, kind, "paused", seconds=None, paused_by="ann", reason=None)
        await limits.set_numbers(database, kind, "set", Numbers(1))
        insert_job(sql, "scheduled", **HELD, kind=kind, limit_key="held")
        insert_job(sql, "scheduled", **HELD, kind=kind, limit_key="held without a row")
        insert_job(sql, "processing", kind=kind, limit_key="runs")
    await limits.set_numbers(database, "b", "", Numbers(3))
    for which, after in ((None, ("", "")), ("b", ("", "")), (None, ("b", "paused")), ("b", ("b", "paused"))):
        every = await limits.list_limits(database, all_keys=True, kind=which, after=after)
        expected = [
            row for row in every if row["set_by"] or row["held"] or row["running"] or row["paused_at"]
        ]
        assert await limits.list_limits(database, kind=which, after=after) == expected
        assert await limits.list_limits(database, kind=which, after=after, limit=2) == expected[:2]
    assert len(expected) < len(every)


async def test_jobs_of_keys_at_rest_are_not_looked_for(sql: Sql, engine: Engine) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key) SELECT 'k', 'a' || n FROM generate_series(1, 3000) AS n"
    )
    place = {"all": False, "most": 100, "kinds": None, "own": False, "after_kind": "", "after_key": ""}
    with engine.connect() as connection:
        connection.execute(ALONG_INDEX)
        plan = connection.execute(text(f"EXPLAIN (ANALYZE) {limits.LIST.text}"), place).scalars().all()
    scans = [re.search(r" on jobs .* loops=(\d+)", line) for line in plan]
    assert sum(int(scan[1]) for scan in scans if scan is not None) < 50


AT_REST: LiteralString = (
    "INSERT INTO jsworker.limits (kind, key, used_at) VALUES ('k', 'a', clock_timestamp() - interval '2 h')"
)
IN_USE: dict[str, LiteralString] = {
    "of a kind": "key = ''",
    "set by an operator": "set_by = 'operator', max_running = 1",
    "used lately": "used_at = clock_timestamp()",
    "paused": "paused_at = clock_timestamp()",
    "bucket not full": "full_at = clock_timestamp() + interval '1 h'",
}
TIDY_GUARD: dict[str, str] = {
    "of a kind": r"t\.key <> ''",
    "set by an operator": r"t\.set_by IS NULL",
    "used lately": r"t\.used_at < clock_timestamp\(\) - interval '1 hour'",
    "paused": r"coalesce\(t\.paused_until < clock_timestamp\(\), t\.paused_at IS NULL\)",
    "bucket not full": r"coalesce\(t\.full_at < clock_timestamp\(\), true\)",
}


async def test_a_thousand_rows_are_tidied_away_at_once(database: Database, sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.limits (kind, key, used_at)"
        " SELECT 'k', 'a' || n, clock_timestamp() - interval '2 h' FROM generate_series(1, 1500) AS n"
    )
    assert await limits.tidy(database)
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 500
    assert not await limits.tidy(database)
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 0


async def test_keys_of_held_jobs_stay(database: Database, sql: Sql) -> None:
    sql.execute(AT_REST)
    insert_job(sql, "scheduled", **HELD, kind="k", limit_key="a")
    await limits.tidy(database)
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 1


async def test_a_held_job_without_a_key_begins_under_that_of_its_kind(database: Database, sql: Sql) -> None:
    """Its key was removed by hand, or it was inserted without one."""
    held = insert_job(sql, "scheduled", **HELD)
    others = [
        insert_job(sql, "scheduled", **HELD, limit_key=KEY),
        insert_job(sql, "scheduled", **HELD | {"held_by": "needs"}),
        insert_job(sql),
    ]
    before = [read_job(sql, job_id) for job_id in others]
    await limits.tidy(database)
    assert [read_job(sql, job_id) for job_id in others] == before
    assert (KIND, "") in [(key.kind, key.key) for key in await admission.waiting_keys(database)]
    assert await admission.wake(database, worker_id=WORKER, kind=KIND, keys=[""]) == 1
    assert read_job(sql, held)["status"] == "queued"


@pytest.mark.parametrize("what", IN_USE)
async def test_rows_at_rest_alone_are_tidied_away(
    database: Database, sql: Sql, engine: Engine, what: str
) -> None:
    sql.execute(AT_REST)
    await limits.tidy(database)
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 0
    sql.execute(AT_REST)
    sql.execute(SQL("UPDATE jsworker.limits SET {}").format(SQL(IN_USE[what])))
    await limits.tidy(database)
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 1
    with engine.begin() as connection:
        connection.execute(without(limits.TIDY, TIDY_GUARD[what]))
    assert read_value(sql, "SELECT count(*) FROM jsworker.limits") == 0


WRITES: dict[str, tuple[TextClause, str, LiteralString]] = {
    "code over operator": (
        limits.WRITE_CODE,
        r"limits\.set_by IS DISTINCT FROM 'operator'|jsworker\.limits\.set_by IS DISTINCT FROM 'operator'",
        "set_by = 'operator', max_running = 9",
    ),
    "reset of code": (
        limits.RESET,
        r"jsworker\.limits\.set_by = 'operator'",
        "set_by = 'code', max_running = 9",
    ),
    "forget an operator's": (
        limits.FORGET,
        r"jsworker\.limits\.set_by = 'code'",
        "set_by = 'operator', max_running = 9",
    ),
    "pause over pause": (
        limits.PAUSE_FOR,
        r"jsworker\.limits\.paused_until < .*",
        "paused_at = clock_timestamp()",
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_each_predicate_of_what_writes_refuses_alone_and_is_needed(
    sql: Sql, engine: Engine, name: str
) -> None:
    statement, guard, columns = WRITES[name]
    sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, '')", [KIND])
    sql.execute(SQL("UPDATE jsworker.limits SET {}").format(SQL(columns)))
    before = row(sql)
    values = {"kind": KIND, "key": "", "kinds": [KIND], "max_running": 2, "rate": None, "per": None}
    values |= {"seconds": 60.0, "paused_by": "w", "reason": None}
    values |= {"worker_id": WORKER, "id": insert_job(sql, "processing"), "token": 1}
    used = {each: value for each, value in values.items() if f":{each}" in statement.text}
    with engine.begin() as connection:
        connection.execute(statement, used)
    assert row(sql) == before
    with engine.begin() as connection:
        connection.execute(without(statement, guard), {each: used[each] for each in used})
    assert row(sql) != before


@pytest.mark.parametrize(
    ("constraint", "columns"),
    [
        ("limits_kind", "kind = 'A'"),
        ("limits_key", "key = repeat('a', 256)"),
        ("limits_key", "key = E'a\\n'"),
        ("limits_max_running", "max_running = 0, set_by = 'code'"),
        ("limits_max_running", "max_running = 1000001, set_by = 'code'"),
        ("limits_rate", "rate = 0, per = 1, set_by = 'code'"),
        ("limits_rate", "rate = 1, set_by = 'code'"),
        ("limits_rate", "per = 1, set_by = 'code'"),
        ("limits_rate", "rate = 1, per = 'nan', set_by = 'code'"),
        ("limits_rate", "rate = 1, per = 'infinity', set_by = 'code'"),
        ("limits_set_by", "max_running = 1"),
        ("limits_set_by", "max_running = 1, set_by = 'me'"),
        ("limits_paused", "reason = 'x'"),
    ],
)
def test_rows_that_cannot_be(sql: Sql, constraint: str, columns: LiteralString) -> None:
    sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES ('k', 'a')")
    with pytest.raises(CheckViolation) as refused:
        sql.execute(SQL("UPDATE jsworker.limits SET {}").format(SQL(columns)))
    assert refused.value.diag.constraint_name == constraint


async def test_runs_that_others_have_locked_are_counted_later(
    database: Database, sql: Sql, winner: Winner
) -> None:
    locked, free = (insert_job(sql, "processing") for _ in range(2))
    winner.run(text("SELECT 1 FROM jsworker.jobs WHERE id = :id FOR UPDATE"), {"id": locked})
    assert not await limits.count_running(database, KIND)
    assert [read_job(sql, job_id)["limit_key"] for job_id in (locked, free)] == [None, ""]
    winner.rollback()
    assert await limits.count_running(database, KIND)
    assert read_job(sql, locked)["limit_key"] == ""
