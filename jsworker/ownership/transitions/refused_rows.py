"""Rows that PostgreSQL refuses to write: reported once for the whole fleet, set aside, tried again ever later.

A sweep is one statement until a row of it is refused. While any of its rows is set aside, the sweep first finds
its rows, without those, and then writes them in halves: a refused row costs nothing until it is tried again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.predicates import as_refused
from jsworker.ownership.refusals import Refused, RowRefused, in_halves
from jsworker.ownership.statements import condition

_REPORTED_ALONE: Final = 5
"""Up to so many rows that are refused together for one reason are reported one by one; more as one line."""
_AS_REFUSED: Final = condition(as_refused)

# The second and every later refusal of the same row is not reported and doubles the pause, up to a day.
NOTE = text("""
WITH input AS (
  SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:sqlstates AS text[]), CAST(:constraints AS text[]))
    AS i(id, sqlstate, constraint_name)
)
INSERT INTO jsworker.refused_rows AS r (
  job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, constraint_name, worker_id, retry_at)
SELECT j.id, CAST(:attempted AS text), j.kind, j.status, j.fencing_token, j.dispatch, input.sqlstate,
  input.constraint_name, CAST(:worker_id AS text), clock_timestamp() + interval '1 minute' * (0.8 + 0.4 * random())
FROM input JOIN jsworker.jobs AS j ON j.id = input.id
ORDER BY j.id
ON CONFLICT (job_id, attempted) DO UPDATE SET
  tries = CASE WHEN (r.status, r.fencing_token, r.dispatch) = (excluded.status, excluded.fencing_token, excluded.dispatch)
    THEN r.tries + 1 ELSE 1 END,
  retry_at = CASE WHEN (r.status, r.fencing_token, r.dispatch) = (excluded.status, excluded.fencing_token, excluded.dispatch)
    THEN clock_timestamp() + make_interval(secs => least(86400, 60 * 2 ^ least(r.tries, 20)) * (0.8 + 0.4 * random()))
    ELSE excluded.retry_at END,
  kind = excluded.kind, status = excluded.status, fencing_token = excluded.fencing_token, dispatch = excluded.dispatch,
  sqlstate = excluded.sqlstate, constraint_name = excluded.constraint_name, worker_id = excluded.worker_id,
  last_at = clock_timestamp()
RETURNING job_id, kind, sqlstate, constraint_name, tries
""")

# Locked marks are deleted by their place: a join reads all marks for each one where statistics tell of none.
FORGET = text("""
DELETE FROM jsworker.refused_rows WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM jsworker.refused_rows AS r
  WHERE r.job_id = ANY(CAST(:ids AS uuid[])) AND r.attempted = :attempted
  ORDER BY r.job_id FOR UPDATE SKIP LOCKED))
""")

# A foreign key may keep millions of ended jobs: one look reads only some marks, and checks a mark of such a job
# only when it is due again. Subqueries are answered by key; for a join the planner may read all jobs, or all marks
# for each one.
TIDY = text(f"""
WITH looked AS MATERIALIZED (
  SELECT r.* FROM jsworker.refused_rows AS r WHERE r.job_id > CAST(:since AS uuid)
  ORDER BY r.job_id FETCH FIRST (CAST(:limit AS bigint)) ROWS WITH TIES
), over AS (
  SELECT r.job_id, r.attempted, r.retry_at FROM looked AS r
  WHERE (r.attempted <> 'prune' OR r.retry_at <= statement_timestamp()) AND (
    SELECT j.id FROM jsworker.jobs AS j WHERE j.id = r.job_id AND {_AS_REFUSED}
      AND (j.needs_publish OR r.attempted NOT IN ('publish', 'mark'))
      AND NOT (j.needs_publish AND r.attempted = 'republish')) IS NULL
  ORDER BY r.job_id, r.attempted
), gone AS (
  DELETE FROM jsworker.refused_rows AS r WHERE r.ctid = ANY(ARRAY(
    SELECT m.place FROM over, LATERAL (
      SELECT ctid AS place FROM jsworker.refused_rows AS m
      WHERE (m.job_id, m.attempted, m.retry_at) = (over.job_id, over.attempted, over.retry_at)
      FOR UPDATE SKIP LOCKED) AS m)) RETURNING r.job_id, r.attempted
)
SELECT count(*) AS marks, (SELECT job_id FROM looked ORDER BY job_id DESC LIMIT 1) AS last,
  array_agg(DISTINCT attempted) FILTER (WHERE (job_id, attempted) NOT IN (SELECT job_id, attempted FROM gone))
    AS attempted
