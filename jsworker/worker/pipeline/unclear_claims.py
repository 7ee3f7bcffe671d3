"""Claims whose answer was lost: what they have claimed is read from the rows."""

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
    """Find out what an unclear claim has claimed; nothing if the database is silent for long.

    Until then the ids stay in flight, so that no other message starts a second claim of them. What did
    commit after all is an orphaned claim, which the heartbeat finds and releases, perhaps just now.
    ``besides``: of an admission, which also claims jobs that it finds by itself, what was in hand before.
    """
    found, over = list[ClaimedJob](), set[Held]()
    worker_id, in_flight = context.worker_id, context.in_flight
    read = partial(claims.read_back, context.database, worker_id=worker_id, ids=ids)
    if besides is not None:
        of_kind = partial(claims.read_back_admitted, kind=kind, besides=besides)
        read = partial(of_kind, context.database, worker_id=worker_id)

    async def ask() -> list[ClaimedJob]:
        # The answer may be older than the end of a release.
        over.update(in_flight.releasing, in_flight.unsettled)
        return await read()

    with suppress(TimeoutError):
        async with asyncio.timeout(2 * context.settings.statement_timeout):
            found = await context.health.until_answered(ask)
    over.update(in_flight.releasing, in_flight.unsettled)
    return [row for row in found if (row.id, row.fencing_token) not in over]
