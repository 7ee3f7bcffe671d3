"""Reading jobs: one with its timeline, or many by a filter. Nothing here decides who owns anything.

However many jobs there are, each statement looks at those that run or at a bounded number of others, through
an index: a partial one for jobs that wait, run or have failed, whose predicate is repeated word for word; for
others that of the ids, which are UUIDv7, so that their order is the order of creation.
"""

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import JobNotFound
from jsworker.core.priorities import NORMAL
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.predicates import (
    ANY_AGE,
    RunAge,
    as_old_as_chosen,
    in_lane_indexed,
    of_lane_indexed,
    progressed_at,
    queued_indexed,
)
from jsworker.ownership.statements import KINDS_BY_LEAPS, condition, filled, sql

WINDOW: Final = 10_000
"""Jobs that one statement looks at for the few that are listed."""
PAGE: Final = 500
"""Jobs that one statement looks at for those that a filter means."""
_FETCHED: Final = 5_000

COLUMNS = text("""
SELECT id, kind, status, worker_id, fencing_token, attempts, errors, stalls, max_attempts, max_stalls, stage,
  progress, message, unique_key, run_at, queued_at, claimed_at, last_activity_at, deadline_at, cleared, clear_reason,
  cancel_requested, last_error, failure_reason, created_at, started_at, finished_at,
  progress_at, held_by, held_at, due_at, limit_key, priority, expires_at, waiting_key, behind, debounce_until, batch_id
FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")

NEWEST = text("""
WITH looked_at AS MATERIALIZED (
  SELECT id, status, kind, priority FROM jsworker.jobs
  WHERE CAST(:after AS uuid) IS NULL OR id < CAST(:after AS uuid)
  ORDER BY id DESC LIMIT :window
)
SELECT ARRAY(
    SELECT id FROM looked_at
    WHERE (CAST(:status AS text) IS NULL OR status = :status) AND (CAST(:kind AS text) IS NULL OR kind = :kind)
      AND (CAST(:priority AS smallint) IS NULL OR priority = CAST(:priority AS smallint))
      AND (CAST(:digits AS text) IS NULL OR right(CAST(id AS text), length(:digits)) = :digits)
    ORDER BY id DESC LIMIT :limit) AS ids,
  (SELECT count(*) FROM looked_at) AS looked_at, (SELECT id FROM looked_at ORDER BY id LIMIT 1) AS last
""")

# Each kind's last ones, and of these the last.
_LAST_QUEUED = """
WITH RECURSIVE {kinds}, several AS (
  SELECT kind FROM kinds WHERE kind IS NOT NULL LIMIT 100
)
SELECT page.id FROM several AS k CROSS JOIN LATERAL (
  SELECT j.id, j.queued_at FROM jsworker.jobs AS j
  WHERE {queued}{of_lane} AND j.kind = k.kind AND (CAST(:after AS uuid) IS NULL OR (
    j.queued_at <= CAST(:place AS timestamptz)
    AND (j.queued_at, j.id) < (CAST(:place AS timestamptz), CAST(:after AS uuid))))
  ORDER BY j.queued_at DESC, j.id DESC LIMIT :limit
) AS page
ORDER BY page.queued_at DESC, page.id DESC LIMIT :limit
"""
_IS_OF_PRIORITY = "(CAST(:priority AS smallint) IS NULL OR priority = CAST(:priority AS smallint))"


def _last_queued(which: str, of_lane: str) -> TextClause:
    kinds = KINDS_BY_LEAPS.replace("{which}", f"{which} AND (CAST(:kind AS text) IS NULL OR j.kind = :kind)")
    return filled(_LAST_QUEUED, kinds=kinds, queued=condition(queued_indexed), of_lane=of_lane)


LAST_QUEUED = _last_queued("", f" AND {_IS_OF_PRIORITY}")
# Along the index in which no normal job stands.
LAST_IN_LANE = _last_queued(f" AND {condition(in_lane_indexed)}", f" AND {condition(of_lane_indexed)}")

# Of what a page has read, and no condition: one that few rows fulfil would let a statement read all of them.
_IS_MEANT = "(CAST(:error AS text) IS NULL OR coalesce(position(lower(CAST(:error AS text)) IN lower(last_error)) > 0, false))"
_IS_OF_KIND = "(CAST(:kind AS text) IS NULL OR kind = :kind)"
_IS_SO_OLD = sql(as_old_as_chosen)
_AFTER = "CAST(:after AS uuid)"
_TIME = "CAST(:place AS timestamptz)"

SINCE = {"no_progress_for": sql(progressed_at), "running_for": "claimed_at", "stale_for": "last_activity_at"}
"""What running jobs that are chosen by their age are sorted by: the first of these that is asked for."""

# As a table of its own: along the index of the ids, whose order may be asked for, stand any number of others.
_RUNS = """
WITH runs AS MATERIALIZED (
  SELECT id, fencing_token, kind, {since} AS since, {is_meant} AS meant FROM jsworker.jobs AS j
  WHERE status || '' = 'processing' AND {is_of_kind} AND {is_of_priority} AND {is_so_old}
)
SELECT id, fencing_token, kind, NULL AS place, meant FROM runs
WHERE {after} IS NULL OR {behind} ORDER BY {order} LIMIT :limit
"""
_PAGE = """
SELECT id, fencing_token, kind, {place} AS place, {is_meant} AS meant FROM jsworker.jobs AS j
WHERE {which} AND {is_of_priority} AND ({after} IS NULL OR ({behind}))
ORDER BY {order} LIMIT :limit
"""


def _runs(order: str, behind: str, since: str = "NULL") -> TextClause:
    parts = {
        "is_of_kind": _IS_OF_KIND,
        "is_of_priority": _IS_OF_PRIORITY,
        "is_so_old": _IS_SO_OLD,
        "is_meant": _IS_MEANT,
        "after": _AFTER,
    }
    return filled(_RUNS, since=since, order=order, behind=behind, **parts)


def _page(which: str, order: str, behind: str, place: str = "NULL") -> TextClause:
    parts = {"is_of_priority": _IS_OF_PRIORITY, "is_meant": _IS_MEANT, "place": place, "after": _AFTER}
    return filled(_PAGE, which=which, order=order, behind=behind, **parts)


# The first range is there for the index, which is not searched by a row of values whose first is not unique.
_BEHIND_DUE = f"run_at >= {_TIME} AND (run_at, id) > ({_TIME}, {_AFTER})"
_IS_FAILED = "status || '' IN ('failed', 'cancelled')"
_IS_FAILED_OF_KIND = "'' || status IN ('failed', 'cancelled') AND kind = :kind"

_FAILED = _page(f"{_IS_FAILED} AND status = :status", "id DESC", f"id < {_AFTER}")
_FAILED_OF_KIND = _page(f"{_IS_FAILED_OF_KIND} AND status = :status", "id DESC", f"id < {_AFTER}")

# Those that wait for an event have no place among those that wait for a time: they come behind them.
_HELD = "status || '' = 'scheduled' AND held_by IS NOT NULL"
_HELD_OF_KIND = "'' || status = 'scheduled' AND kind = :kind AND run_at IS NULL"
_BEHIND_HELD = (
    f"held_by >= CAST(:place AS text) AND (held_by, kind, id) > (CAST(:place AS text), :place_kind, {_AFTER})"
)

LISTED = {
    "scheduled": _page("status || '' = 'scheduled' AND run_at IS NOT NULL", "run_at, id", _BEHIND_DUE),
    "held": _page(_HELD, "held_by, kind, id", _BEHIND_HELD),
    "queued": LAST_QUEUED,
    "processing": _runs("id DESC", f"id < {_AFTER}"),
    "failed": _FAILED,
    "cancelled": _FAILED,
    **{age: _runs("since, id", f"(since, id) > ({_TIME}, {_AFTER})", since) for age, since in SINCE.items()},
}
"""By status, or by the age that was asked for."""
LISTED_OF_KIND = LISTED | {
    "scheduled": _page(
        "'' || status = 'scheduled' AND kind = :kind AND run_at IS NOT NULL", "run_at, id", _BEHIND_DUE
    ),
    "held": _page(_HELD_OF_KIND, "run_at, id", f"id > {_AFTER}"),
    "failed": _FAILED_OF_KIND,
    "cancelled": _FAILED_OF_KIND,
}
PLACES = {
    order: text(f"SELECT {place} AS place, kind AS place_kind FROM jsworker.jobs AS j WHERE id = :after")  # noqa: S608 -- constants
    for order, place in {"scheduled": "run_at", "held": "held_by", "queued": "queued_at", **SINCE}.items()
}
"""Where such a listing goes on; others go on by the ids."""

# Of those that a filter means; running ones are read at once.
PAGES = {
    "processing": LISTED["processing"],
    "scheduled": _page(
        f"'' || status = 'scheduled' AND run_at IS NOT NULL AND {_IS_OF_KIND}",
        "kind, run_at, id",
        f"(kind, run_at, id) > (:place_kind, {_TIME}, {_AFTER})",
        place="run_at",
    ),
    "held": _page(_HELD, "held_by, kind, id", _BEHIND_HELD, place="held_by"),
    # One without a time at which it was queued stands last of its kind, where no place leads on from it.
    "queued": _page(
        f"status || '' = 'queued' AND {_IS_OF_KIND}",
        "kind, queued_at, id",
        f"(kind, queued_at, id) > (:place_kind, {_TIME}, {_AFTER})",
        place="queued_at",
    ),
    **{
        each: _page(f"{_IS_FAILED} AND status = '{each}'", "id", f"id > {_AFTER}")
        for each in ("failed", "cancelled")
    },
}
"""By status; the order is that in which a filter acts on several."""
PAGES_OF_KIND = PAGES | {
    "held": _page(_HELD_OF_KIND, "run_at, id", f"id > {_AFTER}"),
    **{
        each: _page(f"{_IS_FAILED_OF_KIND} AND status = '{each}'", "id", f"id > {_AFTER}")
        for each in ("failed", "cancelled")
    },
}

JOB = text("SELECT * FROM jsworker.jobs WHERE id = :id")

TIMELINE = text("""
SELECT at, event, worker_id, fencing_token, error, detail
FROM jsworker.job_events WHERE job_id = :id ORDER BY id LIMIT 1000
""")

SEEN = text("""
SELECT id, status, fencing_token FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")


class SeenJob(NamedTuple):
    """A job as it was when somebody decided to act on it."""

    id: UUID
    status: str
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Page:
    """Jobs of a listing, each as a dict by column name, without payload and result.

    The next page begins behind ``after``; None: there is no other.
    """

    jobs: list[dict[str, Any]]
    after: UUID | None


async def list_jobs(
    database: Database,
    *,
    status: str | None = None,
    kind: str | None = None,
    limit: int = 50,
    after: UUID | None = None,
    seconds: float | None = None,
    age: RunAge = ANY_AGE,
    priority: int | None = None,
) -> Page:
    """Return jobs: the newest first; of those that are scheduled the next one due, of queued ones the last queued.

    Args:
        status, kind: only such jobs. Completed jobs of a kind, or all of a kind, are searched for from the newest
            on, for there is no index of them.
        after: begin behind this job.
        seconds: end a search after so long with what was found; None: never.
        age: only running jobs that are so old, the oldest first.
        priority: only jobs of this one, by its number.

    Raises:
        JobNotFound: the place of ``after`` in a queue is not known any more.
        ValueError: ``limit`` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"limit {limit} must be 1 or more")
    if age:
        status = "processing"
    filters = {"status": status, "kind": kind, "priority": priority}
    values = {**filters, "limit": limit, "after": after, "error": None, **age.values()}
    if status is None or status == "completed":
        ids, after = await _search(database, values, math.inf if seconds is None else seconds)
    else:
        order = next((name for name in SINCE if values[name] is not None), status)
        ids = await (
            _find_scheduled(database, values) if order == "scheduled" else _find(database, order, values)
        )
        after = ids[-1] if len(ids) == limit else None
    return Page(await _fetch(database, ids, status), after)


async def get_job(database: Database, job_id: UUID) -> dict[str, Any] | None:
    """Return a job as a dict by column name, None when there is none."""
    rows = await database.run(JOB, {"id": job_id})
    return rows[0]._asdict() if rows else None


async def ending_in(database: Database, digits: str, *, seconds: float) -> list[UUID]:
    """Return the jobs whose ids end in these digits, among the newest that can be read in so many seconds."""
    ends_at = time.monotonic() + seconds
    everything = {"status": None, "kind": None, "after": None, "limit": WINDOW, "priority": None}
    async for ids, _ in _windows(database, everything, digits):
        if ids or time.monotonic() >= ends_at:
            return ids
    return []


async def timeline(database: Database, job_id: UUID) -> list[dict[str, Any]]:
    """Return what happened to a job, oldest first, each as a dict by column name."""
    rows = await database.run(TIMELINE, {"id": job_id})
    return [row._asdict() for row in rows]


async def matching(
    database: Database,
    *,
    statuses: Sequence[str],
    kind: str | None = None,
    age: RunAge = ANY_AGE,
    acting: bool = False,
    priority: int | None = None,
    error: str | None = None,
) -> AsyncGenerator[list[tuple[UUID, int]], None]:
    """Yield id and fencing token of the jobs that a filter means, page by page, each job once.

    Args:
        statuses: any of them but completed.
        age: of running jobs only those that are so old; others have none.
        acting: whether each page is acted on before the next is read, so that its jobs leave these statuses or run
            on; then jobs that went from one of them to another meanwhile are looked for a second time.
        priority: only jobs of this one, by its number.
        error: only jobs whose last error holds this text, in capitals or not.
    """
    filters = {"kind": kind, "priority": priority, "error": error, **age.values()}
    ran: set[UUID] = set()
    for _ in range(2 if acting and len(statuses) > 1 else 1):
        meant = {*statuses, "held"} if "scheduled" in statuses else statuses
        for status in (each for each in PAGES if each in meant):
            async for rows in _walk(database, status, filters):
                page = [(row.id, row.fencing_token) for row in rows if row.meant and row.id not in ran]
                if status == "processing":
                    ran.update(job_id for job_id, _ in page)
                if page:
                    yield page


async def look_up(database: Database, ids: list[UUID]) -> dict[UUID, SeenJob]:
    """Return status and token of jobs by id; an id without a job is missing."""
    rows = await database.run(SEEN, {"ids": ids})
    return {row.id: SeenJob(row.id, row.status, row.fencing_token) for row in rows}


async def _search(
    database: Database, values: dict[str, Any], seconds: float
) -> tuple[list[UUID], UUID | None]:
    """Search all jobs from the newest on; return also where to go on, None when all were looked at."""
    ends_at = time.monotonic() + seconds
    limit, ids = values["limit"], []
    async for found, behind in _windows(database, values):
        ids += found
        if len(ids) >= limit:
            return ids[:limit], ids[limit - 1]
        if time.monotonic() >= ends_at:
            return ids, behind
    return ids, None


async def _windows(
    database: Database, values: dict[str, Any], digits: str | None = None
) -> AsyncIterator[tuple[list[UUID], UUID | None]]:
    """Look at all jobs from the newest on; yield those that are meant, and where to go on."""
    window = max(WINDOW, values["limit"])
    behind = values["after"]
    while True:
        place = {"digits": digits, "after": behind, "window": window}
        [row] = await database.run_along_index(NEWEST, values | place)
        behind = row.last if row.looked_at == window else None
        yield row.ids, behind
        if behind is None:
            return


async def _find_scheduled(database: Database, values: dict[str, Any]) -> list[UUID]:
    """Find those that wait for a time, and behind them those that wait for an event."""
    ids: list[UUID] = []
    try:
        ids = await _find(database, "scheduled", values)
    except JobNotFound:
        return await _find(database, "held", values)
    if len(ids) < values["limit"]:
        ids += await _find(database, "held", values | {"after": None, "limit": values["limit"] - len(ids)})
    return ids


async def _find(database: Database, order: str, values: dict[str, Any]) -> list[UUID]:
    place: Any = dict.fromkeys(("place", "place_kind"))
    if values["after"] is not None and order in PLACES:
        rows = await database.run(PLACES[order], {"after": values["after"]})
        if not rows or rows[0].place is None:
            raise JobNotFound(
                f"no place in the listing of {values['status']} jobs is known of job {values['after']}"
            )
        place = rows[0]._asdict()
    statement = (LISTED if values["kind"] is None else LISTED_OF_KIND)[order]
    if order == "queued" and values["priority"] not in (None, NORMAL):
        statement = LAST_IN_LANE
    return [row.id for row in await database.run_along_index(statement, values | place)]


async def _fetch(database: Database, ids: Sequence[UUID], status: str | None) -> list[dict[str, Any]]:
    """Return jobs in the order of their ids given; what has another status by now is left out."""
    rows: dict[UUID, dict[str, Any]] = {}
    for start in range(0, len(ids) or 1, _FETCHED):  # for none too: who may not read jobs gets an error
        for row in await database.run(COLUMNS, {"ids": list(ids[start : start + _FETCHED])}):
            if status in (None, row.status):
                rows[row.id] = row._asdict()
    return [rows[job_id] for job_id in ids if job_id in rows]


async def _walk(database: Database, status: str, filters: dict[str, Any]) -> AsyncIterator[Sequence[Row]]:
    page = (PAGES if filters["kind"] is None else PAGES_OF_KIND)[status]
    length = None if status == "processing" else PAGE
    values = {"limit": length, **filters, **dict.fromkeys(("after", "place", "place_kind"))}
    while True:
        rows = await database.run_along_index(page, values)
        yield rows
        if len(rows) != length:
            return
        values |= {"after": rows[-1].id, "place": rows[-1].place, "place_kind": rows[-1].kind}
