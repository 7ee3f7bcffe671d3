"""FINISH and NEEDS: a batch finishes once, after its last member; then NEEDS wakes or cancels what needs it.

Each is a statement with a snapshot of its own. The statement that settles a job still sees the job as live;
and if NEEDS were a part of FINISH, two needs that finish at once would each see the other as unfinished. If a
process dies in between, the sweep of any worker finds what it left undone: a batch without a live member, or
a finished batch that is not ``propagated``.

No statement waits for a lock, except PROPAGATED for the row of a batch: the holder of a lock finishes or
reopens the batch, or a later sweep does the work.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, literal_column

from jsworker.core import fault_points
from jsworker.ownership import predicates
from jsworker.ownership.database import Database, MostRows
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.refusals import Refused, in_halves
from jsworker.ownership.statements import condition, filled, sql
from jsworker.ownership.transitions.refused_rows import RefusedRows, Sweep, run_sweep

_BATCHES: Final = 500
_MEMBERS: Final = 1000
"""The most batches, and the most members, of one statement."""

_FIRST, _LAST = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"


def _member(status: str) -> str:
    """Return SQL for whether a batch ``b`` has a member of a status; it looks for the youngest one.

    The range is one that only the index jobs_of_batch has: with equations the planner would read the whole
    table, because it expects the first match soon. It is read backwards, because members end roughly in the
    order of their ids, and the index still holds entries of dead row versions of those that have ended.
    """
    return (
        "(SELECT true FROM jsworker.jobs AS j WHERE j.batch_id IS NOT NULL"  # noqa: S608 -- constants
        f" AND (j.batch_id, j.status, j.id) >= (b.id, '{status}', CAST('{_FIRST}' AS uuid))"
        f" AND (j.batch_id, j.status, j.id) <= (b.id, '{status}', CAST('{_LAST}' AS uuid))"
        " ORDER BY j.batch_id DESC, j.status DESC, j.id DESC LIMIT 1)"
    )


# Running members are looked for first, because there usually is one.
_LIVE_MEMBERS: Final = ",\n    ".join(_member(status) for status in ("processing", "queued", "scheduled"))
HAS_LIVE_MEMBER: Final = f"coalesce(\n    {_LIVE_MEMBERS},\n    false)"
"""SQL: whether a batch ``b`` has a member that has not ended."""

_PARTS: Final = {
    "sealed": sql(predicates.sealed),
    "unfinished": sql(predicates.unfinished),
    "finished": sql(predicates.finished),
    "not_propagated": sql(predicates.not_propagated),
    "workflow_open": sql(predicates.workflow_open),
    "not_cancelled": sql(predicates.not_cancelled),
    "same_generation": sql(predicates.at_generation(literal_column("seen.generation"))),
    "same_revision": sql(predicates.at_revision(literal_column("seen.revision"))),
    "held": condition(predicates.held_by("needs")),
    "held_indexed": condition(predicates.scheduled_indexed)
    + " AND "
    + condition(predicates.held_by("needs")),
    "set_aside": condition(predicates.set_aside("needs")),
    "has_live_member": HAS_LIVE_MEMBER,
    "has_failed_member": _member("failed"),
    "has_cancelled_member": _member("cancelled"),
}


def _statement(template: str, **parts: str) -> TextClause:
    return filled(template, **(parts | _PARTS))


FINISH = _statement("""
WITH seen AS MATERIALIZED (
  SELECT b.id, b.generation FROM jsworker.batches AS b
  WHERE b.id = ANY(CAST(:ids AS uuid[])) AND {sealed} AND {unfinished} AND NOT {has_live_member}
), mine AS MATERIALIZED (
  SELECT b.id, b.generation FROM jsworker.batches AS b JOIN seen ON seen.id = b.id
  WHERE {same_generation} AND {sealed} AND {unfinished}
  ORDER BY b.id FOR NO KEY UPDATE OF b SKIP LOCKED
)
UPDATE jsworker.batches AS b SET finished_at = clock_timestamp(),
  outcome = CASE
    WHEN {has_failed_member} THEN 'failed'
    WHEN {has_cancelled_member} THEN 'cancelled'
    ELSE 'completed' END,
  propagated = NOT EXISTS (SELECT FROM jsworker.batch_needs AS n WHERE n.needs = b.id)
