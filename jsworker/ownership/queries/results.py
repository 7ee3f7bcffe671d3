"""Reads the ends of jobs, for callers that wait for their results."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from uuid import UUID

from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import ended, live
from jsworker.ownership.statements import condition, filled, json_size

MOST_ENDS: Final = 500
"""In one answer; with it the largest holds some 30 MB."""
SMALL_BYTES: Final = 64 * 1024
"""As text. A longer result is fetched alone, so that others need not wait for it."""
ENDS_BYTES: Final = MOST_ENDS * SMALL_BYTES // 10
"""One answer is given time for so many; few results are nearly as long as they may be."""

SIZED: Final = f"""j.status, j.result, {json_size("j.result", SMALL_BYTES)} AS size,
    j.last_error, j.failure_reason, j.kind"""
SMALL: Final = f"""SELECT id, status, CASE WHEN size <= {SMALL_BYTES} THEN result END AS result, size,
  last_error, failure_reason, kind"""
"""The columns of ``JobEnd``, from a subquery of an id and ``SIZED``.

The LIMIT of that keeps PostgreSQL from merging the two, which would find each size twice.
"""

# A missing job has a row without a status.
ENDS = filled(
    """
{small} FROM (
  SELECT i.id, {sized}
  FROM unnest(CAST(:ids AS uuid[])) AS i(id) LEFT JOIN jsworker.jobs AS j ON j.id = i.id
  WHERE j.id IS NULL OR {ended}
  LIMIT CAST(:most AS integer)
) AS ended
""",
    small=SMALL,
    sized=SIZED,
    ended=condition(ended),
)

WHOLE_END = filled(
    """
SELECT j.id, j.status, j.result, pg_column_size(j.result) AS size, j.last_error, j.failure_reason, j.kind
FROM jsworker.jobs AS j WHERE j.id = :id AND {ended}
""",
    ended=condition(ended),
)

LIVE_KIND = filled("SELECT j.kind FROM jsworker.jobs AS j WHERE j.id = :id AND {live}", live=condition(live))


class JobEnd(NamedTuple):
    """How a job has ended.

    Attributes:
        id: the job's id.
        status: completed, failed or cancelled; None: there is no such job.
        result: its JSON value; None also where it is too large for an answer about many jobs.
        size: bytes of the result's text; of a large one, as stored; None: it has none.
        error: the last one's text.
        reason: why it has failed for good.
        kind: its kind.
    """

    id: UUID
    status: str | None
    result: Any = None
    size: int | None = None
    error: str | None = None
    reason: str | None = None
    kind: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether the result was left out for its size."""
        return self.size is not None and self.size > SMALL_BYTES


async def read_ends(
    database: Database, ids: Iterable[UUID], *, most: int = MOST_ENDS, seconds: float | None = None
) -> list[JobEnd]:
    """Return how those of these jobs have ended that have, or are not there; at most ``most``.

    It may take ``seconds``, or as long as any statement.
    """
    values = {"ids": uuid_array(ids), "most": most}
    return [JobEnd(*row) for row in await database.run_by_key(ENDS, values, seconds=seconds)]


async def read_whole_end(database: Database, end: JobEnd, *, tries: int) -> JobEnd:
    """Return how a job has ended with all of its result; after each try without an answer it may take longer."""
    seconds = database.seconds_for(end.size or 0, tries=tries)
    rows = await database.run_by_key(WHOLE_END, {"id": end.id}, seconds=seconds)
    return JobEnd(*rows[0]) if rows else JobEnd(end.id, None)


async def live_kind(database: Database, job_id: UUID) -> str | None:
    """Return the kind of a job that has not ended; None: it has, or there is none."""
    rows = await database.run_by_key(LIVE_KIND, {"id": job_id})
    return rows[0][0] if rows else None
