"""Which jobs a command acts on: those named, or those that a filter finds, after a question."""

import asyncio
import io
import math
import re
import select as select_module
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from jsworker.cli.connection import connected_database
from jsworker.cli.failures import WrongUsage
from jsworker.cli.remarks import tell
from jsworker.core.errors import JobNotFound, JsworkerError
from jsworker.core.names import check_kind, shown
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.listing import Count
from jsworker.ownership.queries.run_age import ANY_AGE, RunAge

_PAGE = 500
_PATIENCE_SECONDS = 3.0
_LOOK_SECONDS = 0.2
_LAST_DIGITS = re.compile(r"[0-9a-f]{8}|[0-9a-f-]{9,35}")

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
        age: of running jobs only those that are so old.
    """

    statuses: tuple[str, ...]
    kind: str | None
    age: RunAge = ANY_AGE

    def pages(self, database: Database, *, acting: bool) -> AsyncIterator[list[tuple[UUID, int]]]:
        """Yield the jobs that it means, with their fencing tokens, as ``listing.matching`` does."""
        return listing.matching(database, statuses=self.statuses, kind=self.kind, age=self.age, acting=acting)

    def __str__(self) -> str:
        limits = {"kind": self.kind, "status": " or ".join(self.statuses)} | asdict(self.age)
        given = {name.replace("_", " "): value for name, value in limits.items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in given.items())


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


def choose_age(stale_for: float | None, running_for: float | None, no_progress_for: float | None) -> RunAge:
    """Return how old runs must be that a filter means.

    Raises:
        WrongUsage: something is no number of seconds.
    """
    given = {"stale-for": stale_for, "running-for": running_for, "no-progress-for": no_progress_for}
    for name, seconds in given.items():
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise WrongUsage(f"--{name} {seconds} must be a number of seconds, 0 or more")
    return RunAge(stale_for, running_for, no_progress_for)


def choose_statuses(
    verb: str, status: str | None, possible: tuple[str, ...], age: RunAge = ANY_AGE
) -> tuple[str, ...]:
    """Return the statuses that a filter means.

    Raises:
        WrongUsage: the command can do nothing to jobs of this status, or such jobs have no age.
    """
    if age and status not in (None, "processing"):
        raise WrongUsage(f"--status {status}: only jobs that are processing have a --{_names(age)[0]}")
    if age:
        return ("processing",)
    if status is None:
        return possible
    if status not in possible:
        raise WrongUsage(f"--status {status}: {verb} acts only on jobs that are {' or '.join(possible)}")
    return (status,)


def since_found(age: RunAge) -> str:
    """Return what a job must have done since it was found if it is no longer as old as it was chosen for."""
    signs = {"stale-for": "its worker gave a sign of life", "no-progress-for": "it has progressed"}
    seen = [signs[name] for name in _names(age) if name in signs]
    return " or ".join(seen) or "its worker has just settled it"


def _names(age: RunAge) -> list[str]:
    return [name.replace("_", "-") for name, seconds in asdict(age).items() if seconds is not None]


def select(verb: str, ids: Sequence[UUID] | None, wanted: Filter, *, yes: bool) -> "Selection":
    """Return the jobs to act on, each once: those named, else those that the filter means.

    Raises:
        Declined: the operator looked at their number and did not agree.
        InvalidName: the kind holds characters that are not allowed.
    """
    if ids:
        return Selection([(job_id, None) for job_id in dict.fromkeys(ids)], None)
    if wanted.kind is not None:
        check_kind(wanted.kind)
    if yes:
        return Selection([], wanted)
    found, count = asyncio.run(_look(wanted))
    if count.is_exact and not found:
        tell(f"no job matches: {wanted}")
    else:
        jobs = f"{count.jobs} job" if count.jobs == 1 else f"{count.jobs} jobs"
        confirm(f"{verb} {jobs if count.is_exact else f'at least {jobs}'} ({wanted})?")
    return Selection(found, None if count.is_exact else wanted)


@dataclass(frozen=True, slots=True)
class Selection:
    """The jobs that a command acts on.

    Attributes:
        named: those that are known already.
        wanted: a filter for others; None: there are none.
    """

    named: Found
    wanted: Filter | None

    async def pages(self, database: Database) -> AsyncIterator[Found]:
        """Yield them, a limited number at a time, as they are found: a filter may mean millions."""
        for start in range(0, len(self.named), _PAGE):
            yield self.named[start : start + _PAGE]
        if self.wanted is None:
            return
        any_found = False
        async for page in self.wanted.pages(database, acting=True):
            any_found = True
            yield page
        if not any_found:
            tell(f"no job matches: {self.wanted}")


def confirm(question: str) -> None:
    """Ask on the terminal; only yes is yes.

    Raises:
        Declined: it was something else.
    """
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    # A signal that comes between Python's last look for one and its read would not end that read.
    with suppress(io.UnsupportedOperation):  # stdin is no file
        while not select_module.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            continue
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise Declined


async def _look(wanted: Filter) -> tuple[Found, Count]:
    """Return the jobs that a filter means and their number; if that is large, none of them."""
    async with connected_database() as database:
        count = await listing.count_matching(
            database, statuses=wanted.statuses, kind=wanted.kind, age=wanted.age
        )
        if not count.is_exact:
            return [], count
        pages = wanted.pages(database, acting=False)
        found = [job for page in [page async for page in pages] for job in page]
        return found, Count(len(found), is_exact=True)


async def find_job(database: Database, named: str) -> UUID:
    """Return the id of a job: given whole, or by its last digits, which are looked for among the newest jobs.

    Raises:
        WrongUsage: it is neither.
        JobNotFound: no job was found whose id ends like this, or several.
    """
    with suppress(ValueError):
        return UUID(named)
    digits = named.lower()
    if not _LAST_DIGITS.fullmatch(digits):
        raise WrongUsage(f"{shown(named)} is no id of a job: a UUID, or at least its last eight digits")
    ids = await listing.ending_in(database, digits, seconds=_PATIENCE_SECONDS)
    if not ids:
        raise JobNotFound(f"none of the newest jobs has an id that ends in {digits}; name it by its whole id")
    if len(ids) > 1:
        raise JobNotFound(f"several jobs have ids that end in {digits}: {', '.join(map(str, ids))}")
    return ids[0]
