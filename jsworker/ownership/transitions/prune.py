"""PRUNE: ended jobs are deleted with their timelines and steps when they have been kept for long enough.

A workflow is deleted as a whole: its row first, when its end is long enough ago; then its jobs like others.

Only ended jobs are read and locked, and no lock is waited for: statements about live jobs are not delayed.
"""

from collections.abc import Mapping, Sequence
from datetime import MINYEAR, UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import text

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseTimeout
from jsworker.ownership.database import Database, MostRows
from jsworker.ownership.pool import FarTime, Row, uuid_array
from jsworker.ownership.predicates import as_refused, ended, ended_indexed
from jsworker.ownership.refusals import QUERY_CANCELED, Refused, RowRefused, in_halves
from jsworker.ownership.statements import condition, filled
from jsworker.ownership.transitions.refused_rows import RefusedRows, Sweep, Swept, run_sweep

FIRST_LIMIT: Final = 100
LARGEST_LIMIT: Final = 1_000
"""How many jobs a batch looks for: at first, and at most."""
_QUICK_SECONDS: Final = 0.015
_SLOW_SECONDS: Final = 0.06
_BEGINNING: Final = "-infinity"

CUTOFF = text("SELECT statement_timestamp() - make_interval(secs => CAST(:older_than AS double precision))")

_ENDED: Final = condition(ended)

# The predicate is that of the index jobs_finished, word for word, so that the index can be used. A batch
# begins where the previous one ended: otherwise, while an old transaction keeps VACUUM from removing deleted
# rows, each batch would pass all of them again. This bound compares pairs, so that the planner does not take
# both bounds for a range: before ANALYZE it expects almost no rows in a range, and then sorts every ended job
# rather than walk along the index.
_OLD = f"""
  FROM jsworker.jobs AS j
  WHERE {condition(ended_indexed)}
    AND (j.finished_at, j.id) >= (CAST(:since AS timestamptz), CAST('00000000-0000-0000-0000-000000000000' AS uuid))
    AND j.finished_at < CAST(:before AS timestamptz)
    AND (CAST(:kind AS text) IS NULL OR j.kind = CAST(:kind AS text))
    AND (CAST(:status AS text) IS NULL OR j.status = CAST(:status AS text))"""

# SKIP LOCKED in the search gives every pruner other jobs; a statement that never waits needs no lock order.
# The next batch begins at the instant of the last job found, deleted or not: so it gets past members of
# workflows that still exist.
# Whether a workflow exists is asked only for the rows found: as a condition of the search it would make the
# planner sort every ended job. Ids are passed as arrays, because the planner may answer a join with a
# thousand rows by reading whole tables.
_PRUNE = """
WITH old AS ({old}
), gone AS (
  DELETE FROM jsworker.jobs AS j
  WHERE j.id = ANY(ARRAY(
    SELECT id FROM old
    WHERE batch_id IS NULL OR (SELECT b.id FROM jsworker.batches AS b WHERE b.id = old.batch_id) IS NULL)) AND {ended}
  RETURNING j.id
), entries AS (
  DELETE FROM jsworker.job_events AS e WHERE e.job_id = ANY(ARRAY(SELECT id FROM gone)) RETURNING e.id
), steps AS (
  DELETE FROM jsworker.job_steps AS s WHERE s.job_id = ANY(ARRAY(SELECT id FROM gone))
)
SELECT count(*) AS jobs, (SELECT max(finished_at) FROM old) AS last, (SELECT count(*) FROM old) AS found, (SELECT count(*) FROM entries) AS events,
  {workers} AS workers
FROM gone
"""
_WORKERS = """(SELECT count(*) FROM jsworker.workers AS w
   WHERE w.state IN ('running', 'drained') AND w.last_seen_at > statement_timestamp() - interval '1 minute')"""
_FIRST = (
    f"SELECT j.id, j.finished_at, j.batch_id{_OLD} ORDER BY j.finished_at LIMIT :limit FOR UPDATE SKIP LOCKED"
)
PRUNE = filled(_PRUNE, old=_FIRST, ended=_ENDED, workers=_WORKERS)

OLD_WORKFLOWS = text("""
SELECT w.id FROM jsworker.workflows AS w
WHERE w.finished_at < CAST(:before AS timestamptz) AND w.id <> ALL(CAST(:besides AS uuid[]))
ORDER BY w.finished_at LIMIT :limit FOR UPDATE SKIP LOCKED
""")
PRUNE_WORKFLOWS = text("""
DELETE FROM jsworker.workflows AS w WHERE w.finished_at < CAST(:before AS timestamptz) AND w.id = ANY(ARRAY(
  SELECT w.id FROM jsworker.workflows AS w WHERE w.id = ANY(CAST(:ids AS uuid[])) ORDER BY w.id FOR UPDATE SKIP LOCKED))
RETURNING w.id
""")
_WORKFLOWS: Final = 100
_LONGER: Final = 10
"""Times the statement time-out, for one workflow (it may have very many batches and needs) or one job."""
_FIRST_PAUSE: Final = 60.0
_LONGEST_PAUSE: Final = 86_400.0
"""Seconds until a kept workflow is tried again; each pause is twice as long as the one before."""

