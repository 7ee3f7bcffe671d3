"""What waits: live jobs by kind, the outbox, refused rows, messages that could not be used. Read-only; decides nothing.

Each part reads an index that holds only what waits, however many jobs have ended. Producers invent kinds as they
like, so only those that workers are for are counted each, and no more of them than are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import text

from jsworker.ownership.database import Database

_WORKERS: Final = 1_000
"""Whose kinds are looked at; those that were seen last."""
_MOST_REFUSED: Final = 100_000
"""So many refused rows are counted; a foreign key may keep any number of ended jobs."""
_LONGEST_SECONDS: Final = 1e10
"""Three centuries: a row may hold an infinite time."""

# Those of stopped workers too, until they are forgotten: their jobs are of a kind that is known.
SERVED = text("""
SELECT DISTINCT kind FROM (
  SELECT kinds FROM jsworker.workers ORDER BY last_seen_at DESC LIMIT :workers
) AS w CROSS JOIN LATERAL unnest(w.kinds) AS kind
WHERE kind IS NOT NULL AND kind <> ALL(CAST(:besides AS text[])) ORDER BY kind LIMIT :most
""")

# The predicates of the partial indexes, word for word: plain ones would not be answered by them. Epochs are
# subtracted, for older servers cannot subtract infinite times.
BACKLOG = text(
    """
SELECT {named} AS kind, 'queued' AS what, count(*) AS number, {oldest} AS oldest
FROM jsworker.jobs WHERE status || '' = 'queued' GROUP BY 1
UNION ALL
SELECT {named}, 'scheduled', count(*), NULL
FROM jsworker.jobs WHERE status || '' = 'scheduled' GROUP BY 1
UNION ALL
SELECT {named}, 'processing', count(*), NULL
FROM jsworker.jobs WHERE status || '' = 'processing' GROUP BY 1
UNION ALL
SELECT {named}, 'outbox', count(*), {oldest}
FROM jsworker.jobs WHERE CAST(needs_publish AS integer) = 1 GROUP BY 1
UNION ALL
SELECT attempted, 'refused rows', count(*), NULL
FROM (SELECT attempted FROM jsworker.refused_rows LIMIT {most}) AS r GROUP BY attempted
UNION ALL
SELECT NULL, 'dead messages', count(*), NULL FROM jsworker.dead_messages
""".replace("{most}", str(_MOST_REFUSED))
    .replace("{named}", "CASE WHEN kind = ANY(CAST(:kinds AS text[])) THEN kind END")
    .replace(
        "{oldest}",
        "CAST(extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(queued_at)) AS double precision)",
    )
)


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
        served = {"workers": _WORKERS, "besides": named, "most": most - len(named)}
        named += [row.kind for row in await database.run(SERVED, served)]
    found = {kind: Waiting() for kind in named}
    others: Waiting | None = None
    dead_messages = 0
    refused_rows: dict[str, int] = {}
    for row in await database.run(BACKLOG, {"kinds": named}):
        if row.what == "dead messages":
            dead_messages = row.number
        elif row.what == "refused rows":
            refused_rows[row.kind] = row.number
        elif row.kind is None:
            others = others or Waiting()
            _note(others, row)
        else:
            _note(found[row.kind], row)
    return Backlog(found, others, dead_messages, refused_rows)


def _note(waiting: Waiting, row: Any) -> None:
    if row.what == "outbox":
        waiting.to_publish, waiting.to_publish_oldest_seconds = row.number, _age(row.oldest)
    else:
        waiting.jobs[row.what] = row.number
    if row.what == "queued":
        waiting.oldest_seconds = _age(row.oldest)


def _age(seconds: float | None) -> float:
    return min(max(0.0, seconds or 0.0), _LONGEST_SECONDS)
