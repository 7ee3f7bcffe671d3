"""Dead messages: what came over the stream and could not be read, or named a job that does not exist."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text

from jsworker.ownership.database import Database

KEPT_BYTES = 4096
"""How much of a message is kept; a longer one cannot be replayed."""

KEPT_MESSAGES = 10_000
"""How many are kept; the oldest go first. Anybody who may publish could fill the table otherwise."""

# The lowest id still kept is found from the end of the key's index.
BURY = text("""
WITH buried AS (
  INSERT INTO jsworker.dead_messages (subject, stream_seq, stored_at, reason, data, truncated)
  VALUES (:subject, :stream_seq, :stored_at, :reason, :data, :truncated)
  RETURNING id
), pruned AS (
  DELETE FROM jsworker.dead_messages WHERE id <= (SELECT id - :kept FROM buried)
)
SELECT id FROM buried
""")

DEAD = text("""
SELECT id, at, subject, stream_seq, stored_at, reason, length(data) AS bytes, truncated
FROM jsworker.dead_messages ORDER BY id DESC LIMIT :limit
""")

TAKE = text("""
SELECT id, subject, data, truncated FROM jsworker.dead_messages
WHERE id = ANY(CAST(:ids AS bigint[])) OR :everything ORDER BY id
""")

DROP = text("""
DELETE FROM jsworker.dead_messages WHERE id = ANY(CAST(:ids AS bigint[])) OR :everything RETURNING id
""")


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A kept message, as it is needed to send it again."""

    id: int
    subject: str
    data: bytes
    truncated: bool


async def bury(
    database: Database,
    *,
    subject: str,
    stream_seq: int | None,
    stored_at: datetime | None,
    reason: str,
    data: bytes,
) -> int:
    """Keep a message for people to look at and return its id; only then may it be terminated."""
    parameters = {
        "subject": subject[:500],
        "stream_seq": stream_seq,
        "stored_at": stored_at,
        "reason": reason[:500],
        "data": data[:KEPT_BYTES],
        "truncated": len(data) > KEPT_BYTES,
        "kept": KEPT_MESSAGES,
    }
    rows = await database.run(BURY, parameters)
    return int(rows[0].id)


async def list_dead(database: Database, *, limit: int) -> list[dict[str, Any]]:
    """Return dead messages, the newest first, each as a dict by column name, without their data."""
    return [row._asdict() for row in await database.run(DEAD, {"limit": limit})]


async def read_dead(database: Database, ids: Sequence[int] | None) -> list[DeadMessage]:
    """Return dead messages with their data; None means all."""
    rows = await database.run(TAKE, {"ids": list(ids or ()), "everything": ids is None})
    return [DeadMessage(row.id, row.subject, bytes(row.data), row.truncated) for row in rows]


async def drop_dead(database: Database, ids: Sequence[int] | None) -> list[int]:
    """Delete dead messages and return the ids of those that were there; None means all."""
    rows = await database.run(DROP, {"ids": list(ids or ()), "everything": ids is None})
    return [int(row.id) for row in rows]
