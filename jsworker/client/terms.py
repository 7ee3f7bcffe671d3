"""Checks when a job is due, until when it may begin, and how its key is unique, as producers give it."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from jsworker.core.names import shown
from jsworker.core.processor import JobProcessor, Seconds, Unique
from jsworker.ownership.transitions.enqueue import JobTerms, NewJob

LONGEST_DELAY: Final = 10 * 366 * 86400.0  # seconds; a later date is a mistake
Scope: TypeAlias = Literal["live", "waiting", "window", "debounce"]
WAITING_SCOPES: Final = frozenset({"waiting", "debounce"})
"""Scopes in which a job of a key may wait while another runs; a later call may replace its payload."""
_FIRST: Final = datetime(2000, 1, 1, tzinfo=UTC)  # the earliest time that the table accepts


class Terms(NamedTuple):
    """The options of a call beyond kind, payload, key and limits."""

    run_at: datetime | None = None
    expires_in: Seconds | None = None
    unique: Unique | None = None
    unique_for: Seconds | None = None
    debounce: Seconds | None = None
    debounce_max: Seconds | None = None

    def of(self, processor: type[JobProcessor[Any]], *, keyed: bool) -> Self:
        """Return these terms, with the class's ``expires_in`` if the call gives none.

        The class's terms of keys are used if jobs are ``keyed`` and the call gives none of these four.
        """
        terms = self
        if processor.expires_in is not None and self.expires_in is None:
            terms = self._replace(expires_in=processor.expires_in)
        if not keyed or any(getattr(self, name) is not None for name in _OF_KEYS):
            return terms
        of_class = {name: getattr(processor, name) for name in _OF_KEYS}
        if of_class["unique"] == "live":  # the default
            of_class["unique"] = None
        return terms._replace(**of_class)

    def check_keys(self, keys: Iterable[str | None]) -> None:
        """Raise ValueError if the call itself, not the class, gives terms of keys and a job has no key."""
        said = [name for name in _OF_KEYS if getattr(self, name) is not None]
        if said and any(key is None for key in keys):
            raise ValueError(f"{self._shown(said[0])} needs a unique_key for each job")

    def check(self, delay: Seconds) -> tuple[float, JobTerms]:
        """Return the delay in seconds and the terms of a job that has a key.

        Raises:
            TypeError, ValueError: a term has a wrong type or value, or contradicts another.
        """
        if self == _NONE:
            return seconds_of("delay", delay), _PLAIN
        if self.unique is not None and self.unique not in get_args(Unique):
            raise ValueError(f"unique={shown(self.unique)} must be 'live' or 'waiting'")
        seconds = seconds_of("delay", delay)
        scope, unique_for, debounce, debounce_max = self._check_scope()
        if debounce is not None:
            if seconds or self.run_at is not None:
                other = f"delay={shown(delay)}" if seconds else self._shown("run_at")
                raise ValueError(f"{self._shown('debounce')} and {other}: give one of them")
            delay, seconds = self.debounce or 0.0, debounce
        if self.run_at is not None and seconds:
            raise ValueError(f"delay={shown(delay)} and {self._shown('run_at')}: give one of them")
        run_at = None if self.run_at is None else instant_of("run_at", self.run_at)
        expires_in = None if self.expires_in is None else positive_seconds("expires_in", self.expires_in)
        if expires_in is not None:
            self._check_expiry(expires_in, delay, seconds, run_at)
        delay_of_its_own = seconds if debounce is None else 0.0
        return delay_of_its_own, JobTerms(run_at, expires_in, scope, unique_for, debounce, debounce_max)

    def _check_scope(self) -> tuple[Scope, float | None, float | None, float | None]:
        unique_for, debounce, debounce_max = (
            None if getattr(self, name) is None else positive_seconds(name, getattr(self, name))
            for name in ("unique_for", "debounce", "debounce_max")
        )
        for one, other in (
            ("unique_for", self.unique == "waiting" and "unique"),
            ("debounce", self.unique == "live" and "unique"),
            ("debounce", unique_for is not None and "unique_for"),
        ):
            if other and getattr(self, one) is not None:
                raise ValueError(f"{self._shown(one)} and {self._shown(other)}: give one of them")
        if debounce_max is not None and debounce is None:
            raise ValueError(f"{self._shown('debounce_max')} needs debounce")
        if debounce is not None and debounce_max is not None and debounce > debounce_max:
            raise ValueError(
                f"{self._shown('debounce')} must not be longer than {self._shown('debounce_max')}"
            )
        scope: Scope = "window" if unique_for is not None else self.unique or "live"
        return scope if debounce is None else "debounce", unique_for, debounce, debounce_max

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        return f"{name}={value.isoformat() if isinstance(value, datetime) else shown(value)}"

    def _check_expiry(
        self, expires_in: float, delay: Seconds, seconds: float, run_at: datetime | None
    ) -> None:
        # This finds mistakes, by this machine's clock; the database's clock decides.
        due = seconds if run_at is None else (run_at - datetime.now(UTC)).total_seconds()
        if expires_in <= due:
            what = "delay" if self.debounce is None else "debounce"
            when = f"{what}={shown(delay)}" if run_at is None else f"run_at={run_at.isoformat()}"
            raise ValueError(f"expires_in={shown(self.expires_in)} ends before the job is due: {when}")


_OF_KEYS: Final = ("unique", "unique_for", "debounce", "debounce_max")
_NONE: Final = Terms()
_PLAIN: Final = JobTerms()


def for_jobs(
    terms: JobTerms, keys: Iterable[str | None], *, delay: float
) -> tuple[JobTerms | None, JobTerms | None]:
    """Return the terms of a call's jobs with a key, and of those without.

    They are None if the plain statements can enqueue the jobs.
    """
    # A due time is a term of a key: the plain statements return an expired job that still holds it. Then the
    # jobs without keys have terms, too, because one statement enqueues jobs of the same terms.
    plain = not delay or all(key is None for key in keys)
    keyed, unkeyed = (
        None if plain and each == _PLAIN else each
        for each in (terms, JobTerms(terms.run_at, terms.expires_in))
    )
    return keyed, unkeyed


def is_due(job: NewJob) -> bool:
    """Return whether a job is surely due when it is enqueued; messages of others are left to relays."""
    return not job.delay and (job.terms is None or (job.terms.run_at is None and job.terms.debounce is None))


def positive_seconds(name: str, value: Seconds) -> float:
    """Return a duration of more than 0 seconds; raises as ``seconds_of``."""
    seconds = seconds_of(name, value)
    if seconds == 0:
        raise ValueError(f"{name}={shown(value)} must be more than 0 seconds")
    return seconds


def seconds_of(name: str, value: Seconds) -> float:
    """Return a duration in seconds.

    Raises:
        TypeError: it is neither a number nor a timedelta.
        ValueError: it is negative, longer than ``LONGEST_DELAY``, or not a number.
    """
    given = value.total_seconds() if isinstance(value, timedelta) else value
    try:
        is_in_range = 0 <= given <= LONGEST_DELAY
    except ArithmeticError:  # Decimal("NaN") cannot be compared
        is_in_range = False
    except TypeError:
        what = f"not {type(value).__name__}"
        raise TypeError(f"{name}={shown(value)} must be a number of seconds or a timedelta, {what}") from None
    if not is_in_range:
        raise ValueError(f"{name}={shown(value)} must be from 0 to {LONGEST_DELAY:.0f} seconds")
    return float(given)


def instant_of(name: str, value: datetime) -> datetime:
    """Return an instant in UTC.

    Raises:
        TypeError: it is not a datetime.
        ValueError: it has no time zone, is before 2000, or over ten years ahead by this machine's clock.
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
