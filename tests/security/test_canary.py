"""Marks in every secret and payload; workers and commands fail on them, and no mark appears elsewhere."""

import asyncio
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import nats
import psutil
import psycopg
import pytest
from psycopg.rows import dict_row

from jsworker import JobClient
from jsworker.core.settings import Settings
from tests.cli.commands import Cli, Result
from tests.conftest import FAST
from tests.ownership.rows import Sql
from tests.security.conftest import variables
from tests.stream.conftest import StartServer, start_server
from tests.stream.nats_server import NatsServer
from tests.stream.operator_mode import user_identity
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually
from tests.support.servers import TestServers, as_role

__all__ = ["start_server"]

TARGETS = (*("Keeps", "Violates", "ViolatesByHand", "Strict", "Unstorable", "Breaks", "Tells", "Crashes"),)
FAILING = {
    "violates": "CheckViolation",
    "violates-by-hand": "CheckViolation",
    "strict": "payload of kind strict: number: ",
    "unstorable": "result",
    "breaks": "ZeroDivisionError",
    "crashes": "",
}
"""Kinds that fail, with a word that must be left of the reason."""


@dataclass
class Marks:
    """A mark for each place where a secret may be."""

    database: str = field(default_factory=lambda: mark("database"))
    nats: str = field(default_factory=lambda: mark("nats"))
    payload: str = field(default_factory=lambda: mark("payload"))
    result: str = field(default_factory=lambda: mark("result"))
    checkpoint: str = field(default_factory=lambda: mark("checkpoint"))
    message: str = field(default_factory=lambda: mark("message"))
    exception: str = field(default_factory=lambda: mark("exception"))

    def found_in(self, text: str, *, but: tuple[str, ...] = ()) -> list[str]:
        """Return the marks that a text holds, but for those that belong there."""
        return [name for name, value in vars(self).items() if name not in but and value in text]


def mark(name: str) -> str:
    return f"c4n4ry-{name}-{secrets.token_hex(6)}"


@pytest.fixture
def marks() -> Marks:
    return Marks()


@pytest.fixture
def login(servers: TestServers, database_url: str, marks: Marks) -> Iterator[str]:
    """A role that the server lets in only with a password, and a table that refuses every row."""
    role = f"canary_{secrets.token_hex(4)}"
    access = servers.postgres.cluster / "pg_hba.conf"
    before = access.read_text()
    access.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{before}")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{marks.database}'".encode())
        connection.execute("CREATE TABLE public.canary (secret text CHECK (length(secret) < 1))")
        connection.execute("SELECT pg_reload_conf()")
    yield role
    access.write_text(before)


@pytest.fixture
def sql(database_url: str) -> Iterator[Sql]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


def nats_login(password: str) -> str:
    return f'authorization {{ user: canary, password: "{password}" }}'


@pytest.fixture
async def messages(server: NatsServer, marks: Marks) -> AsyncIterator[list[bytes]]:
    """Everything that is said on the jobs' subjects, headers included."""
    heard: list[bytes] = []

    async def hear(message: Any) -> None:
        heard.append(message.data + str(message.headers).encode())

    async def ignore(_: Exception) -> None:
        """The server is taken away in the end."""

    client = await nats.connect(
        server.url, user="canary", password=marks.nats, allow_reconnect=False, error_cb=ignore
    )
    await client.subscribe("jobs.*", cb=hear)
    yield heard
    await client.close()


@pytest.fixture
async def server(start_server: StartServer, marks: Marks) -> NatsServer:
    return await start_server(nats_login(marks.nats))


@pytest.fixture
def settings(database_url: str, login: str, server: NatsServer, marks: Marks) -> Settings:
    return Settings(
        database_url=as_role(database_url, login),
        database_password=marks.database,
        nats_url=server.url,
        nats_user="canary",
        nats_password=marks.nats,
        log_level="debug",
        http_port=0,
        **FAST,
    )


