"""The SQL of the migrations, for those who apply it by hand: it makes what the migrations make."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from alembic.util import CommandError
from psycopg.rows import dict_row

from alembic import command
from jsworker.ownership.database import REVISIONS
from jsworker.ownership.upgrading import _config, current_revision, upgrade_database, upgrade_script
from tests.support.servers import TestServers

from .catalog import describe_schema
from .conftest import TestDatabases
from .rows import Sql, insert_job, limit_the_time

HEAD = REVISIONS[-1]
Psql = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture
def psql(servers: TestServers, tmp_path: Path) -> Psql:
    def run(url: str, script: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "upgrade.sql"
        file.write_text(script)
        psql = [
            str(servers.postgres.program("psql")),
            "-X",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-f",
            str(file),
            url,
        ]
        return subprocess.run(psql, capture_output=True, text=True, check=False)

    return run


def test_applied_to_an_empty_database_it_makes_the_same_schema(
    databases: TestDatabases, observer: Sql, psql: Psql
) -> None:
    url = databases.create()
    done = psql(url, upgrade_script())
    assert done.returncode == 0, done.stderr
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        assert describe_schema(connection) == describe_schema(observer)
    assert current_revision(url) == HEAD
    assert upgrade_database(url) == HEAD


@pytest.mark.parametrize("since", ["0007", "0015"])
def test_from_a_revision_it_brings_a_database_with_jobs_to_the_newest(
    databases: TestDatabases, observer: Sql, psql: Psql, since: str
) -> None:
    url = databases.create()
    upgrade_database(url, since)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        connection.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, finished_at) "
            "VALUES (gen_random_uuid(), 'a', '{}', 'cancelled', now())"
        )
        done = psql(url, upgrade_script(since))
        assert done.returncode == 0, done.stderr
        assert describe_schema(connection) == describe_schema(observer)
        assert connection.execute("SELECT 1 FROM jsworker.jobs").rowcount == 1
    assert current_revision(url) == HEAD


def test_no_time_limit_of_the_database_ends_it(databases: TestDatabases, psql: Psql) -> None:
    url = databases.create()
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        limit_the_time(connection)
    done = psql(url, upgrade_script())
    assert done.returncode == 0, done.stderr
    assert current_revision(url) == HEAD


def test_it_stops_before_a_table_that_is_held_and_goes_on_from_there(
    databases: TestDatabases, observer: Sql, psql: Psql
) -> None:
    url = databases.create()
    upgrade_database(url, "0015")
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE jsworker.jobs IN ROW EXCLUSIVE MODE")
        done = psql(url, upgrade_script("0015"))
    assert done.returncode == 3
    assert "canceling statement due to lock timeout" in done.stderr
    assert current_revision(url) == "0015"
    assert psql(url, upgrade_script("0015")).returncode == 0
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        insert_job(connection)
        assert describe_schema(connection) == describe_schema(observer)


def test_no_part_is_applied_after_one_that_failed(databases: TestDatabases, psql: Psql) -> None:
    """Whoever runs it may not stop at errors."""
    url = databases.create()
    upgrade_database(url, "0024")
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE jsworker.workers IN ROW EXCLUSIVE MODE")
        done = psql(url, f"\\set ON_ERROR_STOP off\n{upgrade_script('0024')}")
    assert "canceling statement due to lock timeout" in done.stderr
    assert "ERROR:  the database must be at migration 0025 for this part\n" in done.stderr
    assert current_revision(url) == "0024"
    assert upgrade_database(url) == HEAD


def test_at_the_newest_revision_it_does_nothing() -> None:
    lines = upgrade_script(HEAD).splitlines()
    assert lines
    assert all(line.startswith("--") for line in lines)


def test_indexes_are_built_beside_writers_alone() -> None:
    script = upgrade_script()
    assert script.count("CREATE INDEX CONCURRENTLY jobs_held ") == 1
    assert "CREATE INDEX jobs_held " not in script
    assert "DROP INDEX IF EXISTS" not in script


def test_a_revision_of_another_version_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^revision 9999 is none of this version's: 0001, 0002, "
    ) as refusal:
        upgrade_script("9999")
    assert "\n" not in str(refusal.value)


def test_alembics_own_way_to_write_sql_is_refused() -> None:
    with pytest.raises(CommandError, match="run `jsworker db sql`"):
        command.upgrade(_config(None), "0015:head", sql=True)
