"""Failed jobs in groups: jobs of one kind, with errors that differ only in numbers and quoted text.

Groups are found by leaps along an index that holds nothing but failed jobs, and counted up to a bound.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.schema import FAILURE, IS_FAILURE

BOUND: Final = 5_000
"""How many jobs are counted in all groups together, unless ``_LEAST_BOUND`` for each group is more. A
count that reaches its group's share of this means at least as many."""
_LEAST_BOUND: Final = 100
"""The smallest share of a group, however many groups there are."""
TREND_HOURS: Final = 24

_OF_GROUP: Final = f"{IS_FAILURE} AND kind = g.kind AND {FAILURE} = g.failure"


def _next(kind: str, failure: str) -> str:
    return f"""SELECT kind, {FAILURE} AS failure FROM jsworker.jobs
  WHERE {IS_FAILURE} AND (kind, {FAILURE}) > ({kind}, {failure}) ORDER BY kind, {FAILURE} LIMIT 1"""  # noqa: S608 -- constants


FAILURES = text(f"""
WITH RECURSIVE heads AS (
  ({_next("CAST(:after_kind AS text)", "CAST(:after_failure AS uuid)")})
  UNION ALL
  SELECT next.kind, next.failure FROM heads CROSS JOIN LATERAL (
  {_next("heads.kind", "heads.failure")}) AS next
  WHERE CAST(:kind AS text) IS NULL OR heads.kind = :kind
)
SELECT kind, failure FROM heads WHERE CAST(:kind AS text) IS NULL OR kind = :kind LIMIT :limit
""")  # noqa: S608 -- constants

FAILURE_GROUPS = text(f"""
SELECT g.kind, g.failure, counted.jobs, first.at AS first_at, last.at AS last_at, last.id AS last_job,
  last.error, last.reason, counted.hours
FROM unnest(CAST(:kinds AS text[]), CAST(:failures AS uuid[])) AS g(kind, failure)
CROSS JOIN LATERAL (
  SELECT CAST(sum(jobs) AS bigint) AS jobs, jsonb_object_agg(hour, jobs) FILTER (WHERE hour > 0) AS hours FROM (
    SELECT width_bucket(few.finished_at, ARRAY(
        SELECT statement_timestamp() - make_interval(hours => ago)
        FROM generate_series({TREND_HOURS}, 1, -1) AS ago)) AS hour, count(*) AS jobs
    FROM (SELECT finished_at FROM jsworker.jobs WHERE {_OF_GROUP} ORDER BY finished_at DESC LIMIT :bound) AS few
    GROUP BY 1) AS by_hour) AS counted
CROSS JOIN LATERAL (
  SELECT finished_at AS at FROM jsworker.jobs WHERE {_OF_GROUP} ORDER BY finished_at LIMIT 1) AS first
CROSS JOIN LATERAL (
  SELECT id, finished_at AS at, split_part(left(last_error, 500), chr(10), 1) AS error, failure_reason AS reason
  FROM jsworker.jobs WHERE {_OF_GROUP} ORDER BY finished_at DESC, id DESC LIMIT 1) AS last
""")  # noqa: S608 -- constants


class FailureId(NamedTuple):
    """Identifies a group: its kind, and a hash of what its errors have in common."""

    kind: str
    failure: UUID


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed jobs of one kind with like errors.

    Attributes:
        kind, failure: what identifies the group.
        jobs: how many there are; ``is_bounded``: there are at least so many.
        first_at, last_at: when the first and the last of them ended.
        last_job: the last one.
        error: type and message of the last job's last error; None: there was none.
        reason: why no attempt followed that error.
        by_hour: how many of the counted jobs, which ended last, ended in each of the last 24 hours, the
            latest hour last.
    """

    kind: str
    failure: UUID
    jobs: int
    is_bounded: bool
    first_at: datetime
    last_at: datetime
    last_job: UUID
    error: str | None
    reason: str | None
    by_hour: list[int]


class FailurePage(NamedTuple):
    """Groups, the one with the latest failure first; the next page is behind ``after``, None: there is none.

    A page is sorted by itself: pages follow each other in the order of kind and ``failure``.
    """

    groups: list[FailureGroup]
    after: FailureId | None


async def list_failures(
    database: Database, *, kind: str | None = None, after: FailureId | None = None, limit: int = 100
) -> FailurePage:
    """Return groups of failed jobs: all of them, or those of a kind; at most ``limit``."""
    place = after or FailureId(kind or "", UUID(int=0))
    values: dict[str, Any] = {"after_kind": place.kind, "after_failure": place.failure, "kind": kind}
    rows = await database.run_along_index(FAILURES, values | {"limit": limit + 1})
    named = [FailureId(row.kind, row.failure) for row in rows[:limit]]
    groups = await read_failures(database, named)
    return FailurePage(groups, named[-1] if len(rows) > limit else None)


async def read_failures(database: Database, named: list[FailureId]) -> list[FailureGroup]:
    """Return the given groups, the one with the latest failure first; groups without jobs are left out."""
    bound = max(BOUND // max(len(named), 1), _LEAST_BOUND)
    values = {"kinds": [each.kind for each in named], "failures": [each.failure for each in named]}
    rows = await database.run_along_index(FAILURE_GROUPS, values | {"bound": bound})
    groups = [
        FailureGroup(
            *(row.kind, row.failure, row.jobs, row.jobs >= bound, row.first_at, row.last_at, row.last_job),
            *(row.error, row.reason, _by_hour(row.hours or {})),
        )
        for row in rows
    ]
    return sorted(groups, key=lambda group: group.last_at, reverse=True)


def _by_hour(hours: dict[str, int]) -> list[int]:
    return [hours.get(str(hour), 0) for hour in range(1, TREND_HOURS + 1)]
