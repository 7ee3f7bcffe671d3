"""``jsworker.enqueue``: what ENQUEUE does, for producers in any language, in their own transactions."""

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import Connection, errors
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Jsonb
from sqlalchemy import Engine, TextClause

from jsworker.client.enqueueing import MOST_ATTEMPTS, MOST_STALLS, enqueue_statement
from jsworker.client.terms import LONGEST_DELAY
from jsworker.core.errors import InvalidName
from jsworker.core.names import check_kind, check_unique_key
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import publish
from jsworker.ownership.transitions.enqueue import ENQUEUE, new_job_id

from .polling import eventually
from .rows import (
    HELD,
    KIND,
    NOW,
    STATES,
    Sql,
    ago,
    change_job,
    event_names,
    insert_job,
    read_job,
    read_value,
)

MAX_PAYLOAD_BYTES = 2**20
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONTRACT = [
    ("kind", "text", None),
    ("payload", "jsonb", "'{}'::jsonb"),
    ("unique_key", "text", "NULL::text"),
    ("delay", "interval", "NULL::interval"),
    ("max_attempts", "integer", "NULL::integer"),
    ("max_stalls", "integer", "NULL::integer"),
    ("traceparent", "text", "NULL::text"),
    ("tracestate", "text", "NULL::text"),
    ("max_payload_bytes", "integer", "1048576"),
    ("limit_key", "text", "NULL::text"),
    ("priority", "text", "'normal'::text"),
    ("run_at", "timestamp with time zone", "NULL::timestamp with time zone"),
    ("expires_in", "interval", "NULL::interval"),
    ("unique_scope", "text", "NULL::text"),
    ("unique_for", "interval", "NULL::interval"),
    ("debounce", "interval", "NULL::interval"),
    ("debounce_max", "interval", "NULL::interval"),
]
"""Version 1: what is here keeps its place, name, type and default for good; more may follow."""


def call(sql: Sql, *given: Any, **named: Any) -> tuple[UUID, bool]:
    """Call the function as a producer does, and return its one row."""
    arguments = ["%s"] * len(given) + [f"{name} => %s" for name in named]
    statement = f"SELECT * FROM jsworker.enqueue({', '.join(arguments)})"  # noqa: S608 -- names of this file
    [row] = sql.execute(statement.encode(), [*given, *named.values()]).fetchall()
    assert list(row) == ["id", "created"]
    return row["id"], row["created"]


@pytest.fixture
def other(database_url: str) -> Iterator[Connection[DictRow]]:
    """A producer's connection whose transactions stay open."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        yield connection
        connection.rollback()


def test_the_contract(sql: Sql) -> None:
    arguments = read_value(sql, "SELECT pg_get_function_arguments('jsworker.enqueue'::regproc)")
    said = [
        f"{name} {type_}" + (f" DEFAULT {default}" if default else "") for name, type_, default in CONTRACT
    ]
    assert arguments.split(", OUT ")[0].split(", ")[: len(said)] == said
    assert read_value(sql, "SELECT pg_get_function_result('jsworker.enqueue'::regproc)") == "record"
    assert read_value(sql, "SELECT count(*) FROM pg_proc WHERE proname = 'enqueue'") == 1
    row = sql.execute(
        "SELECT prosecdef, proconfig, obj_description(oid) AS said FROM pg_proc"
        " WHERE oid = 'jsworker.enqueue'::regproc"
    ).fetchone()
    assert row is not None
    assert (row["prosecdef"], row["proconfig"]) == (False, ["search_path=pg_catalog, pg_temp"])
    assert row["said"].startswith("jsworker SQL contract 1")


def columns_of(insert: str) -> set[str]:
    found = re.search(r"INSERT INTO jsworker\.jobs \(([\w\s,]+)\)", insert)
    assert found
    return {name.strip() for name in found[1].split(",")}


def run_statement(engine: Engine, statement: TextClause) -> tuple[UUID, bool]:
    """Execute a statement as an application does that has a transaction of its own."""
    with engine.begin() as connection:
        row = connection.execute(statement).one()
    return row.id, row.created


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare rows of two kinds; instants by whether they are there, and about when."""
    assert set(one) == set(other)
    for name in set(one) - {"id", "kind"}:
        if isinstance(one[name], datetime) and isinstance(other[name], datetime):
            assert abs((one[name] - other[name]).total_seconds()) < 60, name
        else:
            assert one[name] == other[name], name


