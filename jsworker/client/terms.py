"""When a job is due and until when it may begin: as producers give it, checked, in seconds and UTC."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Self, get_args

from jsworker.core.names import shown
from jsworker.core.processor import JobProcessor, Seconds, Unique
from jsworker.ownership.transitions.enqueue import JobTerms

LONGEST_DELAY: Final = 10 * 366 * 86400.0  # seconds; a later date is a mistake
_FIRST: Final = datetime(2000, 1, 1, tzinfo=UTC)  # what the table takes


class Terms(NamedTuple):
    """What a call says beyond kind, payload, key and limits."""

    run_at: datetime | None = None
    expires_in: Seconds | None = None
    unique: Unique | None = None
    unique_for: Seconds | None = None

    def of(self, processor: type[JobProcessor[Any]]) -> Self:
        """Return these terms with what a class says where the call says nothing."""
        expires_in = processor.expires_in if self.expires_in is None else self.expires_in
        terms = self._replace(expires_in=expires_in)
        if any(getattr(self, name) is not None for name in _OF_KEYS):
            return terms
        return terms._replace(**{name: getattr(processor, name) for name in _OF_KEYS})

    def check_keys(self, keys: Iterable[str | None]) -> None:
        """Raise ValueError where what is said of keys, by the call and not by its class, has none."""
        said = [name for name in _OF_KEYS if getattr(self, name) is not None]
        if said and any(key is None for key in keys):
            raise ValueError(f"{self._shown(said[0])} needs a unique_key for each job")

    def check(self, delay: Seconds) -> tuple[float, JobTerms]:
        """Return the delay in seconds and the terms of a job that has a key.

        Raises:
            TypeError, ValueError: what cannot be, or cannot be together.
        """
        if self.unique is not None and self.unique not in get_args(Unique):
            raise ValueError(f"unique={shown(self.unique)} must be 'live' or 'waiting'")
        seconds = seconds_of("delay", delay)
        if self.run_at is not None and seconds:
            raise ValueError(f"delay={shown(delay)} and run_at={shown(self.run_at)}: give one of them")
        run_at = None if self.run_at is None else instant_of("run_at", self.run_at)
        expires_in = None if self.expires_in is None else positive_seconds("expires_in", self.expires_in)
        if expires_in is not None:
            self._check_expiry(expires_in, delay, seconds, run_at)
        unique_for = None if self.unique_for is None else positive_seconds("unique_for", self.unique_for)
        if unique_for is not None and self.unique == "waiting":
            raise ValueError(f"{self._shown('unique_for')} and {self._shown('unique')}: give one of them")
        scope = self.unique or "live" if unique_for is None else "window"
        return seconds, JobTerms(run_at, expires_in, scope, unique_for)

    def _shown(self, name: str) -> str:
        return f"{name}={shown(getattr(self, name))}"

    def _check_expiry(
        self, expires_in: float, delay: Seconds, seconds: float, run_at: datetime | None
    ) -> None:
        # By this machine's clock, for a mistake; the database's decides.
        due = seconds if run_at is None else (run_at - datetime.now(UTC)).total_seconds()
        if expires_in <= due:
            when = f"delay={shown(delay)}" if run_at is None else f"run_at={run_at.isoformat()}"
            raise ValueError(f"expires_in={shown(self.expires_in)} ends before the job is due: {when}")


_OF_KEYS: Final = ("unique", "unique_for")
_PLAIN: Final = JobTerms()


def of_job(terms: JobTerms, key: str | None) -> JobTerms | None:
    """Return the terms of a job with or without a key; None: the plain statements enqueue it."""
    if key is None:
        terms = JobTerms(terms.run_at, terms.expires_in)
    return None if terms == _PLAIN else terms


def positive_seconds(name: str, value: Seconds) -> float:
    """Return a duration of more than 0 seconds; raises as ``seconds_of``."""
    seconds = seconds_of(name, value)
    if seconds == 0:
        raise ValueError(f"{name}={shown(value)} must be more than 0 seconds")
    return seconds


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