# Leaves out jobs that were refused before, because a foreign key or a trigger keeps them. They count as found: a
# foreign key may keep millions, and a statement that passed all of them to find others would never end in time.
# A scalar subquery, as above, so that the marks are looked up by key.
_IS_SET_ASIDE = f"""((SELECT r.job_id FROM jsworker.refused_rows AS r
    WHERE r.job_id = j.id AND r.attempted = 'prune' AND r.retry_at > statement_timestamp()
      AND {condition(as_refused)}) IS NOT NULL)"""  # noqa: S608 -- constants of this file
FIND = text(f"""
WITH found AS MATERIALIZED (
  SELECT j.id, j.finished_at, j.status, j.fencing_token, j.dispatch{_OLD} ORDER BY j.finished_at LIMIT :limit
)
SELECT tried.id, seen.last, seen.found, seen.workers
FROM (SELECT max(finished_at) AS last, count(*) AS found, {_WORKERS} AS workers FROM found) AS seen
LEFT JOIN (SELECT j.id FROM found AS j WHERE NOT {_IS_SET_ASIDE}) AS tried ON true
""")  # noqa: S608 -- constants of this file
# Where more jobs ended in one moment than a batch finds, and the first of them are all set aside.
FIND_AT = text(f"""
SELECT j.id{_OLD} AND j.finished_at = CAST(:since AS timestamptz) AND NOT {_IS_SET_ASIDE} LIMIT :limit
""")
_NAMED = """
  SELECT j.id, j.finished_at, j.batch_id FROM jsworker.jobs AS j
  WHERE j.id = ANY(CAST(:ids AS uuid[])) AND {ended} AND j.finished_at < CAST(:before AS timestamptz)
  ORDER BY j.id FOR UPDATE SKIP LOCKED"""
_PRUNE_NAMED = filled(_PRUNE, old=_NAMED, ended=_ENDED, workers=_WORKERS)
_PRUNING = Sweep("prune", ("prune",), PRUNE, FIND, _PRUNE_NAMED)
_PRUNING_AT = Sweep("prune", ("prune",), PRUNE, FIND_AT, _PRUNE_NAMED)

OLD_JOBS = text(f"""
SELECT count(*) AS jobs{_OLD} AND (j.batch_id IS NULL OR (
  SELECT w.id FROM jsworker.batches AS b JOIN jsworker.workflows AS w ON w.id = b.workflow
  WHERE b.id = j.batch_id AND (coalesce(CAST(:kind AS text), CAST(:status AS text)) IS NOT NULL
    OR coalesce(w.finished_at, 'infinity') >= CAST(:before AS timestamptz))) IS NULL)
""")  # noqa: S608 -- constants of this file


class Ended(NamedTuple):
    """Which jobs are pruned: those that ended before an instant, of this kind and status; None: any.

    With a kind or a status, no job of a workflow that exists, which is deleted as a whole.
    """

    before: datetime
    kind: str | None = None
    status: str | None = None


class Batch(NamedTuple):
    """The result of one batch.

    ``last``: when the last job found had ended; the next batch begins there, unless this was the last
    (``is_last``). ``workers``: how many workers run just now; all of them may prune.
    """

    jobs: int
    events: int
    last: datetime | None
    workers: int
    is_last: bool


async def cutoff(database: Database, *, older_than: float) -> datetime:
    """Return the instant ``older_than`` seconds ago by the database's clock."""
    [[before]] = await database.run(CUTOFF, {"older_than": older_than})
    found: datetime = before
    return found


async def prune(
    database: Database,
    ended: Ended,
    *,
    since: datetime | None,
    limit: int,
    refused_rows: RefusedRows | None = None,
) -> Batch:
    """Delete up to ``limit`` ended jobs, with their timelines, the oldest first, from ``since`` on.

    ``since`` is the ``last`` of the previous batch; None: the first batch. A job whose row is locked or refused
    stays, and so does a member of a workflow that exists. So does one that takes too long by itself, for example
    because a foreign key without an index refers to it: it is set aside like a refused one.
    """
    values = ended._asdict() | {"since": since or _BEGINNING, "limit": limit}

    async def sweep(pruning: Sweep) -> Swept:
        if limit > 1 or refused_rows is None:
            return await run_sweep(database, pruning, values, refused_rows)
        return await _prune_one(database, pruning, values, refused_rows)

    swept = await sweep(_PRUNING)
    seen = (swept.found or swept.rows)[0]
    last, is_last = seen.last, seen.found < limit

    def stands_still() -> bool:
        return not (is_last or swept.refused or any(row.jobs for row in swept.rows)) and last == since

    # More jobs of one instant than a batch finds are members of workflows, locked or set aside: the next batch
    # would find them again.
    if stands_still() and swept.found is not None:
        swept = await sweep(_PRUNING_AT)
    if stands_still():
        last = None if last is None else _moment_after(last)
    return Batch(
        jobs=sum(row.jobs for row in swept.rows),
        events=sum(row.events for row in swept.rows),
        last=last,
        workers=seen.workers,
        is_last=is_last,
    )


