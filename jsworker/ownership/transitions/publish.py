"""The outbox: PUBLISH, MARK, PROMOTE. A queued row says itself whether its message is still to be sent."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import (
    needs_publish_indexed,
    published_at_dispatch,
    queued,
    scheduled,
    scheduled_indexed,
    set_aside,
)
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.statements import (
    AT_START,
    NOW,
    compiled,
    given_array,
    given_rows,
    given_seconds,
    j,
    locked,
)
from jsworker.ownership.transitions.refused_rows import RefusedRows, Sweep, run_sweep

_ids = given_array("ids", sa.Uuid)
_limit: Final = sa.bindparam("limit", type_=sa.Integer)


def _publish(mine: sa.CTE) -> sa.TextClause:
    """Return PUBLISH. ``publish_after`` moves on before anything is sent: a relay that dies leaves the row to the next."""
    return compiled(
        sa.update(j)
        .values(publish_after=NOW + timedelta(seconds=5))
        .where(j.c.id == mine.c.id, queued, j.c.needs_publish)
        .returning(
            *(j.c.id, j.c.kind, j.c.dispatch, j.c.cleared, j.c.clear_reason),
            *(j.c.traceparent, j.c.tracestate),
        )
    )


def _promote(mine: sa.CTE) -> sa.TextClause:
    return compiled(
        sa.update(j)
        .values(
            status="queued",
            dispatch=j.c.dispatch + 1,
            needs_publish=True,
            publish_after=NOW,
            queued_at=NOW,
        )
        .where(j.c.id == mine.c.id, scheduled)
        .returning(j.c.id)
    )


def _first(since: sa.ColumnElement[Any], *due: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Return the search for the rows that have been due for the longest time, but no longer than asked for."""
    is_wanted = sa.and_(since <= AT_START, since > AT_START - given_seconds("within"))
    return sa.select(j.c.id).where(*due, is_wanted).order_by(since).limit(_limit)


def _taken(search: sa.Select[Any]) -> sa.CTE:
    """Return rows locked as they are found: each relay has jobs of its own, and what never waits needs no lock order."""
    return search.with_for_update(key_share=True, of=j, skip_locked=True).cte("mine")


def _sweep(
    *aside: str,
    search: sa.Select[Any],
    write: Callable[[sa.CTE], sa.TextClause],
    still: sa.ColumnElement[bool],
) -> Sweep:
    """Return a sweep that is named as the first mark for which it leaves rows aside."""
    named = sa.select(j.c.id).where(j.c.id == sa.any_(_ids), still)
    return Sweep(
        aside[0],
        aside,
        at_once=write(_taken(search)),
        find=compiled(search.where(~set_aside(*aside))),
        write=write(locked(named)),
    )


# One whose MARK is refused would be published again every five seconds.
_PUBLISHING = _sweep(
    "publish",
    "mark",
    search=_first(j.c.publish_after, needs_publish_indexed, queued),
    write=_publish,
    still=sa.and_(j.c.needs_publish, queued, j.c.publish_after <= NOW),
)
PUBLISH = _PUBLISHING.at_once

# Skips what is locked: a row that is being claimed needs no mark, and COMPLETE must not find it locked by us.
_sent = given_rows(
    "sent",
    id=_ids,
    dispatch=given_array("dispatches", sa.BigInteger),
    seq=given_array("seqs", sa.BigInteger),
    created=given_array("created", sa.DateTime(timezone=True)),
)
_published = locked(
    sa.select(j.c.id, _sent.c.seq, _sent.c.created, _sent.c.dispatch)
    .join(_sent, _sent.c.id == j.c.id)
    .where(published_at_dispatch(_sent.c.dispatch))
)
MARK = compiled(
    sa.update(j)
    .values(
        needs_publish=False,
        published_at=NOW,
        stream_seq=_published.c.seq,
        stream_created=_published.c.created,
    )
    .where(j.c.id == _published.c.id, published_at_dispatch(_published.c.dispatch))
    .returning(j.c.id)
)

_PROMOTION = _sweep(
    "promote",
    search=_first(j.c.run_at, scheduled_indexed),
    write=_promote,
    still=sa.and_(scheduled, j.c.run_at <= NOW),
)
PROMOTE = _PROMOTION.at_once

# Who has INSERT alone publishes what it enqueues, and leaves it to the relays to note that.
MAY_MARK = sa.text("""
SELECT bool_and(has_column_privilege('jsworker.jobs', c.name, 'UPDATE')) AS granted
FROM unnest(ARRAY['needs_publish', 'publish_after', 'published_at', 'stream_seq', 'stream_created']) AS c(name)
""")


_EVER: Final = 100 * 366 * 86400.0


class Outgoing(NamedTuple):
    """A queued job whose message is to be sent, at this dispatch."""

    id: UUID
    kind: str
    dispatch: int
    cleared: bool
    clear_reason: str | None
    traceparent: str | None
    tracestate: str | None


class Sent(NamedTuple):
    """A message that JetStream acknowledged; ``stream_created`` tells streams apart, whose sequences start again."""

    id: UUID
    dispatch: int
    stream_seq: int
    stream_created: datetime | None


async def may_mark(database: Database) -> bool:
    """Tell whether this login may take jobs from the outbox and note what was published."""
    [row] = await database.run(MAY_MARK)
    return bool(row.granted)


async def take_outgoing(
    database: Database, *, limit: int, within: float | None = None, refused_rows: RefusedRows | None = None
) -> list[Outgoing]:
    """Take up to ``limit`` jobs whose message is due; no other caller takes them for five seconds.

    Args:
        within: only those that became due within so many seconds; None: all.
        refused_rows: steps past rows that are refused; without it one of them refuses the whole batch.
    """
    swept = await run_sweep(database, _PUBLISHING, _first_values(limit, within), refused_rows)
    return [Outgoing(*row) for row in swept.rows]


async def mark(database: Database, sent: Sequence[Sent], refused_rows: RefusedRows | None = None) -> int:
    """Note what JetStream has acknowledged and return how many rows were marked.

    A job that has been claimed or moved on since needs no mark; rows that are refused are set aside, and count as
    unpublished.
    """

    def write(batch: Sequence[Sent]) -> Awaitable[Sequence[Row]]:
        parameters = {
            "ids": uuid_array(one.id for one in batch),
            "dispatches": [one.dispatch for one in batch],
            "seqs": [one.stream_seq for one in batch],
            "created": [one.stream_created for one in batch],
        }
        return database.run_by_key(MARK, parameters)

    rows, refused = await in_halves(sent, write)
    if refused_rows is not None:
        await refused_rows.note("mark", [(one.id, error) for one, error in refused])
    return len(rows)


async def promote(
    database: Database, *, limit: int, within: float | None = None, refused_rows: RefusedRows | None = None
) -> int:
    """Put up to ``limit`` scheduled jobs that are due into the queue, as ``take_outgoing``, and return how many."""
    swept = await run_sweep(database, _PROMOTION, _first_values(limit, within), refused_rows)
    return len(swept.rows)


def _first_values(limit: int, within: float | None) -> dict[str, float]:
    return {"limit": limit, "within": _EVER if within is None else within}
