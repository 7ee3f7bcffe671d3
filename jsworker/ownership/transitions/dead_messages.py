"""Dead messages: messages of the stream that could not be read, or that named a job that does not exist."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.refusals import Refused, in_halves
from jsworker.ownership.transitions.audit import AuditEntry, run_noted

KEPT_BYTES = 4096
"""How much of a message is kept; a longer one cannot be replayed."""
KEPT_MESSAGES = 10_000
"""How many messages are kept, the newest; otherwise anybody who may publish could fill the table."""

# The lowest id that is kept is counted back from the highest new one. The driver escapes the backslashes of bytes in an
# array where standard_conforming_strings is off; there are none in hexadecimal digits.
KEEP = text("""
WITH kept AS (
  INSERT INTO jsworker.dead_messages (subject, stream_seq, stored_at, reason, data, truncated)
  SELECT subject, stream_seq, stored_at, reason, decode(digits, 'hex'), truncated FROM unnest(
    CAST(:subjects AS text[]), CAST(:stream_seqs AS bigint[]), CAST(:stored_at AS timestamptz[]),
    CAST(:reasons AS text[]), CAST(:digits AS text[]), CAST(:truncated AS boolean[])
  ) AS letter(subject, stream_seq, stored_at, reason, digits, truncated)
  RETURNING id
), pruned AS (
  DELETE FROM jsworker.dead_messages WHERE id <= (SELECT max(id) - :kept FROM kept)
)
SELECT id FROM kept ORDER BY id
""")

DEAD = text("""
SELECT id, at, subject, stream_seq, stored_at, reason, length(data) AS bytes, truncated
FROM jsworker.dead_messages WHERE CAST(:after AS bigint) IS NULL OR id < CAST(:after AS bigint)
ORDER BY id DESC LIMIT :limit
""")

TAKE = text("""
SELECT id, subject, data, truncated FROM jsworker.dead_messages
WHERE id = ANY(CAST(:ids AS bigint[])) ORDER BY id
""")

DROP = text("DELETE FROM jsworker.dead_messages WHERE id = ANY(CAST(:ids AS bigint[])) RETURNING id")


class DeadMessage(NamedTuple):
    """A kept message, with what is needed to send it again."""

    id: int
    subject: str
    data: bytes
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class NewDeadMessage:
    """A message to be kept: where it came from, the rule it breaks and its content."""

    subject: str
    stream_seq: int | None
    stored_at: datetime | None
    reason: str
    data: bytes


async def keep(
    database: Database, letters: Sequence[NewDeadMessage]
) -> tuple[list[int], Refused[NewDeadMessage]]:
    """Store messages for people to look at; return the ids of the new rows, and the refused messages.

    Stored messages may be terminated in the stream.
    """

    def write(batch: Sequence[NewDeadMessage]) -> Awaitable[Sequence[Row]]:
        parameters = {
            "subjects": [letter.subject[:500] for letter in batch],
            "stream_seqs": [letter.stream_seq for letter in batch],
            "stored_at": [letter.stored_at for letter in batch],
            "reasons": [letter.reason[:500] for letter in batch],
            "digits": [letter.data[:KEPT_BYTES].hex() for letter in batch],
            "truncated": [len(letter.data) > KEPT_BYTES for letter in batch],
            "kept": KEPT_MESSAGES,
        }
        return database.run(KEEP, parameters)

    rows, refused = await in_halves(letters, write)
    return [row.id for row in rows], refused


async def list_dead(database: Database, *, limit: int, after: int | None = None) -> list[dict[str, Any]]:
    """Return dead messages, the newest first, each as a dict by column name, without their data.

    ``after``: only messages older than the one with this id.
    """
    return [row._asdict() for row in await database.run(DEAD, {"limit": limit, "after": after})]


async def read_dead(database: Database, ids: Sequence[int]) -> list[DeadMessage]:
    """Return dead messages with their data."""
    return [DeadMessage(*row) for row in await database.run(TAKE, {"ids": list(ids)})]


async def drop_dead(database: Database, ids: Sequence[int], *, entry: AuditEntry | None = None) -> list[int]:
    """Delete dead messages and return the ids of those that were there."""
    return [row.id for row in await run_noted(database, DROP, {"ids": list(ids)}, entry)]
