"""Local time for waits and fences, waits that vary, and the check of waits that users give."""

import random
import time
from datetime import timedelta
from typing import Any, Final

LONGEST_WAIT: Final = 10 * 366 * 86400.0
"""Seconds by which a job may be put off at most: PostgreSQL cannot add arbitrarily large numbers to dates."""

DURATION_BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 1800.0, 7200.0, 28_800.0),
)
"""Upper bounds, in seconds, by which durations are counted: jobs take from milliseconds to hours."""

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return seconds on a clock that also counts while the machine is suspended, where there is one.

    macOS has no clock of that name, but its monotonic clock counts suspension. On other systems without it, a
    worker does not notice that it was suspended, and may work for a moment on jobs that others have taken
    over; the rows of these jobs refuse its writes.
    """
    return time.clock_gettime(_CLOCK)


def jittered(seconds: float, share: float) -> float:
    """Return a wait that varies by this share either way, so that many do not end at one moment."""
    return seconds * random.uniform(1 - share, 1 + share)  # noqa: S311 -- spreads load, hides nothing


def wait_in_seconds(value: Any, what: str) -> float:
    """Return a wait that is given in seconds or as a timedelta, in seconds; ``what`` names it in an error.

    Raises:
        ValueError: it is neither of them, is negative, or is longer than ``LONGEST_WAIT``.
    """
    given = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 <= given <= LONGEST_WAIT:
        rule = f"must be a timedelta or a number of seconds, from 0 to {LONGEST_WAIT:.0f}"
        raise ValueError(f"{what}={ascii(value)[:80]} {rule}")
    return float(given)
