"""Which jobs a command acts on: those named, or those that a filter finds, after a question."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from jsworker.cli.connection import connected_database
from jsworker.cli.failures import WrongUsage
from jsworker.cli.telling import tell
from jsworker.errors import JsworkerError
from jsworker.names import check_kind
from jsworker.ownership import listing

Found = Sequence[tuple[UUID, int | None]]
"""Jobs, with the fencing token at which a filter saw them."""


class Declined(JsworkerError):
    """Nothing was done."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are meant.

    Attributes:
        statuses: any of them.
        kind: only this kind.
        stale_for: only jobs without a sign of life for so many seconds.
    """

    statuses: tuple[str, ...]
    kind: str | None
    stale_for: float | None = None

    def __str__(self) -> str:
        limits = {"kind": self.kind, "status": " or ".join(self.statuses), "stale for": self.stale_for}
        return ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)


def check_choice(verb: str, ids: Sequence[Any] | None, *, filtered: bool, filters: str, yes: bool) -> None:
    """Refuse a command that names nothing, names things twice, or would have to ask nobody.

    Raises:
        WrongUsage: one of these.
    """
    if ids and filtered:
        raise WrongUsage(f"{verb} takes ids or {filters}, not both")
    if not ids and not filtered:
        raise WrongUsage(f"{verb} needs ids, or {filters}")
    if filtered and not yes and not sys.stdin.isatty():
        raise WrongUsage(f"{verb} by {filters} asks before it acts, and here is no terminal: add --yes")


def choose_statuses(verb: str, status: str | None, possible: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statuses that a filter means.

    Raises:
        WrongUsage: the command can do nothing to jobs of this status.
    """
    if status is None:
        return possible
    if status not in possible:
        raise WrongUsage(f"--status {status}: {verb} acts only on jobs that are {' or '.join(possible)}")
    return (status,)


def select(verb: str, ids: Sequence[UUID] | None, wanted: Filter, *, yes: bool) -> Found:
    """Return the jobs to act on, each once: those named, else those found.

    Raises:
        Declined: the operator looked at their number and did not agree.
        InvalidName: the kind holds characters that are not allowed.
    """
    if ids:
        return [(job_id, None) for job_id in dict.fromkeys(ids)]
    if wanted.kind is not None:
        check_kind(wanted.kind)
    found = asyncio.run(_find(wanted))
    if not found:
        tell(f"no job matches: {wanted}")
    elif not yes:
        confirm(f"{verb} {len(found)} job{'s' * (len(found) > 1)} ({wanted})?")
    return found


def confirm(question: str) -> None:
    """Ask on the terminal; only yes is yes.

    Raises:
        Declined: it was something else.
    """
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise Declined


async def _find(wanted: Filter) -> Found:
    async with connected_database() as database:
        return await listing.matching(
            database, statuses=wanted.statuses, kind=wanted.kind, stale_for=wanted.stale_for
        )