FROM mine WHERE b.id = mine.id
RETURNING b.id, b.workflow, b.name, b.kind, b.outcome, b.generation, b.propagated
""")

# ``ready``: batches that need one of ``batches`` and whose needs have all finished. ``unchanged`` share-locks
# the rows of their workflows until the transaction ends: no batch is opened again meanwhile, and none was
# since ``ready`` was read.
_READY = """ready AS MATERIALIZED (
  SELECT d.id, d.workflow, w.revision, {not_cancelled} AND (d.on_failure = 'run' OR NOT EXISTS (
      SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS need ON need.id = n.needs
      WHERE n.batch = d.id AND need.outcome <> 'completed')) AS runs
  FROM jsworker.batches AS d JOIN jsworker.workflows AS w ON w.id = d.workflow
  WHERE d.id IN (SELECT n.batch FROM jsworker.batch_needs AS n WHERE n.needs = ANY(CAST(:batches AS uuid[])))
    AND NOT EXISTS (
      SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS b ON b.id = n.needs
      WHERE n.batch = d.id AND {unfinished})
)"""
_UNCHANGED = """unchanged AS MATERIALIZED (
  SELECT w.id FROM jsworker.workflows AS w
  JOIN (SELECT DISTINCT ready.workflow, ready.revision FROM ready) AS seen ON seen.workflow = w.id
  WHERE {same_revision} ORDER BY w.id FOR SHARE OF w SKIP LOCKED
)"""
# The rows to write are given as arrays: of a few the planner expects that they are found by key, also without
# statistics of the table.
_NEEDS: Final = """
WITH {ready}, {unchanged}, mine AS MATERIALIZED (
  SELECT page.id, ready.runs FROM ready JOIN unchanged ON unchanged.id = ready.workflow
  CROSS JOIN LATERAL ({page} FOR NO KEY UPDATE OF j SKIP LOCKED) AS page LIMIT :limit
), moved AS (
  UPDATE jsworker.jobs AS j SET
    status = CASE WHEN each.runs THEN 'queued' ELSE 'cancelled' END,
    dispatch = j.dispatch + CASE WHEN each.runs THEN 1 ELSE 0 END,
    needs_publish = each.runs,
    publish_after = CASE WHEN each.runs THEN clock_timestamp() ELSE j.publish_after END,
    queued_at = CASE WHEN each.runs THEN clock_timestamp() ELSE j.queued_at END,
    finished_at = CASE WHEN NOT each.runs THEN clock_timestamp() END,
    failure_reason = CASE WHEN NOT each.runs THEN 'needs' END,
    held_by = NULL, held_at = NULL, due_at = NULL
  FROM unnest(ARRAY(SELECT id FROM mine), ARRAY(SELECT runs FROM mine)) AS each(id, runs)
  WHERE j.id = each.id AND {held}
  RETURNING j.id, j.batch_id, j.status, j.fencing_token
), entries AS (
  INSERT INTO jsworker.job_events (job_id, event, fencing_token, detail)
  SELECT moved.id, 'cancelled', moved.fencing_token, jsonb_build_object('reason', 'needs')
  FROM moved WHERE moved.status = 'cancelled'
)
SELECT id, batch_id, status FROM moved
"""
_FOUND: Final = """
WITH {ready}
SELECT page.id FROM ready CROSS JOIN LATERAL ({page}) AS page LIMIT :limit
"""
# A range that only the index jobs_held_of_batch has, in its order. Other indexes of scheduled jobs match, too, and
# with many small batches the planner would rather read and sort one of these for each batch: hence ``along_index``.
_PAGE: Final = f"""SELECT j.id FROM jsworker.jobs AS j
    WHERE (j.batch_id, j.id) >= (ready.id, CAST('{_FIRST}' AS uuid)) AND (j.batch_id, j.id) <= (ready.id, CAST('{_LAST}' AS uuid))
      AND {{held_indexed}}{{which}} ORDER BY j.batch_id, j.id LIMIT :limit"""  # noqa: S608 -- constants
_BLOCKS: Final = {"ready": _READY, "unchanged": _UNCHANGED, "page": _PAGE}
NEEDS = _statement(_NEEDS, **_BLOCKS, which="")
_NEEDS_SWEEP: Final = Sweep(
    "needs",
    ("needs",),
    NEEDS,
    _statement(_FOUND, **_BLOCKS, which=" AND NOT {set_aside}"),
    _statement(_NEEDS, **_BLOCKS, which=" AND j.id = ANY(CAST(:ids AS uuid[]))"),
    along_index=True,
)

# Not while a member is held although its needs have finished: its row or its workflow's was locked, or its
# row refused. Nor while a batch is being opened again: the members that this holds again are not visible yet.
PROPAGATED = _statement(
    """