FROM looked
""")  # noqa: S608 -- a constant of this file
MOST_MARKS: Final = 5_000
"""How many marks a look reads."""
_BEGINNING: Final = UUID(int=0)

AMONG = text(f"""
SELECT DISTINCT r.job_id FROM jsworker.refused_rows AS r JOIN jsworker.jobs AS j ON j.id = r.job_id
WHERE r.attempted = :attempted AND r.retry_at > statement_timestamp() AND {_AS_REFUSED}
  AND (CAST(:ids AS uuid[]) IS NULL OR r.job_id = ANY(CAST(:ids AS uuid[])))
""")  # noqa: S608 -- a constant of this file

OF_JOBS = text("""
SELECT job_id, attempted, sqlstate, constraint_name, tries, first_at, last_at, retry_at, worker_id
FROM jsworker.refused_rows WHERE job_id = ANY(CAST(:ids AS uuid[])) ORDER BY job_id, first_at
""")

REFERENCED: Final = ("23503", "23001")
"""SQLSTATEs foreign_key_violation and, for ON DELETE RESTRICT from PostgreSQL 18 on, restrict_violation."""

# Not those of jobs that a foreign key keeps: no error, and trying millions of them again takes hours. A locked
# mark is being written or deleted just now.
TRY_AGAIN = text(f"""
DELETE FROM jsworker.refused_rows WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM jsworker.refused_rows AS r
  WHERE NOT (r.attempted = 'prune' AND r.sqlstate IN {REFERENCED}) LIMIT :limit FOR UPDATE SKIP LOCKED
)) RETURNING job_id
""")  # noqa: S608 -- constants of this file


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that was refused for the first time, or the first of ``jobs`` rows that were refused together."""

    job_id: UUID
    kind: str
    attempted: str
    sqlstate: str
    constraint: str | None
    jobs: int = 1


Tell = Callable[[RefusedRow], None]


class RefusedRows:
    """Refused rows as this process knows them, and how many it has ``noted``; the table has those of all."""

    def __init__(self, database: Database, *, worker_id: str | None, tell: Tell = lambda _: None) -> None:
        """Begin without any; ``tell`` is called with each row that is refused for the first time."""
        self._database = database
        self._worker_id = worker_id
        self._tell = tell
        self._attempts: set[str] = set()
        self._since = _BEGINNING
        """The job after which the next look begins; after the last one, the looks begin again."""
        self._seen: set[str] = set()
        self._expected: set[str] = set()
        """The transitions seen, and expected, since the looks began last."""
        self.noted = 0

    def any_of(self, *attempted: str) -> bool:
        """Return whether rows may be set aside for any of these transitions."""
        return not self._attempts.isdisjoint(attempted)

    def expect(self, attempted: str) -> None:
        """Assume that rows are set aside for this transition, until looks at all marks find none."""
        self._attempts.add(attempted)
        self._expected.add(attempted)

    async def note(self, attempted: str, refused: Iterable[tuple[UUID, RowRefused]]) -> None:
        """Set rows aside, and report those that are refused for the first time."""
        if not (found := dict(refused)):
            return
        self.expect(attempted)
        self.noted += len(found)
        values = {
            "attempted": attempted,
            "worker_id": self._worker_id,
            "ids": uuid_array(found),
            "sqlstates": [error.sqlstate for error in found.values()],
            "constraints": [error.constraint for error in found.values()],
        }
        noted = await self._database.run(NOTE, values)
        self.expect(attempted)  # again: a look that began earlier may have ended meanwhile without finding it
        self._tell_new(attempted, noted)

    async def among(self, attempted: str, ids: Iterable[UUID] | None = None) -> set[UUID]:
        """Return the jobs that are set aside now, of these or of all; asks the database only if needed."""
        if not self.any_of(attempted):
            return set()
        values = {"attempted": attempted, "ids": None if ids is None else uuid_array(ids)}
        return {row.job_id for row in await self._database.run(AMONG, values)}

    async def look(self) -> None:
        """Look at the next marks: delete those of rows that are gone or have changed, note what is still set aside."""
        if self._since == _BEGINNING:
            self._seen.clear()
            self._expected.clear()
        [found] = await self._database.run(TIDY, {"since": self._since, "limit": MOST_MARKS})
        self._seen.update(found.attempted or ())
        if found.marks >= MOST_MARKS:
            self._since = found.last
            self._attempts |= self._seen
        else:
            self._since = _BEGINNING
            # The looks may not have found what was refused meanwhile.
            self._attempts = self._seen | self._expected

    def _tell_new(self, attempted: str, noted: Sequence[Row]) -> None:
        by_reason: defaultdict[tuple[str, str | None], list[Row]] = defaultdict(list)
        for row in noted:
            if row.tries == 1:
                by_reason[row.sqlstate, row.constraint_name].append(row)
        for (sqlstate, constraint), rows in by_reason.items():
            reported = rows if len(rows) <= _REPORTED_ALONE else rows[:1]
            jobs = len(rows) // len(reported)
            for row in reported:
                self._tell(RefusedRow(row.job_id, row.kind, attempted, sqlstate, constraint, jobs))


