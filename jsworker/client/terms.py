"""When a job is due and until when it may begin: as producers give it, checked, in seconds and UTC."""

from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from jsworker.core.names import shown
from jsworker.ownership.transitions.enqueue import JobTerms

Seconds: TypeAlias = float | timedelta

LONGEST_DELAY: Final = 10 * 366 * 86400.0  # seconds; a later date is a mistake
_FIRST: Final = datetime(2000, 1, 1, tzinfo=UTC)  # what the table takes


class Terms(NamedTuple):
    """What a call says beyond kind, payload, key and limits."""

    run_at: datetime | None = None

    def check(self, delay: Seconds) -> tuple[float, JobTerms | None]:
        """Return the delay in seconds and the terms of each job; None: the plain statements enqueue it.

        Raises:
            TypeError, ValueError: what cannot be, or cannot be together.
        """
        seconds = seconds_of("delay", delay)
        if self.run_at is None:
            return seconds, None
        if seconds:
            raise ValueError(f"delay={shown(delay)} and run_at={shown(self.run_at)}: give one of them")
        return seconds, JobTerms(run_at=instant_of("run_at", self.run_at))


def seconds_of(name: str, value: Seconds, *, longest: float = LONGEST_DELAY) -> float:
    """Return a duration in seconds.

    Raises:
        TypeError: it is neither a number nor a timedelta.
        ValueError: it is negative, longer than ``longest`` seconds, or not a number.
    """
    given = value.total_seconds() if isinstance(value, timedelta) else value
    try:
        is_in_range = 0 <= given <= longest
    except TypeError:
        what = f"not {type(value).__name__}"
        raise TypeError(f"{name}={shown(value)} must be a number of seconds or a timedelta, {what}") from None
    if not is_in_range:
        raise ValueError(f"{name}={shown(value)} must be from 0 to {longest:g} seconds")
    return float(given)


def instant_of(name: str, value: datetime) -> datetime:
    """Return an instant in UTC.

    Raises:
        TypeError: it is no datetime.
        ValueError: it has no time zone, is before 2000, or ten years ahead by this machine's clock.
    """
    if not isinstance(value, datetime):
        raise TypeError(
            f"{name}={shown(value)} must be a datetime with a time zone, not {type(value).__name__}"
        )
    if value.utcoffset() is None:
        raise ValueError(f"{name}={value.isoformat()} must have a time zone, for example tzinfo=UTC")
    try:
        instant = value.astimezone(UTC)
    except OverflowError:
        instant = datetime.max.replace(tzinfo=UTC)
    last = datetime.now(UTC) + timedelta(seconds=LONGEST_DELAY)
    if not _FIRST <= instant <= last:
        raise ValueError(f"{name}={value.isoformat()} must be from 2000 on and at most ten years ahead")
    return instant
