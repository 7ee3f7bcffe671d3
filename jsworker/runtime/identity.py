"""Who this process is: an id that no other life ever had, and evidence by which its end can be proven."""

import os
import secrets
import socket
from pathlib import Path

from jsworker import __version__
from jsworker.ownership.registry import WorkerRow
from jsworker.settings import Settings


def identify(settings: Settings, kinds: list[str]) -> WorkerRow:
    """Return this process's row of the registry: ``hostname-pid-random`` and what Linux tells about it."""
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
        process_started=_start_time(),
        kinds=kinds,
        concurrency=settings.concurrency,
        version=__version__,
        heartbeat_interval=settings.heartbeat_interval,
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


def _start_time() -> str | None:
    """Return the process's start in clock ticks since boot: with the pid it names one life."""
    stat = _read("/proc/self/stat")
    return None if stat is None else stat.rpartition(")")[2].split()[19]
