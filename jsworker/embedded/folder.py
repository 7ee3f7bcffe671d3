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
        """Tell that the servers answer, and where."""
        _write(self._urls, urls)

    def delete_urls(self) -> None:
        """Forget what a guard told."""
        self._urls.unlink(missing_ok=True)

    def read_ports(self) -> dict[str, int]:
        """Return the ports of the last start by server name; empty when there was none."""
        return _read(self._ports) or {}

    def write_ports(self, ports: dict[str, int]) -> None:
        """Keep the ports for the next start."""
        _write(self._ports, ports)


def _read(file: Path) -> Any:
    # A file cut off by a crash of the machine counts as missing.
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _write(file: Path, value: object) -> None:
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(value))
    unfinished.replace(file)
