"""What waits: live jobs by kind, the outbox, refused rows, messages that nobody could use. Read-only; decides nothing.

Each part reads an index that holds only what waits, however many jobs have ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import text

from jsworker.ownership.database import Database

# The predicates of the partial indexes, word for word: plain ones would not be answered by them.
BACKLOG = text("""
SELECT kind, 'queued' AS what, count(*) AS number,
  CAST(extract(epoch FROM clock_timestamp() - min(queued_at)) AS double precision) AS oldest
FROM jsworker.jobs WHERE status || '' = 'queued' GROUP BY kind
UNION ALL
SELECT kind, 'scheduled', count(*), NULL
FROM jsworker.jobs WHERE status || '' = 'scheduled' GROUP BY kind
UNION ALL
SELECT kind, 'processing', count(*), NULL
FROM jsworker.jobs WHERE status || '' = 'processing' GROUP BY kind
UNION ALL
SELECT kind, 'outbox', count(*),
  CAST(extract(epoch FROM clock_timestamp() - min(queued_at)) AS double precision)
FROM jsworker.jobs WHERE CAST(needs_publish AS integer) = 1 GROUP BY kind
UNION ALL
SELECT attempted, 'refused rows', count(*), NULL FROM jsworker.refused_rows GROUP BY attempted
UNION ALL
SELECT NULL, 'dead messages', count(*), NULL FROM jsworker.dead_messages
""")


@dataclass(slots=True)
class Waiting:
    """One kind's live jobs.

    Attributes:
        jobs: how many, by status: scheduled, queued, processing.
        oldest_seconds: for how long the job at the front has been queued; 0 when there is none.
        to_publish: queued jobs whose message is still to be sent.
        to_publish_oldest_seconds: for how long the oldest of them has been queued.
    """

    jobs: dict[str, int] = field(default_factory=lambda: {"scheduled": 0, "queued": 0, "processing": 0})
    oldest_seconds: float = 0.0
    to_publish: int = 0
    to_publish_oldest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in the whole table.

    Attributes:
        kinds: by kind; those asked for are there even without a job.
        dead_messages: messages that nobody could use.
        refused_rows: jobs that are set aside because PostgreSQL refuses their row, by what was attempted.
    """

    kinds: dict[str, Waiting]
    dead_messages: int
    refused_rows: dict[str, int]


async def backlog(database: Database, kinds: Sequence[str]) -> Backlog:
    """Return what waits, of every kind that has live jobs, and of ``kinds``."""
    found = {kind: Waiting() for kind in kinds}
    dead_messages = 0
    refused_rows: dict[str, int] = {}
    for row in await database.run(BACKLOG):
        if row.what == "dead messages":
            dead_messages = int(row.number)
            continue
        if row.what == "refused rows":
            refused_rows[row.kind] = int(row.number)
            continue
        waiting = found.setdefault(row.kind, Waiting())
        if row.what == "outbox":
            waiting.to_publish, waiting.to_publish_oldest_seconds = int(row.number), _age(row.oldest)
            continue
        waiting.jobs[row.what] = int(row.number)
        if row.what == "queued":
            waiting.oldest_seconds = _age(row.oldest)
    return Backlog(found, dead_messages, refused_rows)


def _age(seconds: float | None) -> float:
    return max(0.0, seconds or 0.0)
