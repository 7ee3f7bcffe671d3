"""``jsworker priority``: a waiting job goes to another lane."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, get_args
from uuid import UUID

from jsworker.cli import options
from jsworker.cli.options import argument
from jsworker.cli.output import ActionOutcome, refused, report
from jsworker.cli.selection import connected_database
from jsworker.core.priorities import Priority, priority_number
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.priorities import set_priorities

app = options.new_app()


def _priorities(incomplete: str) -> list[str]:
    """Complete what follows the ids, which a shell takes for another one."""
    return [each for each in get_args(Priority) if each.startswith(incomplete)]


@app.command()
def priority(
    ids: Annotated[list[UUID], argument("ID...", "The jobs' ids.", autocompletion=_priorities)],
    priority: Annotated[Priority, argument("PRIORITY", "high, normal or low.")],
    *,
    as_json: options.Json = False,
) -> int:
    """Give waiting jobs another priority.

    A queued job gets a message in its new lane, which a worker publishes within its relay interval. Jobs that
    run or have ended keep theirs.

    Example: `jsworker priority 01a2074f-a6fa-739d-acb3-4f19a2de76ad high`
    """
    with operators_rights("priority"):
        return asyncio.run(report(_set(list(dict.fromkeys(ids)), priority), as_json=as_json))


async def _set(ids: Sequence[UUID], priority: Priority) -> AsyncIterator[ActionOutcome]:
    entry = AuditEntry.of_jobs("set_priority", ids, actor=os_user(), to=priority)
    async with connected_database() as database:
        done = await set_priorities(database, ids, priority_number(priority), entry=entry)
        for job_id in ids:
            if job_id in done.refused:
                yield refused(job_id, done.refused[job_id])
            else:
                yield ActionOutcome(job_id, priority)
        await entry.end(database, matched=len(ids))
