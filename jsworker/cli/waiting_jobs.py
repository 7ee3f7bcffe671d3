"""``jsworker priority`` and ``reschedule``: jobs that wait go to another lane, or wait for another time."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, get_args
from uuid import UUID

from jsworker.cli import options
from jsworker.cli.options import argument, option
from jsworker.cli.output import ActionOutcome, refused, report
from jsworker.cli.selection import ask_database, choose_instant, connected_database
from jsworker.client.terms import LONGEST_DELAY, instant_of
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.priorities import Priority, priority_number
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.priorities import Changed, set_priorities
from jsworker.ownership.transitions.reschedule import reschedule_all
from jsworker.ownership.transitions.schedules import database_now

app = options.new_app()


def _priorities(incomplete: str) -> list[str]:
    """Complete the priority after the ids: the shell takes it for another id."""
    return [each for each in get_args(Priority) if each.startswith(incomplete)]


@app.command()
def priority(
    ids: Annotated[
        list[UUID], argument("ID...", "The jobs' ids.", parser=options.job_id, autocompletion=_priorities)
    ],
    priority: Annotated[Priority, argument("PRIORITY", "high, normal or low.")],
    *,
    as_json: options.Json = False,
) -> int:
    """Change the priority of waiting jobs.

    A queued job gets a message in its new lane, which a worker publishes within its relay interval. Jobs that
    run or have ended keep theirs.

    Example: `jsworker priority 01a2074f-a6fa-739d-acb3-4f19a2de76ad high`
    """
    change = partial(set_priorities, priority=priority_number(priority))
    with operators_rights("priority"):
        return _change("set_priority", ids, change, to=priority, outcome=priority, as_json=as_json)


@app.command()
def reschedule(
    ids: Annotated[list[UUID], argument("ID...", "The jobs' ids.", parser=options.job_id)],
    *,
    at: Annotated[str | None, option("TIME", "When they are due, in ISO 8601 with its zone.")] = None,
    delay: Annotated[
        float | None, option("SECONDS", "In how long they are due, by the database's clock; 0: now.")
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Change the due time of jobs that wait for a time, a delay or their next attempt.

    Jobs that wait for anything else, that run or have ended, stay as they are.

    Example: `jsworker reschedule 01a2074f-a6fa-739d-acb3-4f19a2de76ad --delay 0`
    """
    if (at is None) is (delay is None):
        raise WrongUsage("reschedule takes --at TIME or --delay SECONDS")
    if delay is not None and not (math.isfinite(delay) and 0 <= delay <= LONGEST_DELAY):
        raise WrongUsage(f"--delay {delay:g} must be from 0 to {LONGEST_DELAY:.0f}")
    if at is None:
        run_at = ask_database(database_now) + timedelta(seconds=delay or 0.0)
    else:
        try:
            run_at = instant_of("at", choose_instant("at", at))
        except ValueError as error:
            raise WrongUsage(f"--{error}".replace("=", " ", 1)) from None
    change = partial(reschedule_all, run_at=run_at)
    with operators_rights("reschedule"):
        return _change("reschedule", ids, change, to=run_at.isoformat(), outcome="scheduled", as_json=as_json)


def _change(
    action: str,
    ids: Sequence[UUID],
    change: Callable[..., Awaitable[Changed]],
    *,
    to: str,
    outcome: str,
    as_json: bool,
) -> int:
    """Change waiting jobs, each once, and print ``outcome`` for each job that was changed."""
    named = list(dict.fromkeys(ids))
    entry = AuditEntry.of_jobs(action, named, actor=os_user(), to=to)

    async def outcomes() -> AsyncGenerator[list[ActionOutcome], None]:
        async with connected_database() as database:
            done = await change(database, named, entry=entry)
            whys = {job_id: done.refused.get(job_id) for job_id in named}
            try:
                yield [
                    ActionOutcome(job_id, outcome) if why is None else refused(job_id, why)
                    for job_id, why in whys.items()
                ]
            finally:  # also if stdout cannot be written
                await entry.end(database, matched=len(named))

    return asyncio.run(report(outcomes(), as_json=as_json, expected=len(named)))
