"""The PostgreSQL 18 of the wheel."""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.child_processes import start_with_parent
from jsworker.embedded.resources import LOOPBACK, find_postgres, write_privately
from jsworker.embedded.server import EmbeddedServer, server_environment
from jsworker.embedded.unprivileged import (
    Account,
    can_enter,
    new_cluster_folder,
    owner_of,
    record_data_folder,
    runnable_installation,
    unprivileged_account,
)

SUPERUSER = "postgres"

_DEFAULT_SETTINGS = MappingProxyType({"max_connections": "200"})
_HOST_ACCESS = f"host all,replication all {LOOPBACK}/32 scram-sha-256\n"
_READY_LINE = 7
_FAST_SHUTDOWN = (signal.SIGINT, 20.0)
_IMMEDIATE_SHUTDOWN = (signal.SIGQUIT, 10.0)
_PROGRAM_DEADLINE = 60.0
_SHOWN_LINES = 10


class EmbeddedPostgres(EmbeddedServer):
    """A PostgreSQL 18 on a loopback port, with the superuser ``postgres``.

    A superuser of the database can run programs as the server's user. So its password is drawn at random at
    the first start; it lies in the file ``password`` of the data folder, which its owner alone may read, and
    in the URLs. A cluster without that file gets a new password at its next start.

    PostgreSQL refuses to run as root. Under root it runs as the owner of the cluster: the unprivileged user
    ``pgserver``, made when missing. When that user cannot enter the data folder because a parent is closed to
    others, the cluster lies in /var/lib/jsworker (else /var/tmp/jsworker-0) and the data folder holds a
    symbolic link to it; such a cluster is deleted, a week after its last use, when its data folder has been
    deleted. When that user cannot run the wheel's programs (a virtualenv below /root), they are copied to the
    same place once.

    Args:
        data: its folder: cluster and log; made when missing.
        port: TCP port on 127.0.0.1; None takes a free one.
        settings: settings of PostgreSQL, for example ``{"fsync": "off"}`` for data that may be lost; the
            defaults are PostgreSQL's own and max_connections = 200.
    """

    name = "PostgreSQL"
    _stop_signals = (_FAST_SHUTDOWN, _IMMEDIATE_SHUTDOWN)

    def __init__(
        self, data: Path, *, port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(data, port)
        self._settings = {**_DEFAULT_SETTINGS, **(settings or {})}
        self._programs_folder: Path | None = None

    @property
    def url(self) -> str:
        """Where clients connect, to the database ``postgres``, with the password.

        Raises:
            ServersUnavailable: the server was never started.
        """
        return self.database_url("postgres")

    @property
    def cluster(self) -> Path:
        """PostgreSQL's own data directory."""
        return (self.data / "cluster").resolve()

    def database_url(self, name: str) -> str:
        """Return where clients connect to a database, with the password.

        Raises:
            ServersUnavailable: the server was never started.
        """
        return f"postgresql://{SUPERUSER}:{self._password()}@{LOOPBACK}:{self.port}/{name}"

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database on the running server.

        Args:
            name: its name.
            template: the database to copy, without connections to it; None copies PostgreSQL's own.

        Returns:
            Its URL.

        Raises:
            ServersUnavailable: the server refused or does not answer.
        """
        statement = f"CREATE DATABASE {_identifier(name)}"
        if template is not None:
            statement += f" TEMPLATE {_identifier(template)}"
        where = ["-h", LOOPBACK, "-p", str(self.port), "-U", SUPERUSER, "-d", "postgres"]
        done = subprocess.run(  # noqa: S603 -- the wheel's own program
            [self.program("psql"), *where, "-X", "-q", "-c", statement],
            env=server_environment() | {"PGPASSWORD": self._password()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServersUnavailable(f"database {name!r} cannot be created: {_end_of(done.stderr)}")
        return self.database_url(name)

    def kill(self) -> None:
        """End all of the server's processes at once, as a crash would; the next start recovers."""
        if self._process is not None and self.running:
            # Backends could commit after the postmaster's death; stopped first, it makes no new ones.
            self._process.send_signal(signal.SIGSTOP)
            backends = _children_of(self._process.pid)
            super().kill()
            for backend in backends:
                with suppress(ProcessLookupError):
                    os.kill(backend, signal.SIGKILL)

    def program(self, name: str) -> Path:
        """Return one of PostgreSQL's programs, for example ``pg_basebackup``, that the server's user can run.

        Raises:
            ServersUnavailable: the wheel is not installed.
        """
        if self._programs_folder is None:
            self._programs_folder = runnable_installation(find_postgres(), self._account()) / "bin"
        return self._programs_folder / name

    def discard(self) -> None:
        """End the server and delete its folder, with the cluster wherever it lies."""
        self._stop_with(_IMMEDIATE_SHUTDOWN)
        shutil.rmtree(self.cluster.parent, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)

    def _locked_folder(self) -> Path:
        pointer = self.data / "cluster"
        if pointer.is_symlink() and not pointer.exists():
            raise ServersUnavailable(
                f"PostgreSQL's data of {self.data} in {pointer.readlink()} are gone: "
                "delete the data folder to start afresh"
            )
        if not pointer.exists():
            account = unprivileged_account()
            if account is not None and not can_enter(self.data, account):
                folder = new_cluster_folder(self.data, account)
                (folder / "cluster").mkdir()
                pointer.symlink_to(folder / "cluster")
        return self.cluster.parent

    def _prepare(self, lock: IO[bytes]) -> None:
        account = self._account()
        if account is not None and not can_enter(self.cluster.parent, account):
            raise ServersUnavailable(
                f"user {account.name}, who runs PostgreSQL for root, cannot enter {self.cluster.parent}: "
                "open its parents to others (chmod o+x) or choose another data folder"
            )
        self._programs_folder = runnable_installation(find_postgres(), account) / "bin"
        if not (self.cluster / "PG_VERSION").exists():
            self._create_cluster(account, lock)
        if self.cluster.parent != self.data:
            record_data_folder(self.cluster.parent, self.data)
        # The lock is held, so no process of this cluster lives; another may have got the old process id.
        (self.cluster / "postmaster.pid").unlink(missing_ok=True)
        if not self._password_file.exists():
            self._guard_with_password(account, lock)

    def _command(self) -> Sequence[str | Path]:
        addresses = {"port": str(self.port), "listen_addresses": LOOPBACK, "unix_socket_directories": ""}
        return [self.program("postgres"), "-D", self.cluster, *_options({**self._settings, **addresses})]

    def _answers(self, pid: int) -> bool:
        # The postmaster writes its state there, so that no other server on the port can be taken for it.
        try:
            lines = (self.cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _READY_LINE and lines[0] == str(pid) and lines[_READY_LINE].strip() == "ready"

    def _account(self) -> Account | None:
        if (self.cluster / "PG_VERSION").exists():
            return owner_of(self.cluster)
        return unprivileged_account()

    def _create_cluster(self, account: Account | None, lock: IO[bytes]) -> None:
        # Under another name until it is whole: a start that is killed here leaves nothing that looks whole.
        unfinished = self.cluster.with_name("cluster.unfinished")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(mode=0o700)
        if account is not None:
            os.chown(unfinished, account.uid, account.gid)
        self._initdb(unfinished, account, lock)
        # It belongs to a cluster of this folder that is no more.
        self._password_file.unlink(missing_ok=True)
        unfinished.rename(self.cluster)

    def _initdb(self, folder: Path, account: Account | None, lock: IO[bytes]) -> None:
        options = ["--username", SUPERUSER, "--auth", "reject", "--encoding", "UTF8", "--no-instructions"]
        options += ["--locale-provider", "builtin", "--builtin-locale", "C.UTF-8", "--locale", "C"]
        if self._settings.get("fsync") == "off":
            options.append("--no-sync")
        self._run_program([self.program("initdb"), "-D", folder, *options], account, lock)

    def _guard_with_password(self, account: Account | None, lock: IO[bytes]) -> None:
        # The file comes last: a start that is killed here is repeated as a whole by the next one.
        password = secrets.token_hex(16)
        options = _options({**self._settings, "exit_on_error": "on", "log_min_error_statement": "panic"})
        self._run_program(
            [self.program("postgres"), "--single", "-D", self.cluster, *options, "postgres"],
            account,
            lock,
            sent=f"ALTER ROLE {SUPERUSER} PASSWORD '{password}'\n",
        )
        (self.cluster / "pg_hba.conf").write_text(_HOST_ACCESS)
        write_privately(self._password_file, password)

    def _run_program(
        self, command: Sequence[str | Path], account: Account | None, lock: IO[bytes], sent: str = ""
    ) -> None:
        process = start_with_parent(
            command,
            env=server_environment(),
            cwd=Path("/"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[lock.fileno()],
            start_new_session=True,
            death_signal=signal.SIGKILL,
            account=account,
        )
        try:
            output, _ = process.communicate(sent.encode(), timeout=_PROGRAM_DEADLINE)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode != 0:
            raise ServersUnavailable(
                f"{Path(command[0]).name} in {self.data} failed: {_end_of(output.decode(errors='replace'))}"
            )

    @property
    def _password_file(self) -> Path:
        return self.data / "password"

    def _password(self) -> str:
        try:
            return self._password_file.read_text()
        except FileNotFoundError:
            raise ServersUnavailable(
                f"{self.name} in {self.data} has no password yet: start it first"
            ) from None


def _options(settings: Mapping[str, str]) -> list[str]:
    return [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]


def _children_of(pid: int) -> list[int]:
    import psutil  # noqa: PLC0415 -- comes with the wheel; this module must load without it

    return [child.pid for child in psutil.Process(pid).children()]


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _end_of(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])
