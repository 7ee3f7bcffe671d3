import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from alembic import command
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, MigrationMissing, SettingsError
from jsworker.ownership import database as levels
from jsworker.ownership import upgrading
from jsworker.ownership.database import Database
from jsworker.ownership.schema import SCHEMA, metadata
from jsworker.ownership.upgrading import current_revision, upgrade_database

from .catalog import describe_schema
from .conftest import TestDatabases
from .polling import eventually
from .rows import Sql, insert_job, limit_the_time, read_job

HEAD = levels.REVISIONS[-1]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_url(databases: TestDatabases) -> str:
    return databases.create()


AtRevision = Callable[[str], str]


@pytest.fixture(scope="module")
def at_revision(databases: TestDatabases) -> AtRevision:
    """Makes databases of a revision: the first one of each is migrated, all others are copies of it.

    It is migrated from the nearest earlier one that there is.
    """
    templates: dict[str, str | None] = {"": None}

    def make(revision: str) -> str:
        wanted = HEAD if revision == "head" else revision
        if wanted not in templates:
            url = databases.create(templates[max(each for each in templates if each < wanted)])
            upgrade_database(url, wanted)
            templates[wanted] = str(make_url(url).database)
        return databases.create(templates[wanted])

    return make


@contextmanager
def connected(url: str) -> Iterator[Sql]:
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