@dataclass(frozen=True, slots=True)
class Sweep:
    """A statement that finds and writes rows, and the same as two statements: ``find`` and ``write``.

    A row of ``find`` without an id is not written.
    ``attempted`` is the name of its own marks, ``aside`` are the names of all marks for which it skips a row.
    ``along_index``: see ``Database.run_along_index``.
    """

    attempted: str
    aside: tuple[str, ...]
    at_once: TextClause
    find: TextClause
    write: TextClause
    along_index: bool = False


class Swept(NamedTuple):
    """The rows that a sweep wrote and found (None if it was one statement), and the refused ones."""

    rows: Sequence[Row]
    found: Sequence[Row] | None
    refused: Refused[UUID]


async def run_sweep(
    database: Database,
    sweep: Sweep,
    values: Mapping[str, Any],
    refused_rows: RefusedRows | None,
    *,
    seconds: float | None = None,
) -> Swept:
    """Write the rows that a sweep finds, without refused ones; without ``refused_rows`` one refuses all.

    Each of its statements has ``seconds``, or the statement time-out.
    """
    run = database.run_along_index if sweep.along_index else database.run
    if refused_rows is None:
        return Swept(await run(sweep.at_once, values, seconds=seconds), None, [])
    if not refused_rows.any_of(*sweep.aside):
        try:
            return Swept(await run(sweep.at_once, values, seconds=seconds), None, [])
        except RowRefused:
            refused_rows.expect(sweep.attempted)  # the refused row is found below, or set aside by others
    found = await run(sweep.find, values, seconds=seconds)
    ids = [row.id for row in found if row.id is not None]
    rows, refused = await in_halves(
        ids, lambda half: run(sweep.write, {**values, "ids": uuid_array(half)}, seconds=seconds)
    )
    await refused_rows.note(sweep.attempted, refused)
    if written := set(ids) - {job_id for job_id, _ in refused}:
        await database.run(FORGET, {"ids": uuid_array(written), "attempted": sweep.attempted})
    return Swept(rows, found, refused)


@dataclass(frozen=True, slots=True)
class Mark:
    """A refused row as operators see it."""

    job_id: UUID
    attempted: str
    sqlstate: str
    constraint_name: str | None
    tries: int
    first_at: datetime
    last_at: datetime
    retry_at: datetime
    worker_id: str | None


async def marks_of(database: Database, ids: Iterable[UUID]) -> dict[UUID, list[Mark]]:
    """Return the marks of these jobs; a job without marks is missing."""
    marks: defaultdict[UUID, list[Mark]] = defaultdict(list)
    for row in await database.run(OF_JOBS, {"ids": uuid_array(ids)}):
        marks[row.job_id].append(Mark(*row))
    return marks


async def try_again(database: Database, *, limit: int) -> int:
    """Delete up to ``limit`` marks, so that each row is tried with the next sweep; return how many.

    Marks of ended jobs that a foreign key keeps stay.
    """
    return len(await database.run(TRY_AGAIN, {"limit": limit}))