WITH dependants AS (
  SELECT DISTINCT n.batch FROM jsworker.batch_needs AS n WHERE n.needs = ANY(CAST(:ids AS uuid[]))
), holding AS MATERIALIZED (
  SELECT d.batch FROM dependants AS d
  WHERE (SELECT true FROM jsworker.jobs AS j
      WHERE (j.batch_id, j.id) >= (d.batch, CAST('{first}' AS uuid))
        AND (j.batch_id, j.id) <= (d.batch, CAST('{last}' AS uuid)) AND {held_indexed}
      ORDER BY j.batch_id, j.id LIMIT 1)
    AND NOT EXISTS (
      SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS b ON b.id = n.needs
      WHERE n.batch = d.batch AND {unfinished})
), ready AS MATERIALIZED (
  SELECT b.id, b.workflow, b.generation, w.revision
  FROM unnest(CAST(:ids AS uuid[]), CAST(:generations AS bigint[])) AS seen(id, generation)
  JOIN jsworker.batches AS b ON b.id = seen.id JOIN jsworker.workflows AS w ON w.id = b.workflow
  WHERE {same_generation} AND {finished} AND NOT EXISTS (
    SELECT FROM jsworker.batch_needs AS of_mine JOIN holding ON holding.batch = of_mine.batch
    WHERE of_mine.needs = b.id)
), {unchanged}
UPDATE jsworker.batches AS b SET propagated = true
FROM ready AS seen JOIN unchanged ON unchanged.id = seen.workflow
WHERE b.id = seen.id AND {same_generation} AND {finished}
RETURNING b.id
""",
    unchanged=_UNCHANGED,
    first=_FIRST,
    last=_LAST,
)

# Finishes workflows as FINISH finishes batches.
FINISH_WORKFLOW = _statement("""
WITH seen AS MATERIALIZED (
  SELECT w.id, w.revision FROM jsworker.workflows AS w
  WHERE w.id = ANY(CAST(:ids AS uuid[])) AND {workflow_open} AND NOT EXISTS (
    SELECT FROM jsworker.batches AS b WHERE b.workflow = w.id AND {unfinished})
), mine AS MATERIALIZED (
  SELECT w.id FROM jsworker.workflows AS w JOIN seen ON seen.id = w.id
  WHERE {same_revision} AND {workflow_open} ORDER BY w.id FOR NO KEY UPDATE OF w SKIP LOCKED
)
UPDATE jsworker.workflows AS w SET finished_at = clock_timestamp(), outcome = CASE
    WHEN EXISTS (SELECT FROM jsworker.batches AS b WHERE b.workflow = w.id AND b.outcome = 'failed') THEN 'failed'
    WHEN EXISTS (SELECT FROM jsworker.batches AS b WHERE b.workflow = w.id AND b.outcome = 'cancelled') THEN 'cancelled'
    ELSE 'completed' END
