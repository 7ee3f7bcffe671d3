"""Reading jobs: one with its timeline, or many by a filter. Nothing here decides who owns anything.

However many jobs there are, each statement reads only running jobs or a bounded number of others, through an
index. Jobs that wait, run or have failed, and ended jobs of one kind, are read along partial indexes, whose
predicates are repeated word for word; others along the index of the ids, which are UUIDv7, so that their
order is the order of creation.
"""

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import JobNotFound
from jsworker.core.priorities import NORMAL
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import (
    ANY_AGE,
    RunAge,
    as_old_as_chosen,
    in_lane_indexed,
    of_lane_indexed,
    progressed_at,
    queued_indexed,
)
from jsworker.ownership.queries.job_filter import ANY_JOB, IS_MEANT, JobFilter, Selection
from jsworker.ownership.schema import FAILURE, IS_FAILURE, jobs
from jsworker.ownership.statements import KINDS_BY_LEAPS, condition, filled, sql

WINDOW: Final = 10_000
"""The most jobs that a statement of a search reads, unless more are to be listed; with a kind, it also reads
up to so many of each status that has not ended. The first one reads as many as are to be listed."""
PAGE: Final = 500
"""The jobs that one statement reads to find those that a filter selects, unless more are to be listed; running
jobs are all read by one statement."""
_FETCHED: Final = 5_000
_CLOCKS_DIFFER: Final = 600.0
"""Seconds, at most, by which a producer's clock, whose time is in its ids, may differ from the database's."""
_LAST_MILLISECOND: Final = 2**48 - 1

