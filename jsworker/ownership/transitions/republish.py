"""The reads of the queue by sweeps, and REPUBLISH for jobs whose message is proven lost."""

from collections.abc import Awaitable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.priorities import NORMAL
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.refusals import in_halves
from jsworker.ownership.statements import NOW, compiled, condition, given_array, j
from jsworker.ownership.transitions.refused_rows import RefusedRows

_PASSED_OVER = 500
"""The number of oldest rows of a kind among which a search looks for rows that no message brings. Rows behind
these need no search yet: older jobs are in front of them."""
_BATCH = 500
_CHANGE = timedelta(minutes=1)
"""How long publishers may still name the stream that was there before; and by how much clocks may differ."""

_LONGEST_WAIT = timedelta(minutes=5)
"""The longest wait before a job whose messages vanish again and again is published once more."""

# Statements that walk along an index stay text: nested recursive CTEs are harder to read as expressions.
_QUEUED: Final = condition(predicates.queued_indexed)
_WAITS: Final = condition(predicates.queued_before)

# Walks from one instant to the next and reads the rows of each: thousands of jobs that were enqueued together have
# the same instant, and a walk from row to row would pass all of them for each row.
_WAITING = """
WITH RECURSIVE instants AS (
  SELECT CAST('-infinity' AS timestamptz) AS queued_at, 0 AS place
  UNION ALL
  SELECT next.queued_at, instants.place + 1
  FROM instants CROSS JOIN LATERAL (
    SELECT j.queued_at FROM jsworker.jobs AS j
    WHERE {queued} AND {of_kind} AND {of_lane} AND j.queued_at > instants.queued_at AND {waits}{besides}
    ORDER BY j.queued_at LIMIT 1
  ) AS next
  WHERE instants.place < {length}
)
SELECT id FROM (
  SELECT row.id, instants.place, row.needs_publish, row.stream_seq
  FROM instants CROSS JOIN LATERAL (
    SELECT j.id, j.needs_publish, j.stream_seq FROM jsworker.jobs AS j
    WHERE {queued} AND {of_kind} AND {of_lane} AND j.queued_at = instants.queued_at{besides}
    LIMIT {length}
  ) AS row
  WHERE instants.place > 0 LIMIT {length}
) AS page
WHERE id <> ALL(CAST(:besides AS uuid[]))
  AND (CAST(:delivered AS bigint) IS NULL OR needs_publish OR stream_seq IS NULL
    OR stream_seq <= CAST(:delivered AS bigint))
ORDER BY place, id LIMIT :limit
"""


def _waiting(of_lane: predicates.Predicate, besides: str = "") -> sa.TextClause:
    length = "(CAST(:length AS integer) + cardinality(CAST(:besides AS uuid[])))"
    of_kind = condition(predicates.of_kind)
    of_lane_text = condition(of_lane)
    return statements.filled(
        _WAITING,
        queued=_QUEUED,
        of_kind=of_kind,
        of_lane=of_lane_text,
        waits=_WAITS,
        length=length,
        besides=besides,
    )


_NOT_REFUSED: Final = f" AND {condition(~predicates.set_aside('claim'))}"
WAITING = _waiting(predicates.normal)
WAITING_IN_LANE = _waiting(predicates.of_lane_indexed)
# Leaves out rows whose CLAIM is refused: they wait for ever and would always come first.
WAITING_BESIDES = _waiting(predicates.normal, _NOT_REFUSED)
WAITING_IN_LANE_BESIDES = _waiting(predicates.of_lane_indexed, _NOT_REFUSED)

