"""Reading jobs: one with its timeline, or many by a filter. Nothing here decides who owns anything.

However many jobs there are, each statement looks at a bounded number of rows, through an index: a partial one for
jobs that wait, run or have failed, whose predicate is repeated word for word; for the others that of the ids, which
are UUIDv7, so that their order is the order of creation.
"""

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import JobNotFound
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row
from jsworker.ownership.predicates import ANY_AGE, RunAge, as_old_as_chosen, progressed_at, queued_indexed
from jsworker.ownership.statements import KINDS_BY_LEAPS, condition, filled, sql

WINDOW: Final = 10_000
"""Jobs that one statement looks at for the few that are listed."""
FEW: Final = 2_000
"""Running jobs that are sorted by their ids; more are listed by their workers."""
PAGE: Final = 500
"""Jobs that one statement looks at for those that a filter means."""
COUNTED: Final = 2_000
"""Jobs of a status that are looked at to count those that a filter means."""
_FETCHED: Final = 5_000

COLUMNS = text("""
SELECT id, kind, status, worker_id, fencing_token, attempts, errors, stalls, max_attempts, max_stalls, stage,
  progress, message, unique_key, run_at, queued_at, claimed_at, last_activity_at, deadline_at, cleared, clear_reason,
  cancel_requested, last_error, failure_reason, created_at, started_at, finished_at,
  progress_at
FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")


NEWEST = text("""
WITH looked_at AS MATERIALIZED (
  SELECT id, status, kind FROM jsworker.jobs
  WHERE CAST(:after AS uuid) IS NULL OR id < CAST(:after AS uuid)
  ORDER BY id DESC LIMIT :window
), meant AS (
  SELECT id FROM looked_at
  WHERE (CAST(:status AS text) IS NULL OR status = :status) AND (CAST(:kind AS text) IS NULL OR kind = :kind)
  ORDER BY id DESC LIMIT :limit
)
SELECT ARRAY(SELECT id FROM meant ORDER BY id DESC) AS ids, (SELECT count(*) FROM looked_at) AS looked_at,
  (SELECT id FROM looked_at ORDER BY id LIMIT 1) AS last
""")

ENDING_IN = text("""
WITH looked_at AS MATERIALIZED (
  SELECT id FROM jsworker.jobs
  WHERE CAST(:after AS uuid) IS NULL OR id < CAST(:after AS uuid)
  ORDER BY id DESC LIMIT :window
)
SELECT ARRAY(SELECT id FROM looked_at WHERE right(CAST(id AS text), length(:digits)) = :digits ORDER BY id) AS ids,
  (SELECT count(*) FROM looked_at) AS looked_at, (SELECT id FROM looked_at ORDER BY id LIMIT 1) AS last
""")

# The first range is there for the index, which is not searched by a row of values whose first is not unique.
_NEXT_DUE = """
SELECT id FROM jsworker.jobs
WHERE {status} AND (CAST(:after AS uuid) IS NULL OR (
  run_at >= CAST(:place AS timestamptz) AND (run_at, id) > (CAST(:place AS timestamptz), CAST(:after AS uuid))))
ORDER BY run_at, id LIMIT :limit
"""
NEXT_DUE = filled(_NEXT_DUE, status="status || '' = 'scheduled'")
NEXT_DUE_OF_KIND = filled(_NEXT_DUE, status="'' || status = 'scheduled' AND kind = :kind")

# Each kind's last ones, and of these the last.
LAST_QUEUED = filled(
    """
WITH RECURSIVE {kinds}, several AS (
  SELECT kind FROM kinds WHERE kind IS NOT NULL LIMIT 100
)
SELECT page.id FROM several AS k CROSS JOIN LATERAL (
  SELECT j.id, j.queued_at FROM jsworker.jobs AS j
  WHERE j.status || '' = 'queued' AND j.kind = k.kind AND (CAST(:after AS uuid) IS NULL OR (
    j.queued_at <= CAST(:place AS timestamptz)
    AND (j.queued_at, j.id) < (CAST(:place AS timestamptz), CAST(:after AS uuid))))
  ORDER BY j.queued_at DESC, j.id DESC LIMIT :limit
) AS page
ORDER BY page.queued_at DESC, page.id DESC LIMIT :limit
""",
    kinds=KINDS_BY_LEAPS.replace("{which}", " AND (CAST(:kind AS text) IS NULL OR j.kind = :kind)"),
    queued=condition(queued_indexed),
)

RUNNING = text("""
SELECT id, kind FROM jsworker.jobs WHERE status || '' = 'processing' ORDER BY worker_id LIMIT :most
""")

_IS_SO_OLD = sql(as_old_as_chosen)
_OLDEST_RUNS = """
SELECT id FROM jsworker.jobs AS j
WHERE status || '' = 'processing' AND (CAST(:kind AS text) IS NULL OR kind = :kind) AND {is_so_old}
  AND (CAST(:after AS uuid) IS NULL OR ({since}, id) > (CAST(:place AS timestamptz), CAST(:after AS uuid)))
ORDER BY {since}, id LIMIT :limit
"""
SINCE = {"no_progress_for": sql(progressed_at), "running_for": "claimed_at", "stale_for": "last_activity_at"}
"""What running jobs that are chosen by their age are sorted by: the first of these that is asked for."""
OLDEST_RUNS = {age: filled(_OLDEST_RUNS, is_so_old=_IS_SO_OLD, since=since) for age, since in SINCE.items()}

_FAILED = """
SELECT id FROM jsworker.jobs
WHERE {failed} AND status = :status AND (CAST(:after AS uuid) IS NULL OR id < CAST(:after AS uuid))
ORDER BY id DESC LIMIT :limit
"""
_FAILED_AT_ALL = "status || '' IN ('failed', 'cancelled')"
_FAILED_OF_KIND = "'' || status IN ('failed', 'cancelled') AND kind = :kind"
FAILED = filled(_FAILED, failed=_FAILED_AT_ALL)
FAILED_OF_KIND = filled(_FAILED, failed=_FAILED_OF_KIND)

PLACES = {
    order: text(f"SELECT {place} AS place FROM jsworker.jobs AS j WHERE id = :after")  # noqa: S608 -- constants
    for order, place in {
        "processing": "worker_id",
        "scheduled": "run_at",
        "queued": "queued_at",
        **SINCE,
    }.items()
}
"""Where a listing goes on, by status or by age."""

JOB = text("SELECT * FROM jsworker.jobs WHERE id = :id")

TIMELINE = text("""
SELECT at, event, worker_id, fencing_token, error, detail
FROM jsworker.job_events WHERE job_id = :id ORDER BY id LIMIT 1000
""")

SEEN = text("""
SELECT id, status, fencing_token FROM jsworker.jobs WHERE id = ANY(CAST(:ids AS uuid[]))
""")

# Pages of all jobs of a status, in the order of an index, with those marked that a filter means.
_PAGE = """
SELECT id, fencing_token, kind, worker_id, run_at, queued_at, {meant} AS meant FROM jsworker.jobs AS j
WHERE {status} AND (CAST(:after AS uuid) IS NULL OR ({place}))
ORDER BY {order} LIMIT :limit
"""
_IS_OF_KIND = "(CAST(:kind AS text) IS NULL OR kind = :kind)"
_AFTER = "CAST(:after AS uuid)"
_IN_ORDER_OF_IDS = {"order": "id", "place": f"id > {_AFTER}", "meant": "true"}

PAGES = {
    "processing": filled(
        _PAGE,
        status="status || '' = 'processing'",
        order="worker_id, id",
        place=f"worker_id >= :worker_id AND (worker_id, id) > (:worker_id, {_AFTER})",
        meant=f"{_IS_OF_KIND} AND {_IS_SO_OLD}",
    ),
    "scheduled": filled(
        _PAGE,
        status=f"'' || status = 'scheduled' AND {_IS_OF_KIND}",
        order="kind, run_at, id",
        place=f"(kind, run_at, id) > (:place_kind, CAST(:run_at AS timestamptz), {_AFTER})",
        meant="true",
    ),
    # One without a time at which it was queued stands last of its kind, where no place leads on from it.
    "queued": filled(
        _PAGE,
        status=f"status || '' = 'queued' AND {_IS_OF_KIND}",
        order="kind, queued_at, id",
        place=f"(kind, queued_at, id) > (:place_kind, CAST(:queued_at AS timestamptz), {_AFTER})",
        meant="true",
    ),
    "failed": filled(_PAGE, status=f"{_FAILED_AT_ALL} AND status = 'failed'", **_IN_ORDER_OF_IDS),
}
"""By status; the order is that in which a filter acts on several."""
FAILED_PAGE_OF_KIND = filled(_PAGE, status=f"{_FAILED_OF_KIND} AND status = 'failed'", **_IN_ORDER_OF_IDS)

_COUNT = "SELECT count(*) AS looked_at, count(*) FILTER (WHERE meant) AS jobs FROM ({page}) AS page"
_COUNTS = {page: filled(_COUNT, page=page.text) for page in (*PAGES.values(), FAILED_PAGE_OF_KIND)}


@dataclass(frozen=True, slots=True)
class SeenJob:
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


@dataclass(frozen=True, slots=True)
class Count:
    """How many jobs a filter means; there may be more when it is not exact, for not all were looked at."""

    jobs: int
    is_exact: bool


class _Found(NamedTuple):
    """What a statement found: ids in their order, and where to go on; None: there are no more.

    Running jobs go on by their workers, behind this owner's; the job itself may have ended by then.
    """

    ids: Sequence[UUID]
    after: UUID | None
    owner: str | None = None


async def list_jobs(
    database: Database,
    *,
    status: str | None = None,
    kind: str | None = None,
    limit: int = 50,
    after: UUID | None = None,
    seconds: float | None = None,
    age: RunAge = ANY_AGE,
) -> Page:
    """Return jobs: the newest first; of those that are scheduled the next one due, of queued ones the last queued.

    Thousands of running jobs are listed by their workers; those that are chosen by their age the oldest first.

    Args:
        status, kind: only such jobs. Completed jobs of a kind, or all of a kind, are searched for from the newest
            on, for there is no index of them.
        after: begin behind this job.
        seconds: end a search after so long with what was found; None: never.
        age: only running jobs that are so old.

    Raises:
        JobNotFound: the place of ``after`` in a queue is not known any more.
        ValueError: ``limit`` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"limit {limit} must be 1 or more")
    if age:
        found = await _find_oldest(database, age, kind, limit, after)
        return Page(await _fetch(database, found.ids, "processing"), found.after)
    ends_at = math.inf if seconds is None else time.monotonic() + seconds
    found = await _find(database, status, kind, limit, _Found([], after))
    ids = [*found.ids]
    while found.after is not None and len(ids) < limit and time.monotonic() < ends_at:
        found = await _find(database, status, kind, limit - len(ids), found)
        ids += found.ids
    return Page(await _fetch(database, ids, status), found.after)


