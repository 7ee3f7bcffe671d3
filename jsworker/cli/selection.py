"""Shared by commands about jobs: the database, the choice of jobs, and the question before they act."""

import asyncio
import io
import select as select_module
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from jsworker.cli.options import LAST_DIGITS
from jsworker.cli.output import database_clock, remark
from jsworker.core.errors import JobNotFound, JsworkerError
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import shown
from jsworker.core.settings import load_settings
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import ANY_AGE, RunAge
from jsworker.ownership.queries import listing
from jsworker.ownership.refusals import readers_right
from jsworker.ownership.transitions.workers import list_workers

T = TypeVar("T")

_STATEMENT_SECONDS = 30.0
"""Least statement timeout: people who search may wait longer than workers."""
_SEARCH_SECONDS = 3.0
_LOOK_SECONDS = 0.2
_MOST_WORKERS: Final = 10_000


class Declined(JsworkerError):
    """Nothing was done."""


@asynccontextmanager
async def connected_database() -> AsyncIterator[Database]:
    """Open the database of the environment's settings."""
    settings = load_settings()
    statement_timeout = max(settings.statement_timeout, _STATEMENT_SECONDS)
    async with Database(settings.database_dsn(), statement_timeout=statement_timeout) as database:
        await database.check_usable()
        await database_clock.ask(database)
        yield database


def ask_database(question: Callable[[Database], Awaitable[T]]) -> T:
    """Return what the database of the environment's settings answers."""

    async def ask() -> T:
        with readers_right():
            async with connected_database() as database:
                return await question(database)

    return asyncio.run(ask())


def warn_unless_served(kind: str) -> None:
    """Warn on stderr if no live worker serves a kind: its name may be mistyped.

    An error here is ignored: it must not make the command itself fail.
    """
    try:
        workers = ask_database(partial(list_workers, limit=_MOST_WORKERS))
    except JsworkerError:  # the login may not read workers, or the database has just gone
        return
    if not any(worker["alive"] and kind in worker["kinds"] for worker in workers):
        remark(f"no live worker serves kind {kind}: is it spelled right?")


def check_choice(verb: str, ids: Sequence[Any] | None, *, filtered: bool, filters: str, yes: bool) -> None:
    """Refuse a command with neither ids nor filters, with both, or that cannot ask without a terminal."""
    if ids and filtered:
        raise WrongUsage(f"{verb} takes ids or {filters}, not both")
    if not ids and not filtered:
        raise WrongUsage(f"{verb} needs ids, or {filters}")
    if filtered and not yes and not sys.stdin.isatty():
        raise WrongUsage(f"{verb} by {filters} asks before it acts, and here is no terminal: add --yes")


def choose_age(stale_for: float | None, running_for: float | None, no_progress_for: float | None) -> RunAge:
    """Return the least ages of runs that the options of a filter give."""
    try:
        return RunAge(stale_for, running_for, no_progress_for)
    except ValueError as error:
        name, _, rule = str(error).partition("=")
        raise WrongUsage(f"--{name.replace('_', '-')} {rule}") from None


def choose_statuses(
    verb: str, status: str | None, possible: tuple[str, ...], age: RunAge = ANY_AGE
) -> tuple[str, ...]:
    """Return the statuses of jobs that a filter selects."""
    if age and status not in (None, "processing"):
        raise WrongUsage(f"--status {status}: only jobs that are processing have a --{age_options(age)[0]}")
    if age:
        return ("processing",)
    if status is None:
        return possible
    if status not in possible:
        raise WrongUsage(f"--status {status}: {verb} acts only on jobs that are {' or '.join(possible)}")
    return (status,)


def choose_moment(name: str, text: str) -> datetime:
    """Return the time that an option gives; without a zone, it is in this machine's."""
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise WrongUsage(f"--{name} {shown(text)} must be a time in ISO 8601: 2026-05-01T08:00:00Z") from None
    try:
        return given.astimezone()
    except (OverflowError, ValueError):
        raise WrongUsage(f"--{name} {shown(text)} is too early or too late") from None


def choose_instant(name: str, text: str) -> datetime:
    """Return the time that an option gives with its zone."""
    with suppress(ValueError):
        given = datetime.fromisoformat(text)
        if given.tzinfo is not None:
            return given
    rule = "must be a time with its zone, as 2030-01-31T18:00+01:00 or 2030-01-31T17:00Z"
    raise WrongUsage(f"--{name} {shown(text)} {rule}")


def age_options(age: RunAge) -> list[str]:
    """Return the names of the options by which an age was given."""
    return [name.replace("_", "-") for name, seconds in asdict(age).items() if seconds is not None]


def confirm(question: str) -> None:
    """Ask on the terminal; raise Declined unless the answer is y or yes."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    # A signal between Python's last check for signals and a blocking read would not interrupt the read.
    with suppress(io.UnsupportedOperation):  # stdin is no file
        while not select_module.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            continue
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise Declined


async def find_job(database: Database, named: str) -> dict[str, Any]:
    """Return a job by its whole id, or by its last digits, which are searched for among the newest jobs."""
    return await listing.get_job(database, await _id_of(database, named))


async def _id_of(database: Database, named: str) -> UUID:
    with suppress(ValueError):
        return UUID(named)
    digits = named.lower()
    if not LAST_DIGITS.fullmatch(digits):
        raise WrongUsage(f"{shown(named)} is no id of a job: a UUID, or at least its last eight digits")
    ids = await listing.ending_in(database, digits, seconds=_SEARCH_SECONDS)
    if not ids:
        raise JobNotFound(f"none of the newest jobs has an id that ends in {digits}; name it by its whole id")
    if len(ids) > 1:
        raise JobNotFound(f"several jobs have ids that end in {digits}: {', '.join(map(str, ids))}")
    return ids[0]
