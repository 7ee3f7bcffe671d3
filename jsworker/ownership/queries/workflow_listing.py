"""Reading workflows: a list, one with its nodes and their progress, and pages of the results of a node."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text

from jsworker.core.contents import Contents
from jsworker.core.errors import DatabaseTimeout, WorkflowNotFound
from jsworker.core.job import MemberResult
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.queries.results import SIZED, SMALL, SMALL_BYTES, JobEnd, read_whole_end
from jsworker.ownership.statements import filled

_PAGE: Final = 50  # each with a result of up to SMALL_BYTES
_SECONDS: Final = 30.0  # a node may have a hundred thousand members

_COLUMNS: Final = """w.id, w.name, CASE
    WHEN w.outcome IS NOT NULL THEN w.outcome WHEN w.cancelled_at IS NOT NULL THEN 'cancelling' ELSE 'running' END AS status,
  w.created_at, w.cancelled_at, w.finished_at"""

LIST = text(f"""
SELECT {_COLUMNS},
  (SELECT count(*) FROM jsworker.batches AS b WHERE b.workflow = w.id) AS nodes,
  (SELECT count(*) FROM jsworker.batches AS b WHERE b.workflow = w.id AND b.finished_at IS NOT NULL) AS nodes_finished
FROM jsworker.workflows AS w
WHERE (CAST(:after AS uuid) IS NULL OR w.id < CAST(:after AS uuid))
ORDER BY w.id DESC LIMIT :limit
""")  # noqa: S608 -- constants of this file

ONE = text(f"SELECT {_COLUMNS} FROM jsworker.workflows AS w WHERE w.id = CAST(:id AS uuid)")  # noqa: S608 -- as above
NODES = text("""
SELECT b.id, b.name, b.kind, b.on_failure, b.created_at, b.finished_at, b.outcome,
  ARRAY(SELECT need.name FROM jsworker.batch_needs AS n JOIN jsworker.batches AS need ON need.id = n.needs
        WHERE n.batch = b.id ORDER BY need.place) AS needs,
  (SELECT coalesce(jsonb_object_agg(by_status.status, by_status.number), '{}') FROM (
     SELECT CASE WHEN j.held_by = 'needs' AND j.status = 'scheduled' THEN 'held' ELSE j.status END AS status,
       count(*) AS number FROM jsworker.jobs AS j WHERE j.batch_id = b.id GROUP BY 1) AS by_status) AS jobs
FROM jsworker.batches AS b WHERE b.workflow = CAST(:id AS uuid) ORDER BY b.place
""")
FAILED = text("""
SELECT j.id, b.name AS node, j.last_error FROM jsworker.batches AS b JOIN jsworker.jobs AS j ON j.batch_id = b.id
WHERE b.workflow = CAST(:id AS uuid) AND j.status = 'failed' ORDER BY b.place, j.id LIMIT 10
""")

PLACE_OF = text("""
SELECT b.workflow, w.name, b.name AS node FROM jsworker.batches AS b JOIN jsworker.workflows AS w ON w.id = b.workflow
WHERE b.id = CAST(:batch AS uuid)
""")
NEEDS_OF = text("""
SELECT need.name, need.id FROM jsworker.jobs AS j
JOIN jsworker.batch_needs AS n ON n.batch = j.batch_id JOIN jsworker.batches AS need ON need.id = n.needs
WHERE j.id = CAST(:job_id AS uuid) ORDER BY need.place
""")
# The first failed job of the nodes because of which a job was cancelled, also through cancelled nodes.
FAILED_BEFORE = text("""
WITH RECURSIVE before AS (
  SELECT j.batch_id AS id, 'cancelled' AS outcome FROM jsworker.jobs AS j
  WHERE j.id = CAST(:job_id AS uuid) AND j.failure_reason = 'needs'
  UNION
  SELECT need.id, need.outcome FROM before
  JOIN jsworker.batch_needs AS n ON n.batch = before.id JOIN jsworker.batches AS need ON need.id = n.needs
  WHERE before.outcome = 'cancelled' AND EXISTS (
    SELECT FROM jsworker.jobs AS c
    WHERE c.batch_id = before.id AND c.status = 'cancelled' AND c.failure_reason = 'needs')
)
SELECT j.id, b.name AS node, j.last_error FROM before JOIN jsworker.batches AS b ON b.id = before.id
JOIN jsworker.jobs AS j ON j.batch_id = b.id AND j.status = 'failed' ORDER BY b.place, j.id LIMIT 1
""")
# In the order of the index: cancelled, completed, failed.
RESULTS = filled(
    """
{small} FROM (
  SELECT j.id, {sized} FROM jsworker.jobs AS j
  WHERE j.batch_id = CAST(:batch AS uuid) AND j.status IN ('cancelled', 'completed', 'failed')
    AND (j.status, j.id) > (CAST(:status AS text), CAST(:after AS uuid))
  ORDER BY j.batch_id, j.status, j.id LIMIT :limit
) AS ended
""",
    small=SMALL,
    sized=SIZED,
)
OUTCOME = text("SELECT b.outcome FROM jsworker.batches AS b WHERE b.id = CAST(:batch AS uuid)")
# Opening a batch again increments its generation.
END = text("""
SELECT b.generation FROM jsworker.batches AS b WHERE b.id = CAST(:batch AS uuid) AND b.finished_at IS NOT NULL
""")


async def list_workflows(database: Database, *, limit: int, after: UUID | None) -> list[dict[str, Any]]:
    """Return workflows by column name, the newest first."""
    rows = await database.run_along_index(LIST, {"limit": limit, "after": after})
    return [row._asdict() for row in rows]


async def get_workflow(database: Database, workflow: UUID) -> dict[str, Any]:
    """Return a workflow by column name, with ``nodes`` in the order in which they were added, and ``errors``.

    ``errors`` are up to ten failed jobs, each with its node and last error. Each node has the names of its ``needs`` and the number of its ``jobs`` by status, where ``held`` are those
    that wait for its needs. Raises WorkflowNotFound: no workflow has this id.
    """
    given = {"id": workflow}
    rows = await database.run(ONE, given)
    if not rows:
        raise WorkflowNotFound(f"no workflow has id {workflow}")
    nodes = [row._asdict() for row in await database.run(NODES, given, seconds=_SECONDS)]
    errors = [row._asdict() for row in await database.run(FAILED, given, seconds=_SECONDS)]
    return {**rows[0]._asdict(), "nodes": nodes, "errors": errors}


async def place_of(database: Database, batch: UUID) -> dict[str, Any] | None:
    """Return the workflow of a batch: its id, its name and the name of the batch's node."""
    rows = await database.run(PLACE_OF, {"batch": batch})
    return rows[0]._asdict() if rows else None