async def get_job(database: Database, job_id: UUID) -> dict[str, Any] | None:
    """Return a job as a dict by column name, None when there is none."""
    rows = await database.run(JOB, {"id": job_id})
    return rows[0]._asdict() if rows else None


async def ending_in(database: Database, digits: str, *, seconds: float) -> list[UUID]:
    """Return the jobs whose ids end in these digits, of the newest that can be looked at in so many seconds."""
    ends_at = time.monotonic() + seconds
    values = {"digits": digits, "after": None, "window": WINDOW}
    while True:
        [row] = await database.run_along_index(ENDING_IN, values)
        if row.ids or row.looked_at < WINDOW or time.monotonic() >= ends_at:
            return list(row.ids)
        values["after"] = row.last


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
) -> AsyncIterator[list[tuple[UUID, int]]]:
    """Yield id and fencing token of the jobs that a filter means, page by page, each job once.

    Args:
        statuses: any of them: scheduled, queued, processing, failed.
        age: of running jobs only those that are so old; others have none.
        acting: whether each page is acted on before the next is read, so that its jobs leave these statuses or run
            on; then jobs that went from one of them to another meanwhile are looked for a second time.
    """
    ran: set[UUID] = set()
    for _ in range(2 if acting and len(statuses) > 1 else 1):
        for status in (each for each in PAGES if each in statuses):
            async for rows in _walk(database, status, kind, age):
                page = [(row.id, row.fencing_token) for row in rows if row.id not in ran]
                if status == "processing":
                    ran.update(job_id for job_id, _ in page)
                if page:
                    yield page