async def _prune_one(
    database: Database, pruning: Sweep, values: Mapping[str, Any], refused_rows: RefusedRows
) -> Swept:
    try:
        seconds = _LONGER * database.seconds_for(0)
        return await run_sweep(database, pruning, values, refused_rows, seconds=seconds)
    except DatabaseTimeout:
        await database.end_given_up()
    found = await database.run(pruning.find, values)
    refused = [(row.id, RowRefused(QUERY_CANCELED, None)) for row in found if row.id is not None]
    await refused_rows.note("prune", refused)
    return Swept([], found, refused)


def _moment_after(time: datetime) -> datetime:
    # Nothing can be added to minus infinity: pruning goes on at the first year that Python supports.
    return (
        datetime(MINYEAR, 1, 1, tzinfo=UTC) if isinstance(time, FarTime) else time + timedelta(microseconds=1)
    )


class WorkflowBatch(NamedTuple):
    """The result of one batch of workflows: those refused for the first time, and whether it was the last of a pass."""

    refused: Refused[UUID]
    is_last: bool


class OldWorkflows:
    """Deletes workflows; those that a foreign key or a trigger keeps are tried again after ever longer pauses.

    Each process knows only those that it has tried itself.
    """

    def __init__(self, database: Database) -> None:
        """Begin without knowing any that is kept."""
        self._database = database
        self._before: datetime | None = None
        self._most = MostRows(database, _WORKFLOWS)
        self._passed: set[UUID] = set()
        """Those of this pass that stay."""
        self._kept: dict[UUID, tuple[float, float]] = {}
        """The pause of each kept workflow, and when it is over."""

    def begin(self, before: datetime) -> None:
        """Begin a pass: delete those that ended before an instant."""
        self._before, self._passed = before, set()
        self._most = MostRows(self._database, _WORKFLOWS)
        now = boottime()
        self._passed.update(kept for kept, (_, over) in self._kept.items() if over > now)

    async def delete_some(self) -> WorkflowBatch:
        """Delete the next workflows of the pass, the oldest first, except locked and kept ones."""
        return await self._most.write(self._delete)

    async def _delete(self, most: int) -> WorkflowBatch:
        values = {"before": self._before, "limit": most, "besides": uuid_array(self._passed)}
        ids = [row.id for row in await self._database.run(OLD_WORKFLOWS, values)]
        try:
            rows, refused = await in_halves(ids, self._delete_these)
        except DatabaseTimeout:
            if most > 1:
                raise
            await self._database.end_given_up()
            rows, refused = [], [(one, RowRefused(QUERY_CANCELED, None)) for one in ids]
        self._passed.update(set(ids) - {row.id for row in rows})
        new = [(one, error) for one, error in refused if one not in self._kept]
        for one, _ in refused:
            pause = min(2 * self._kept[one][0], _LONGEST_PAUSE) if one in self._kept else _FIRST_PAUSE
            self._kept[one] = pause, boottime() + pause
        is_last = len(ids) < most
        if is_last:  # others have deleted those that were not found again
            self._kept = {one: pause for one, pause in self._kept.items() if one in self._passed}
        return WorkflowBatch(new, is_last)

    async def _delete_these(self, ids: Sequence[UUID]) -> Sequence[Row]:
        seconds = _LONGER * self._database.seconds_for(0) if len(ids) == 1 else None
        values = {"before": self._before, "ids": uuid_array(ids)}
        return await self._database.run(PRUNE_WORKFLOWS, values, seconds=seconds)


async def prune_workflows(database: Database, before: datetime) -> Refused[UUID]:
    """Delete the rows of workflows that ended before an instant, except locked, refused and very slow ones.

    Returns the refused ones; those that take too long are among them.
    """
    workflows = OldWorkflows(database)
    workflows.begin(before)
    kept: Refused[UUID] = []
    is_last = False
    while not is_last:
        refused, is_last = await workflows.delete_some()
        kept += refused
    return kept


async def count_old(database: Database, ended: Ended) -> int:
    """Return how many jobs would be pruned."""
    [row] = await database.run(OLD_JOBS, ended._asdict() | {"since": _BEGINNING})
    return int(row.jobs)


def next_limit(limit: int, *, seconds: float) -> int:
    """Return the limit of the next batch by the duration of the last: long timelines take far longer."""
    if seconds > _SLOW_SECONDS:
        return max(limit // 2, 1)
    return min(2 * limit, LARGEST_LIMIT) if seconds < _QUICK_SECONDS else limit
