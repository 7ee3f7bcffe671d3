"""Reads from the rows which jobs were claimed by a claim whose answer was lost."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from uuid import UUID

from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.worker.context import WorkerContext


async def read_back(
    context: WorkerContext, kind: str, ids: Sequence[UUID], besides: Collection[UUID] | None = None
) -> list[ClaimedJob]:
    """Return the jobs that an unclear claim has claimed; none if the database is silent for long.

    Meanwhile the ids stay in flight, so that no other message starts a second claim of them. A claim that
    commits but is not found here is an orphaned claim: the heartbeat finds and releases it, perhaps just now.
    ``besides`` is given for an admission, which also claims jobs that it finds by itself: the jobs in hand
    before it.
    """
    found: list[ClaimedJob] = []
    over: set[Held] = set()
    in_flight = context.in_flight
    if besides is None:
        read = partial(claims.read_back, ids=ids)
    else:
        read = partial(claims.read_back_admitted, kind=kind, besides=besides)

    async def ask() -> list[ClaimedJob]:
        # The answer may show a row whose release has ended meanwhile.
        over.update(in_flight.releasing, in_flight.unsettled)
        return await read(context.database, worker_id=context.worker_id)

    with suppress(TimeoutError):
        async with asyncio.timeout(2 * context.settings.statement_timeout):
            found = await context.health.until_answered(ask)
    over.update(in_flight.releasing, in_flight.unsettled)
    return [row for row in found if (row.id, row.fencing_token) not in over]
