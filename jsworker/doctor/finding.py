"""Findings: what a check says, how severe it is, and what to do about it."""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "info", "warning", "error"]

_MOST_NAMES: Final = 8


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        check: its dotted name, the area first, as in ``postgresql.migration``. ``found_by`` sets that of a
            check; repairs give theirs.
        level: ``error``: something does not work, or jobs are in danger; ``warning``: it will cause problems
            later, or the check failed; ``info``: worth knowing, or not checked because of what another
            finding tells; ``ok``.
        says: one line with the figures.
        do: what to do, one line; None: nothing.
    """

    check: str
    level: Level
    says: str
    do: str | None = None


ok = partial(Finding, "", "ok")
info = partial(Finding, "", "info")
warning = partial(Finding, "", "warning")
error = partial(Finding, "", "error")


def unchecked(because: str, *, failed: bool = False) -> Finding:
    """Return the finding that a check was not made, with the reason; a warning if the check itself failed."""
    says = f"not checked because {because}"
    return warning(says, "Remove the reason, then run the doctor again.") if failed else info(says)


def encryption(*, encrypted: bool, local: bool, readable: str, do: str) -> Finding:
    """Return a finding on whether a connection can be read in transit; ``readable``: what could be read."""
    if encrypted or local:
        return ok("the connection uses TLS" if encrypted else "the connection does not leave this machine")
    return warning(f"the connection leaves this machine without TLS: {readable} can be read on the way", do)


def counted(number: int, noun: str, *, plural: str | None = None, bound: int | None = None) -> str:
    """Return a number with its noun: ``1 job``, ``7 jobs``, and from a bound on ``more than 1,000 jobs``."""
    many = plural or f"{noun}s"
    if bound is not None and number >= bound:
        return f"more than {bound - 1:,} {many}"
    return f"{number:,} {noun if number == 1 else many}"


def listed(names: Sequence[str]) -> str:
    """Return the first eight names, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def seconds(value: float) -> str:
    """Return a duration in words: ``0.4 s``, ``42 s``, ``5 min``, ``3 h``, ``2 d``; infinity is ``ever``.

    Below zero it is ``0 s``: the clock was set back since it began.
    """
    value = max(value, 0.0)
    if value == inf:
        return "ever"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
