"""``db upgrade`` and ``db current``, and what the other commands say to a database without tables."""

import secrets

import psycopg
import pytest

from jsworker.ownership.database import OLDEST_REVISION, REVISIONS, upgrade_advice
from jsworker.ownership.upgrading import upgrade_database
from tests.support.servers import TestServers

from .commands import Cli


@pytest.fixture
def empty_database(servers: TestServers, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> str:
    url = servers.postgres.create_database(f"cli_{secrets.token_hex(4)}")
    monkeypatch.setenv("JSWORKER_DATABASE_URL", url)
    return url


HEAD = REVISIONS[-1]
RUN_UPGRADE = "the database has no jsworker schema: run `jsworker db upgrade`"


@pytest.mark.usefixtures("empty_database")
def test_a_database_is_migrated_once_and_told(cli: Cli) -> None:
    before = cli("db", "current")
    assert (before.code, before.errors) == (1, [RUN_UPGRADE])
    assert before.lines == [f"not migrated (this version's own: {HEAD})"]
    assert cli("db", "upgrade").ok().lines == [f"the database is at migration {HEAD}"]
    assert cli("db", "upgrade", "--json").ok().json == {"revision": HEAD, "head": HEAD}
    assert cli("db", "current").ok().lines == [f"{HEAD} (this version's own: {HEAD})"]
    assert cli("db", "current", "--json").ok().json == {"revision": HEAD, "head": HEAD}
    assert cli("jobs", "--json").ok().json == []


@pytest.mark.usefixtures("empty_database")
@pytest.mark.parametrize(
    "command",
    [
        ("jobs",),
        ("job", "01a1f942-ecd8-7295-9a2a-9573fc7c36ee"),
        ("workers",),
        ("enqueue", "double"),
        ("cancel", "--status", "queued", "--yes"),
        ("dead-messages",),
    ],
)
def test_without_tables_the_way_out_is_told(command: tuple[str, ...], cli: Cli) -> None:
    assert cli(*command).refused(1) == RUN_UPGRADE


@pytest.mark.skipif(OLDEST_REVISION == HEAD, reason="no migration was added since the previous minor version")
def test_a_database_of_the_previous_version_is_worked_with(cli: Cli, empty_database: str) -> None:
    upgrade_database(empty_database, OLDEST_REVISION)
    shown = cli("db", "current")
    assert shown.code == 0
    assert shown.lines == [f"{OLDEST_REVISION} (this version's own: {HEAD})"]
    assert shown.errors == [upgrade_advice(OLDEST_REVISION)]
    assert cli("jobs", "--json").ok().json == []
    assert cli("workers", "--json").ok().json == []
    assert cli("db", "upgrade").ok().lines == [f"the database is at migration {HEAD}"]
    assert cli("db", "current").ok().errors == []


def test_a_newer_database_is_left_alone(cli: Cli, empty_database: str) -> None:
    cli("db", "upgrade").ok()
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("UPDATE jsworker.alembic_version SET version_num = '9999'")
    assert cli("db", "current").ok().lines == [f"9999 (this version's own: {HEAD})"]
    newer = f"migration 9999, which is newer than this version's own {HEAD}: it is left as it is"
    assert cli("db", "upgrade").refused(1) == f"the database is at {newer}"


def test_the_sql_is_printed_without_a_database(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JSWORKER_DATABASE_URL")
    whole, part = cli("db", "sql").ok(), cli("db", "sql", REVISIONS[-2]).ok()
    assert "CREATE TABLE jsworker.jobs (" in whole.lines
    assert part.lines[-1] == "COMMIT;"
    assert len(part.lines) < len(whole.lines)
    assert "revision 9999 is none of this version's" in cli("db", "sql", "9999").refused(2)
