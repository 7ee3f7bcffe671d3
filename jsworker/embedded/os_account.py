"""The operating system's user that PostgreSQL runs as when we are root, for it refuses to run as root."""

import errno
import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsworker.core.errors import ServersUnavailable

# Not "postgres": whoever may connect to an embedded server can run programs as its user, and on a host with
# an installed PostgreSQL that name opens the installed one.
USER_NAME = "pgserver"
_CREATE_USER = (
    ("useradd", "--system", "--no-create-home", "--shell", "/bin/sh", USER_NAME),
    ("adduser", "-S", "-D", "-H", "-s", "/bin/sh", USER_NAME),
)
_LAST_RESORT = "nobody"


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the operating system."""

    name: str
    uid: int
    gid: int


def unprivileged_account() -> Account | None:
    """Return the user to run a new PostgreSQL as; None when we are not root and run it as ourselves.

    The user ``pgserver`` is created when it does not exist; where that is impossible (read-only system, no
    ``useradd``), it is ``nobody``.

    Raises:
        ServersUnavailable: the system has neither user.
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
    """Return the user that owns an existing cluster; None when we are not root and run it as ourselves."""
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
    return can_run(["/bin/sh", "-c", 'cd -- "$1"', "sh", folder], account)


def can_run(command: Sequence[str | Path], account: Account) -> bool:
    """Try whether the user can run a command, and whether it exits with 0.

    Raises:
        ServersUnavailable: this process may not become that user at all.
    """
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
        # It counts who is there now: another process may have created the user in the same moment.
        if account := _find(USER_NAME):
            return account
    return None
