"""``jsworker.enqueue``: what ENQUEUE does, for producers in any language, in their own transactions."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import Connection, errors
from psycopg.rows import DictRow, dict_row

from jsworker.client.enqueueing import MAX_PAYLOAD_BYTES, MOST_ATTEMPTS, MOST_STALLS
from jsworker.client.terms import LONGEST_DELAY
from jsworker.core.errors import InvalidName
from jsworker.core.names import check_kind, check_unique_key
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import publish
from jsworker.ownership.transitions.enqueue import ENQUEUE, NewJob, enqueue, new_job_id

from .polling import eventually
from .rows import KIND, Sql, ago, event_names, insert_job, read_job, read_value

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
        assert columns_of(function) == columns_of(ENQUEUE.text) | {"expires_at"}

    @pytest.mark.parametrize(
        ("new", "given"),
        [
            (NewJob(UUID(int=0), "{}"), {}),
            (NewJob(UUID(int=0), '[1, "é"]', "order:12"), {"payload": '[1, "é"]', "unique_key": "order:12"}),
            (NewJob(UUID(int=0), "null", None, 3600.0), {"payload": "null", "delay": "1 hour"}),
            (
                NewJob(UUID(int=0), "{}", "k", 0.0, 7, 100, TRACEPARENT, "vendor=1"),
                {
                    "unique_key": "k",
                    "delay": "0",
                    "max_attempts": 7,
                    "max_stalls": 100,
                    "traceparent": TRACEPARENT,
                    "tracestate": "vendor=1",
                },
            ),
            (
                NewJob(UUID(int=0), "{}", limit_key="tenant 7", priority=0),
                {"limit_key": "tenant 7", "priority": "high"},
            ),
            (NewJob(UUID(int=0), "{}", priority=2), {"priority": "low"}),
        ],
    )
    async def test_the_rows_are_the_same(
        self, database: Database, sql: Sql, new: NewJob, given: dict[str, Any]
    ) -> None:
        job_id, created = call(sql, KIND, **given)
        assert created
        made = read_job(sql, job_id)
        # Keys are of the live: the twin takes another kind.
        answer = await enqueue(database, "other-kind", new._replace(id=new_job_id()), publish_after=0.0)
        twin = read_job(sql, answer.id)
        instants = ("run_at", "queued_at", "publish_after", "created_at")
        for name in instants:
            assert (made[name] is None) == (twin[name] is None), name
            if made[name] is not None:
                assert abs((twin[name] - made[name]).total_seconds()) < 60, name
        apart = {"id", "kind", *instants}
        assert {name: made[name] for name in made if name not in apart} == {
            name: twin[name] for name in twin if name not in apart
        }

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
    ({"expires_in": "1 s", "delay": "1 min"}, "expires_in=00:00:01 ends before the job is due"),
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


@pytest.mark.parametrize("expires_in", ["1 hour", None])
def test_what_has_expired_holds_no_key(sql: Sql, expires_in: str | None) -> None:
    first = insert_job(sql, unique_key="a", expires_at=ago(1))
    second, created = call(sql, KIND, unique_key="a", expires_in=expires_in)
    assert (created, second == first) == (True, False)
    row = read_job(sql, first)
    assert (row["status"], row["failure_reason"]) == ("cancelled", "expired")
    assert event_names(sql, first) == ["cancelled"]
    assert call(sql, KIND, unique_key="a") == (second, False)


@pytest.mark.parametrize(
    "columns",
    [{"expires_at": ago(-60)}, {"expires_at": ago(1), "fencing_token": 1}],
    ids=["not yet", "claimed"],
)
def test_what_has_not_or_began_before_holds_it(sql: Sql, columns: dict[str, Any]) -> None:
    first = insert_job(sql, unique_key="a", **columns)
    assert call(sql, KIND, unique_key="a") == (first, False)