FROM mine WHERE w.id = mine.id
RETURNING w.id, w.name, w.outcome, (SELECT count(*) FROM jsworker.batches AS b WHERE b.workflow = w.id) AS batches,
  CAST(extract(epoch FROM w.finished_at - w.created_at) AS double precision) AS seconds
""")

# What was left unfinished: at most ``_MOST_LEFT`` rows of each sort.
LEFT = _statement("""
(SELECT 'batch' AS what, b.id, b.generation FROM jsworker.batches AS b
 WHERE b.id > CAST(:after AS uuid) AND {unfinished} AND {sealed} AND NOT {has_live_member} ORDER BY b.id LIMIT :limit)
UNION ALL
(SELECT 'needs', b.id, b.generation FROM jsworker.batches AS b
 WHERE b.id > CAST(:after AS uuid) AND {finished} AND {not_propagated} ORDER BY b.id LIMIT :limit)
UNION ALL
(SELECT 'workflow', w.id, w.revision FROM jsworker.workflows AS w
 WHERE w.id > CAST(:after AS uuid) AND {workflow_open}
   AND NOT EXISTS (SELECT FROM jsworker.batches AS b WHERE b.workflow = w.id AND {unfinished})
 ORDER BY w.id LIMIT :limit)
UNION ALL
(SELECT 'cancelled', w.id, w.revision FROM jsworker.workflows AS w
 WHERE w.id > CAST(:after AS uuid) AND {workflow_open} AND NOT {not_cancelled} ORDER BY w.id LIMIT :limit)
