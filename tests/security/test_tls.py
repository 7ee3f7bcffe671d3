"""TLS and mutual TLS to both servers: it works, and every way to be wrong is one line, with nothing lost."""

import asyncio
import os
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.supervisor.parent import Supervisor
from tests.cli.commands import COMMAND, Cli, Result
from tests.cli.conftest import _logs_as_before
from tests.security.conftest import JOBS_MODULE, variables
from tests.security.tls_front import SSL_REQUEST, TlsFront, behind_tls
from tests.stream.certificates import Authority, Pair
from tests.stream.conftest import StartServer, start_server
from tests.stream.nats_server import HOST, NatsServer
from tests.supervisor.parent_process import ParentProcess

__all__ = ["_logs_as_before", "start_server"]

Launch = Callable[..., ParentProcess]
MakeSettings = Callable[..., Settings]


Authorities = tuple[Authority, Authority]


@pytest.fixture
def authorities(authority: Authority, tmp_path: Path) -> Authorities:
    """The authority that the clients trust, and another one."""
    return authority, Authority(tmp_path, "stranger")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "guarded_jobs.py").write_text(JOBS_MODULE)
    return tmp_path


Call = Callable[..., Awaitable[Result]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls a command in a thread of this process: the event loop has servers to serve meanwhile."""

    async def call_(settings: Settings, *arguments: str) -> Result:
        with monkeypatch.context() as patched:
            for name, value in variables(settings).items():
                patched.setenv(name, value)
            return await asyncio.to_thread(Cli(capsys), *arguments)

    return call_


async def run_worker(settings: Settings, folder: Path) -> Result:
    """Run a worker as a process, which ends by itself."""
    process = await asyncio.create_subprocess_exec(
        *[*COMMAND, "run", "guarded_jobs:Echo"],
        env={**os.environ, **variables(settings)},
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


def over_tls(url: str, front: TlsFront, **files: Path) -> str:
    """Return a database's URL that leads through the front."""
    parts = urlsplit(url)
    query = "&".join(["sslmode=verify-full", *(f"{name}={path}" for name, path in files.items())])
    return f"postgresql://{parts.username}@{HOST}:{front.port}{parts.path}?{query}"


async def works(settings: Settings, launch: Launch) -> None:
    """Let a worker run a job that a client has enqueued."""
    worker = launch(settings, "Echo", options=("--log-level", "debug"))
    async with JobClient(settings) as client:
        job = await client.enqueue("echo", {"n": 1})
        assert client.unpublished_because is None
        await worker.tells("job.completed")
        assert (await client.get(job.id)).result == {"n": 1}


WRONG = {
    "expired": "certificate verify failed",
    "stranger": "certificate verify failed",
    "other host": 'does not match host name "127.0.0.1"',
    "no client certificate": "certificate required",
    "expired client certificate": "certificate expired",
    "no authority": 'root certificate file "/nowhere/gone.pem" does not exist',
}


class TestPostgres:
    async def test_tls(
        self, database_url: str, authority: Authority, make_settings: MakeSettings, launch: Launch
    ) -> None:
        async with behind_tls(database_url, authority.issue("server")) as front:
            url = over_tls(database_url, front, sslrootcert=authority.certificate)
            await works(make_settings(database_url=url), launch)
            assert front.encrypted
            assert not front.clear

    async def test_mutual_tls(
        self, database_url: str, authority: Authority, make_settings: MakeSettings, launch: Launch
    ) -> None:
        async with behind_tls(database_url, authority.issue("server"), clients=authority) as front:
            own = authority.issue("client")
            files = {"sslrootcert": authority.certificate, "sslcert": own.certificate, "sslkey": own.key}
            await works(make_settings(database_url=over_tls(database_url, front, **files)), launch)
            assert front.encrypted

    async def test_a_connection_that_is_accepted_as_the_front_closes_is_closed_with_it(
        self, authority: Authority
    ) -> None:
        async with behind_tls("postgresql://127.0.0.1:1/nothing", authority.issue("server")) as front:
            client = socket.create_connection(("127.0.0.1", front.port), timeout=10)
            for _ in range(2):  # it is accepted, and the task that makes its transport has not begun
                await asyncio.sleep(0)
        with client:
            client.setblocking(False)
            with suppress(ConnectionError):
                async with asyncio.timeout(30):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    async def test_a_connection_that_its_client_leaves_as_the_front_closes_is_closed_at_both_ends(
        self, authority: Authority, database_url: str
    ) -> None:
        """As by one that does not like the certificate; a warning of what is left open fails the test."""
        context = ssl.create_default_context(cafile=str(authority.certificate))

        def greet(port: int) -> None:
            with socket.create_connection((HOST, port), timeout=30) as client:
                client.sendall(struct.pack("!II", 8, SSL_REQUEST))
                assert client.recv(1) == b"S"
                context.wrap_socket(client, server_hostname=HOST).close()

        pair = authority.issue("server")
        for steps in range(20):  # of the event loop, until the front ends what it has accepted
            async with behind_tls(database_url, pair) as front:
                await asyncio.to_thread(greet, front.port)
                for _ in range(steps):
                    await asyncio.sleep(0)
                await front.close()

    @pytest.mark.parametrize("wrong", WRONG)
    async def test_a_command_says_what_is_wrong(
        self, authorities: Authorities, settings: Settings, call: Call, wrong: str
    ) -> None:
        async with wrong_front(wrong, settings.database_url, authorities) as (front, url):
            said = await call(settings.model_copy(update={"database_url": url}), "jobs")
            assert WRONG[wrong] in said.refused(1)
            assert said.errors[0].startswith(f"PostgreSQL at {HOST}:{front.port}")
            assert front.clear == []

    async def test_a_worker_says_what_is_wrong(
        self, authorities: Authorities, settings: Settings, here: Path
    ) -> None:
        """It tries for ten seconds: certificates may just be exchanged."""

        async def run(wrong: str) -> None:
            async with wrong_front(wrong, settings.database_url, authorities) as (front, url):
                changed = settings.model_copy(update={"database_url": url})
                said = await run_worker(changed, here)
                assert WRONG[wrong] in said.refused(1)
                assert front.clear == []

        await asyncio.gather(*map(run, ["expired", "other host", "no client certificate"]))

    async def test_a_server_without_tls(self, database_url: str, settings: Settings, call: Call) -> None:
        url = f"{database_url}?sslmode=verify-full&sslrootcert=system"
        said = await call(settings.model_copy(update={"database_url": url}), "jobs")
        assert "server does not support SSL, but SSL was required" in said.refused(1)


@asynccontextmanager
async def wrong_front(
    wrong: str, database_url: str, authorities: Authorities
) -> AsyncIterator[tuple[TlsFront, str]]:
    """Put the database behind a front that the URL does not fit."""
    authority, stranger = authorities
    pair, files = authority.issue(f"server {wrong}"), {"sslrootcert": authority.certificate}
    clients: Authority | None = None
    match wrong:
        case "expired":
            pair = authority.issue("expired", expired=True)
        case "stranger":
            pair = stranger.issue("server")
        case "other host":
            pair = authority.issue("other", address="192.0.2.1")
        case "no client certificate":
            clients = authority
        case "expired client certificate":
            own, clients = authority.issue("client", expired=True), authority
            files |= {"sslcert": own.certificate, "sslkey": own.key}
        case "no authority":
            files = {"sslrootcert": Path("/nowhere/gone.pem")}
    async with behind_tls(database_url, pair, clients=clients) as front:
        yield front, over_tls(database_url, front, **files)


def tls(pair: Pair, *, clients: Authority | None = None) -> str:
    verify = f'ca_file: "{clients.certificate}", verify: true' if clients else ""
    return f'tls {{ cert_file: "{pair.certificate}", key_file: "{pair.key}", {verify} }}'


LONG = 120.0
"""Seconds for which a server that is away would be tried."""
WRONG_NATS = {
    "expired": "its TLS certificate cannot be verified, certificate has expired",
    "stranger": "its TLS certificate cannot be verified, ",
    "other host": "its TLS certificate cannot be verified, IP address mismatch",
    "no client certificate": "it wants a client certificate that it trusts",
    "expired client certificate": "it refuses the client's certificate, certificate expired",
    "no tls": "it offers no TLS, which tls:// and JSWORKER_NATS_TLS_CA ask for",
}


@dataclass(frozen=True)
class Unfit:
    """Settings that do not fit their nats-server, where it is, and what is said of it."""

    settings: Settings
    place: str
    line: str


@pytest.fixture
async def unfit(
    request: pytest.FixtureRequest,
    start_server: StartServer,
    authorities: Authorities,
    make_settings: MakeSettings,
) -> Unfit:
    configuration, files = wrong_tls(request.param, *authorities)
    server: NatsServer = await start_server(configuration)
    url = server.url.replace("nats://", "tls://")
    settings = make_settings(nats_url=url, nats_tls_ca=authorities[0].certificate, **files)
    return Unfit(settings, f"NATS at {HOST}:{server.port}: ", WRONG_NATS[request.param])


class TestNats:
    async def test_mutual_tls(
        self, start_server: StartServer, authority: Authority, make_settings: MakeSettings, launch: Launch
    ) -> None:
        server = await start_server(tls(authority.issue("server"), clients=authority))
        own = authority.issue("client")
        settings = make_settings(
            nats_url=server.url.replace("nats://", "tls://"),
            nats_tls_ca=authority.certificate,
            nats_tls_cert=own.certificate,
            nats_tls_key=own.key,
        )
        await works(settings, launch)

    @pytest.mark.parametrize("unfit", WRONG_NATS, indirect=True)
    async def test_what_is_wrong_is_said_at_once_and_nothing_is_stored(
        self, unfit: Unfit, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", LONG)
        async with asyncio.timeout(LONG / 2):
            said = (await call(unfit.settings, "enqueue", "echo")).refused(1)
        assert said.startswith(unfit.place)
        assert unfit.line in said
        assert (await call(unfit.settings, "jobs", "--json")).ok().json == []

    @pytest.mark.parametrize("unfit", ["stranger", "no tls"], indirect=True)
    @pytest.mark.usefixtures("_logs_as_before")
    def test_a_worker_says_what_is_wrong_at_once(
        self, unfit: Unfit, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(here)
        monkeypatch.setattr("jsworker.cli.run.Supervisor", partial(Supervisor, connect_seconds=LONG))
        for name, value in variables(unfit.settings).items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        said = Cli(capsys)("run", "guarded_jobs:Echo").refused(1)
        assert time.monotonic() - began < LONG / 2
        assert said.startswith(unfit.place)
        assert unfit.line in said


def wrong_tls(wrong: str, authority: Authority, stranger: Authority) -> tuple[str, Mapping[str, Any]]:
    """Return a server's configuration and the client's files that do not fit it."""
    match wrong:
        case "expired":
            return tls(authority.issue("server", expired=True)), {}
        case "stranger":
            return tls(stranger.issue("server")), {}
        case "other host":
            return tls(authority.issue("server", address="192.0.2.1")), {}
        case "no client certificate":
            return tls(authority.issue("server"), clients=authority), {}
        case "expired client certificate":
            own = authority.issue("client", expired=True)
            files = {"nats_tls_cert": own.certificate, "nats_tls_key": own.key}
            return tls(authority.issue("server"), clients=authority), files
        case _:
            return "", {}