async def count_matching(
    database: Database, *, statuses: Sequence[str], kind: str | None = None, age: RunAge = ANY_AGE
) -> Count:
    """Return how many jobs a filter means, counted among a limited number of each status."""
    jobs, is_exact = 0, True
    for status in statuses:
        values = _values(kind, age) | {"limit": COUNTED + 1}
        [row] = await database.run_along_index(_COUNTS[_page_of(status, kind)], values)
        jobs += row.jobs
        is_exact = is_exact and row.looked_at <= COUNTED
    return Count(jobs, is_exact)


async def look_up(database: Database, ids: list[UUID]) -> dict[UUID, SeenJob]:
    """Return status and token of jobs by id; an id without a job is missing."""
    rows = await database.run(SEEN, {"ids": ids})
    return {row.id: SeenJob(row.id, row.status, row.fencing_token) for row in rows}


async def _find(
    database: Database, status: str | None, kind: str | None, limit: int, begun: _Found
) -> _Found:
    """Look for jobs by one statement, or two, behind what was found before."""
    after = begun.after
    values = {"status": status, "kind": kind, "limit": limit, "after": after, "window": max(WINDOW, limit)}
    match status:
        case "processing":
            return await _find_running(database, kind, limit, begun)
        case "scheduled":
            statement = NEXT_DUE if kind is None else NEXT_DUE_OF_KIND
            values["place"] = await _place(database, status, status, after)
        case "queued":
            statement = LAST_QUEUED
            values["place"] = await _place(database, status, status, after)
        case "failed" | "cancelled":
            statement = FAILED if kind is None else FAILED_OF_KIND
        case _:
            [row] = await database.run_along_index(NEWEST, values)
            if len(row.ids) == limit:
                return _Found(row.ids, row.ids[-1])
            return _Found(row.ids, row.last if row.looked_at == values["window"] else None)
    return _full(await database.run_along_index(statement, values), limit)


