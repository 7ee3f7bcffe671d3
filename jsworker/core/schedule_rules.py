"""When schedules are due: cron rules or equal steps, and the policies for missed instants."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, takewhile
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from jsworker.core.errors import InvalidName
from jsworker.core.names import shown

ON_TIME_SECONDS: Final = 60.0
"""An instant that is fired within this time is on time; after it, the instant counts as missed."""

_MOST_CAUGHT_UP: Final = 1000
_MOST_COUNTED: Final = 1000
_SHORTEST_STEP: Final = 1.0
_LONGEST_STEP: Final = 366 * 86400.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_NAME: Final = 100
_EVERY: Final = "every "
_CATCH_UP: Final = "catch_up="
_LONGEST_CHANGE: Final = timedelta(hours=25)
"""Clocks have never been set back by more."""
_MOST_YEARS: Final = 50
"""A rule that is not due for so long never is, as for the library."""
_FIRST_WINDOW: Final = timedelta(hours=1)
_WINDOW_GROWTH: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policies:
    payload: Any = field(default_factory=dict)
    missed: Literal["coalesce", "skip"] = "coalesce"
    catch_up: int = 0
    overlap: Literal["allow", "skip"] = "allow"

    def check_policies(self) -> None:
        """Raise ``ValueError`` for an unknown policy, or policies that contradict each other."""
        if self.missed not in ("coalesce", "skip"):
            raise ValueError(f"missed={shown(self.missed)} must be coalesce or skip")
        if self.overlap not in ("allow", "skip"):
            raise ValueError(f"overlap={shown(self.overlap)} must be allow or skip")
        if type(self.catch_up) is not int or not 0 <= self.catch_up <= _MOST_CAUGHT_UP:
            rule = f"must be a whole number from 0 to {_MOST_CAUGHT_UP}"
            raise ValueError(f"catch_up={shown(self.catch_up)} {rule}")
        if self.catch_up and self.missed == "skip":
            raise ValueError("missed='skip' and catch_up contradict each other")
        if self.catch_up and self.overlap == "skip":
            raise ValueError(
                "overlap='skip' and catch_up contradict each other: the first job holds up the others"
            )

    @property
    def missed_text(self) -> str:
        """The policy for missed instants, as it is stored."""
        return f"{_CATCH_UP}{self.catch_up}" if self.catch_up else self.missed


@dataclass(frozen=True, slots=True)
class Cron(_Policies):
    """Due at the times of a cron rule of five fields, read in a time zone.

    Fields, names (``MON``, ``JAN``), ranges, steps, ``L`` and ``#`` are those of the library cronsim. A time
    that daylight saving time skips is due at the next existing time, a time that occurs twice is due once;
    rules whose minute or hour begins with ``*`` follow the hours as they come.

    Attributes:
        rule: minute, hour, day of the month, month, day of the week.
        tz: name of a time zone of the IANA database.
        payload: what each job gets.
        missed: the policy if the first instant without a job is more than a minute ago: ``coalesce`` runs
            only the latest one, ``skip`` those of the last minute.
        catch_up: how many of the latest missed instants get a job each, at most 1,000.
        overlap: ``skip`` leaves an instant out while the job of the previous one waits or runs.

    Raises:
        ValueError: the rule, the time zone or a policy is not valid, or the rule never comes due.
    """

    rule: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        self.check_policies()
        if not isinstance(self.rule, str) or len(self.rule.split()) != 5:
            fields = "minute, hour, day of the month, month, day of the week"
            hint = f"{fields}; for seconds there is Every(seconds=…)"
            raise ValueError(f"cron rule {shown(self.rule)} must have five fields: {hint}")
        try:
            ZoneInfo(self.tz)
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
            raise ValueError(f"tz={shown(self.tz)} must be a time zone, for example Europe/Berlin") from None
        self.after(datetime.now(UTC))

    @property
    def text(self) -> str:
        """The rule as it is stored."""
        return " ".join(self.rule.split())

    def after(self, instant: datetime) -> datetime:
        """Return the first due instant after this one, in UTC.

        Raises:
            ValueError: the rule cannot be read, or never comes due again.
        """
        local = instant.astimezone(ZoneInfo(self.tz))
        found = self._first_after(instant, local.replace(fold=0))
        if self._follows_hours:
            # What the clock would show if it were set back until then: times may come twice before that.
            ahead = min(found - instant, _LONGEST_CHANGE)
            set_back = (instant + ahead).astimezone(local.tzinfo) - ahead
            if local.fold or set_back < local:
                found = min(found, self._first_after(instant, min(local, set_back).replace(fold=1)))
        return found

    @property
    def _follows_hours(self) -> bool:
        return any(field.startswith("*") for field in self.rule.split()[:2])

    def _first_after(self, instant: datetime, start: datetime) -> datetime:
        """Return the first due instant after this one, of the local times after ``start`` with its fold."""
        try:
            # With the zone, the library leaves hours out, or never answers, where clocks are changed.
            for due in CronSim(self.rule, start.replace(tzinfo=None)):
                local = due.replace(tzinfo=start.tzinfo, fold=start.fold)
                while _is_skipped(local) and not self._follows_hours:
                    local += timedelta(minutes=1)
                if (found := local.astimezone(UTC)) > instant and not _is_skipped(local):
                    return found
                if due.year > start.year + _MOST_YEARS:
                    break
        except CronSimError as error:
            raise ValueError(f"cron rule {shown(self.rule)}: {str(error).lower()}") from None
        raise ValueError(f"cron rule {shown(self.rule)} never comes due")


def _is_skipped(local: datetime) -> bool:
    """Return whether clocks are set forward over a local time."""
    return local.astimezone(UTC).astimezone(local.tzinfo) != local


@dataclass(frozen=True, slots=True)
class Every(_Policies):
    """Due at the multiples of a step since 1970-01-01 00:00 UTC, so that restarts do not move the instants.

    Attributes:
        seconds, minutes, hours, days: the step is their sum, from a second to 366 days.
        payload, missed, catch_up, overlap: as in ``Cron``.

    Raises:
        ValueError: the step is out of range, or a policy is not valid.
    """

    seconds: float = 0
    minutes: float = 0
    hours: float = 0
    days: float = 0

    def __post_init__(self) -> None:
        self.check_policies()
        length, wanted = 0.0, "a step from 1 second to 366 days"
        try:
            length = self._step.total_seconds()
        except TypeError:
            wanted = f"numbers: {wanted}"
        except (ValueError, OverflowError):
            pass
        if not _SHORTEST_STEP <= length <= _LONGEST_STEP:
            given = ", ".join(
                f"{name}={shown(value)}"
                for name in ("seconds", "minutes", "hours", "days")
                if (value := getattr(self, name))
            )
            raise ValueError(f"Every({given}) must be {wanted}")

    @property
    def _step(self) -> timedelta:
        return timedelta(seconds=self.seconds, minutes=self.minutes, hours=self.hours, days=self.days)

    @property
    def text(self) -> str:
        """The rule as it is stored."""
        length = self._step.total_seconds()
        return f"{_EVERY}{int(length) if length.is_integer() else length} s"

    @property
    def tz(self) -> str:
        """The time zone; equal steps do not depend on it."""
        return "UTC"

    def after(self, instant: datetime) -> datetime:
        """Return the first due instant after this one, in UTC."""
        step = self._step
        return _EPOCH + ((instant - _EPOCH) // step + 1) * step


Schedule = Cron | Every


@dataclass(frozen=True, slots=True)
class Due:
    """What to do about a schedule that is due.

    Attributes:
        run: the instants that get a job, the earliest first.
        then: when it is due next.
        missed: how many get no job, the earliest of all among them; at most 1,000 are counted.
    """

    run: tuple[datetime, ...]
    then: datetime
    missed: int


def due(schedule: Schedule, first: datetime, now: datetime) -> Due:
    """Return which of the instants from ``first``, which is due, to ``now`` get a job.

    If ``first`` is at most a minute ago, all of them; else the policy for missed ones decides about all. With
    ``skip`` those of the last minute get their jobs all the same.
    """
    if (now - first).total_seconds() <= ON_TIME_SECONDS:
        run = [first, *_between(schedule, first, now)]
    elif schedule.missed == "skip":
        run = list(_between(schedule, now - timedelta(seconds=ON_TIME_SECONDS), now))
    else:
        run = _latest(schedule, first, now, schedule.catch_up or 1)
    then = schedule.after(max(now, first))
    until = run[0] if run else then
    passed = takewhile(lambda instant: instant < until, chain((first,), _between(schedule, first, now)))
    return Due(tuple(run), then, sum(1 for _ in islice(passed, _MOST_COUNTED)))


def read_schedule(rule: str, tz: str, missed: str, **policies: Any) -> Schedule:
    """Return a schedule as it was stored.

    Raises:
        ValueError: it cannot be read.
    """
    if missed.startswith(_CATCH_UP):
        policies["catch_up"] = int(missed.removeprefix(_CATCH_UP))
    else:
        policies["missed"] = missed
    if rule.startswith(_EVERY):
        return Every(seconds=float(rule.removeprefix(_EVERY).removesuffix(" s")), **policies)
    return Cron(rule, tz, **policies)


def check_schedule_name(name: str) -> str:
    """Return ``name`` when it may name a schedule: 1 to 100 printable characters.

    Raises:
        InvalidName: it may not.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
        rule = f"must be text of 1 to {_LONGEST_NAME} printable characters"
        raise InvalidName(f"name {shown(name)} of a schedule {rule}")
    return str.__str__(name)


def named_schedules(kind: str, given: Any) -> dict[str, Schedule]:
    """Return the schedules of a processor by their names; a single schedule has the name of the kind.

    Raises:
        InvalidName: a name is not allowed.
        TypeError: a value is not a schedule.
    """
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else {kind: given}
    for schedule in named.values():
        if not isinstance(schedule, Cron | Every):
            raise TypeError(f"must be a Cron, an Every, or several by name, not {type(schedule).__name__}")
    return {check_schedule_name(name): schedule for name, schedule in named.items()}


def _between(schedule: Schedule, first: datetime, now: datetime) -> Iterator[datetime]:
    def following() -> Iterator[datetime]:
        instant = first
        while True:
            instant = schedule.after(instant)
            yield instant

    return takewhile(lambda instant: instant <= now, following())


def _latest(schedule: Schedule, first: datetime, now: datetime, number: int) -> list[datetime]:
    """Return the latest instants from ``first`` up to now, without going through all of a long outage."""
    window = _FIRST_WINDOW
    while now - window > first:
        found = list(_between(schedule, now - window, now))
        if len(found) >= number:
            return found[-number:]
        window *= _WINDOW_GROWTH
    return [first, *_between(schedule, first, now)][-number:]