async def needs_of(database: Database, job_id: UUID) -> dict[str, UUID]:
    """Return what the batch of a job needs: batches by the names of their nodes."""
    return {row.name: row.id for row in await database.run(NEEDS_OF, {"job_id": job_id})}


async def failed_before(database: Database, job_id: UUID) -> Row | None:
    """Return ``id``, ``node`` and ``last_error`` of a failed job because of which a job was cancelled."""
    rows = await database.run(FAILED_BEFORE, {"job_id": job_id})
    return rows[0] if rows else None


async def results(
    database: Database, contents: Contents, batch: UUID, after: MemberResult | None, *, tries: int = 0
) -> list[MemberResult]:
    """Return a page of results of a batch's ended members, behind ``after``; none: it was the last member.

    A large result is read alone; after each of ``tries``, it may take longer.

    Raises KeyMissing or ContentRefused for a result that cannot be decoded.
    """
    place = (
        {"status": "", "after": UUID(int=0)}
        if after is None
        else {"status": after.status, "after": after.job_id}
    )
    found: list[MemberResult] = []
    for row in await _results(database, {"batch": batch, **place}):
        end = JobEnd(*row)
        if end.is_cut:
            end = await read_whole_end(database, end, tries=tries)
        if end.status is not None:  # else it was pruned meanwhile
            result = contents.decode_value(end.result, "result", end.kind, end.id)
            found.append(MemberResult(end.id, end.status, result, end.error))
    return found


async def _results(database: Database, place: dict[str, Any]) -> Sequence[Row]:
    """Read a page of results; a smaller one, in the same time, if it does not come in time."""
    limit, seconds = _PAGE, database.seconds_for(_PAGE * SMALL_BYTES)
    while True:
        try:
            return await database.run_along_index(RESULTS, place | {"limit": limit}, seconds=seconds)
        except DatabaseTimeout:
            if limit == 1:
                raise
        limit = max(limit // 5, 1)


async def outcome_of(database: Database, batch: UUID) -> str | None:
    """Return the outcome of a batch, None: it has not finished; raise LookupError if the batch is gone."""
    rows = await database.run(OUTCOME, {"batch": batch})
    if not rows:
        raise LookupError
    found: str | None = rows[0].outcome
    return found


async def end_of(database: Database, batch: UUID) -> int | None:
    """Return a number that tells this end of a batch from others; None: the batch is open, or gone."""
    rows = await database.run(END, {"batch": batch})
    return rows[0].generation if rows else None