HOUR = timedelta(hours=1)
IN_SQL = {"unique": "unique_scope"}
"""Options of the client that have another name here: UNIQUE is a word of SQL's own."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"payload": [1, "é"], "unique_key": "order:12"},
    {"payload": None, "delay": HOUR},
    {"unique_key": "k", "delay": timedelta(0), "max_attempts": 7, "max_stalls": 100},
    {"limit_key": "tenant 7", "priority": "high"},
    {"priority": "low"},
    {"priority": "normal"},
    {"run_at": datetime.now(UTC) + HOUR, "expires_in": 2 * HOUR},
    {"run_at": datetime(2020, 1, 1, tzinfo=UTC)},
    {"run_at": datetime.now(UTC) + HOUR, "delay": timedelta(0)},
    {"unique_key": "k", "expires_in": HOUR, "unique": "live"},
    {"unique_key": "k", "unique": "waiting"},
    {"unique_key": "k", "unique": "waiting", "run_at": datetime.now(UTC) + HOUR, "limit_key": "acme"},
    {"unique_key": "k", "unique_for": HOUR},
    {"unique_key": "k", "unique_for": HOUR, "unique": "live", "delay": 2 * HOUR, "priority": "low"},
    {"unique_key": "k", "debounce": HOUR},
    {"unique_key": "k", "debounce": HOUR, "delay": timedelta(0)},
    {"unique_key": "k", "debounce": HOUR, "unique": "waiting", "expires_in": 2 * HOUR, "limit_key": "acme"},
    {"unique_key": "k", "debounce": HOUR, "debounce_max": 2 * HOUR, "second": {"debounce": 2 * HOUR}},
    {
        "unique_key": "k",
        "debounce": HOUR,
        "debounce_max": HOUR * 1.5,
        "limit_key": "acme",
        "second": {"debounce": HOUR * 1.5, "debounce_max": 9 * HOUR, "limit_key": "other"},
    },
]
"""As ``enqueue_statement`` takes them; ``second``: what the second of two calls has instead."""


def test_the_span_of_a_producer(sql: Sql) -> None:
    job = read_job(sql, call(sql, KIND, traceparent=TRACEPARENT, tracestate="vendor=1")[0])
    assert (job["traceparent"], job["tracestate"]) == (TRACEPARENT, "vendor=1")


def test_an_instant_and_an_expiry(sql: Sql) -> None:
    [later] = sql.execute("SELECT clock_timestamp() + interval '1 hour' AS at").fetchall()
    job = read_job(sql, call(sql, KIND, run_at=later["at"], expires_in="2 hours")[0])
    assert (job["status"], job["run_at"], job["needs_publish"]) == ("scheduled", later["at"], False)
    assert abs((job["expires_at"] - job["created_at"]).total_seconds() - 7200) < 60
    past = read_job(sql, call(sql, KIND, run_at="2020-01-01 00:00:00+00")[0])
    assert (past["status"], past["run_at"].year, past["dispatch"]) == ("queued", 2020, 1)


class TestAsEnqueue:
    def test_the_columns_are_the_same(self, sql: Sql) -> None:
        function = read_value(sql, "SELECT prosrc FROM pg_proc WHERE oid = 'jsworker.enqueue'::regproc")
        assert columns_of(function) == columns_of(ENQUEUE.text) | {"expires_at", "waiting_key"}

    @pytest.mark.parametrize("given", OPTIONS, ids=lambda given: ",".join(given) or "none")
    def test_the_rows_are_those_of_the_client(self, sql: Sql, engine: Engine, given: dict[str, Any]) -> None:
        """Of the first call with these options, and of a second one."""
        payload, second = given.get("payload", {}), given.get("second", {})
        options = {name: value for name, value in given.items() if name not in {"payload", "second"}}
        of_client = [
            run_statement(engine, enqueue_statement("other-kind", payload, **options)),
            run_statement(engine, enqueue_statement("other-kind", [2], **options | second)),
        ]
        in_sql = {IN_SQL.get(name, name): value for name, value in options.items()}
        of_function = [
            call(sql, KIND, json.dumps(payload), **in_sql),
            call(sql, KIND, "[2]", **in_sql | {IN_SQL.get(name, name): of for name, of in second.items()}),
        ]
        assert [created for _, created in of_function] == [created for _, created in of_client]
        for (job_id, _), (twin_id, _) in zip(of_function, of_client, strict=True):
            assert_alike(read_job(sql, job_id), read_job(sql, twin_id))
        windows = "SELECT kind, until FROM jsworker.unique_windows ORDER BY kind"
        of_kinds = {row["kind"]: row for row in sql.execute(windows).fetchall()}
        assert set(of_kinds) in (set(), {KIND, "other-kind"})
        if of_kinds:
            assert_alike(of_kinds[KIND], of_kinds["other-kind"])

    def test_ids_rise_with_time(self, sql: Sql) -> None:
        ids = [call(sql, KIND)[0] for _ in range(20)]
        assert all(each.version == 7 for each in ids)
        assert len(set(ids)) == 20
        milliseconds = [each.int >> 80 for each in ids]
        assert milliseconds == sorted(milliseconds)
        assert abs(milliseconds[0] - (new_job_id().int >> 80)) < 60_000

    async def test_the_relay_takes_it_after_the_commit_and_not_before(
        self, database: Database, sql: Sql, other: Connection[DictRow]
    ) -> None:
        job_id, _ = call(other, KIND)
        later, _ = call(other, KIND, delay="1 hour")
        assert await publish.take_outgoing(database, limit=10) == []
        other.commit()
        assert [each.id for each in await publish.take_outgoing(database, limit=10)] == [job_id]
        assert read_job(sql, later)["status"] == "scheduled"

    def test_a_rolled_back_producer_leaves_nothing(self, sql: Sql, other: Connection[DictRow]) -> None:
        call(other, KIND, unique_key="k")
        other.rollback()
        assert call(sql, KIND, unique_key="k")[1]


class TestUniqueKeys:
    @pytest.mark.parametrize("status", ["scheduled", "queued", "processing"])
    def test_a_live_job_holds_the_key(self, sql: Sql, status: str) -> None:
        holder = insert_job(sql, status, unique_key="k")
        before = read_job(sql, holder)
        assert call(sql, KIND, '{"new": 1}', unique_key="k") == (holder, False)
        assert read_job(sql, holder) == before

    @pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
    def test_an_ended_job_does_not(self, sql: Sql, status: str) -> None:
        insert_job(sql, status, unique_key="k")
        assert call(sql, KIND, unique_key="k")[1]

    def test_a_key_belongs_to_its_kind(self, sql: Sql) -> None:
        insert_job(sql, unique_key="k", kind="other-kind")
        assert call(sql, KIND, unique_key="k")[1]

    @pytest.mark.usefixtures("sql")
    def test_twice_in_one_transaction(self, other: Connection[DictRow]) -> None:
        first, created = call(other, KIND, unique_key="k")
        assert created
        assert call(other, KIND, unique_key="k") == (first, False)

    @pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
    async def test_a_twin_that_is_not_committed_is_waited_for(
        self, database_url: str, sql: Sql, other: Connection[DictRow], end: str
    ) -> None:
        first, _ = call(other, KIND, unique_key="k")

        def second() -> tuple[UUID, bool]:
            with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
                return call(connection, KIND, unique_key="k")

        waiting = asyncio.create_task(asyncio.to_thread(second))
        blocked = "SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
        await eventually(lambda: sql.execute(blocked).rowcount == 1, "the second producer waits")
        other.execute(end.encode())
        found, created = await waiting
        assert (found == first, created) == ((True, False) if end == "COMMIT" else (False, True))

    async def test_a_window_that_ends_before_its_commit_has_a_job_that_lives(
        self, database_url: str, sql: Sql, other: Connection[DictRow]
    ) -> None:
        first, _ = call(other, KIND, unique_key="k", unique_for="1 hour")
        other.execute("UPDATE jsworker.unique_windows SET until = now() - interval '1 s'")

        def second() -> tuple[UUID, bool]:
            with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
                return call(connection, KIND, unique_key="k", unique_for="1 hour")

        waiting = asyncio.create_task(asyncio.to_thread(second))
        blocked = "SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
        await eventually(lambda: sql.execute(blocked).rowcount == 1, "the second producer waits")
        other.commit()
        assert await waiting == (first, False)

    async def test_an_owner_goes_on_while_a_producer_waits_to_commit(
        self, sql: Sql, other: Connection[DictRow]
    ) -> None:
        holder = insert_job(sql, "processing", unique_key="k")
        assert call(other, KIND, unique_key="k") == (holder, False)
        sql.execute("SET lock_timeout = '5s'")
        sql.execute("UPDATE jsworker.jobs SET last_activity_at = clock_timestamp() WHERE id = %s", [holder])
        sql.execute("RESET lock_timeout")

    async def test_twins_at_once_create_one_job(self, database_url: str, sql: Sql) -> None:
        def one() -> tuple[UUID, bool]:
            with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
                return call(connection, KIND, unique_key="k")

        answers = await asyncio.gather(*(asyncio.to_thread(one) for _ in range(8)))
        assert sum(created for _, created in answers) == 1
        assert len({job_id for job_id, _ in answers}) == 1
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 1

    def test_a_key_that_is_taken_and_freed_too_fast(self, sql: Sql) -> None:
        sql.execute("CREATE SEQUENCE tries")
        sql.execute(
            "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM nextval('public.tries'); RETURN NULL; END $$"
        )
        sql.execute(
            "CREATE TRIGGER vanish BEFORE INSERT ON jsworker.jobs FOR EACH ROW EXECUTE FUNCTION vanish()"
        )
        try:
            with pytest.raises(errors.SerializationFailure) as refused:
                call(sql, KIND, unique_key="k")
            assert refused.value.diag.message_primary == (
                f'unique_key "k" of kind {KIND} is taken and freed too fast; try again'
            )
            assert read_value(sql, "SELECT last_value FROM tries") == 3
        finally:
            sql.execute("DROP FUNCTION vanish() CASCADE")
            sql.execute("DROP SEQUENCE tries")

    def test_at_a_stricter_isolation_a_twin_is_a_serialisation_failure(
        self, sql: Sql, other: Connection[DictRow]
    ) -> None:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM jsworker.jobs")
        call(sql, KIND, unique_key="k")
        with pytest.raises(errors.SerializationFailure):
            call(other, KIND, unique_key="k")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": None}, "kind NULL must match ^[a-z0-9][a-z0-9_-]{0,63}$"),
    ({"kind": ""}, 'kind "" must match'),
    ({"kind": "Echo"}, 'kind "Echo" must match'),
    ({"kind": "a.b"}, 'kind "a.b" must match'),
    ({"kind": "echo\n"}, r'kind "echo\n" must match'),
    ({"kind": "a" * 65}, "must match"),
    ({"kind": "é"}, 'kind "é" must match'),
    ({"payload": None}, "payload must be JSON, not NULL"),
    (
        {"payload": '"' + "a" * MAX_PAYLOAD_BYTES + '"'},
        "payload of 1048578 bytes exceeds max_payload_bytes=1048576",
    ),
    ({"payload": "[1, 2]", "max_payload_bytes": 5}, "payload of 6 bytes exceeds max_payload_bytes=5"),
    ({"max_payload_bytes": None}, "payload of 2 bytes exceeds max_payload_bytes=NULL"),
    ({"unique_key": ""}, 'unique_key "" must be text of 1 to 255 printable characters'),
    ({"unique_key": "k" * 256}, "must be text of 1 to 255 printable characters"),
    ({"unique_key": "a\tb"}, r'unique_key "a\tb" must be text of 1 to 255 printable characters'),
    ({"unique_key": "a\u2028b"}, "must be text of 1 to 255 printable characters"),
    ({"delay": "-1 second"}, "delay=-00:00:01 must be from 0 to 316224000 seconds"),
    ({"delay": "11 years"}, "delay=11 years must be from 0 to 316224000 seconds"),
    ({"delay": "infinity"}, "delay=infinity must be from 0 to 316224000 seconds"),
    ({"delay": "-infinity"}, "delay=-infinity must be from 0 to 316224000 seconds"),
    ({"limit_key": ""}, 'limit_key "" must be text of 1 to 255 printable characters'),
    ({"limit_key": "k" * 256}, "must be text of 1 to 255 printable characters"),
    ({"limit_key": "a\tb"}, r'limit_key "a\tb" must be text of 1 to 255 printable characters'),
    ({"priority": "urgent"}, 'priority "urgent" must be high, normal or low'),
    ({"priority": None}, "priority NULL must be high, normal or low"),
    ({"run_at": "1999-01-01 00:00:00+00"}, "must be from 2000 on and at most ten years ahead"),
    ({"run_at": "infinity"}, "run_at=infinity must be from 2000 on and at most ten years ahead"),
    ({"run_at": "2030-01-01 00:00:00+00", "delay": "1 s"}, "delay and run_at: give one of them"),
    ({"expires_in": "0"}, "expires_in=00:00:00 must be more than 0"),
    ({"expires_in": "-1 s"}, "expires_in=-00:00:01 must be more than 0"),
    ({"expires_in": "11 years"}, "expires_in=11 years must be more than 0 and at most 316224000 seconds"),
    (
        {"expires_in": "1 s", "delay": "1 min"},
        "expires_in=00:00:01 ends before the job is due: delay=00:01:00",
    ),
    ({"unique_scope": "all", "unique_key": "k"}, 'unique_scope "all" must be live or waiting'),
    ({"unique_scope": "waiting"}, "unique_scope=waiting needs a unique_key"),
    ({"unique_for": "1 hour"}, "unique_for=01:00:00 needs a unique_key"),
    ({"debounce": "1 s"}, "debounce=00:00:01 needs a unique_key"),
    ({"debounce_max": "1 s"}, "debounce_max=00:00:01 needs a unique_key"),
    ({"unique_key": "k", "unique_for": "0"}, "unique_for=00:00:00 must be more than 0 and at most 316224000"),
    ({"unique_key": "k", "unique_for": "infinity"}, "unique_for=infinity must be more than 0"),
    ({"unique_key": "k", "debounce": "0"}, "debounce=00:00:00 must be more than 0 and at most 316224000"),
    ({"unique_key": "k", "debounce": "-1 s"}, "debounce=-00:00:01 must be more than 0"),
    (
        {"unique_key": "k", "debounce": "1 s", "debounce_max": "11 years"},
        "debounce_max=11 years must be more than 0 and at most 316224000 seconds",
    ),
    (
        {"unique_key": "k", "unique_for": "1 s", "unique_scope": "waiting"},
        "unique_for=00:00:01 and unique_scope=waiting: give one of them",
    ),
    (
        {"unique_key": "k", "debounce": "1 s", "unique_scope": "live"},
        "debounce=00:00:01 and unique_scope=live: give one of them",
    ),
    (
        {"unique_key": "k", "debounce": "1 s", "unique_for": "1 s"},
        "debounce=00:00:01 and unique_for=00:00:01: give one of them",
    ),
    (
        {"unique_key": "k", "debounce": "1 s", "delay": "2 s"},
        "debounce=00:00:01 and delay=00:00:02: give one of them",
    ),
    ({"unique_key": "k", "debounce": "1 s", "run_at": "2030-01-01 00:00:00+00"}, "give one of them"),
    ({"unique_key": "k", "debounce_max": "1 s"}, "debounce_max=00:00:01 needs debounce"),
    (
        {"unique_key": "k", "debounce": "2 s", "debounce_max": "1 s"},
        "debounce=00:00:02 must not be longer than debounce_max=00:00:01",
    ),
    (
        {"unique_key": "k", "debounce": "1 min", "expires_in": "1 s"},
        "expires_in=00:00:01 ends before the job is due: debounce=00:01:00",
    ),
    ({"max_attempts": 0}, "max_attempts=0 must be from 1 to 1000000"),
    ({"max_attempts": MOST_ATTEMPTS + 1}, "max_attempts=1000001 must be from 1 to 1000000"),
    ({"max_stalls": 0}, "max_stalls=0 must be from 1 to 100"),
    ({"max_stalls": MOST_STALLS + 1}, "max_stalls=101 must be from 1 to 100"),
    ({"traceparent": "00-aa"}, 'traceparent "00-aa" must be a traceparent of W3C Trace Context'),
    ({"tracestate": "a" * 513}, "must be 1 to 512 printable characters of ASCII"),
    ({"tracestate": ""}, 'tracestate "" must be'),
    ({"tracestate": "a\nb"}, r'tracestate "a\nb" must be 1 to 512 printable characters of ASCII'),
]


class TestBadInput:
    @pytest.mark.parametrize(("given", "said"), BAD)
    def test_is_told_in_one_line(self, sql: Sql, given: dict[str, Any], said: str) -> None:
        with pytest.raises(errors.InvalidParameterValue) as refused:
            call(sql, **{"kind": KIND} | given)
        message = str(refused.value.diag.message_primary)
        assert said in message
        assert len(message) < 200
        assert "\n" not in message
        assert refused.value.sqlstate == "22023"
        assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 0

    def test_neither_payload_nor_secret_is_repeated(self, sql: Sql) -> None:
        with pytest.raises(errors.InvalidParameterValue) as refused:
            call(sql, "Echo", '{"password": "hunter2"}')
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize("payload", ["{", "NaN", '"\\u0000"', ""])
    def test_what_is_no_json(self, sql: Sql, payload: str) -> None:
        with pytest.raises((errors.InvalidTextRepresentation, errors.UntranslatableCharacter)):
            call(sql, KIND, payload)

    def test_what_is_just_allowed(self, sql: Sql) -> None:
        call(sql, "a" * 64, '"' + "a" * (MAX_PAYLOAD_BYTES - 2) + '"', "k" * 255)
        call(sql, KIND, unique_key="a\u00a0b\u200dc")  # clients in Python refuse what is invisible
        call(sql, KIND, delay=f"{LONGEST_DELAY} seconds", max_attempts=MOST_ATTEMPTS, max_stalls=MOST_STALLS)

    @pytest.mark.parametrize("kind", ["", "Echo", "a.b", "-a", "_a", "0", "a" * 64, "a" * 65, "a b", "a\n"])
    def test_kinds_are_judged_as_by_the_client(self, sql: Sql, kind: str) -> None:
        try:
            check_kind(kind)
        except InvalidName:
            with pytest.raises(errors.InvalidParameterValue):
                call(sql, kind)
        else:
            call(sql, kind)

    @pytest.mark.parametrize("key", ["order:12", "é", "a b", "\x7f", "\x85", "a" * 255, "a" * 256, "\u2029"])
    def test_keys_are_judged_as_by_the_client(self, sql: Sql, key: str) -> None:
        try:
            check_unique_key(key)
        except InvalidName:
            with pytest.raises(errors.InvalidParameterValue):
                call(sql, KIND, unique_key=key)
        else:
            call(sql, KIND, unique_key=key)

    @pytest.mark.usefixtures("sql")
    def test_a_callers_search_path_and_settings_change_nothing(self, other: Connection[DictRow]) -> None:
        other.execute("CREATE SCHEMA mine")
        for name in ("octet_length(text)", "clock_timestamp()", "gen_random_uuid()"):
            other.execute(
                f"CREATE FUNCTION mine.{name} RETURNS int LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE 'hijacked'; END $$".encode()
            )
        other.execute("SET search_path = mine, pg_catalog")
        other.execute("SET standard_conforming_strings = off")
        assert call(other, KIND, unique_key="u0001")[1]
        with pytest.raises(errors.InvalidParameterValue):
            call(other, KIND, unique_key="a\tb")


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", None])
def test_a_window_outlives_its_job(sql: Sql, status: str | None) -> None:
    ended = insert_job(sql, status) if status else UUID(int=7)
    sql.execute(
        "INSERT INTO jsworker.unique_windows VALUES (%s, 'a', %s, clock_timestamp() + interval '1 hour')",
        [KIND, ended],
    )
    assert call(sql, KIND, unique_key="a", unique_for="1 s") == (ended, False)
    sql.execute("UPDATE jsworker.unique_windows SET until = clock_timestamp() - interval '1 s'")
    second, created = call(sql, KIND, unique_key="a", unique_for="1 hour")
    assert (created, second == ended) == (True, False)
    assert call(sql, KIND, unique_key="a", unique_for="1 hour") == (second, False)


@pytest.mark.parametrize(
    ("expires_at", "fencing_token", "created"),
    [(None, 0, False), (ago(1), 0, True), (ago(1), 1, False)],
    ids=["live", "expired", "claimed in time"],
)
def test_a_window_that_is_over_is_held_by_a_live_job(
    sql: Sql, expires_at: Any, fencing_token: int, *, created: bool
) -> None:
    first = insert_job(sql, expires_at=expires_at, fencing_token=fencing_token)
    sql.execute(
        "INSERT INTO jsworker.unique_windows VALUES (%s, 'a', %s, clock_timestamp() - interval '1 s')",
        [KIND, first],
    )
    job_id, is_new = call(sql, KIND, unique_key="a", unique_for="1 hour")
    assert (is_new, job_id == first) == (created, not created)


async def test_twins_of_a_window_create_one_job(database_url: str, sql: Sql) -> None:
    def one() -> tuple[UUID, bool]:
        with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
            return call(connection, KIND, unique_key="k", unique_for="1 hour")

    answers = await asyncio.gather(*(asyncio.to_thread(one) for _ in range(8)))
    assert sum(created for _, created in answers) == 1
    assert len({job_id for job_id, _ in answers}) == 1
    assert read_value(sql, "SELECT count(*) FROM jsworker.jobs") == 1


@pytest.mark.parametrize("option", [{"unique_scope": "waiting"}, {"debounce": "1 hour"}])
def test_one_may_wait_beside_one_that_runs(sql: Sql, option: dict[str, str]) -> None:
    running = insert_job(sql, "processing", waiting_key="a")
    waits, created = call(sql, KIND, unique_key="a", **option)
    assert (created, waits == running) == (True, False)
    assert call(sql, KIND, unique_key="a", **option) == (waits, False)


def debounce_again(sql: Sql, **columns: Any) -> dict[str, Any]:
    """Enqueue a job that debounces, change its row, enqueue once more and return the row."""
    first, _ = call(sql, KIND, '{"n": 1}', unique_key="a", debounce="1 hour", debounce_max="3 hours")
    change_job(sql, first, **columns)
    more = {"debounce": "2 hours", "limit_key": None, "expires_in": "9 hours"}
    assert call(sql, KIND, '{"n": 2}', unique_key="a", **more) == (first, False)
    return read_job(sql, first)


@pytest.mark.parametrize(
    ("columns", "ahead"),
    [
        ({"dispatch": 0}, 7200),
        ({"debounce_until": ago(-5000)}, 5000),
        ({"debounce_until": ago(-1000)}, 3600),
        ({"status": "queued", "dispatch": 1, "queued_at": NOW, "publish_after": NOW}, 3600),
        ({"fencing_token": 1, "attempts": 1, "errors": 1}, 3600),
        ({"behind": UUID(int=7)}, 3600),
    ],
    ids=["waits", "at most so far", "never earlier", "queued", "claimed before", "behind another"],
)
def test_a_further_call_moves_back_what_was_never_due(
    sql: Sql, columns: dict[str, Any], ahead: float
) -> None:
    job = debounce_again(sql, **columns)
    assert job["payload"] == {"n": 2}
    assert abs((job["run_at"] - job["created_at"]).total_seconds() - ahead) < 60
    expires = job["expires_at"]
    assert (expires is None) == ("fencing_token" in columns)


def test_what_was_made_of_the_payload_before_goes_with_it(sql: Sql) -> None:
    first, _ = call(sql, KIND, unique_key="a", debounce="1 hour", debounce_max="3 hours")
    before = read_job(sql, first)["debounce_until"]
    other = insert_job(sql)
    change_job(sql, first, checkpoint=Jsonb({"page": 3}))
    for job_id in (first, other):
        sql.execute(
            "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token)"
            " VALUES (%s, 'charge', '1', 1)",
            [job_id],
        )
    call(sql, KIND, unique_key="a", debounce="1 hour", debounce_max="9 hours")
    job = read_job(sql, first)
    assert (job["checkpoint"], job["debounce_until"]) == (None, before)
    assert [row["job_id"] for row in sql.execute("SELECT job_id FROM jsworker.job_steps").fetchall()] == [
        other
    ]


@pytest.mark.parametrize(("limit_key", "waits_under"), [("acme", "acme"), (None, "")])
def test_what_is_held_by_a_limit_waits_under_the_new_key(
    sql: Sql, limit_key: str | None, waits_under: str
) -> None:
    held = insert_job(sql, "scheduled", **HELD | {"limit_key": "before", "waiting_key": "a"})
    assert call(sql, KIND, unique_key="a", debounce="1 hour", limit_key=limit_key) == (held, False)
    assert read_job(sql, held)["limit_key"] == waits_under


async def debounced_behind(other: Connection[DictRow], database_url: str, sql: Sql) -> tuple[UUID, bool]:
    """Return what a call answers that has waited for the transaction of ``other``, which this commits."""

    def second() -> tuple[UUID, bool]:
        with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
            return call(connection, KIND, '{"n": 2}', unique_key="k", debounce="1 hour")

    waiting = asyncio.create_task(asyncio.to_thread(second))
    blocked = "SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
    await eventually(lambda: sql.execute(blocked).rowcount == 1, "the second producer waits")
    other.commit()
    return await waiting


async def test_a_debouncer_waits_for_a_twin_that_is_not_committed(
    database_url: str, sql: Sql, other: Connection[DictRow]
) -> None:
    first, _ = call(other, KIND, '{"n": 1}', unique_key="k", debounce="1 hour")

    assert await debounced_behind(other, database_url, sql) == (first, False)
    assert read_job(sql, first)["payload"] == {"n": 2}


async def test_what_was_claimed_meanwhile_is_left_alone(
    database_url: str, sql: Sql, other: Connection[DictRow]
) -> None:
    first = insert_job(sql, payload=Jsonb({"n": 1}), waiting_key="k")
    claim = STATES["processing"] | {"status": "processing", "needs_publish": False}
    change_job(other, first, **claim)

    found, created = await debounced_behind(other, database_url, sql)
    assert (created, found == first) == (True, False)
    assert read_job(sql, first)["payload"] == {"n": 1}


@pytest.mark.parametrize("key", ["unique_key", "waiting_key"])
@pytest.mark.parametrize("expires_in", ["1 hour", None])
def test_what_has_expired_holds_no_key(sql: Sql, expires_in: str | None, key: str) -> None:
    first = insert_job(sql, expires_at=ago(1), **{key: "a"})
    scope = "live" if key == "unique_key" else "waiting"
    second, created = call(sql, KIND, unique_key="a", expires_in=expires_in, unique_scope=scope)
    assert (created, second == first) == (True, False)
    row = read_job(sql, first)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "expired")
    assert event_names(sql, first) == ["cancelled"]
    assert call(sql, KIND, unique_key="a", unique_scope=scope) == (second, False)


@pytest.mark.parametrize(
    "columns",
    [{"expires_at": ago(-60)}, {"expires_at": ago(1), "fencing_token": 1}],
    ids=["not yet", "claimed"],
)
def test_what_has_not_or_began_before_holds_it(sql: Sql, columns: dict[str, Any]) -> None:
    first = insert_job(sql, unique_key="a", **columns)
    assert call(sql, KIND, unique_key="a") == (first, False)