# Reads the queued rows of each kind in the order of (queued_at, id), each found from the previous one by the index.
# For one ordered read the planner would fetch and sort the whole backlog, because it expects few rows.
# statement_timestamp(), because an index cannot be searched by a value that may change during the read.
# At most a thousand kinds, and in any case those that workers serve. A page reads at most four times its length of
# rows of a kind: if so many rows still wait for a relay, the page ends before it is full.
# What was published again is due later each time, or a stream that keeps nothing would be flooded: after the time
# that the job had waited by then, or that its extra dispatches allow. A first message is due at once, even if it was
# published late. Epochs are subtracted, because older servers cannot subtract infinite times.
POSTED = statements.filled(
    """
WITH RECURSIVE {kinds}, several AS (
  SELECT kind FROM (SELECT kind FROM kinds WHERE kind IS NOT NULL LIMIT 1000) AS first
  UNION SELECT unnest(w.kinds) FROM jsworker.workers AS w
)
SELECT page.id, k.kind, page.dispatch, page.stream_seq, page.stream_created, page.queued_at, page.priority,
  (extract(epoch FROM statement_timestamp()) - extract(epoch FROM page.published_at) BETWEEN 0 AND least(
    extract(epoch FROM page.published_at) - extract(epoch FROM page.queued_at),
    CAST(:older_than AS float) * (power(2, least(greatest(page.dispatch - page.fencing_token - 1, 0), 9)) - 1),
    {longest_wait}
  )) IS NOT TRUE AS is_due
FROM several AS k CROSS JOIN LATERAL (
  WITH RECURSIVE walk AS (
    SELECT CAST(NULL AS uuid) AS id, CAST(:after AS timestamptz) AS queued_at, CAST(:after_id AS uuid) AS at_id,
      0 AS place, CAST(NULL AS bigint) AS dispatch, true AS needs_publish, CAST(NULL AS bigint) AS stream_seq,
      CAST(NULL AS timestamptz) AS stream_created, CAST(NULL AS smallint) AS priority,
      CAST(NULL AS timestamptz) AS published_at, CAST(NULL AS bigint) AS fencing_token
    UNION ALL
    SELECT next.id, next.queued_at, next.id, walk.place + 1, next.dispatch, next.needs_publish, next.stream_seq,
      next.stream_created, next.priority, next.published_at, next.fencing_token
    FROM walk CROSS JOIN LATERAL (
      SELECT j.id, j.queued_at, j.dispatch, j.needs_publish, j.stream_seq, j.stream_created, j.priority,
        j.published_at, j.fencing_token
      FROM jsworker.jobs AS j
      WHERE {queued} AND j.kind = k.kind AND j.queued_at >= walk.queued_at
        AND (j.queued_at, j.id) > (walk.queued_at, walk.at_id)
        AND {waits}
      ORDER BY j.queued_at, j.id LIMIT 1
    ) AS next
    WHERE walk.place < 4 * CAST(:limit AS integer)
  )
  SELECT * FROM walk WHERE place > 0 AND NOT needs_publish LIMIT :limit
) AS page
WHERE k.kind IS NOT NULL
ORDER BY page.queued_at, page.id LIMIT :limit
""",
    kinds=statements.KINDS_BY_LEAPS.replace("{which}", ""),
    queued=_QUEUED,
    waits=_WAITS,
    longest_wait=f"{_LONGEST_WAIT.total_seconds():g}",
)

_ids, _dispatches = given_array("ids", sa.Uuid), given_array("dispatches", sa.BigInteger)
_gone = statements.given_rows("gone", id=_ids, dispatch=_dispatches)
_is_lost = predicates.lost_at_dispatch(_gone.c.dispatch)
_lost = statements.locked(sa.select(j.c.id).join(_gone, _gone.c.id == j.c.id).where(_is_lost))
_again = (
    sa.update(j)
    .values(dispatch=j.c.dispatch + 1, needs_publish=True, publish_after=NOW)
    .where(j.c.id == _lost.c.id, predicates.queued, ~j.c.needs_publish)
    .returning(*j.c["id", "fencing_token", "dispatch", "stream_seq"])
    .cte("again")
)
_detail = statements.json_object(dispatch=_again.c.dispatch, lost_seq=_again.c.stream_seq)
_logged = statements.entry(_again, "republished", worker_id=predicates.worker_id, detail=_detail)
REPUBLISH = compiled(sa.select(_again.c.id).add_cte(_logged))

QUEUED_KINDS = statements.filled(
    """
SELECT k.kind FROM unnest(CAST(:kinds AS text[])) AS k(kind) CROSS JOIN LATERAL (
  SELECT j.queued_at FROM jsworker.jobs AS j WHERE {queued} AND j.kind = k.kind ORDER BY j.queued_at LIMIT 1
) AS oldest
""",
    queued=_QUEUED,
)