async def _find_running(database: Database, kind: str | None, limit: int, begun: _Found) -> _Found:
    """Look for running jobs: the newest first if they are few, else by their workers, as was begun."""
    after, owner = begun.after, begun.owner
    if owner is None:
        running = await database.run_along_index(RUNNING, {"most": FEW + 1})
        if len(running) <= FEW:
            ids = sorted((row.id for row in running if kind in (None, row.kind)), reverse=True)
            ids = [job_id for job_id in ids if after is None or job_id < after]
            return _Found(ids[:limit], ids[limit - 1] if len(ids) > limit else None)
        owner = await _place(database, "processing", "processing", after)
    length = max(PAGE, limit)
    values = _values(kind, ANY_AGE) | {"after": after, "worker_id": owner, "limit": length}
    rows = await database.run_along_index(PAGES["processing"], values)
    ids = [row.id for row in rows if row.meant][:limit]
    if len(ids) == limit:
        return _Found(ids, ids[-1])
    if len(rows) < length:
        return _Found(ids, None)
    return _Found(ids, rows[-1].id, rows[-1].worker_id)


async def _find_oldest(
    database: Database, age: RunAge, kind: str | None, limit: int, after: UUID | None
) -> _Found:
    order = next(name for name in SINCE if age.values()[name] is not None)
    place = await _place(database, order, "processing", after)
    values = {"kind": kind, "limit": limit, "after": after, "place": place, **age.values()}
    return _full(await database.run(OLDEST_RUNS[order], values), limit)


async def _place(database: Database, order: str, status: str, after: UUID | None) -> Any:
    if after is None:
        return None
    rows = await database.run(PLACES[order], {"after": after})
    if not rows or rows[0].place is None:
        raise JobNotFound(f"no place in the listing of {status} jobs is known of job {after}")
    return rows[0].place


def _full(rows: Sequence[Row], limit: int) -> _Found:
    ids = [row.id for row in rows]
    return _Found(ids, ids[-1] if len(ids) == limit else None)


async def _fetch(database: Database, ids: Sequence[UUID], status: str | None) -> list[dict[str, Any]]:
    """Return jobs in the order of their ids given; what has another status by now is left out."""
    rows: dict[UUID, dict[str, Any]] = {}
    for start in range(
        0, len(ids) or 1, _FETCHED
    ):  # for none too: a role that may not read jobs gets an error
        for row in await database.run(COLUMNS, {"ids": list(ids[start : start + _FETCHED])}):
            if status in (None, row.status):
                rows[row.id] = row._asdict()
    return [rows[job_id] for job_id in ids if job_id in rows]


async def _walk(database: Database, status: str, kind: str | None, age: RunAge) -> AsyncIterator[list[Row]]:
    values = _values(kind, age) | {"limit": PAGE}
    while True:
        rows = await database.run_along_index(_page_of(status, kind), values)
        yield [row for row in rows if row.meant]
        if len(rows) < PAGE:
            return
        last = rows[-1]
        values |= {"after": last.id, "worker_id": last.worker_id, "run_at": last.run_at}
        values |= {"place_kind": last.kind, "queued_at": last.queued_at}


def _page_of(status: str, kind: str | None) -> TextClause:
    return FAILED_PAGE_OF_KIND if status == "failed" and kind is not None else PAGES[status]


def _values(kind: str | None, age: RunAge) -> dict[str, Any]:
    beginning = dict.fromkeys(("after", "worker_id", "run_at", "place_kind", "queued_at"))
    return {"kind": kind, **age.values(), **beginning}
