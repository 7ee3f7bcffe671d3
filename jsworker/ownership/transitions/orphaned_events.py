"""Entries of timelines whose job is gone: the one thing that an inspection may clear away, when it is asked to."""

from sqlalchemy import text

from jsworker.ownership.database import Database

# An entry is written in the statement that writes its job, so an entry that is seen without its job was
# left behind. As a join a large page might be answered by reading every job.
DELETE_ORPHANED_EVENTS = text("""
WITH page AS (
  SELECT id, job_id FROM jsworker.job_events WHERE id > :after ORDER BY id LIMIT :limit
), orphaned AS (
  SELECT id FROM page WHERE (SELECT true FROM jsworker.jobs AS j WHERE j.id = page.job_id) IS NULL
), gone AS (
  DELETE FROM jsworker.job_events AS e WHERE e.id = ANY(ARRAY(SELECT id FROM orphaned)) RETURNING e.id
)
SELECT (SELECT count(*) FROM gone) AS deleted, (SELECT max(id) FROM page) AS last
""")


async def delete_orphaned_events(database: Database, *, after: int, limit: int) -> tuple[int, int | None]:
    """Delete entries of timelines whose job is gone, of one page of entries in the order of their ids.

    Args:
        database: where.
        after: the last id of the page before; 0: this is the first.
        limit: how many entries are looked at.

    Returns:
        How many were deleted, and the last id of this page; None: there was nothing left to look at.
    """
    [row] = await database.run(DELETE_ORPHANED_EVENTS, {"after": after, "limit": limit})
    return int(row.deleted), row.last
