"""Findings: what a check says, how severe it is, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "info", "warning", "error"]

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        check: its dotted name, the area first, as in ``postgresql.migration``.
        level: ``error``: something does not work, or jobs are in danger; ``warning``: it will hurt one day;
            ``info``: good to know, or not known; ``ok``.
        says: one line with the figures.
        do: what to do, one line; None: nothing.
    """

    check: str
    level: Level
    says: str
    do: str | None = None

    @property
    def area(self) -> str:
        """What the check is about: the first part of its name."""
        return self.check.partition(".")[0]


class Remark(NamedTuple):
    """A finding without the name of its check."""

    level: Level
    says: str
    do: str | None = None


def ok(says: str) -> Remark:
    """Return that all is well."""
    return Remark("ok", says)


def info(says: str, do: str | None = None) -> Remark:
    """Return what is good to know, or is not known."""
    return Remark("info", says, do)


def warning(says: str, do: str) -> Remark:
    """Return what will hurt one day."""
    return Remark("warning", says, do)


def error(says: str, do: str) -> Remark:
    """Return what does not work, or endangers jobs."""
    return Remark("error", says, do)


def unchecked(because: str) -> Remark:
    """Return that a check was not made, and why not."""
    return info(f"not checked because {because}")


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line: how many errors and warnings there are."""
    levels = [finding.level for finding in findings]
    return f"{counted(levels.count('error'), 'error')}, {counted(levels.count('warning'), 'warning')}"


def counted(number: int, noun: str, *, plural: str | None = None, bound: int | None = None) -> str:
    """Return a number with its noun: ``1 job``, ``7 jobs``, and from a bound on ``more than 1,000 jobs``."""
    many = plural or f"{noun}s"
    if bound is not None and number >= bound:
        return f"more than {bound - 1:,} {many}"
    return f"{number:,} {noun if number == 1 else many}"


def listed(names: Sequence[str]) -> str:
    """Return names in a row, not too many of them."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def seconds(value: float) -> str:
    """Return a duration in words: ``0.4 s``, ``42 s``, ``5 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
