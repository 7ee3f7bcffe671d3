"""ENQUEUE: inserts jobs; a job's message is published after the commit."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import uuid_utils.compat
from sqlalchemy import Text, TextClause, any_, func, select, text

from jsworker.core.errors import DatabaseTimeout, TransitionRefused
from jsworker.core.garbage import no_collection
from jsworker.core.names import shown
from jsworker.core.priorities import NORMAL
from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import live, may_begin, of_kind
from jsworker.ownership.statements import NOW, compiled, condition, filled, given_array, given_seconds, j
from jsworker.ownership.transitions.expire import free_keys

COLUMNS = """
    id, kind, payload, unique_key, max_attempts, max_stalls, traceparent, tracestate, limit_key, priority,
    status, run_at, dispatch, needs_publish, publish_after, queued_at"""
_DUE = """
    CASE WHEN {delay} > 0 THEN 'scheduled' ELSE 'queued' END,
    clock_timestamp() + make_interval(secs => {delay}),
    CASE WHEN {delay} > 0 THEN 0 ELSE 1 END,
    {delay} <= 0,
    CASE WHEN {delay} <= 0 THEN clock_timestamp() + make_interval(secs => CAST(:publish_after AS double precision)) END,
    CASE WHEN {delay} <= 0 THEN clock_timestamp() END"""

KEY: Final = "CAST(:unique_key AS text)"
OF_ONE: Final = """
  SELECT CAST(:id AS uuid), CAST(:kind AS text), CAST(:payload AS jsonb), {live_key},
    CAST(:max_attempts AS integer), CAST(:max_stalls AS integer),
    CAST(:traceparent AS text), CAST(:tracestate AS text), CAST(:limit_key AS text), CAST(:priority AS smallint),{due}{more}
  FROM {source}"""
# Text, because an INSERT of computed rows is harder to read as an expression. DO NOTHING, never DO UPDATE, which
# would block the live job's owner until the producer commits. If there is no row in the answer, a job with the
# same key is being committed right now; execute it again.
ONE_OF_A_KEY: Final = """
WITH created AS (
  INSERT INTO jsworker.jobs ({columns}){of_one}
  ON CONFLICT DO NOTHING
  RETURNING id, dispatch
)
SELECT id, true AS created, dispatch FROM created
UNION ALL
SELECT j.id, false, j.dispatch FROM jsworker.jobs AS j
WHERE j.kind = :kind AND j.{key} = :unique_key AND {holder} AND NOT EXISTS (SELECT FROM created)
"""
ENQUEUE = filled(
    ONE_OF_A_KEY,
    of_one=OF_ONE,
    columns=COLUMNS,
    live_key=KEY,
    key="unique_key",
    holder=condition(live),
    due=_DUE.format(delay="d.delay"),
    more="",
    source="(SELECT CAST(:delay AS double precision)) AS d(delay)",
)

# If one call has a key twice, the first wins. All producers insert keys in the same order, which avoids deadlocks:
# each waits for equal keys that are not committed yet.
MANY: Final = """
WITH input AS (
  SELECT * FROM unnest(
    CAST(:ids AS uuid[]), CAST(:payloads AS text[]), CAST(:unique_keys AS text[]), CAST(:delays AS double precision[]),
    CAST(:max_attempts AS integer[]), CAST(:max_stalls AS integer[]),
    CAST(:traceparents AS text[]), CAST(:tracestates AS text[]), CAST(:limit_keys AS text[]),
    CAST(:priorities AS smallint[])
  ) WITH ORDINALITY AS i(
    id, payload, unique_key, delay, max_attempts, max_stalls, traceparent, tracestate, limit_key, priority, place)
  ORDER BY unique_key, place
)
INSERT INTO jsworker.jobs ({columns})
SELECT id, CAST(:kind AS text), CAST(payload AS jsonb), unique_key, max_attempts, max_stalls,
  traceparent, tracestate, limit_key, priority,{due}
