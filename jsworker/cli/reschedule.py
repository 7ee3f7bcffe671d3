"""``jsworker reschedule``: jobs that wait for a time wait for another one."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

from jsworker.cli import options
from jsworker.cli.options import argument, option
from jsworker.cli.output import ActionOutcome, refused, report
from jsworker.cli.selection import choose_moment, connected_database
from jsworker.client.terms import LONGEST_DELAY, instant_of
from jsworker.core.exit_codes import WrongUsage
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.reschedule import reschedule_all

app = options.new_app()


@app.command()
def reschedule(
    ids: Annotated[list[UUID], argument("ID...", "The jobs' ids.")],
    *,
    at: Annotated[str | None, option("TIME", "When they are due, in ISO 8601.")] = None,
    delay: Annotated[float | None, option("SECONDS", "In how long they are due; 0: now.")] = None,
    as_json: options.Json = False,
) -> int:
    """Let jobs that wait for a time, a delay or their next attempt, wait for another one.

    A time without a zone is this machine's. Jobs that wait for anything else, that run or have ended, stay
    as they are.

    Example: `jsworker reschedule 01a2074f-a6fa-739d-acb3-4f19a2de76ad --delay 0`
    """
    if (at is None) is (delay is None):
        raise WrongUsage("reschedule takes --at TIME or --delay SECONDS")
    if delay is not None and not (math.isfinite(delay) and 0 <= delay <= LONGEST_DELAY):
        raise WrongUsage(f"--delay {delay:g} must be from 0 to {LONGEST_DELAY:.0f}")
    try:
        ahead = datetime.now(UTC) + timedelta(seconds=delay or 0.0)
        run_at = ahead if at is None else instant_of("at", choose_moment("at", at))
    except ValueError as error:
        raise WrongUsage(f"--{error}".replace("=", " ", 1)) from None
    with operators_rights("reschedule"):
        return asyncio.run(report(_move(list(dict.fromkeys(ids)), run_at), as_json=as_json))


async def _move(ids: Sequence[UUID], run_at: datetime) -> AsyncIterator[ActionOutcome]:
    entry = AuditEntry.of_jobs("reschedule", ids, actor=os_user(), to=run_at.isoformat())
    async with connected_database() as database:
        done = await reschedule_all(database, ids, run_at, entry=entry)
        for job_id in ids:
            if job_id in done.refused:
                yield refused(job_id, done.refused[job_id])
            else:
                yield ActionOutcome(job_id, "scheduled")
        await entry.end(database, matched=len(ids))
