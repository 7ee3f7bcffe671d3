"""How many cores this process may use: those of the machine, or fewer."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores, at least 1: by affinity and by the CPU quota of the control group.

    Args:
        root: where /proc and /sys are.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = (len(affinity(0)) if affinity else os.cpu_count()) or 1
    return max(1, math.ceil(min([cores, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control group and of its parent groups."""
    with suppress(OSError, ValueError):  # not on Linux, or in a form that is not known
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mount = root / "sys/fs/cgroup"
            if controllers:  # version 1
                if "cpu" not in controllers.split(","):
                    continue
                mount /= "cpu"
            # In a container the path may be that of the host, while the mount is the container's own group.
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError, ZeroDivisionError):  # no such files, or "max" instead of a number
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        if int(quota) > 0:  # -1: no limit
            yield int(quota) / int(period)
