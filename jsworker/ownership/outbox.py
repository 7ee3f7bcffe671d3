"""The outbox: PUBLISH, MARK, PROMOTE. A queued row says itself whether its message is still to be sent."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array

# statement_timestamp() can be looked up in an index; clock_timestamp() would be compared with every waiting row.
# publish_after moves on before anything is sent: whoever dies in between leaves the row to the next tick.
# Skipping while it picks gives every relay jobs of its own; a statement that never waits needs no lock order.
PUBLISH = text("""
WITH mine AS (
  SELECT id FROM jsworker.jobs
  WHERE CAST(needs_publish AS integer) = 1 AND status = 'queued' AND publish_after <= statement_timestamp()
    AND publish_after > statement_timestamp() - make_interval(secs => CAST(:within AS double precision))
  ORDER BY publish_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET publish_after = clock_timestamp() + interval '5 seconds'
FROM mine WHERE j.id = mine.id AND j.needs_publish AND j.status = 'queued'
RETURNING j.id, j.kind, j.dispatch, j.cleared, j.clear_reason, j.traceparent, j.tracestate
""")

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
PROMOTE = text("""
WITH mine AS (
  SELECT id FROM jsworker.jobs
  WHERE status || '' = 'scheduled' AND run_at <= statement_timestamp()
    AND run_at > statement_timestamp() - make_interval(secs => CAST(:within AS double precision))
  ORDER BY run_at LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET
  status = 'queued', dispatch = j.dispatch + 1, needs_publish = true,
  publish_after = clock_timestamp(), queued_at = clock_timestamp()
FROM mine WHERE j.id = mine.id AND j.status = 'scheduled'
RETURNING j.id
""")

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


async def take_outgoing(database: Database, *, limit: int, within: float | None = None) -> list[Outgoing]:
    """Take up to ``limit`` jobs whose message is due; nobody else takes them for five seconds.

    Args:
        database: where they are.
        limit: how many.
        within: only those that became due within so many seconds; None: all.
    """
    return [
        Outgoing(*row)
        for row in await database.run(
            PUBLISH, {"limit": limit, "within": _EVER if within is None else within}
        )
    ]


async def mark(database: Database, sent: Sequence[Sent]) -> int:
    """Note what was published; a job that has been claimed or moved on since needs no mark.

    Returns:
        How many rows were marked.
    """
    parameters = {
        "ids": uuid_array(one.id for one in sent),
        "dispatches": [one.dispatch for one in sent],
        "seqs": [one.stream_seq for one in sent],
        "created": [one.stream_created for one in sent],
    }
    return len(await database.run_by_key(MARK, parameters))


async def promote(database: Database, *, limit: int, within: float | None = None) -> int:
    """Put up to ``limit`` scheduled jobs that are due into the queue and return how many.

    Args:
        database: where they are.
        limit: how many.
        within: only those that became due within so many seconds; None: all.
    """
    return len(await database.run(PROMOTE, {"limit": limit, "within": _EVER if within is None else within}))