Work = Callable[..., ParentProcess]
Call = Callable[..., Result]


@pytest.fixture
def work(tmp_path: Path, settings: Settings, marks: Marks) -> Iterator[Work]:
    """Start workers whose secrets come from files, or stand in their URLs."""
    shutil.copy(Path(__file__).with_name("canary_jobs.py"), tmp_path / "canary_jobs.py")
    started: list[ParentProcess] = []

    def start(log_format: str, *, from_files: bool) -> ParentProcess:
        environment = variables(settings)
        for name in ("JSWORKER_DATABASE_PASSWORD", "JSWORKER_NATS_PASSWORD"):
            file = tmp_path / name
            file.write_text(environment.pop(name))
            file.chmod(0o400)
            environment[f"{name}_FILE"] = str(file)
        if not from_files:
            environment = {name: value for name, value in environment.items() if "PASSWORD" not in name}
            environment.pop("JSWORKER_NATS_USER")
            url, at = settings.database_url, "canary_"
            environment["JSWORKER_DATABASE_URL"] = with_password(url, marks.database)
            environment["JSWORKER_NATS_URL"] = settings.nats_url.replace("://", f"://canary:{marks.nats}@")
            assert at in url
        canaries = {
            "CANARY_RESULT": marks.result,
            "CANARY_CHECKPOINT": marks.checkpoint,
            "CANARY_EXCEPTION": marks.exception,
            "CANARY_URL": with_password(settings.database_url, marks.database),
        }
        parent = ParentProcess(
            *(f"canary_jobs:{target}" for target in TARGETS),
            folder=tmp_path,
            environment=environment | canaries,
            options=("--log-format", log_format),
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        parent.kill_all()


def with_password(url: str, password: str) -> str:
    return url.replace("@", f":{password}@", 1)


async def says(worker: ParentProcess, *words: str) -> str:
    """Wait until a line of the log holds all of these and return it; events are told in words to people."""

    async def said() -> str:
        for line in worker.log.splitlines():
            if all(word in line or word.replace(".", " ") in line for word in words):
                return line
        raise AssertionError(f"{words}: {worker.log}")

    return await eventually(said)


async def port_of(worker: ParentProcess) -> int:
    line = await says(worker, "http.listening")
    return int("".join(each for each in line.partition("port")[2] if each.isdigit())[:5])


def ask(port: int, path: str) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return str(answer.read().decode())
    except HTTPError as refused:
        with refused:
            return f"{refused} {refused.read().decode()}"
    except OSError as refused:
        return str(refused)


def command_lines(worker: ParentProcess) -> str:
    parent = psutil.Process(worker.pid)
    return " ".join(
        part for process in (parent, *parent.children(recursive=True)) for part in process.cmdline()
    )


async def ended(sql: Sql, jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Wait until every job has ended and return the rows by kind."""

    async def all_ended() -> dict[str, dict[str, Any]]:
        rows = sql.execute("SELECT * FROM jsworker.jobs").fetchall()
        assert {row["id"] for row in rows if row["finished_at"]} == set(jobs.values()), rows
        return {row["kind"]: row for row in rows}

    return await eventually(all_ended)


async def enqueue_all(settings: Settings, marks: Marks) -> dict[str, Any]:
    patient = settings.model_copy(update={"statement_timeout": 10.0})
    async with JobClient(patient) as client:
        jobs = {
            kind: (await client.enqueue(kind, {"secret": marks.payload, "number": marks.payload})).id
            for kind in (*FAILING, "keeps", "tells")
        }
        assert client.unpublished_because is None
    return jobs


@pytest.mark.parametrize(
    ("log_format", "from_files"), [("json", True), ("console", False)], ids=["json, files", "console, URLs"]
)
async def test_no_mark_is_found_where_it_does_not_belong(
    *,
    work: Work,
    settings: Settings,
    server: NatsServer,
    messages: list[bytes],
    sql: Sql,
    marks: Marks,
    cli: Call,
    log_format: str,
    from_files: bool,
) -> None:
    worker = work(log_format, from_files=from_files)
    port = await port_of(worker)
    jobs = await enqueue_all(settings, marks)
    rows = await ended(sql, jobs)
    await publish_nonsense(server, marks)
    await says(worker, "message.dead")
    # What is kept is kept: the jobs did come across what is looked for below.
    assert (rows["keeps"]["result"], rows["keeps"]["status"]) == ({"found": marks.result}, "completed")
    assert rows["keeps"]["checkpoint"] == {"kept": marks.checkpoint}
    for kind, word in FAILING.items():
        assert rows[kind]["status"] == "failed"
        assert word in str(rows[kind]["last_error"])

    stored = [(row["last_error"], row["failure_reason"], row["message"]) for row in rows.values()]
    stored += [tuple(row.values()) for row in sql.execute("SELECT error, detail FROM jsworker.job_events")]
    stored += [
        tuple(row.values()) for row in sql.execute("SELECT reason, subject FROM jsworker.dead_messages")
    ]
    stored += [tuple(row.values()) for row in sql.execute("SELECT * FROM jsworker.workers")]
    assert marks.found_in(str(stored), but=("exception",)) == []
    assert messages
    assert marks.found_in(str(messages), but=("message",)) == []
    probes = "".join(ask(port, path) for path in ("/livez", "/readyz", "/startupz", "/metrics", "/nowhere"))
    assert "jsworker_runs_ended_total" in probes
    assert marks.found_in(probes) == []
    assert marks.found_in(command_lines(worker)) == []
    await asyncio.to_thread(listings_hold_no_mark, cli, jobs, marks)

    await lose_the_servers(worker, server, sql, settings, patiently=from_files)
    probes = "".join(ask(port, path) for path in ("/livez", "/readyz", "/metrics"))
    assert marks.found_in(probes) == []
    assert any(words in worker.log for words in ("job.failed", "failed for good"))
    assert marks.exception in worker.log  # a processor's own words
    assert marks.found_in(worker.log, but=("exception",)) == []


async def publish_nonsense(server: NatsServer, marks: Marks) -> None:
    client = await nats.connect(server.url, user="canary", password=marks.nats)
    await client.jetstream().publish("jobs.keeps", f'{{"v": 1, "secret": "{marks.message}"}}'.encode())
    await client.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Call:
    def call(*arguments: object) -> Result:
        with monkeypatch.context() as patch:
            for name, value in variables(settings).items():
                patch.setenv(name, value)
            return Cli(capsys)(*arguments)

    return call


def listings_hold_no_mark(cli: Call, jobs: dict[str, Any], marks: Marks) -> None:
    for arguments in (["jobs"], ["workers"], ["dead-messages"], ["jobs", "--status", "failed"]):
        for more in ([], ["--json"]):
            shown = cli(*arguments, *more).ok().out
            assert marks.found_in(shown, but=("exception",)) == [], arguments
    assert marks.found_in(cli("doctor").out) == []
    for kind, job_id in jobs.items():
        shown = cli("job", job_id, "--json").ok().out
        assert marks.payload in shown  # here it belongs
        assert marks.found_in(shown, but=("payload", "result", "checkpoint", "exception")) == [], kind
    assert marks.found_in(cli("cancel", *jobs.values()).err) == []
    assert marks.found_in(cli("retry", jobs["keeps"]).refused(1)) == []


async def lose_the_servers(
    worker: ParentProcess, server: NatsServer, sql: Sql, settings: Settings, *, patiently: bool
) -> None:
    """Let both servers come back with other passwords, and wait until the worker has said so.

    NATS refuses the login again and again; ``patiently``: until the worker tells that too, after 15 s.
    """
    await server.stop()
    server.configure(nats_login("changed"))
    await server.start()
    role = settings.database_url.partition("://")[2].partition("@")[0]
    sql.execute(f"ALTER ROLE {role} PASSWORD 'changed'".encode())
    sql.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [role])
    await says(worker, "worker.degraded", "postgresql")
    await says(worker, "worker.degraded", "authorization violation" if patiently else "nats")


WRONG = {
    "a refused password": {"DATABASE_URL": "{database}", "DATABASE_PASSWORD": "{mark}"},
    "a refused password in the URL": {"DATABASE_URL": "{database:with_mark}"},
    "nobody listens": {"DATABASE_URL": "postgresql://me:{mark}@127.0.0.1:1/jobs"},
    "a password in the query": {"DATABASE_URL": "postgresql://me@127.0.0.1:1/jobs?password={mark}"},
    "a key's password in the query": {
        "DATABASE_URL": "postgresql://me@127.0.0.1:1/jobs?sslmode=verify-full&sslrootcert=/gone&sslpassword={mark}"
    },
    "a URL without a host": {"DATABASE_URL": "postgresql://me:{mark}"},
    "a URL with a space": {"DATABASE_URL": "postgresql://me:{mark} x@host/jobs"},
    "both passwords": {"DATABASE_URL": "postgresql://me:{mark}@host/jobs", "DATABASE_PASSWORD": "{mark}"},
    "a refused NATS password": {"NATS_URL": "{nats}", "NATS_USER": "canary", "NATS_PASSWORD": "{mark}"},
    "a refused NATS password in the URL": {"NATS_URL": "{nats:with_mark}"},
    "a refused token": {"NATS_URL": "{nats}", "NATS_TOKEN": "{mark}"},
    "a token in the URL": {"NATS_URL": "{nats:with_token}"},
    "a NATS URL with a path": {"NATS_URL": "nats://me:{mark}@host:4222/path"},
    "a password without a user": {"NATS_PASSWORD": "{mark}"},
    "two logins": {"NATS_USER": "me", "NATS_PASSWORD": "{mark}", "NATS_TOKEN": "{mark}"},
    "no credentials in the file": {"NATS_CREDS_FILE": "{file}"},
    "no seed in the file": {"NATS_NKEY_SEED_FILE": "{file}"},
    "a refused seed": {"NATS_URL": "{nats}", "NATS_NKEY_SEED_FILE": "{seed}"},
}
COMMANDS = (["enqueue", "echo"], ["db", "current"], ["stream", "ensure", "echo"], ["jobs", "--json"])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_command_that_cannot_connect_tells_no_secret(
    *,
    wrong: str,
    login: str,
    database_url: str,
    server: NatsServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = mark("wrong")
    seed = user_identity().seed.decode()
    (tmp_path / "seed").write_text(seed)
    (tmp_path / "file").write_text(f"-----BEGIN NATS USER JWT-----\n{secret}\n")
    known = {
        "{database}": as_role(database_url, login),
        "{database:with_mark}": with_password(as_role(database_url, login), secret),
        "{nats}": server.url,
        "{nats:with_mark}": server.url.replace("://", f"://canary:{secret}@"),
        "{nats:with_token}": server.url.replace("://", f"://{secret}@"),
        "{file}": str(tmp_path / "file"),
        "{seed}": str(tmp_path / "seed"),
        "{mark}": secret,
    }
    monkeypatch.setenv("JSWORKER_DATABASE_URL", database_url)
    for name, template in WRONG[wrong].items():
        parts = re.split(r"({[a-z:_]+})", template)
        monkeypatch.setenv(f"JSWORKER_{name}", "".join(known.get(part, part) for part in parts))
    codes = set()
    for arguments in COMMANDS:
        said = Cli(capsys)(*arguments)
        assert secret not in said.out + said.err
        assert seed not in said.out + said.err
        assert len(said.errors) <= 1
        assert "Traceback" not in said.err
        codes.add(said.code)
    assert codes & {1, 2}
