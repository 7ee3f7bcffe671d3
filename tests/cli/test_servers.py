"""What commands say about servers that are missing, closed, unfit or taken: one line, exit code 1."""

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import nats
import psycopg
import pytest
from nats.js.api import StreamConfig

from jsworker.embedded.resources import find_nats_server, free_port
from jsworker.supervisor.parent import Supervisor
from tests.support.servers import TestServers, as_role

from .commands import COMMAND, DEADLINE, Cli, listens, wait_until
from .conftest import JOBS_MODULE

NO_ONE = "127.0.0.1:1"
PASSWORD = "correct horse"


@pytest.fixture(scope="session")
def role_with_password(servers: TestServers) -> str:
    """A role that the server lets in only with its password."""
    role = f"guarded_{secrets.token_hex(4)}"
    access = servers.postgres.cluster / "pg_hba.conf"
    access.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n" + access.read_text())
    with psycopg.connect(servers.postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{PASSWORD}'".encode())
        connection.execute("SELECT pg_reload_conf()")
        rules = b"SELECT count(*) FROM pg_hba_file_rules WHERE user_name = ARRAY[%s]"
        wait_until(lambda: connection.execute(rules, [role]).fetchone() == (1,), "the rule is loaded")
    return role


@pytest.fixture(scope="session")
def nats_without_jetstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("nats") / "log"
    command = [str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(port), "--log", str(log)]
    with subprocess.Popen(command) as server:
        try:
            wait_until(lambda: listens(port), "nats-server listens")
            yield f"nats://127.0.0.1:{port}"
        finally:
            server.kill()


def make_stream(environment: Mapping[str, str], name: str, subject: str) -> None:
    async def make() -> None:
        client = await nats.connect(environment["JSWORKER_NATS_URL"])
        try:
            await client.jetstream().add_stream(StreamConfig(name=name, subjects=[subject]))
        finally:
            await client.close()

    asyncio.run(make())


@pytest.fixture(scope="session")
def unfit(
    servers: TestServers,
    cli_environment: Mapping[str, str],
    role_with_password: str,
    nats_without_jetstream: str,
) -> dict[str, tuple[dict[str, str], str]]:
    """Variables that lead to something unfit, and the line that says so."""
    name = secrets.token_hex(4)
    url = cli_environment["JSWORKER_DATABASE_URL"]
    guarded = as_role(url, role_with_password)
    make_stream(cli_environment, f"taken_{name}", f"elsewhere.{name}")
    make_stream(cli_environment, f"elses_{name}", f"p{name}.>")
    empty = servers.postgres.create_database(f"empty_{name}")
    return {
        "no database": (
            {"JSWORKER_DATABASE_URL": f"postgresql://postgres@{NO_ONE}/jobs"},
            f"PostgreSQL at {NO_ONE}/jobs is not available: ",
        ),
        "no such database": (
            {"JSWORKER_DATABASE_URL": f"{servers.postgres.database_url('no_such')}"},
            'refused the login: database "no_such" does not exist',
        ),
        "wrong password": (
            {"JSWORKER_DATABASE_URL": guarded, "JSWORKER_DATABASE_PASSWORD": "battery staple"},
            f'refused the login: password authentication failed for user "{role_with_password}"',
        ),
        "no password": (
            {"JSWORKER_DATABASE_URL": guarded},
            "PostgreSQL at ",
        ),
        "no migration": (
            {"JSWORKER_DATABASE_URL": empty},
            "the database has no jsworker schema: run `jsworker db upgrade`",
        ),
        "no nats": (
            {"JSWORKER_NATS_URL": f"nats://{NO_ONE}"},
            f"NATS at {NO_ONE} refused the connection: no server listens there",
        ),
        "no jetstream": (
            {"JSWORKER_NATS_URL": nats_without_jetstream},
            "has JetStream disabled",
        ),
        "stream taken": (
            {"JSWORKER_STREAM": f"taken_{name}"},
            f"stream taken_{name} cannot be used: ",
        ),
        "subjects taken": (
            {"JSWORKER_STREAM": f"mine_{name}", "JSWORKER_SUBJECT_PREFIX": f"p{name}"},
            f"stream elses_{name} overlaps",
        ),
    }


CASES = [
    *("no database", "no such database", "wrong password", "no password", "no migration", "no nats"),
    *("no jetstream", "stream taken", "subjects taken"),
]
ABOUT_NATS = CASES[-4:]


@pytest.fixture(scope="module", autouse=True)
def worker_without_nats(
    cli_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """Started before all tests of this module: it tries to connect for ten seconds."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "cli_jobs.py").write_text(JOBS_MODULE)
    process = subprocess.Popen(
        [*COMMAND, "run", "cli_jobs:Double"],
        cwd=folder,
        env={**os.environ, **cli_environment, "JSWORKER_NATS_URL": f"nats://{NO_ONE}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("case", CASES)
def test_a_command_says_what_is_wrong(
    case: str, unfit: dict[str, tuple[dict[str, str], str]], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, line = unfit[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if case == "no nats":
        assert line in cli("dead-messages", "replay", 1).refused(1)
        return
    said = cli("enqueue", "double").refused(1)
    assert line in said
    assert "battery staple" not in said
    if case not in ABOUT_NATS:
        assert line in cli("jobs", "--json").refused(1)


@pytest.mark.parametrize("case", [case for case in CASES if case not in {*ABOUT_NATS, "no migration"}])
def test_db_says_what_is_wrong(
    case: str, unfit: dict[str, tuple[dict[str, str], str]], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, line = unfit[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert line in cli("db", "upgrade").refused(1)
    assert line in cli("db", "current", "--json").refused(1)


def test_the_right_password_opens(
    role_with_password: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = as_role(os.environ["JSWORKER_DATABASE_URL"], role_with_password)
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("JSWORKER_DATABASE_URL", url)
    monkeypatch.setenv("JSWORKER_DATABASE_PASSWORD_FILE", str(tmp_path / "password"))
    cli("jobs", "--json").ok()


# Of refused logins and of streams that cannot be used, one each: a worker tells what the commands above tell.
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "case", ["no database", "wrong password", "no migration", "no jetstream", "subjects taken"]
)
def test_a_worker_says_what_is_wrong(
    case: str, unfit: dict[str, tuple[dict[str, str], str]], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What may come back is waited for; how long is shown by the worker without NATS. What a server says is
    # the end, but it may say it late.
    seconds = 1.0 if case == "no database" else 30.0
    monkeypatch.setattr("jsworker.cli.run.Supervisor", partial(Supervisor, connect_seconds=seconds))
    variables, line = unfit[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = cli("run", "cli_jobs:Double")
    assert (ended.code, ended.out) == (1, "")
    [said] = ended.errors  # what the target prints goes to the child's own stderr
    assert line in said
    assert "battery staple" not in said


def test_a_worker_without_nats_gives_up(worker_without_nats: subprocess.Popen[str]) -> None:
    out, err = worker_without_nats.communicate(timeout=DEADLINE)
    assert (worker_without_nats.returncode, out) == (1, "")
    assert err.splitlines() == [
        "this line is no JSON",
        f"NATS at {NO_ONE} refused the connection: no server listens there",
    ]