def test_a_downgrade_is_refused_and_changes_nothing(
    at_revision: AtRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = at_revision("head")
    monkeypatch.setenv("JSWORKER_DATABASE_URL", url)
    with connected(url) as sql:
        insert_job(sql)
        before = describe_schema(sql)
        for revision in ("base", "-1"):
            with pytest.raises(CommandError, match=r"^schema jsworker has no downgrade: leave it as it is"):
                command.downgrade(Config(ROOT / "alembic.ini"), revision)
        assert describe_schema(sql) == before
        assert sql.execute("SELECT 1 FROM jsworker.jobs").rowcount == 1
    assert current_revision(url) == HEAD


def test_an_upgrade_of_the_newest_schema_keeps_every_row(at_revision: AtRevision) -> None:
    url = at_revision("head")
    with connected(url) as sql:
        insert_job(sql)
        assert upgrade_database(url) == HEAD
        assert sql.execute("SELECT 1 FROM jsworker.jobs").rowcount == 1


def test_alembic_finds_no_difference_between_metadata_and_migration(database_url: str) -> None:
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table_schema": SCHEMA,
                "include_schemas": True,
                "include_name": lambda name, kind, _: kind != "schema" or name == SCHEMA,
                "compare_server_default": True,
            },
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_metadata_creates_the_tables_that_the_migration_creates(empty_url: str, observer: Sql) -> None:
    engine = create_engine(make_url(empty_url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA jsworker")
        metadata.create_all(connection)
    engine.dispose()
    migrated = describe_schema(observer)
    with connected(empty_url) as sql:
        created = describe_schema(sql)
    for part in ("columns", "constraints", "indexes"):
        assert created[part] == migrated[part], part
    assert [row[:3] for row in created["relations"]] == [row[:3] for row in migrated["relations"]]
    # These are the migrations' alone.
    assert len(migrated["triggers"]) == 3
    assert len(migrated["functions"]) == 4
    options = {name: options for name, *_, options in migrated["relations"] if options}
    assert options == {
        "jobs": ["fillfactor=60"],
        "statistics": ["fillfactor=50"],
        "workers": ["fillfactor=70"],
    }


def test_a_difference_is_found(at_revision: AtRevision, observer: Sql) -> None:
    migrated = describe_schema(observer)
    url = at_revision("head")
    with connected(url) as sql:
        for part, change in {
            "columns": "ALTER TABLE jsworker.jobs ALTER stage SET DEFAULT ''",
            "constraints": "ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_counters",
            "indexes": "ALTER INDEX jsworker.jobs_due SET (fillfactor = 50)",
            "triggers": "ALTER TABLE jsworker.jobs DISABLE TRIGGER jobs_guard",
            "functions": "ALTER FUNCTION jsworker.refuse_job_update() STABLE",
            "relations": "ALTER TABLE jsworker.workers SET (fillfactor = 100)",
        }.items():
            sql.execute(change.encode())
            assert describe_schema(sql)[part] != migrated[part], part


Tell = Callable[[str], None]


def migrate_by_function(url: str, tell: Tell) -> None:
    upgrade_database(url, tell=tell)


def migrate_by_command(url: str, _: Tell = print) -> None:
    """Do what ``alembic upgrade head`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSWORKER_DATABASE_URL", url)
        command.upgrade(Config(ROOT / "alembic.ini"), "head")


@pytest.mark.parametrize("migrate", [migrate_by_function, migrate_by_command])
async def test_a_second_upgrade_waits_for_the_first(
    empty_url: str, migrate: Callable[[str, Tell], None]
) -> None:
    said: list[str] = []
    engine = create_engine(make_url(empty_url).set(drivername="postgresql+psycopg"))
    with connected(empty_url) as sql:
        with engine.begin() as first:
            upgrading._upgrade_by_one(first, "head", print)
            limit = SQL("ALTER DATABASE {} SET lock_timeout = '1ms'").format(Identifier(sql.info.dbname))
            sql.execute(limit)  # ends no wait for a migration
            second = asyncio.create_task(asyncio.to_thread(migrate, empty_url, said.append))
            waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            await eventually(lambda: sql.execute(waiting).rowcount == 1, "the second upgrade waits")
        await second
        assert describe_schema(sql)["triggers"]
    if migrate is migrate_by_function:
        assert said == ["waiting for another migration, which holds the advisory lock 1785952111"]
    engine.dispose()


async def test_an_open_transaction_keeps_a_migration_waiting_and_nobody_else(at_revision: AtRevision) -> None:
    url = at_revision("0001")
    with connected(url) as holder, connected(url) as other:
        insert_job(other)
        with holder.transaction():
            holder.execute("UPDATE jsworker.jobs SET payload = '[1]'")
            migrating = asyncio.create_task(asyncio.to_thread(upgrade_database, url))
            waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'jsworker.jobs'::regclass"
            await eventually(lambda: other.execute(waits).rowcount == 1, "the migration waits for the table")
            other.execute("SET statement_timeout = '5s'")
            insert_job(other)  # behind the migration's lock, which it gives up after a second
            assert not migrating.done()
        assert await migrating == HEAD


def test_a_transaction_that_does_not_end_is_named(
    at_revision: AtRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrading, "_LONGEST_WAIT_SECONDS", 0.5)
    url = at_revision("0001")
    with connected(url) as holder, holder.transaction():
        holder.execute("LOCK TABLE jsworker.jobs IN ROW EXCLUSIVE MODE")
        pid = holder.info.backend_pid
        with pytest.raises(
            DatabaseRefused, match=rf"cannot be migrated: a table is held by pid {pid} of role"
        ):
            upgrade_database(url)
    assert current_revision(url) == "0001"


def test_a_transaction_of_another_role_is_named_to_a_login_that_may_not_see_its_age(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrading, "_LONGEST_WAIT_SECONDS", 0.5)
    role = f"owner_{secrets.token_hex(4)}"
    own_url = make_url(empty_url).set(username=role).render_as_string(hide_password=False)
    with connected(empty_url) as holder:
        holder.execute(SQL("CREATE ROLE {} LOGIN").format(Identifier(role)))
        database = make_url(empty_url).database or ""
        holder.execute(
            SQL("GRANT CREATE ON DATABASE {} TO {}").format(Identifier(database), Identifier(role))
        )
        upgrade_database(own_url, "0001")
        with holder.transaction():
            holder.execute("LOCK TABLE jsworker.jobs IN ACCESS SHARE MODE")
            named = rf"a table is held by pid {holder.info.backend_pid} of role [^,]*: end it"
            with pytest.raises(DatabaseRefused, match=named):
                upgrade_database(own_url)


def test_a_snapshot_for_which_the_build_of_an_index_waits_is_named(
    at_revision: AtRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a backup of another schema, for example: it holds no lock on the tables."""
    monkeypatch.setattr(upgrading, "_LONGEST_WAIT_SECONDS", 2.0)
    url = at_revision("0007")
    with connected(url) as holder:
        holder.execute(MANY)
        with holder.transaction():
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT CAST('nobody' AS text) AS of_ours")
            named = (
                rf"the build of an index waits for pid {holder.info.backend_pid} of role .*, open for \d+ s"
            )
            with pytest.raises(DatabaseRefused, match=named):
                upgrade_database(url, "0008")
    assert upgrade_database(url, "0008") == "0008"


@pytest.mark.parametrize("how", ["other text", "dropped", "twice"])
def test_a_function_that_was_changed_by_hand_is_named(at_revision: AtRevision, how: str) -> None:
    url = at_revision("0025")
    with connected(url) as sql:
        functions = (
            "SELECT oid::regprocedure::text, pg_get_functiondef(oid) FROM pg_proc WHERE proname = 'enqueue'"
        )
        [function] = sql.execute(functions).fetchall()
        if how == "other text":
            sql.execute(function["pg_get_functiondef"].replace("w.until <=", "w.until  <=").encode())
        elif how == "dropped":
            sql.execute(f"DROP FUNCTION {function['oid']}".encode())
        else:
            sql.execute("CREATE FUNCTION jsworker.enqueue(one int) RETURNS int LANGUAGE sql AS 'SELECT one'")
    with pytest.raises(DatabaseRefused, match=r"jsworker\.enqueue was changed by hand: make it anew"):
        upgrade_database(url)
    assert current_revision(url) == "0025"


def test_an_event_trigger_that_refuses_a_migration_is_named(empty_url: str) -> None:
    with connected(empty_url) as connection:
        connection.execute("""
            CREATE FUNCTION only_at_night() RETURNS event_trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE 'no changes by day'; END $$;
            CREATE EVENT TRIGGER only_at_night ON ddl_command_end EXECUTE FUNCTION only_at_night();
        """)
    with pytest.raises(DatabaseRefused, match=r"cannot be migrated: function only_at_night\(\) .*P0001"):
        upgrade_database(empty_url)


@pytest.mark.parametrize(
    ("written", "validated", "names"),
    [
        ("0003", "0004", ["jobs_kind", "jobs_unique_key"]),
        ("0005", "0006", ["jobs_limits", "jobs_numbers", "jobs_times"]),
        ("0009", "0010", ["jobs_unique_key"]),
    ],
)
def test_the_rules_are_validated_beside_writers_in_a_transaction_of_their_own(
    at_revision: AtRevision, written: str, validated: str, names: list[str]
) -> None:
    url = at_revision(written)
    with connected(url) as sql, connected(url) as writer:
        insert_job(sql)
        with writer.transaction():
            writer.execute("UPDATE jsworker.jobs SET payload = '[1]'")
            assert upgrade_database(url, validated) == validated
        rules = sql.execute(
            "SELECT convalidated FROM pg_constraint WHERE conname = ANY(%s)", [names]
        ).fetchall()
    assert [rule["convalidated"] for rule in rules] == [True] * len(names)


@pytest.mark.parametrize("before", ["0002", "0004", "0008", "0015"])
def test_in_one_transaction_they_are_not_validated_beside_jobs(at_revision: AtRevision, before: str) -> None:
    url = at_revision(before)
    with connected(url) as sql:
        insert_job(sql)
    with pytest.raises(CommandError, match=r"keep workers from their jobs .*: run `jsworker db upgrade`"):
        migrate_by_command(url)
    assert current_revision(url) == before
    assert upgrade_database(url) == HEAD


def test_rows_beyond_the_bounds_are_brought_to_the_nearest(at_revision: AtRevision) -> None:
    """Whatever producers wrote before: the upgrade goes through, and afterwards every row can be moved on."""
    url = at_revision("0004")
    most = 2**53
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("stalls", "queued", {"max_stalls": 2_000_000_000, "max_attempts": 2_000_000_000}),
        ("claimed", "processing", {"max_stalls": 1000}),
        ("dispatch", "queued", {"dispatch": 2**63 - 1}),
        ("ended", "completed", {"dispatch": -5, "fencing_token": 2**63 - 1}),
        ("late", "scheduled", {"run_at": "infinity", "max_attempts": None, "max_stalls": None}),
        ("old", "queued", {"queued_at": "0044-03-15 BC", "stream_created": "-infinity"}),
        ("since when", "queued", {"queued_at": None}),
        ("usual", "queued", {}),
        ("running", "processing", {"dispatch": most, "fencing_token": most}),
    ]
    with connected(url) as sql:
        ids = {name: insert_job(sql, status, **columns) for name, status, columns in cases}
        usual = read_job(sql, ids["usual"])
        upgrade_database(url)
        found = {name: read_job(sql, job_id) for name, job_id in ids.items()}
        assert {name: found["usual"][name] for name in usual} == usual  # later migrations add columns
        sql.execute("UPDATE jsworker.jobs SET dispatch = dispatch + 1, fencing_token = fencing_token + 1")
    assert (found["stalls"]["max_stalls"], found["stalls"]["max_attempts"]) == (100, 1_000_000)
    assert found["claimed"]["max_stalls"] == 1000
    assert (found["dispatch"]["dispatch"], found["dispatch"]["stream_created"]) == (most // 2 - 1, None)
    assert (found["ended"]["dispatch"], found["ended"]["fencing_token"]) == (0, most // 2)
    assert found["late"]["run_at"].year == 9999
    assert (found["late"]["max_attempts"], found["late"]["max_stalls"]) == (None, None)  # the class decides
    assert found["since when"]["queued_at"] == found["since when"]["created_at"]
    assert (found["old"]["queued_at"].year, found["old"]["stream_created"].year) == (2000, 2000)


async def test_a_row_that_is_written_while_the_bounds_are_set_is_brought_to_the_nearest(
    at_revision: AtRevision,
) -> None:
    url = at_revision("0004")
    with connected(url) as producer, connected(url) as other:
        insert_job(other)
        with producer.transaction():
            job_id = insert_job(producer, dispatch=2**63 - 1)
            migrating = asyncio.create_task(asyncio.to_thread(upgrade_database, url))
            waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'jsworker.jobs'::regclass"
            await eventually(lambda: other.execute(waits).rowcount == 1, "the migration waits for the table")
        assert await migrating == HEAD
        assert read_job(other, job_id)["dispatch"] == 2**52 - 1


def test_a_row_that_slipped_through_is_told_to_alembic_and_mended_by_the_upgrade(
    at_revision: AtRevision, observer: Sql
) -> None:
    url = at_revision("0005")
    with connected(url) as sql:
        numbers = "SELECT pg_get_constraintdef(oid) AS rule FROM pg_constraint WHERE conname = 'jobs_numbers'"
        rule = sql.execute(numbers).fetchall()[0]["rule"]
        sql.execute("ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_numbers")
        job_id = insert_job(sql, dispatch=2**63 - 1)
        sql.execute(f"ALTER TABLE jsworker.jobs ADD CONSTRAINT jobs_numbers {rule}".encode())
        with pytest.raises(CommandError, match=r"beyond the bounds .*: run `jsworker db upgrade`"):
            migrate_by_command(url)
        assert upgrade_database(url) == HEAD
        assert read_job(sql, job_id)["dispatch"] == 2**52 - 1
        assert describe_schema(sql)["triggers"] == describe_schema(observer)["triggers"]


MANY = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, attempts, errors, finished_at)
SELECT gen_random_uuid(), 'nap', '{}', CASE n % 2 WHEN 0 THEN 'failed' ELSE 'completed' END, 1, 1,
  CASE n % 2 WHEN 0 THEN 1 ELSE 0 END, now()
FROM generate_series(1, 10001) AS n
"""
BUILT = ("jobs_due_of_kind", "jobs_failed", "jobs_failed_of_kind")


def built(sql: Sql) -> dict[str, bool]:
    """Which indexes of 0008 are there, and whether they are valid."""
    rows = sql.execute(
        "SELECT c.relname, i.indisvalid FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid "
        "WHERE c.relname = ANY(%s)",
        [list(BUILT)],
    )
    return {row["relname"]: row["indisvalid"] for row in rows}


@contextmanager
def many_jobs_in_use(url: str, other: Sql) -> Iterator[None]:
    """Insert jobs and keep a transaction open that has written one: builds of indexes wait for its end."""
    other.execute(MANY)
    with connected(url) as holder, holder.transaction():
        holder.execute(
            "UPDATE jsworker.jobs SET message = '' WHERE id = (SELECT id FROM jsworker.jobs LIMIT 1)"
        )
        yield


async def test_indexes_of_many_jobs_are_built_beside_writers(at_revision: AtRevision) -> None:
    url = at_revision("0007")
    with connected(url) as other:
        with many_jobs_in_use(url, other):
            migrating = asyncio.create_task(asyncio.to_thread(upgrade_database, url, "0008"))
            waits = "SELECT 1 FROM pg_stat_progress_create_index WHERE lockers_total > 0"
            await eventually(
                lambda: other.execute(waits).rowcount == 1, "the build waits for the transaction"
            )
            other.execute("SET statement_timeout = '5s'; SET lock_timeout = '100ms'")
            insert_job(other)  # no transaction waits for it
            assert not migrating.done()
        assert await migrating == "0008"
        assert built(other) == dict.fromkeys(BUILT, True)


def test_an_index_that_was_half_built_is_built_anew(
    at_revision: AtRevision, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = at_revision("0007")
    with connected(url) as sql:
        sql.execute(MANY)
        with connected(url) as holder, holder.transaction():
            holder.execute("UPDATE jsworker.jobs SET message = ''")
            sql.execute("SET lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                sql.execute("CREATE INDEX CONCURRENTLY jobs_failed ON jsworker.jobs (id)")
        assert built(sql) == {"jobs_failed": False}
        assert upgrade_database(url, "0008") == "0008"
        assert built(sql) == dict.fromkeys(BUILT, True)


@pytest.mark.parametrize("since", ["base", "0007"])
def test_no_time_limit_of_the_database_ends_a_migration(
    databases: TestDatabases, at_revision: AtRevision, since: str
) -> None:
    url = databases.create() if since == "base" else at_revision(since)
    with connected(url) as sql:
        if since != "base":
            sql.execute(MANY)
        limit_the_time(sql)
    assert upgrade_database(url, "0008") == "0008"


async def test_two_upgrades_build_an_index_once(at_revision: AtRevision) -> None:
    url = at_revision("0007")
    said: list[str] = []
    with connected(url) as other:
        with many_jobs_in_use(url, other):
            first = asyncio.create_task(asyncio.to_thread(upgrade_database, url, "0008"))
            waits = "SELECT index_relid FROM pg_stat_progress_create_index WHERE lockers_total > 0"
            await eventually(
                lambda: other.execute(waits).rowcount == 1, "the build waits for the transaction"
            )
            index = other.execute(waits).fetchall()[0]["index_relid"]
            second = asyncio.create_task(asyncio.to_thread(upgrade_database, url, "0008", tell=said.append))
            await eventually(lambda: bool(said), "the second upgrade waits for the first")
        assert (await first, await second) == ("0008", "0008")
        assert built(other) == dict.fromkeys(BUILT, True)
        kept = "SELECT CAST(to_regclass('jsworker.jobs_due_of_kind') AS oid) AS index"
        assert other.execute(kept).fetchall() == [{"index": index}]
        assert other.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'").rowcount == 0
    first_wait, *then = said
    assert first_wait == "waiting for another upgrade, which builds indexes"
    # The first may still have to note its revision when its indexes are built.
    assert set(then) <= {"waiting for another migration, which holds the advisory lock 1785952111"}


async def test_a_build_whose_connection_is_ended_is_told_in_one_line(at_revision: AtRevision) -> None:
    url = at_revision("0007")
    with connected(url) as other:
        with many_jobs_in_use(url, other):
            building = asyncio.create_task(asyncio.to_thread(upgrade_database, url, "0008"))
            end = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_progress_create_index WHERE lockers_total > 0"
            )
            await eventually(lambda: other.execute(end).rowcount == 1, "the build waits and is ended")
            with pytest.raises(DatabaseUnavailable, match=r"^PostgreSQL at .* \(SQLSTATE 57P01\)$"):
                await building
        assert await asyncio.to_thread(upgrade_database, url, "0008") == "0008"
        assert built(other) == dict.fromkeys(BUILT, True)


def test_an_index_that_is_missing_in_the_newest_schema_is_built_anew(at_revision: AtRevision) -> None:
    url = at_revision("head")
    with connected(url) as sql:
        sql.execute("DROP INDEX jsworker.jobs_failed")
        upgrade_database(url)
        assert built(sql) == dict.fromkeys(BUILT, True)


def test_in_a_transaction_indexes_of_many_jobs_are_not_built(at_revision: AtRevision) -> None:
    url = at_revision("0007")
    with connected(url) as sql:
        sql.execute(MANY)
        with pytest.raises(CommandError, match=r"keep workers from their jobs: run `jsworker db upgrade`"):
            migrate_by_command(url)
        assert built(sql) == {}


def test_every_migration_is_a_transaction_of_its_own(at_revision: AtRevision) -> None:
    url = at_revision("head")
    with connected(url) as sql:
        by = [
            "SELECT xmin FROM pg_attribute WHERE attrelid = 'jsworker.jobs'::regclass AND attname = 'kind'",
            "SELECT xmin FROM pg_trigger WHERE tgname = 'jobs_live_stay'",
            "SELECT xmin FROM pg_class WHERE oid = 'jsworker.jobs'::regclass",
            "SELECT xmin FROM pg_constraint WHERE conname = 'jobs_kind'",
        ]
        transactions = {sql.execute(query.encode()).fetchone()["xmin"] for query in by}  # type: ignore[index]
    assert len(transactions) == 4


def test_four_upgrades_at_once(empty_url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        reached = list(threads.map(upgrade_database, [empty_url] * 4))
    assert reached == [HEAD] * 4


def test_the_alembic_command_line_migrates(empty_url: str, observer: Sql) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=ROOT,
        env=os.environ | {"JSWORKER_DATABASE_URL": empty_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with connected(empty_url) as sql:
        assert describe_schema(sql) == describe_schema(observer)


def test_alembic_commands_work_without_the_command_line_of_jsworker(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", empty_url)
    config = Config(ROOT / "alembic.ini")
    assert current_revision(empty_url) is None
    command.upgrade(config, "head")
    command.check(config)
    assert current_revision(empty_url) == HEAD


def test_the_alembic_command_names_the_missing_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JSWORKER_DATABASE_URL", raising=False)
    with pytest.raises(SettingsError, match=r"^JSWORKER_DATABASE_URL must be set$"):
        command.current(Config(ROOT / "alembic.ini"))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("DELETE FROM jsworker.alembic_version", r"\(SQLSTATE 42P07\): by jsworker.alembic_version, no m"),
        (
            "INSERT INTO jsworker.alembic_version VALUES ('0003')",
            r"cannot be migrated: table alembic_version must have one row, not 2: 000[13], 000[13]$",
        ),
    ],
)
def test_a_table_of_revisions_that_somebody_has_changed_is_named(
    at_revision: AtRevision, change: LiteralString, rule: str
) -> None:
    url = at_revision("0001")
    with connected(url) as sql:
        sql.execute(change)
    with pytest.raises(DatabaseRefused, match=rule):
        upgrade_database(url)


def test_a_database_of_a_newer_version_is_left_alone(at_revision: AtRevision) -> None:
    url = at_revision("head")
    with connected(url) as sql:
        sql.execute("UPDATE jsworker.alembic_version SET version_num = '9999'")
        with pytest.raises(
            DatabaseRefused, match=r"at migration 9999, which is newer than this version"
        ) as refused:
            upgrade_database(url)
        assert "\n" not in str(refused.value)
        assert current_revision(url) == "9999"


class TestLevel:
    def test_the_revisions_that_are_known_are_those_of_the_scripts(self) -> None:
        scripts = ScriptDirectory.from_config(upgrading._config(None))
        assert [each.revision for each in scripts.walk_revisions()] == list(reversed(levels.REVISIONS))

    def test_this_version(self) -> None:
        levels.check_level(HEAD)

    def test_never_migrated(self) -> None:
        with pytest.raises(MigrationMissing, match="no jsworker schema: run `jsworker db upgrade`"):
            levels.check_level(None)

    def test_older(self) -> None:
        before = levels.REVISIONS[levels.REVISIONS.index(levels.OLDEST_REVISION) - 1]
        needed = f"this version needs {levels.OLDEST_REVISION} or later: run `jsworker db upgrade`"
        with pytest.raises(MigrationMissing, match=f"^the database is at migration {before}, {needed}$"):
            levels.check_level(before)

    def test_the_previous_versions_own_is_enough_and_people_are_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(levels, "REVISIONS", ("0001", "0002", "0003", "0004"))
        monkeypatch.setattr(levels, "OLDEST_REVISION", "0002")
        assert [levels.check_level(each) for each in ("0002", "0003", "0004")] == ["0002", "0003", "0004"]
        for older in ("0002", "0003"):
            assert str(levels.upgrade_advice(older)).startswith(
                f"the database is at migration {older}, older"
            )
        assert [levels.upgrade_advice(each) for each in (None, "0001", "0004", "9999")] == [None] * 4

    def test_newer_is_left_to_work(self) -> None:
        levels.check_level("9999")


async def test_a_worker_refuses_an_empty_database_and_takes_a_migrated_one(empty_url: str) -> None:
    database = Database(empty_url, statement_timeout=3.0)
    with pytest.raises(MigrationMissing):
        await database.check_usable()
    await asyncio.to_thread(upgrade_database, empty_url)
    await database.check_usable()
    assert await database.migrated_to() == HEAD
    await database.close()
