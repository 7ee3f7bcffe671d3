"""What waits: live jobs by kind, the outbox, refused rows, messages that could not be used. Read-only; decides nothing.

Each part reads an index that holds only what waits, however many jobs have ended. Producers invent kinds as they
like, so only those that workers are for are counted each, and no more of them than are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.statements import filled

# Those of stopped workers too, until they are forgotten: their jobs are of a kind that is known.
SERVED = text("""
SELECT DISTINCT kind FROM (
  SELECT kinds FROM jsworker.workers ORDER BY last_seen_at DESC LIMIT 1000
) AS w CROSS JOIN LATERAL unnest(w.kinds) AS kind
WHERE kind IS NOT NULL AND kind <> ALL(CAST(:besides AS text[])) ORDER BY kind LIMIT :most
""")

# The predicates of the partial indexes, word for word: plain ones would not be answered by them.
_LIVE = {
    "queued": "status || '' = 'queued'",
    "scheduled": "status || '' = 'scheduled'",
    "processing": "status || '' = 'processing'",
    "outbox": "CAST(needs_publish AS integer) = 1",
}
# Epochs are subtracted, for older servers cannot subtract infinite times, and bounded by three centuries.
_COUNT = """
SELECT CASE WHEN kind = ANY(CAST(:kinds AS text[])) THEN kind END AS kind, '{what}' AS what, count(*) AS number,
  CAST(least(greatest(extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(queued_at)), 0), 1e10)
    AS double precision) AS oldest
FROM jsworker.jobs WHERE {which} GROUP BY 1
"""
# A foreign key may keep any number of ended jobs, whose rows are refused to be pruned.
_OTHERS = """
SELECT attempted, 'refused rows', count(*), NULL
FROM (SELECT attempted FROM jsworker.refused_rows LIMIT 100000) AS r GROUP BY attempted
UNION ALL
SELECT NULL, 'dead messages', count(*), NULL FROM jsworker.dead_messages
"""
_COUNTS = [filled(_COUNT, what=what, which=which).text for what, which in _LIVE.items()]
BACKLOG = text("UNION ALL".join([*_COUNTS, _OTHERS]))


@dataclass(slots=True)
class Waiting:
    """One kind's live jobs.

    Attributes:
        jobs: how many, by status: scheduled, queued, processing.
        oldest_seconds: for how long the job at the front has been queued; 0 when there is none.
        to_publish: queued jobs whose message is still to be sent; the oldest of them has been queued for so long.
    """

    jobs: dict[str, int] = field(default_factory=lambda: {"scheduled": 0, "queued": 0, "processing": 0})
    oldest_seconds: float = 0.0
    to_publish: int = 0
    to_publish_oldest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in the whole table.

    Attributes:
        kinds: by kind: those asked for and those of other workers, even without a job.
        others: all other kinds together; None: they have no live jobs.
        dead_messages: messages that could not be used.
        refused_rows: jobs that are set aside because PostgreSQL refuses their row, by what was attempted.
    """

    kinds: dict[str, Waiting]
    others: Waiting | None
    dead_messages: int
    refused_rows: dict[str, int]


async def backlog(database: Database, kinds: Sequence[str], *, most: int) -> Backlog:
    """Return what waits: ``most`` kinds are counted each, these first, then as there is room those of other workers."""
    named = list(kinds[:most])
    if len(named) < most:
        served = {"besides": named, "most": most - len(named)}
        named += [row.kind for row in await database.run(SERVED, served)]
    found: dict[Any, Waiting] = {kind: Waiting() for kind in named}
    dead_messages = 0
    refused_rows: dict[str, int] = {}
    for row in await database.run(BACKLOG, {"kinds": named}):
        match row.what:
            case "dead messages":
                dead_messages = row.number
            case "refused rows":
                refused_rows[row.kind] = row.number
            case "outbox":
                waiting = found.setdefault(row.kind, Waiting())
                waiting.to_publish, waiting.to_publish_oldest_seconds = row.number, row.oldest
            case status:
                waiting = found.setdefault(row.kind, Waiting())
                waiting.jobs[status] = row.number
                waiting.oldest_seconds = row.oldest if status == "queued" else waiting.oldest_seconds
    others = found.pop(None, None)
    return Backlog(found, others, dead_messages, refused_rows)
