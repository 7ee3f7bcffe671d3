"""Local time for waits and fences."""

import time


def boottime() -> float:
    """Return seconds on a clock that also counts while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
