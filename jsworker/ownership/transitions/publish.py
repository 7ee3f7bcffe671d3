"""The outbox: PUBLISH, MARK, PROMOTE. A queued row says itself whether its message is still to be sent."""

from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.ownership.database import Database
from jsworker.ownership.halving import in_halves
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.transitions.refused_rows import NOT_SET_ASIDE, RefusedRows, Sweep, sweep

# statement_timestamp() can be looked up in an index; clock_timestamp() would be compared with every waiting row.
# publish_after moves on before anything is sent: whoever dies in between leaves the row to the next tick.
# Skipping while it picks gives every relay jobs of its own; a statement that never waits needs no lock order.
_PUBLISH = """
WITH mine AS ({mine}
)
UPDATE jsworker.jobs AS j SET publish_after = clock_timestamp() + interval '5 seconds'
FROM mine WHERE j.id = mine.id AND j.needs_publish AND j.status = 'queued'
RETURNING j.id, j.kind, j.dispatch, j.cleared, j.clear_reason, j.traceparent, j.tracestate
"""
PUBLISH = text(
    _PUBLISH.replace(
        "{mine}",
        """
  SELECT id FROM jsworker.jobs
  WHERE CAST(needs_publish AS integer) = 1 AND status = 'queued' AND publish_after <= statement_timestamp()
    AND publish_after > statement_timestamp() - make_interval(secs => CAST(:within AS double precision))
  ORDER BY publish_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED""",
    )
)

# Past rows that are refused. One whose MARK is refused would be published again every five seconds.
PUBLISHING = Sweep(
    "publish",
    aside=("publish", "mark"),
    find=text(
        """
SELECT j.id FROM jsworker.jobs AS j
WHERE CAST(j.needs_publish AS integer) = 1 AND j.status = 'queued' AND j.publish_after <= statement_timestamp()
  AND j.publish_after > statement_timestamp() - make_interval(secs => CAST(:within AS double precision))
  AND {not set aside}
ORDER BY j.publish_after LIMIT :limit
""".replace("{not set aside}", NOT_SET_ASIDE)
    ),
    write=text(
        _PUBLISH.replace(
            "{mine}",
            """
  SELECT id FROM jsworker.jobs
  WHERE id = ANY(CAST(:ids AS uuid[])) AND needs_publish AND status = 'queued' AND publish_after <= clock_timestamp()
  ORDER BY id FOR NO KEY UPDATE SKIP LOCKED""",
        )
    ),
)

# Skips what is locked: a row that is being claimed needs no mark, and COMPLETE must not find it locked by us.
# The guard on dispatch: a slow publisher must not clear the flag of a newer dispatch.
MARK = text("""
WITH sent AS (
  SELECT * FROM unnest(
    CAST(:ids AS uuid[]), CAST(:dispatches AS bigint[]), CAST(:seqs AS bigint[]), CAST(:created AS timestamptz[])
  ) AS s(id, dispatch, seq, created)
), mine AS (
  SELECT j.id, sent.seq, sent.created, sent.dispatch
  FROM jsworker.jobs AS j JOIN sent ON sent.id = j.id
  WHERE j.status = 'queued' AND j.needs_publish AND j.dispatch = sent.dispatch
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET
  needs_publish = false, published_at = clock_timestamp(), stream_seq = mine.seq, stream_created = mine.created
FROM mine
WHERE j.id = mine.id AND j.status = 'queued' AND j.needs_publish AND j.dispatch = mine.dispatch
RETURNING j.id
""")

# Only here is run_at compared with the clock.
_PROMOTE = """
WITH mine AS ({mine}
)
UPDATE jsworker.jobs AS j SET
  status = 'queued', dispatch = j.dispatch + 1, needs_publish = true,
  publish_after = clock_timestamp(), queued_at = clock_timestamp()
FROM mine WHERE j.id = mine.id AND j.status = 'scheduled'
RETURNING j.id
"""
PROMOTE = text(
    _PROMOTE.replace(
        "{mine}",
        """
  SELECT id FROM jsworker.jobs
  WHERE status || '' = 'scheduled' AND run_at <= statement_timestamp()
    AND run_at > statement_timestamp() - make_interval(secs => CAST(:within AS double precision))
  ORDER BY run_at LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED""",
    )
)
PROMOTION = Sweep(
    "promote",
    aside=("promote",),
    find=text(
        """
SELECT j.id FROM jsworker.jobs AS j
WHERE j.status || '' = 'scheduled' AND j.run_at <= statement_timestamp()
  AND j.run_at > statement_timestamp() - make_interval(secs => CAST(:within AS double precision))
  AND {not set aside}
ORDER BY j.run_at LIMIT :limit
""".replace("{not set aside}", NOT_SET_ASIDE)
    ),
    write=text(
        _PROMOTE.replace(
            "{mine}",
            """
  SELECT id FROM jsworker.jobs
  WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'scheduled' AND run_at <= clock_timestamp()
  ORDER BY id FOR NO KEY UPDATE SKIP LOCKED""",
        )
    ),
)

# Who has INSERT alone publishes what it enqueues, and leaves it to the relays to note that.
MAY_MARK = text("""
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
    """A message that JetStream acknowledged.

    Attributes:
        dispatch: the dispatch that was published.
        stream_seq: where it is in the stream.
        stream_created: which stream that is: sequences start again in a new one.
    """

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
    """Take up to ``limit`` jobs whose message is due; nobody else takes them for five seconds.

    Args:
        database: where they are.
        limit: how many.
        within: only those that became due within so many seconds; None: all.
        refused_rows: steps past rows that are refused; without it one of them refuses the whole batch.
    """
    return [
        Outgoing(*row) for row in await _sweep(database, PUBLISH, PUBLISHING, limit, within, refused_rows)
    ]


async def mark(database: Database, sent: Sequence[Sent], refused_rows: RefusedRows | None = None) -> int:
    """Note what was published; a job that has been claimed or moved on since needs no mark.

    Args:
        database: where they are.
        sent: what JetStream has acknowledged.
        refused_rows: sets rows aside that are refused; they count as unpublished.

    Returns:
        How many rows were marked.
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
    """Put up to ``limit`` scheduled jobs that are due into the queue and return how many.

    Args:
        database: where they are.
        limit: how many.
        within: only those that became due within so many seconds; None: all.
        refused_rows: steps past rows that are refused; without it one of them refuses the whole batch.
    """
    return len(await _sweep(database, PROMOTE, PROMOTION, limit, within, refused_rows))


async def _sweep(  # noqa: PLR0917 -- two callers beside it
    database: Database,
    statement: TextClause,
    apart: Sweep,
    limit: int,
    within: float | None,
    refused_rows: RefusedRows | None,
) -> Sequence[Row]:
    values = {"limit": limit, "within": _EVER if within is None else within}
    if refused_rows is None:
        return await database.run(statement, values)
    return (await sweep(database, statement, apart, values, refused_rows=refused_rows)).rows
