"""Who this process is: an id that no other life ever had, and evidence by which its end can be proven."""

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from jsworker import __version__
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.workers import WorkerRow

_ENDED = frozenset("ZX")
"""States of a process that runs no more: a zombie waits only for its parent to take note."""


def identify(
    settings: Settings, kinds: Sequence[str], kinds_without_timeout: Sequence[str] = ()
) -> WorkerRow:
    """Return this process's row of the registry: ``hostname-pid-random`` and what Linux knows of it."""
    hostname = settings.hostname or socket.gethostname()
    pid = os.getpid()
    name = settings.worker_id or f"{hostname}-{pid}"
    return WorkerRow(
        id=f"{name}-{secrets.token_hex(4)}",
        hostname=hostname,
        pod_uid=settings.pod_uid,
        container=settings.container,
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
        pid=pid,
        process_started=start_of(pid),
        kinds=kinds,
        concurrency=settings.concurrency,
        version=__version__,
        heartbeat_interval=settings.heartbeat_interval,
        kinds_without_timeout=kinds_without_timeout,
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None  # not Linux: no evidence of this sort, the stale rule covers it


def _link(path: str) -> str | None:
    try:
        return str(Path(path).readlink())
    except OSError:
        return None


def start_of(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None: it does not run in this PID namespace.

    With the pid it names one life.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in _ENDED else fields[18]