_BEGINNING = "-infinity", UUID(int=0)


class Posted(NamedTuple):
    """A queued job whose message was published: stream and place in it, if known, and when it was queued.

    If the message is gone, another one ``is_due``; or only later, because it was not the first to vanish.
    """

    id: UUID
    kind: str
    dispatch: int
    stream_seq: int | None
    stream_created: datetime | None
    queued_at: datetime
    priority: int = NORMAL
    is_due: bool = True

    def is_beside(self, created: datetime) -> bool:
        """Return whether the message went to another stream, although that made at ``created`` was there."""
        return self.stream_created not in {None, created} and self.queued_at > created + _CHANGE


async def waiting(
    database: Database,
    *,
    kind: str,
    older_than: float,
    limit: int,
    besides: Collection[UUID],
    delivered: int | None = None,
    seconds: float | None = None,
    past_refused: bool = False,
    priority: int = NORMAL,
) -> list[UUID]:
    """Return queued jobs of a kind and priority to claim without their message, the oldest first. CLAIM decides.

    Args:
        older_than: the least seconds for which they have been queued.
        besides: ids that this process runs, is claiming or has put off.
        delivered: the number up to which all messages have been delivered. Only jobs whose message is not
            published or has no higher number are returned; None: all jobs.
        past_refused: leave out rows that are set aside because their CLAIM was refused.
    """
    values = {
        "kind": kind,
        "older_than": older_than,
        "limit": limit,
        "besides": list(besides),
        "delivered": delivered,
        "length": limit if delivered is None else max(limit, _PASSED_OVER),
    }
    if priority == NORMAL:
        statement = WAITING_BESIDES if past_refused else WAITING
    else:
        statement = WAITING_IN_LANE_BESIDES if past_refused else WAITING_IN_LANE
        values["priority"] = priority
    return [row.id for row in await database.run(statement, values, seconds=seconds)]


async def queued_kinds(database: Database, *, kinds: Sequence[str], seconds: float | None = None) -> set[str]:
    """Return those of these kinds of which a job is queued."""
    rows = await database.run_along_index(QUEUED_KINDS, {"kinds": list(kinds)}, seconds=seconds)
    return {row.kind for row in rows}


async def posted(
    database: Database,
    *,
    after: tuple[datetime, UUID] | None,
    older_than: float,
    limit: int,
    seconds: float | None = None,
) -> list[Posted]:
    """Return a page of jobs queued for ``older_than`` seconds whose message was published.

    In the order of ``(queued_at, id)``, ``after`` that of the page before. Where very many jobs that still
    wait for their relay stand first, it ends early: what stands behind them is found once they are published.
    """
    after_at, after_id = after or _BEGINNING
    values = {"after": after_at, "after_id": after_id, "older_than": older_than, "limit": limit}
    return [Posted(*row) for row in await database.run(POSTED, values, seconds=seconds)]


async def republish(
    database: Database,
    *,
    worker_id: str,
    gone: Sequence[tuple[UUID, int]],
    refused_rows: RefusedRows | None = None,
) -> list[UUID]:
    """Let the relay publish anew what was lost, ids and dispatches proven ``gone``, and return the jobs.

    What has moved on needs no message; rows that are refused are set aside.
    """

    def write(batch: Sequence[tuple[UUID, int]]) -> Awaitable[Sequence[Row]]:
        ids, dispatches = [job_id for job_id, _ in batch], [dispatch for _, dispatch in batch]
        return database.run(REPUBLISH, {"worker_id": worker_id, "ids": ids, "dispatches": dispatches})

    aside = set() if refused_rows is None else await refused_rows.among("republish", [job for job, _ in gone])
    wanted = [(job_id, dispatch) for job_id, dispatch in gone if job_id not in aside]
    rows, refused = await in_halves(wanted, write, size=_BATCH)
    if refused_rows is not None:
        await refused_rows.note("republish", [(job_id, error) for (job_id, _), error in refused])
    return [row.id for row in rows]