COLUMNS = text("""
SELECT id, kind, status, worker_id, fencing_token, attempts, errors, stalls, max_attempts, max_stalls, stage,
  progress, message, unique_key, run_at, queued_at, claimed_at, last_activity_at, deadline_at, cleared, clear_reason,
  cancel_requested, last_error, failure_reason, created_at, started_at, finished_at,
  progress_at, held_by, held_at, due_at, limit_key, priority, expires_at, waiting_key, behind, debounce_until, batch_id
FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")

_NEWEST = """
WITH {few}looked_at AS MATERIALIZED (
  SELECT j.id, j.status, j.kind, {is_meant} AS meant FROM ({jobs}) AS j
)
SELECT ARRAY(
    SELECT id FROM looked_at
    WHERE meant AND (CAST(:status AS text) IS NULL OR status = :status) AND (CAST(:kind AS text) IS NULL OR kind = :kind)
      AND (CAST(:digits AS text) IS NULL OR right(CAST(id AS text), length(:digits)) = :digits)
    ORDER BY id DESC LIMIT :limit) AS ids,
  (SELECT count(*) FROM looked_at) AS looked_at, (SELECT id FROM looked_at ORDER BY id LIMIT 1) AS last, {is_whole} AS is_whole
"""
_BEFORE = "(CAST(:after AS uuid) IS NULL OR j.id < CAST(:after AS uuid))"
NEWEST = filled(
    _NEWEST,
    few="",
    jobs=f"SELECT * FROM jsworker.jobs AS j WHERE {_BEFORE} ORDER BY j.id DESC LIMIT :window",  # noqa: S608 -- constants
    is_meant=IS_MEANT,
    is_whole="true",
)

# Ended jobs are read along an index. No index has the other jobs in this order; they are read if they are not
# too many. The kind is compared as a range: with an equation the planner takes the index of the ids to be as
# good, although any number of other jobs may be in it.
_OF_KIND = """waiting AS MATERIALIZED (
  (SELECT j.id FROM jsworker.jobs AS j WHERE {queued} AND j.kind = :kind ORDER BY j.queued_at, j.id LIMIT {most})
  UNION ALL
  (SELECT j.id FROM jsworker.jobs AS j WHERE '' || j.status = 'scheduled' AND j.kind = :kind
   ORDER BY j.run_at, j.id LIMIT {most})
  UNION ALL
  (SELECT j.id FROM jsworker.jobs AS j WHERE j.status || '' = 'processing' AND j.kind = :kind
   ORDER BY j.worker_id LIMIT {most})
), ended AS MATERIALIZED (
  SELECT j.id FROM jsworker.jobs AS j WHERE j.finished_at IS NOT NULL AND {before} AND j.kind >= :kind
    AND (j.kind, j.id) <= (:kind, coalesce(CAST(:after AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
  ORDER BY j.kind DESC, j.id DESC LIMIT :window
), few AS MATERIALIZED (
  SELECT j.id FROM (SELECT id FROM ended UNION ALL SELECT id FROM waiting) AS j WHERE {before}
  ORDER BY j.id DESC LIMIT :window
), """
NEWEST_OF_KIND = filled(
    _NEWEST,
    few=_OF_KIND,
    queued=condition(queued_indexed),
    most=str(WINDOW),
    before=_BEFORE,
    jobs="SELECT j.* FROM few JOIN jsworker.jobs AS j ON j.id = few.id",
    is_meant=IS_MEANT,
    is_whole=f"(SELECT count(*) < {WINDOW} FROM waiting)",  # noqa: S608 -- a constant
)
"""``is_whole``: all jobs of the kind were taken into account; if false, too many of them have not ended."""

MOST_KINDS: Final = 100
"""The most kinds, the first by name, whose queued jobs are listed; others must be asked for by kind."""

# The last queued jobs of each kind, and of all these the last.
_LAST_QUEUED = """
WITH RECURSIVE {kinds}, several AS (
  SELECT kind FROM kinds WHERE kind IS NOT NULL LIMIT {most}
)
SELECT page.id, page.queued_at AS place, k.kind FROM several AS k CROSS JOIN LATERAL (
  SELECT j.id, j.queued_at FROM jsworker.jobs AS j
  WHERE {queued}{of_lane} AND j.kind = k.kind AND (CAST(:after AS uuid) IS NULL OR (
    j.queued_at <= CAST(:place AS timestamptz)
    AND (j.queued_at, j.id) < (CAST(:place AS timestamptz), CAST(:after AS uuid))))
  ORDER BY j.queued_at DESC, j.id DESC LIMIT :limit
) AS page
ORDER BY page.queued_at DESC, page.id DESC LIMIT :limit
"""


def _last_queued(which: str = "", of_lane: str = "") -> TextClause:
    kinds = KINDS_BY_LEAPS.replace("{which}", f"{which} AND (CAST(:kind AS text) IS NULL OR j.kind = :kind)")
    queued = condition(queued_indexed)
    return filled(_LAST_QUEUED, kinds=kinds, queued=queued, of_lane=of_lane, most=str(MOST_KINDS))


LAST_QUEUED = _last_queued()
# Along the index without jobs of normal priority.
_OF_LANE = f" AND {condition(in_lane_indexed)}"
LAST_IN_LANE = _last_queued(_OF_LANE, f" AND {condition(of_lane_indexed)}")


def _other_kinds(which: str) -> TextClause:
    return filled(
        """
WITH RECURSIVE {kinds}
SELECT kind FROM kinds WHERE kind IS NOT NULL OFFSET {most} LIMIT 1
""",
        kinds=KINDS_BY_LEAPS.replace("{which}", which),
        queued=condition(queued_indexed),
        most=str(MOST_KINDS),
    )


OTHER_KINDS, OTHER_KINDS_IN_LANE = _other_kinds(""), _other_kinds(_OF_LANE)
"""The first kind whose queued jobs are not listed."""

_IS_OF_KIND = "(CAST(:kind AS text) IS NULL OR kind = :kind)"
_IS_SO_OLD = sql(as_old_as_chosen)
_AFTER = "CAST(:after AS uuid)"
_TIME = "CAST(:place AS timestamptz)"

SINCE = {"no_progress_for": sql(progressed_at), "running_for": "claimed_at", "stale_for": "last_activity_at"}
"""What running jobs chosen by their age are sorted by: the first of these ages that is asked for."""

# Materialized: if the order of ids is asked for, the planner could read the index of the ids, which holds any
# number of other jobs.
_RUNS = """
WITH runs AS MATERIALIZED (
  SELECT id, fencing_token, kind, {since} AS since, {is_meant} AS meant FROM jsworker.jobs AS j
  WHERE status || '' = 'processing' AND {is_of_kind} AND {is_so_old}
)
SELECT id, fencing_token, kind, since AS place, meant FROM runs
WHERE {after} IS NULL OR {behind} ORDER BY {order} LIMIT :limit
"""
_PAGE = """
SELECT id, fencing_token, kind, {place} AS place, {is_meant} AS meant FROM jsworker.jobs AS j
WHERE {which} AND ({after} IS NULL OR ({behind}))
ORDER BY {order} LIMIT :limit
"""


def _runs(order: str, behind: str, since: str = "NULL") -> TextClause:
    parts = {"is_of_kind": _IS_OF_KIND, "is_so_old": _IS_SO_OLD, "is_meant": IS_MEANT, "after": _AFTER}
    return filled(_RUNS, since=since, order=order, behind=behind, **parts)


def _page(which: str, order: str, behind: str, place: str = "NULL") -> TextClause:
    parts = {"is_meant": IS_MEANT, "place": place, "after": _AFTER}
    return filled(_PAGE, which=which, order=order, behind=behind, **parts)


# The range of the first column is there for the index; the pairs then leave out jobs of the same instant.
_BEHIND_DUE = f"run_at >= {_TIME} AND (run_at, id) > ({_TIME}, {_AFTER})"
_OF_FAILURE = f"{IS_FAILURE} AND kind = :kind AND {FAILURE} = CAST(:failure AS uuid)"
_IS_FAILED = "status || '' IN ('failed', 'cancelled')"
_IS_FAILED_OF_KIND = "'' || status IN ('failed', 'cancelled') AND kind = :kind"

_FAILED = _page(f"{_IS_FAILED} AND status = :status", "id DESC", f"id < {_AFTER}")
_FAILED_OF_KIND = _page(f"{_IS_FAILED_OF_KIND} AND status = :status", "id DESC", f"id < {_AFTER}")

# Jobs that wait for an event have no place among those that wait for a time: they are listed behind these.
_HELD = "status || '' = 'scheduled' AND held_by IS NOT NULL"
_HELD_OF_KIND = "'' || status = 'scheduled' AND kind = :kind AND run_at IS NULL"
_BEHIND_HELD = (
    f"held_by >= CAST(:place AS text) AND (held_by, kind, id) > (CAST(:place AS text), :place_kind, {_AFTER})"
)

LISTED = {
    "scheduled": _page(
        "status || '' = 'scheduled' AND run_at IS NOT NULL", "run_at, id", _BEHIND_DUE, place="run_at"
    ),
    "held": _page(_HELD, "held_by, kind, id", _BEHIND_HELD, place="held_by"),
    "queued": LAST_QUEUED,
    "processing": _runs("id DESC", f"id < {_AFTER}"),
    "failed": _FAILED,
    "cancelled": _FAILED,
    "failure": _page(
        _OF_FAILURE,
        "finished_at DESC, id DESC",
        f"finished_at <= {_TIME} AND (finished_at, id) < ({_TIME}, {_AFTER})",
        place="finished_at",
    ),
    **{age: _runs("since, id", f"(since, id) > ({_TIME}, {_AFTER})", since) for age, since in SINCE.items()},
}
"""The statements of listings by status, by the age that was asked for, or of a group of failures."""
LISTED_OF_KIND = LISTED | {
    "scheduled": _page(
        "'' || status = 'scheduled' AND kind = :kind AND run_at IS NOT NULL",
        "run_at, id",
        _BEHIND_DUE,
        place="run_at",
    ),
    "held": _page(_HELD_OF_KIND, "run_at, id", f"id > {_AFTER}"),
    "failed": _FAILED_OF_KIND,
    "cancelled": _FAILED_OF_KIND,
}
PLACES = {
    order: text(f"SELECT {place} AS place, kind AS place_kind FROM jsworker.jobs AS j WHERE id = :after")  # noqa: S608 -- constants
    for order, place in {
        "scheduled": "run_at",
        "held": "held_by",
        "queued": "queued_at",
        "failure": "finished_at",
        **SINCE,
    }.items()
}
"""The statements that find where a listing of this order goes on; other listings go on by the ids."""

# Pages of the jobs that a filter selects; all running jobs are one page.
PAGES = {
    "processing": LISTED["processing"],
    "scheduled": _page(
        f"'' || status = 'scheduled' AND run_at IS NOT NULL AND {_IS_OF_KIND}",
        "kind, run_at, id",
        f"(kind, run_at, id) > (:place_kind, {_TIME}, {_AFTER})",
        place="run_at",
    ),
    "held": LISTED["held"],
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
"""By status, in the order in which jobs of several statuses are read."""
PAGES_OF_KIND = PAGES | {
    "held": _page(_HELD_OF_KIND, "run_at, id", f"id > {_AFTER}"),
    **{
        each: _page(f"{_IS_FAILED_OF_KIND} AND status = '{each}'", "id", f"id > {_AFTER}")
        for each in ("failed", "cancelled")
    },
}

PAGE_OF_FAILURE = _page(
    _OF_FAILURE,
    "finished_at, id",
    f"finished_at >= {_TIME} AND (finished_at, id) > ({_TIME}, {_AFTER})",
    place="finished_at",
)
"""The page for a filter that selects a group of failures."""

MEANT = text(f"SELECT j.id FROM jsworker.jobs AS j WHERE j.id = ANY(CAST(:ids AS uuid[])) AND {IS_MEANT}")  # noqa: S608 -- constants

JOB = text("SELECT * FROM jsworker.jobs WHERE id = :id")
CONTENTS: Final = ("payload", "result", "checkpoint")
SHOWN_BYTES: Final = 2**20
"""The longest content of a job that a page reads, as JSON text."""
_NULL_BYTES: Final = 16
"""No JSON null is stored in more; longer contents need not be read to know that they are none."""
_OTHERS = ", ".join(column.name for column in jobs.columns if column.name not in CONTENTS)
# The stored size is found without reading the content; it may be compressed, so the text is measured, too.
_SHOWN = ", ".join(
    f"""CASE WHEN CAST(:contents AS boolean) THEN CASE WHEN pg_column_size({name}) <= {SHOWN_BYTES} THEN
  CASE WHEN octet_length(CAST({name} AS text)) <= {SHOWN_BYTES} THEN {name} END END END AS {name},
  CASE WHEN pg_column_size({name}) <= {_NULL_BYTES} AND {name} = CAST('null' AS jsonb) THEN NULL
    WHEN CAST(:contents AS boolean) AND pg_column_size({name}) <= {SHOWN_BYTES}
    THEN octet_length(CAST({name} AS text)) ELSE pg_column_size({name}) END AS {name}_bytes"""
    for name in CONTENTS
)
JOB_SHOWN = text(f"SELECT {_OTHERS}, {_SHOWN} FROM jsworker.jobs WHERE id = :id")  # noqa: S608 -- constants

MOST_EVENTS: Final = 1_000
TIMELINE = text(f"""
SELECT at, event, worker_id, fencing_token, error, detail
FROM (SELECT * FROM jsworker.job_events WHERE job_id = :id ORDER BY id DESC LIMIT {MOST_EVENTS}) AS last
ORDER BY id
""")  # noqa: S608 -- a constant

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

    The next page begins behind ``after``; None: there is no other. ``leaves_out_kinds``: queued jobs of kinds
    behind the first ``MOST_KINDS`` were not looked at.
    """

    jobs: list[dict[str, Any]]
    after: UUID | None
    leaves_out_kinds: bool = False


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
    where: JobFilter = ANY_JOB,
) -> Page:
    """Return jobs, the newest first; of scheduled ones the next due first, of queued ones the last queued.

    Args:
        status, kind: only such jobs. Completed jobs are searched for from the newest on, because there is no
            index of them alone.
        after: begin behind this job.
        seconds: after so long, end a search with what was found; None: never.
        age: only running jobs that are so old, the oldest first.
        priority: only jobs of this priority, given by its number.
        where: only jobs that match, which are searched for among all others; in a group of failures, the last
            that ended comes first.

    Raises:
        JobNotFound: the place of ``after`` in the listing is not known any more.
        ValueError: ``limit`` is less than 1, or a group of failures is meant without its kind.
    """
    if limit < 1:
        raise ValueError(f"limit {limit} must be 1 or more")
    if age:
        status = "processing"
    if where.failure is not None:
        status = "failed"
        Selection((status,), kind, where=where)  # refuses a group without its kind
    filters = {"status": status, "kind": kind, "priority": priority, **where.values()}
    values = {**filters, "limit": limit, "after": after, **age.values()}
    ends_at = time.monotonic() + (math.inf if seconds is None else seconds)
    if status is None or status == "completed":
        ids, after = await _search(database, values, ends_at)
    elif status == "scheduled":
        ids, after = await _find_scheduled(database, values, ends_at)
    else:
        order = next((name for name in SINCE if values[name] is not None), status)
        order = order if where.failure is None else "failure"
        ids, after = await _find(database, order, values, ends_at)
    leaves_out = False
    if status == "queued" and kind is None:
        statement = OTHER_KINDS if priority in (None, NORMAL) else OTHER_KINDS_IN_LANE
        leaves_out = bool(await database.run_along_index(statement, {}))
    return Page(await _fetch(database, ids, status), after, leaves_out)


async def get_job(database: Database, job_id: UUID) -> dict[str, Any]:
    """Return a job as a dict by column name; JobNotFound: there is none."""
    return await _get(database, JOB, {"id": job_id})


async def get_job_shown(database: Database, job_id: UUID, *, contents: bool) -> dict[str, Any]:
    """Return what ``get_job`` does, with payload, result and checkpoint only if asked for and not too long.

    ``payload_bytes``, ``result_bytes`` and ``checkpoint_bytes`` are their sizes: of their text if it was read
    or measured, else as they are stored; None: there is no such content, or it is JSON null.
    """
    return await _get(database, JOB_SHOWN, {"id": job_id, "contents": contents})


async def _get(database: Database, statement: TextClause, values: dict[str, Any]) -> dict[str, Any]:
    rows = await database.run(statement, values)
    if not rows:
        raise JobNotFound(f"no job has id {values['id']}")
    found: dict[str, Any] = rows[0]._asdict()
    return found


async def ending_in(database: Database, digits: str, *, seconds: float) -> list[UUID]:
    """Return the newest jobs whose ids end in these digits, those of the same ``WINDOW`` jobs.

    The search ends after about ``seconds``.
    """
    ends_at = time.monotonic() + seconds
    everything = {"status": None, "kind": None, "after": None, "limit": WINDOW, "priority": None}
    everything |= ANY_JOB.values()
    async for ids, _ in _windows(database, everything, digits):
        if ids or time.monotonic() >= ends_at:
            return ids
    return []


async def timeline(database: Database, job_id: UUID) -> list[dict[str, Any]]:
    """Return the last ``MOST_EVENTS`` entries of a job's timeline, oldest first, as dicts by column name."""
    rows = await database.run(TIMELINE, {"id": job_id})
    return [row._asdict() for row in rows]


async def matching(
    database: Database, wanted: Selection, *, acting: bool = False
) -> AsyncGenerator[list[tuple[UUID, int]], None]:
    """Yield id and fencing token of the jobs that match, page by page; jobs that were running come once.

    Another job comes again if its status changes before the jobs of the new one are read, or, with
    ``acting``, if the action on it was refused. A page is empty if none of the jobs read for it matches; callers with limited time can stop there.

    Args:
        database: where the jobs are.
        wanted: which jobs; completed ones are not found.
        acting: whether the caller acts on each page before it reads the next, so that the page's jobs leave
            these statuses or run on; then a second pass looks for jobs that changed from one of these
            statuses to another.
    """
    statuses = wanted.statuses
    filters = {
        "kind": wanted.kind,
        "priority": wanted.priority,
        **wanted.where.values(),
        **wanted.age.values(),
    }
    ran: set[UUID] = set()
    for _ in range(2 if acting and len(statuses) > 1 else 1):
        meant = {*statuses, "held"} if "scheduled" in statuses else statuses
        for status in (each for each in PAGES if each in meant):
            async for rows in _walk(database, status, filters):
                page = [(row.id, row.fencing_token) for row in rows if row.meant and row.id not in ran]
                if status == "processing":
                    ran.update(job_id for job_id, _ in page)
                yield page


async def look_up(database: Database, ids: list[UUID]) -> dict[UUID, SeenJob]:
    """Return status and token of jobs by id; an id without a job is missing."""
    rows = await database.run(SEEN, {"ids": ids})
    return {row.id: SeenJob(row.id, row.status, row.fencing_token) for row in rows}


async def _search(
    database: Database, values: dict[str, Any], ends_at: float
) -> tuple[list[UUID], UUID | None]:
    """Search all jobs from the newest on; also return the job behind which to go on, None: all were read."""
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
    """Read jobs from the newest on; yield those that match, and the job behind which to go on.

    Jobs enqueued long before or after the times that are asked for are not read.
    """
    statement = NEWEST if values["kind"] is None else NEWEST_OF_KIND
    window = values["limit"]
    first, behind = _first_id(values["since"], -_CLOCKS_DIFFER), values["after"]
    if values["until"] is not None:
        last = _first_id(values["until"], _CLOCKS_DIFFER)
        behind = last if behind is None else min(behind, last)
    while True:
        place = {"digits": digits, "after": behind, "window": window}
        [row] = await database.run_along_index(statement, values | place)
        if not row.is_whole:
            statement = NEWEST
            continue
        behind = row.last if row.looked_at == window and row.last >= first else None
        yield row.ids, behind
        if behind is None:
            return
        window = max(min(10 * window, WINDOW), window)


def _first_id(instant: datetime | None, seconds: float) -> UUID:
    """Return the lowest id of a job enqueued ``seconds`` after an instant; for None the lowest of all."""
    milliseconds = 0 if instant is None else int((instant.timestamp() + seconds) * 1000)
    return UUID(int=min(max(milliseconds, 0), _LAST_MILLISECOND) << 80)


async def _find_scheduled(
    database: Database, values: dict[str, Any], ends_at: float
) -> tuple[list[UUID], UUID | None]:
    """Find jobs that wait for a time and, behind them, jobs that wait for an event."""
    try:
        ids, after = await _find(database, "scheduled", values, ends_at)
    except JobNotFound:
        return await _find(database, "held", values, ends_at)
    if after is not None:
        return ids, after
    left = values | {"after": None, "limit": values["limit"] - len(ids)}
    held, after = await _find(database, "held", left, ends_at)
    return ids + held, after


async def _find(
    database: Database, order: str, values: dict[str, Any], ends_at: float
) -> tuple[list[UUID], UUID | None]:
    """Find jobs in the order of an index; also return the job behind which to go on, None: all were read."""
    limit, ids = values["limit"], []
    is_filtered = any(
        values[name] is not None for name in ("priority", *ANY_JOB.values()) if name != "failure"
    )
    length = max(limit, PAGE) if is_filtered else limit
    statement = (LISTED if values["kind"] is None else LISTED_OF_KIND)[order]
    if order == "queued" and values["priority"] not in (None, NORMAL):
        statement = LAST_IN_LANE
    values = values | await _place_of(database, order, values) | {"limit": length}
    while True:
        rows = await database.run_along_index(statement, values)
        if not is_filtered:
            ids += [row.id for row in rows]
        elif order == "queued":  # its statement is to read only an index, which does not tell which match
            read = {"ids": uuid_array(row.id for row in rows)}
            meant = {row.id for row in await database.run(MEANT, values | read)}
            ids += [row.id for row in rows if row.id in meant]
        else:
            ids += [row.id for row in rows if row.meant]
        if len(ids) >= limit:
            return ids[:limit], ids[limit - 1]
        if len(rows) < length:
            return ids, None
        if time.monotonic() >= ends_at:
            return ids, rows[-1].id
        values |= _behind(rows[-1])


async def _place_of(database: Database, order: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return where in the order the listing begins, behind the job that the caller has named."""
    if values["after"] is None or order not in PLACES:
        return dict.fromkeys(("place", "place_kind"))
    rows = await database.run(PLACES[order], {"after": values["after"]})
    if not rows or rows[0].place is None:
        raise JobNotFound(
            f"no place in the listing of {values['status']} jobs is known of job {values['after']}"
        )
    place: dict[str, Any] = rows[0]._asdict()
    return place


def _behind(row: Row) -> dict[str, Any]:
    return {"after": row.id, "place": row.place, "place_kind": row.kind}


async def _fetch(database: Database, ids: Sequence[UUID], status: str | None) -> list[dict[str, Any]]:
    """Return jobs in the order of the given ids, without those that have another status by now."""
    rows: dict[UUID, dict[str, Any]] = {}
    for start in range(0, len(ids) or 1, _FETCHED):  # also without ids: a login without rights gets an error
        for row in await database.run(COLUMNS, {"ids": list(ids[start : start + _FETCHED])}):
            if status in (None, row.status):
                rows[row.id] = row._asdict()
    return [rows[job_id] for job_id in ids if job_id in rows]


async def _walk(database: Database, status: str, filters: dict[str, Any]) -> AsyncIterator[Sequence[Row]]:
    page = (PAGES if filters["kind"] is None else PAGES_OF_KIND)[status]
    if filters["failure"] is not None:
        page = PAGE_OF_FAILURE
    length = None if status == "processing" else PAGE
    moves = status == "scheduled" or filters["failure"] is not None
    had = set[UUID]()  # jobs that came once: an action on a page may move its jobs behind the walk
    values = {"limit": length, **filters, **dict.fromkeys(("after", "place", "place_kind"))}
    while True:
        rows = await database.run_along_index(page, values)
        yield [row for row in rows if row.id not in had] if moves else rows
        if len(rows) != length:
            return
        if moves:
            had.update(row.id for row in rows)
        values |= _behind(rows[-1])
