"""How many jobs of a kind, or of a key, may run at once, and how many may begin in a span of time."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from jsworker.core.errors import InvalidPayload
from jsworker.core.names import check_limit_key, shown

Key = str | Callable[[Any], Any] | None
"""A field of the payload, or a callable that returns the key of a payload; None: the jobs have no key."""

MOST_RUNNING: Final = 1_000_000
MOST_A_SECOND: Final = 1_000_000
LONGEST_SPAN: Final = 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Limit:
    """How many jobs of a kind may run at once in the whole installation; with a ``key``, of each key.

    It limits owners. A run that has lost its job may still act outside of the database; its fencing token is
    for refusing that.

    Attributes:
        max_running: from 1 to 1,000,000.
        key: a field of the payload, or a callable that gets the payload and returns the key.

    Raises:
        ValueError, TypeError: the number or the key is not allowed.
    """

    max_running: int
    key: Key = None

    def __post_init__(self) -> None:
        _check_number("limit", self.max_running, MOST_RUNNING)
        _check_key(self.key)


@dataclass(frozen=True, slots=True)
class Rate:
    """How many jobs of a kind may begin in a span of time; with a ``key``, of each key.

    After a time without jobs ``number`` jobs begin at once, then one in each ``per / number`` seconds, by the
    clock of the database.

    Attributes:
        number: how many, from 1 to 1,000,000.
        per: seconds, up to 366 days; at most 1,000,000 jobs a second.
        key: as in ``Limit``; a kind with a limit and a rate has one key for both.

    Raises:
        ValueError, TypeError: a number or the key is not allowed.
    """

    number: int
    per: float = 1.0
    key: Key = None

    def __post_init__(self) -> None:
        _check_number("rate", self.number, MOST_RUNNING)
        if isinstance(self.per, bool) or not isinstance(self.per, int | float):
            raise TypeError(f"rate per={shown(self.per)} must be a number of seconds")
        if not (math.isfinite(self.per) and 0 < self.per <= LONGEST_SPAN):
            raise ValueError(f"rate per={self.per!r} must be over 0 and at most {LONGEST_SPAN:.0f} seconds")
        if self.number / self.per > MOST_A_SECOND:
            raise ValueError(
                f"rate {self.number} per {self.per:g} s must be at most {MOST_A_SECOND} a second"
            )
        _check_key(self.key)


def common_key(limit: Limit | None, rate: Rate | None) -> Key:
    """Return the common key of a kind's limit and rate: a job has only one key.

    Raises:
        ValueError: their keys differ.
    """
    keys = [each.key for each in (limit, rate) if each is not None]
    if len(keys) == 2 and keys[0] != keys[1]:
        one, other = map(name_of_key, keys)
        raise ValueError(f"limit key={one} and rate key={other} must be the same: a job has one key")
    return keys[0] if keys else None


def name_of_key(key: Key) -> str:
    """Return how a key is called in messages: the field, or the callable's name."""
    return (
        shown(key)
        if key is None or isinstance(key, str)
        else getattr(key, "__qualname__", type(key).__name__)
    )


def key_of(kind: str, key: Key, payload: Any) -> str:
    """Return the limit key of a payload, which is of the payload type or a JSON object.

    Raises:
        InvalidPayload: the field is missing or null, the callable raised, or the key is neither text nor a
            whole number nor a UUID; the message holds no value of the payload.
        InvalidName: the key is not text of 1 to 255 printable characters.
    """
    if isinstance(key, str):
        what = f"field {shown(key)}"
        found = payload.get(key) if isinstance(payload, Mapping) else getattr(payload, key, None)
        if found is None:
            is_there = key in payload if isinstance(payload, Mapping) else hasattr(payload, key)
            fault = f"{what} is null" if is_there else f"the payload has no {what}"
            raise InvalidPayload(f"limit key of kind {kind}: {fault}")
    else:
        what = "what its callable returned"
        try:
            found = key(payload) if key is not None else ""
        except Exception as error:
            raise InvalidPayload(
                f"limit key of kind {kind}: its callable raised {type(error).__name__}"
            ) from error
    if isinstance(found, bool) or not isinstance(found, str | int | UUID):
        raise InvalidPayload(
            f"limit key of kind {kind}: {what} is {type(found).__name__}, not text or a number"
        )
    if isinstance(found, int):
        found = int.__repr__(found)  # str() of a member of an enum is its name
    return check_limit_key(str(found) if isinstance(found, UUID) else found)


def _check_number(what: str, value: int, most: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{what}={shown(value)} must be a whole number, not {type(value).__name__}")
    if not 1 <= value <= most:
        raise ValueError(f"{what}={value} must be from 1 to {most}")


def _check_key(key: Key) -> None:
    if key is not None and not callable(key) and (not isinstance(key, str) or not key):
        raise TypeError(f"key={shown(key)} must be the name of a field of the payload, or a callable")
