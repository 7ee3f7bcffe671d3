"""How much memory processes take: by /proc where there is one, else by ps."""

import os
import subprocess  # nosec B404
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PS_SECONDS: Final = 5.0


def resident_bytes(pids: Collection[int]) -> dict[int, int]:
    """Return the resident bytes of processes; those that have ended are left out."""
    if not pids:
        return {}
    return _by_proc(pids) if (PROC / "self" / "statm").exists() else _by_ps(pids)


def own_resident_bytes() -> int | None:
    """Return the resident bytes of this process at once; None where there is no /proc."""
    return _by_proc([os.getpid()]).get(os.getpid())


def _by_proc(pids: Collection[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = int((PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    return found


def _by_ps(pids: Collection[int]) -> dict[int, int]:
    command = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PS_SECONDS, check=False)  # noqa: S603  # nosec B603
    except (OSError, subprocess.SubprocessError):  # the next look tries again
        return {}
    lines = (line.split() for line in answer.stdout.splitlines())
    return {int(pid): int(kibibytes) * 1024 for pid, kibibytes in lines}
