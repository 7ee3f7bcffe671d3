"""docs/other-languages.md: its statements, its command and its code are run, by a producer's login."""

import re
import secrets
import subprocess

import psycopg
import pytest
from sqlalchemy.engine import make_url

from tests.ownership.test_enqueue_function import CONTRACT
from tests.security.guarded import apply_roles, make_logins
from tests.support.documents import Page
from tests.support.servers import TestServers, as_role

PAGE = Page("docs/other-languages.md")


@pytest.fixture
def producer(database_url: str) -> str:
    """The URL of a producer's login, which has a schema of its own for its orders."""
    apply_roles(database_url)
    login = f"shop_{secrets.token_hex(4)}"
    make_logins(database_url, {"producer": login})
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {login} AUTHORIZATION {login}".encode())
    return as_role(database_url, login)


def test_everything_that_it_shows(producer: str, database_url: str, servers: TestServers) -> None:
    transaction, scopes, debounce, version = PAGE.blocks("sql")
    with psycopg.connect(producer, autocommit=True) as connection:
        connection.execute(transaction.encode())
        said = connection.execute(version.encode()).fetchone()
        assert said is not None
        assert said[0].startswith("jsworker SQL contract 1")
    names, [command] = PAGE.names(), PAGE.blocks("sh")
    assert names["place_order"](producer, 13)
    with pytest.raises(psycopg.errors.UniqueViolation):
        names["place_order"](producer, 13)
    with psycopg.connect(producer) as connection:
        calls = [connection.execute(each.encode()).fetchall() for each in scopes.splitlines() * 2]
        connection.commit()
        assert [created for [(_, created)] in calls] == [True, True, False, False]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(debounce.encode())
    make_logins(database_url, {"debouncer": str(make_url(producer).username)})
    with psycopg.connect(producer) as connection:
        assert [connection.execute(debounce.encode()).fetchall()[0][1] for _ in "12"] == [True, False]
    ran = subprocess.run(
        ["/bin/sh", "-c", command.replace("psql", str(servers.postgres.program("psql")), 1)],
        env={"DATABASE_URL": producer},
        capture_output=True,
        check=True,
        text=True,
    )
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT id::text, kind, payload, coalesce(unique_key, waiting_key), status FROM jsworker.jobs"
            " ORDER BY id"
        ).fetchall()
    assert [row[1:] for row in rows] == [
        ("send-invoice", {"order": 12}, "order:12", "scheduled"),
        ("send-invoice", {"order": 13}, "order:13", "queued"),
        ("index-document", {"id": 7}, "document:7", "queued"),
        ("send-report", {"user": 7}, None, "queued"),
        ("index-document", {"id": 8}, "document:8", "scheduled"),
        ("count-words", {"text": "a b a"}, None, "queued"),
    ]
    assert rows[-1][0] == ran.stdout.strip()


def test_what_it_says_of_inserts_of_one_s_own(producer: str) -> None:
    with psycopg.connect(producer, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, needs_publish, publish_after,"
            " queued_at) VALUES (gen_random_uuid(), 'echo', '{}', 'queued', 1, true, clock_timestamp(),"
            " clock_timestamp())"
        )
        connection.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, run_at)"
            " VALUES (gen_random_uuid(), 'echo', '{}', 'scheduled', clock_timestamp() + interval '1 hour')"
        )


def test_its_table_is_the_contract() -> None:
    listed = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)?) \| (\w+) \|", PAGE.text)
    named = [(name, type_) for names, type_ in listed for name in re.findall(r"\w+", names)]
    short = {"timestamp with time zone": "timestamptz"}
    assert named == [(name, short.get(type_, type_)) for name, type_, _ in CONTRACT]