FROM {source}
ON CONFLICT DO NOTHING
RETURNING id
"""
ENQUEUE_MANY = filled(MANY, columns=COLUMNS, due=_DUE.format(delay="delay"), source="input")
_ARRAYS = (
    "ids",
    "payloads",
    "unique_keys",
    "delays",
    "max_attempts",
    "max_stalls",
    "traceparents",
    "tracestates",
    "limit_keys",
    "priorities",
)
"""The parameters of ENQUEUE_MANY for the fields of ``NewJob``, in their order."""

_ISO_8601: Final = 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
# COPY takes no expressions, so a later time is computed first, as text that no setting of the login changes.
TIME_LATER = compiled(
    select(func.to_char(func.timezone("UTC", NOW + given_seconds("seconds")), _ISO_8601).label("time"))
)

# For jobs without keys, which cannot conflict: five times cheaper for many. ``now`` is the statement's time.
COPY_MANY = text("""
COPY jsworker.jobs (
  id, kind, payload, max_attempts, max_stalls, priority, traceparent, tracestate,
  status, run_at, dispatch, needs_publish, publish_after, queued_at) FROM STDIN
""")

_has_one_of_the_keys = j.c.unique_key == any_(given_array("unique_keys", Text))
_live_by_key = select(j.c.unique_key, j.c.id).where(of_kind, _has_one_of_the_keys, live)
LIVE_BY_KEY = compiled(_live_by_key)
LIVE_BY_KEY_TERMS = compiled(_live_by_key.where(may_begin))

_ROW_BYTES: Final = 200
"""What a row takes besides its payload."""
_LEAST_COPIED: Final = 30
"""The least number of jobs for COPY; a statement with a kept plan inserts fewer in less time."""

TRIES: Final = 3
NO_MORE: Final[Mapping[str, Any]] = {}


class JobTerms(NamedTuple):
    """Rarely used terms of a job; such jobs are enqueued by the statements of ``enqueue_terms``.

    Attributes:
        run_at: when the job is due, instead of a delay.
        expires_in: seconds from the call until it is cancelled, unless it has begun.
        scope: the jobs among which its key is unique: ``live`` ones, ``waiting`` ones, or all of a ``window``.
            ``debounce`` is like ``waiting``, and the waiting job takes the new payload and a later time.
        unique_for: the window, in seconds from the call, or from the end of a wait for its row.
        debounce: seconds from the last insert until the job is due.
        debounce_max: seconds from the first insert until the job is due at the latest.
    """

    run_at: datetime | None = None
    expires_in: float | None = None
    scope: Literal["live", "waiting", "window", "debounce"] = "live"
    unique_for: float | None = None
    debounce: float | None = None
    debounce_max: float | None = None


class NewJob(NamedTuple):
    """A job to enqueue: ``payload`` is JSON text, ``delay`` seconds until it is due.

    ``limit_key`` is the key under which limits count it, ``priority`` a number.
    """

    id: UUID
    payload: str
    unique_key: str | None = None
    delay: float = 0.0
    max_attempts: int | None = None
    max_stalls: int | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    limit_key: str | None = None
    priority: int = NORMAL
    terms: JobTerms | None = None


class ChildJob(NamedTuple):
    """A job that a run enqueues together with the completion of its own job."""

    kind: str
    job: NewJob


class Enqueued(NamedTuple):
    """The result of an enqueue; if not ``created``, ``id`` is of the live job that holds the unique key."""

    id: UUID
    created: bool


def new_job_id() -> UUID:
    """Return a new UUIDv7: such ids rise with time, so that new rows share cached index pages."""
    return uuid_utils.compat.uuid7()


async def enqueue(
    database: Database,
    kind: str,
    job: NewJob,
    *,
    publish_after: float,
    statement: TextClause | None = None,
    more: Mapping[str, Any] = NO_MORE,
) -> Enqueued:
    """Insert a job in a transaction of its own, unless a live one holds its unique key.

    ``enqueue_terms`` passes a ``statement`` of its own, and ``more`` parameters for it.

    Raises:
        TransitionRefused: the key was taken and freed again three times in a row.
        DatabaseTimeout: no answer in time, perhaps because another transaction holds the key.
    """
    values = {**values_of(kind, job, publish_after), **more}
    asked = ENQUEUE if statement is None else statement
    waits, size = job.unique_key is not None, len(job.payload)
    for _ in range(TRIES):
        try:
            rows = await database.run_by_key(asked, values, size=size, waits=waits)
        except DatabaseTimeout as error:
            if not waits:
                raise
            held = f"unique key {shown(job.unique_key)} of kind {kind}"
            raise DatabaseTimeout(
                f"{error}: another transaction may hold {held}, or those of others"
            ) from None
        if rows:
            return Enqueued(*rows[0][:2])
        if more:
            await free_keys(database, kind, [job.unique_key])
    raise too_fast(kind, job)


async def enqueue_many(
    database: Database,
    kind: str,
    new: Sequence[NewJob],
    *,
    publish_after: float = 0.0,
    statement: TextClause | None = None,
    more: Mapping[str, Any] = NO_MORE,
) -> list[Enqueued]:
    """Insert jobs in one statement, like ``enqueue``, and return the results in order.

    Many jobs without unique keys that are due at once are inserted by COPY.
    """
    if not new:
        return []
    span = new[0].traceparent
    plain = all(
        job.unique_key is None and job.limit_key is None and job.delay == 0 and job.traceparent is span
        for job in new
    )
    if plain and statement is None and len(new) >= _LEAST_COPIED:
        later = await database.run(TIME_LATER, {"seconds": publish_after}) if publish_after else ()
        await database.copy_in(COPY_MANY, _lines(kind, new, *(row.time for row in later)))
        with no_collection():
            return [Enqueued(job.id, created=True) for job in new]
    found: dict[UUID, Enqueued] = {}
    values = {"kind": kind, "publish_after": publish_after, **more}
    asked = ENQUEUE_MANY if statement is None else statement
    waiting = new
    for _ in range(TRIES):
        inserted = await _insert(database, asked, waiting, values)
        found |= {job_id: Enqueued(job_id, True) for job_id in inserted}
        if waiting := [job for job in new if job.id not in found]:
            keys = {"kind": kind, "unique_keys": [job.unique_key for job in waiting]}
            by_key = LIVE_BY_KEY_TERMS if more else LIVE_BY_KEY
            holders = {row.unique_key: row.id for row in await database.run(by_key, keys)}
            for job in waiting:
                if job.unique_key in holders:
                    found[job.id] = Enqueued(holders[job.unique_key], created=False)
            waiting = [job for job in waiting if job.id not in found]
        if not waiting:
            return [found[job.id] for job in new]
        if more:
            await free_keys(database, kind, [job.unique_key for job in waiting])
    raise too_fast(kind, waiting[0])


def too_fast(kind: str, job: NewJob) -> TransitionRefused:
    """Return the error of an enqueue that had no row in its answer for too many times."""
    return TransitionRefused(
        f"unique key {job.unique_key!r} of kind {kind} is taken and freed too fast; try again"
    )


def values_of(kind: str, job: NewJob, publish_after: float) -> dict[str, Any]:
    """Return the parameters of ENQUEUE."""
    values = {"kind": kind, "publish_after": publish_after, **job._asdict()}
    del values["terms"]
    return values


async def _insert(
    database: Database, statement: TextClause, new: Sequence[NewJob], values: Mapping[str, Any]
) -> list[UUID]:
    waits = any(job.unique_key is not None for job in new)
    # Statements with many keys may wait for long, so they do not use the pool of statements by key.
    run = database.run_by_key if len(new) < _LEAST_COPIED else database.run
    rows = await run(statement, {**values, **arrays_of(new)}, size=size_of(new), waits=waits)
    return [row[0] for row in rows]


def arrays_of(new: Sequence[NewJob]) -> dict[str, Any]:
    """Return the parameters of ENQUEUE_MANY that are arrays."""
    columns = [list(column) for column in zip(*new, strict=True)]
    arrays: dict[str, Any] = dict(zip(_ARRAYS, columns[: len(_ARRAYS)], strict=True))
    arrays["ids"] = uuid_array(arrays["ids"])
    return arrays


def size_of(new: Iterable[NewJob]) -> int:
    """Return about how many bytes the rows of jobs take, for ``Database.run``."""
    return sum(len(job.payload) + _ROW_BYTES for job in new)


def _lines(kind: str, new: Sequence[NewJob], publish_after: str = "now") -> str:
    """Return a line of COPY's text format for each job; all jobs of a call have the same span."""
    span = f"{field_of_copy(new[0].traceparent)}\t{field_of_copy(new[0].tracestate)}"
    tail = f"{span}\tqueued\tnow\t1\tt\t{publish_after}\tnow\n"
    return "".join(
        [
            f"{job.id.hex}\t{kind}\t{field_of_copy(job.payload)}\t{field_of_copy(job.max_attempts)}\t"
            f"{field_of_copy(job.max_stalls)}\t{job.priority}\t{tail}"
            for job in new
        ]
    )


def field_of_copy(value: str | int | None) -> str:
    """Return a value escaped for COPY's text format."""
    if value is None:
        return r"\N"
    text = str(value).replace("\\", r"\\")  # first, so that later escapes are not escaped again
    return text.replace("\t", r"\t").replace("\n", r"\n").replace("\r", r"\r")