""")
_MOST_LEFT: Final = 2000

BATCHES_OF = _statement("""
SELECT DISTINCT j.batch_id FROM jsworker.jobs AS j WHERE j.id = ANY(CAST(:ids AS uuid[])) AND j.batch_id IS NOT NULL
""")


class FinishedBatch(NamedTuple):
    """A batch whose last member has ended; ``propagated``: no other batch needs it."""

    id: UUID
    workflow: UUID
    name: str
    kind: str
    outcome: str
    generation: int
    propagated: bool


class FinishedWorkflow(NamedTuple):
    """A workflow whose last batch has finished, ``seconds`` after the workflow was enqueued."""

    id: UUID
    name: str
    outcome: str
    batches: int
    seconds: float


@dataclass(slots=True)
class Advanced:
    """The result of ``advance``.

    Attributes:
        batches, workflows: those that the call has finished.
        woken: how many jobs were queued because their needs have finished; they wait to be published.
        cancelled: how many were cancelled because a need failed, or a need or the workflow was cancelled.
        refused: batches and workflows whose row PostgreSQL refused to update.
    """

    batches: list[FinishedBatch] = field(default_factory=list)
    workflows: list[FinishedWorkflow] = field(default_factory=list)
    woken: int = 0
    cancelled: int = 0
    refused: Refused[UUID] = field(default_factory=list)


class Left(NamedTuple):
    """What was left undone.

    Attributes:
        batches: sealed, unfinished ones without a live member.
        needs: finished batches that are not propagated, with their generations.
        workflows: open ones without an unfinished batch.
        cancelled: open workflows that were cancelled.
        more_after: the id behind which there may be more; None: there is no more.
    """

    batches: list[UUID]
    needs: dict[UUID, int]
    workflows: list[UUID]
    cancelled: list[UUID]
    more_after: UUID | None


async def advance(
    database: Database,
    batches: Iterable[UUID],
    *,
    needs: dict[UUID, int] | None = None,
    workflows: Iterable[UUID] = (),
    refused_rows: RefusedRows | None = None,
) -> Advanced:
    """Finish those of ``batches`` whose members have all ended, and do everything that follows from this.

    Args:
        database: the database.
        batches: batches of which a member has ended.
        needs: finished batches that were not propagated, with their generations.
        workflows: workflows whose last batch may have finished.
        refused_rows: sets aside jobs whose row is refused; without it, one refused row refuses all.
    """
    done = Advanced()
    touched, finished, ended = set(batches), dict(needs or {}), set(workflows)
    while touched or finished:
        for batch in await _finish(database, touched, done):
            ended.add(batch.workflow)
            if not batch.propagated:
                finished[batch.id] = batch.generation
        if finished:
            await fault_points.reach("after_finish_before_needs")
        touched, finished = await _propagate(database, finished, done, refused_rows), {}
    rows, refused = await in_halves(
        sorted(ended),
        lambda some: database.run(FINISH_WORKFLOW, {"ids": uuid_array(some)}),
        size=_BATCHES,
    )
    done.workflows += [FinishedWorkflow(*row) for row in rows]
    done.refused += refused
    return done


async def left_undone(database: Database, *, after: UUID | None = None, seconds: float | None = None) -> Left:
    """Return what processes left undone because they died or found rows locked, of ids behind ``after``."""
    rows = await database.run(LEFT, {"limit": _MOST_LEFT, "after": after or _FIRST}, seconds=seconds)
    of = {what: {row.id: row.generation for row in rows if row.what == what} for what in _WHAT}
    more_after = min((max(found) for found in of.values() if len(found) == _MOST_LEFT), default=None)
    return Left(list(of["batch"]), of["needs"], list(of["workflow"]), list(of["cancelled"]), more_after)


_WHAT: Final = ("batch", "needs", "workflow", "cancelled")


async def batches_of(database: Database, job_ids: Collection[UUID]) -> list[UUID]:
    """Return the batches of jobs; those without one are left out."""
    if not job_ids:
        return []
    return [row.batch_id for row in await database.run(BATCHES_OF, {"ids": uuid_array(job_ids)})]


async def _finish(database: Database, ids: Collection[UUID], done: Advanced) -> list[FinishedBatch]:
    rows, refused = await in_halves(
        sorted(ids), lambda some: database.run(FINISH, {"ids": uuid_array(some)}), size=_BATCHES
    )
    finished = [FinishedBatch(*row) for row in rows]
    done.refused += refused
    done.batches += finished
    return finished


async def _propagate(
    database: Database, finished: dict[UUID, int], done: Advanced, refused_rows: RefusedRows | None
) -> set[UUID]:
    """Wake or cancel jobs that need these batches, and return the batches whose members were cancelled."""
    emptied: set[UUID] = set()
    members, left = MostRows(database, _MEMBERS), sorted(finished)
    while left:
        rows = await members.write(partial(_sweep_needs, database, left, refused_rows))
        cancelled = [row.batch_id for row in rows if row.status == "cancelled"]
        emptied.update(cancelled)
        done.cancelled += len(cancelled)
        done.woken += len(rows) - len(cancelled)
        if len(rows) == members.most:
            continue  # there may be more members
        await fault_points.reach("after_needs_before_propagated")
        some = left[: min(members.most, _BATCHES)]
        left = left[len(some) :]
        _, refused = await in_halves(some, partial(_note_propagated, database, finished))
        done.refused += refused
    return emptied


async def _sweep_needs(
    database: Database, batches: Sequence[UUID], refused_rows: RefusedRows | None, limit: int
) -> Sequence[Row]:
    values = {"batches": uuid_array(batches[: min(limit, _BATCHES)]), "limit": limit}
    return (await run_sweep(database, _NEEDS_SWEEP, values, refused_rows)).rows


async def _note_propagated(
    database: Database, generations: dict[UUID, int], some: Sequence[UUID]
) -> Sequence[Row]:
    seen = {"ids": uuid_array(some), "generations": [generations[each] for each in some]}
    return await database.run_along_index(PROPAGATED, seen)
