"""The outbox: PUBLISH, MARK, PROMOTE. A queued row itself says whether its message must still be sent."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.priorities import NORMAL
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, number_array, uuid_array
from jsworker.ownership.predicates import Predicate, published_at_dispatch
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.statements import NOW, compiled, given_array, j
from jsworker.ownership.transitions.refused_rows import RefusedRows, Sweep, run_sweep

_ids = given_array("ids", sa.Uuid)
_EVER: Final = 100 * 366 * 86400.0

QUEUED_AGAIN: Final = {
    "status": "queued",
    "dispatch": j.c.dispatch + 1,
    "needs_publish": True,
    "publish_after": NOW,
    "queued_at": NOW,
}
"""The values written when a job without a message enters the queue."""
AT_ITS_PLACE: Final = {"queued_at": sa.func.coalesce(j.c.queued_at, NOW)}
"""The value written if it was in the queue before and only made way for another job of its key."""
_was_deferred: Final = j.c.behind.is_not(None)


def _sweep(
    attempted: str,
    *aside: str,
    since: sa.ColumnElement[Any],
    indexed: Sequence[Predicate],
    guard: Sequence[Predicate],
    values: Mapping[str, Any],
    answer: Iterable[sa.ColumnElement[Any]],
) -> Sweep:
    """Return a sweep over due rows, the longest due first, but none due for longer than asked for.

    ``attempted`` names the sweep and its marks of refused rows; the search uses the predicates ``indexed``.
    """

    def write(mine: sa.CTE) -> sa.TextClause:
        rows = sa.update(j).values(**values).where(j.c.id == mine.c.id, *guard)
        return compiled(rows.returning(*answer))

    now = statements.AT_START
    is_wanted = sa.and_(since <= now, since > now - statements.given_seconds("within"))
    limit = sa.bindparam("limit", type_=sa.Integer)
    search = sa.select(j.c.id).where(*indexed, is_wanted).order_by(since).limit(limit)
    # Locked in the order of the search: each relay gets other rows, and statements that never wait cannot deadlock.
    taken = search.with_for_update(key_share=True, of=j, skip_locked=True).cte("mine")
    named = sa.select(j.c.id).where(j.c.id == sa.any_(_ids), *guard, since <= NOW)
    find = compiled(search.where(~predicates.set_aside(attempted, *aside)))
    return Sweep(attempted, (attempted, *aside), write(taken), find, write(statements.locked(named)))


# ``publish_after`` is moved before anything is sent: if a relay dies, another one takes the row later. A row
# whose MARK is refused is left out, or it would be published again every five seconds.
_PUBLISHING = _sweep(
    "publish",
    "mark",
    since=j.c.publish_after,
    indexed=(predicates.needs_publish_indexed, predicates.queued),
    guard=(predicates.queued, j.c.needs_publish),
    values={"publish_after": NOW + timedelta(seconds=5)},
    answer=(*j.c["id", "kind", "dispatch", "cleared"], *statements.BOUNDED_TEXTS.values(), j.c.priority),
)
PUBLISH = _PUBLISHING.at_once

_PROMOTION = _sweep(
    "promote",
    since=j.c.run_at,
    indexed=(predicates.scheduled_indexed,),
    guard=(predicates.scheduled,),
    values=QUEUED_AGAIN | {"queued_at": sa.case((_was_deferred, AT_ITS_PLACE["queued_at"]), else_=NOW)},
    answer=(j.c.id,),
)
PROMOTE = _PROMOTION.at_once

# Skips locked rows: a row that is being claimed needs no mark, and a MARK that waits would hold locks that
# COMPLETE must not find.
_sent = statements.given_rows(
    "sent",
    id=_ids,
    dispatch=given_array("dispatches", sa.BigInteger),
    seq=given_array("seqs", sa.BigInteger),
)
_created = sa.cast(sa.bindparam("created"), sa.DateTime(timezone=True))
_found = sa.select(j.c.id, *_sent.c["seq", "dispatch"]).join(_sent, _sent.c.id == j.c.id)
_published = statements.locked(_found.where(published_at_dispatch(_sent.c.dispatch)))
_where = {"stream_seq": _published.c.seq, "stream_created": _created}
_marked = (
    sa.update(j)
    .values(needs_publish=False, published_at=NOW, **_where)
    .where(j.c.id == _published.c.id, published_at_dispatch(_published.c.dispatch))
    .returning(j.c.id)
    .cte("marked")
)
MARK = compiled(sa.select(sa.func.count().label("count")).select_from(_marked))

# A login with INSERT only publishes its own jobs, and leaves the marks to the relays.
MAY_MARK = sa.text("""
SELECT bool_and(has_column_privilege('jsworker.jobs', c.name, 'UPDATE')) AS granted
FROM unnest(ARRAY['needs_publish', 'publish_after', 'published_at', 'stream_seq', 'stream_created']) AS c(name)
""")


class Outgoing(NamedTuple):
    """A queued job whose message must be sent, at this dispatch."""

    id: UUID
    kind: str
    dispatch: int
    cleared: bool
    clear_reason: str | None
    traceparent: str | None
    tracestate: str | None
    priority: int = NORMAL


class Sent(NamedTuple):
    """A message that JetStream acknowledged; ``stream_created`` identifies the stream of ``stream_seq``."""

    id: UUID
    dispatch: int
    stream_seq: int
    stream_created: datetime | None


async def may_mark(database: Database) -> bool:
    """Return whether this login may take jobs from the outbox and mark them as published."""
    [(granted,)] = await database.run_by_key(MAY_MARK, {})
    return bool(granted)


async def take_outgoing(
    database: Database, *, limit: int, within: float | None = None, refused_rows: RefusedRows | None = None
) -> list[Outgoing]:
    """Take up to ``limit`` jobs whose message is due; no other caller takes them for five seconds.

    Only those that became due in the last ``within`` seconds (None: all); see ``run_sweep`` on refused rows.
    """
    values = {"limit": limit, "within": _EVER if within is None else within}
    swept = await run_sweep(database, _PUBLISHING, values, refused_rows)
    return [Outgoing._make(row) for row in swept.rows]


async def mark(database: Database, sent: Sequence[Sent], refused_rows: RefusedRows | None = None) -> int:
    """Mark rows whose messages JetStream has acknowledged, and return how many were marked.

    Rows that were claimed or dispatched again since then need no mark; refused rows are set aside.
    """

    def write(batch: Sequence[Sent]) -> Awaitable[Sequence[Row]]:
        ids, dispatches, seqs, [created, *_] = zip(*batch, strict=True)
        values = {"ids": uuid_array(ids), "dispatches": number_array(dispatches), "seqs": number_array(seqs)}
        return database.run_by_key(MARK, {**values, "created": created})

    marked = 0
    for _, of_stream in groupby(sent, key=attrgetter("stream_created")):  # one, unless it was made anew
        counts, refused = await in_halves(list(of_stream), write)
        marked += sum(count for (count,) in counts)
        if refused_rows is not None:
            await refused_rows.note("mark", [(one.id, error) for one, error in refused])
    return marked


async def promote(
    database: Database, *, limit: int, within: float | None = None, refused_rows: RefusedRows | None = None
) -> int:
    """Queue up to ``limit`` scheduled jobs that are due, as ``take_outgoing`` does, and return how many."""
    values = {"limit": limit, "within": _EVER if within is None else within}
    swept = await run_sweep(database, _PROMOTION, values, refused_rows)
    return len(swept.rows)
