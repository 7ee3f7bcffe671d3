"""Local time for waits and fences."""

import time
from typing import Final

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return seconds on a clock that also counts while the machine is suspended, where there is one."""
    return time.clock_gettime(_CLOCK)
