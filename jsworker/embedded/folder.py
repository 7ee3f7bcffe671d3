"""The files by which commands and the guard of one data folder find each other.

Who is there is told by locks alone. Every command holds ``commands`` shared; the guard ends when it gets it
exclusively. Whoever looks for a guard to join, or starts one, holds ``start``. The guard holds ``guard``
while it lives.
"""

import json
import os
from pathlib import Path
from typing import IO, Any

from jsworker.embedded.locks import SHARED, try_lock

PRIVATE = 0o600
"""The mode of files that nobody but their owner may read."""


class DataFolder:
    """The data folder of embedded servers.

    Attributes:
        path: the folder.
        guard_log: what the guard has to say.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.guard_log = path / "guard.log"
        self._urls = path / "urls.json"
        self._ports = path / "ports.json"

    def open_lock(self, name: str) -> IO[bytes]:
        """Open the lock file ``commands``, ``start`` or ``guard``; closing it lets the lock go."""
        return (self.path / f"{name}.lock").open("ab")

    def last_words(self) -> str:
        """Return the last line of the guard's log."""
        return (self.guard_log.read_text(errors="replace").splitlines() or [""])[-1]

    def has_guard(self) -> bool:
        """Tell whether a guard lives."""
        with self.open_lock("guard") as lock:
            return not try_lock(lock, SHARED)

    def read_urls(self) -> dict[str, str] | None:
        """Return the running servers' URLs by server name; None when no guard has told them yet."""
        urls: dict[str, str] | None = _read(self._urls)
        return urls

    def write_urls(self, urls: dict[str, str]) -> None:
        """Tell that the servers answer, and where; the URLs hold PostgreSQL's password."""
        write_privately(self._urls, json.dumps(urls))

    def delete_urls(self) -> None:
        """Forget what a guard told."""
        self._urls.unlink(missing_ok=True)

    def read_ports(self) -> dict[str, int]:
        """Return the ports of the last start by server name; empty when there was none."""
        return _read(self._ports) or {}

    def write_ports(self, ports: dict[str, int]) -> None:
        """Keep the ports for the next start."""
        write_privately(self._ports, json.dumps(ports))


def write_privately(file: Path, text: str) -> None:
    """Write or replace, as a whole, a file that nobody but the owner of its folder may read."""
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(PRIVATE, exist_ok=False)
    if os.geteuid() == 0:
        folder = file.parent.stat()
        os.chown(unfinished, folder.st_uid, folder.st_gid)
    unfinished.write_text(text)
    unfinished.replace(file)


def open_log(file: Path, *, limit: int) -> IO[bytes]:
    """Open a log at its end, begun anew beyond ``limit`` bytes; nobody but its owner may read it."""
    file.touch(PRIVATE)
    log = file.open("ab")
    os.fchmod(log.fileno(), PRIVATE)  # earlier versions made it readable for all
    if log.tell() > limit:
        log.truncate(0)
        log.seek(0)
    return log


def _read(file: Path) -> Any:
    # A file cut off by a crash of the machine counts as missing.
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
