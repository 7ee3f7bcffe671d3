"""ENQUEUE for jobs with terms, for example a due time or an expiry; other jobs use ``enqueue``."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import TextClause, and_, text

from jsworker.ownership.database import Database
from jsworker.ownership.predicates import live, may_begin, never_claimed, scheduled, waiting
from jsworker.ownership.statements import condition, filled, j
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import COLUMNS, KEY, OF_ONE, Enqueued, JobTerms, NewJob, values_of

# The present time is read once for each row, so that all columns agree on whether the job is due.
_PRESENT: Final = "(SELECT clock_timestamp() AS now) AS n"
_DUE: Final = """
    CASE WHEN d.run_at <= n.now THEN 'queued' ELSE 'scheduled' END, d.run_at,
    CASE WHEN d.run_at <= n.now THEN 1 ELSE 0 END, d.run_at <= n.now,
    CASE WHEN d.run_at <= n.now THEN n.now + make_interval(secs => CAST(:publish_after AS double precision)) END,
    CASE WHEN d.run_at <= n.now THEN n.now END,
    n.now + make_interval(secs => CAST(:expires_in AS double precision))"""
_INSTANT: Final = "LATERAL (SELECT coalesce(CAST(:run_at AS timestamptz), n.now + make_interval(secs => {delay}))) AS d(run_at)"
_parts: Final = {"columns": f"{COLUMNS}, expires_at", "due": _DUE}
_instant: Final = _INSTANT.format(delay="CAST(:delay AS double precision)")
_one: Final = _parts | {"source": f"{_PRESENT}, {_instant}"}
# Where ON CONFLICT names another index than that of the ids: the statement may be executed again after its commit.
_IS_NEW: Final = "NOT EXISTS (SELECT FROM jsworker.jobs AS same WHERE same.id = CAST(:id AS uuid))"

# A job that expired before it began no longer holds its key, although the index still has it: then no row.
_holds_its_key: Final = and_(live, may_begin)
ENQUEUE_TERMS = filled(
    enqueue.ONE_OF_A_KEY,
    of_one=OF_ONE,
    live_key=KEY,
    key="unique_key",
    holder=condition(_holds_its_key),
    more="",
    **_one,
)

# For a key of which one job may wait while another one runs.
ENQUEUE_WAITING = filled(
    enqueue.ONE_OF_A_KEY,
    of_one=OF_ONE,
    live_key="NULL",
    key="waiting_key",
    holder=condition(and_(waiting, may_begin)),
    more=f", {KEY}",
    **_one | {"columns": f"{COLUMNS}, expires_at, waiting_key"},
)

# One job in a window, also after it has ended, and for as long as it lives. The statement that takes the window
# inserts the job; concurrent ones wait for the window's row and find it taken. Their snapshot still has the old row
# of a window taken meanwhile, so they have no row in their answer. It lacks the job of that window, too: whether that
# lives is known only of the job that the snapshot's own row names. A window that was taken by a transaction which was
# rolled back begins after the wait for it; the first one of a key does not: its row is computed before the wait.
_IN_THE_WINDOW: Final = (
    f"EXISTS (SELECT FROM jsworker.jobs AS j WHERE j.id = w.job_id AND {condition(_holds_its_key)})"
)
_AS_SEEN: Final = """EXISTS (
  SELECT FROM jsworker.unique_windows AS seen
  WHERE seen.kind = w.kind AND seen.key = w.key AND seen.job_id = w.job_id)"""
_UNTIL: Final = "clock_timestamp() + make_interval(secs => CAST(:unique_for AS double precision))"
ENQUEUE_WINDOW = filled(
    """
WITH taken AS (
  INSERT INTO jsworker.unique_windows AS w (kind, key, job_id, until)
  SELECT CAST(:kind AS text), {key}, CAST(:id AS uuid), {until}
  WHERE {is_new}
  ON CONFLICT (kind, key) DO UPDATE SET job_id = excluded.job_id, until = {until}
  WHERE w.until <= clock_timestamp() AND {as_seen} AND NOT {job_lives}
  RETURNING w.job_id
), created AS (
  INSERT INTO jsworker.jobs ({columns}){of_one}, taken
  RETURNING id, dispatch
)
SELECT id, true AS created, dispatch FROM created
UNION ALL
SELECT w.job_id, false, 0 FROM jsworker.unique_windows AS w
WHERE w.kind = :kind AND w.key = :unique_key AND (w.until > clock_timestamp() OR {job_lives})
  AND NOT EXISTS (SELECT FROM created)
""",
    of_one=OF_ONE,
    live_key="NULL",
    key=KEY,
    until=_UNTIL,
    is_new=_IS_NEW,
    job_lives=_IN_THE_WINDOW,
    as_seen=_AS_SEEN,
    more="",
    **_one,
)
# Page by page: the windows of any number of jobs that still wait may have ended, and stay.
ENDED_WINDOWS = text("""
SELECT w.until, w.kind, w.key FROM jsworker.unique_windows AS w
WHERE w.until <= statement_timestamp() AND w.until >= CAST(:until AS timestamptz)
  AND (w.until, w.kind, w.key) > (CAST(:until AS timestamptz), CAST(:kind AS text), CAST(:key AS text))
ORDER BY w.until, w.kind, w.key LIMIT :limit
""")
FORGET_WINDOWS = filled(
    """
DELETE FROM jsworker.unique_windows AS w WHERE w.until <= clock_timestamp() AND w.ctid = ANY(ARRAY(
  SELECT over.place FROM unnest(CAST(:kinds AS text[]), CAST(:keys AS text[])) AS ended(kind, key), LATERAL (
    SELECT w.ctid AS place FROM jsworker.unique_windows AS w
    WHERE (w.kind, w.key) = (ended.kind, ended.key) AND w.until <= statement_timestamp()
      AND {as_seen} AND NOT {job_lives}
    FOR UPDATE SKIP LOCKED) AS over))
RETURNING w.job_id
""",
    job_lives=_IN_THE_WINDOW,
    as_seen=_AS_SEEN,
)

# The waiting job of the key takes the new payload; not ``excluded.payload``, which needs the right to read it. DO
# UPDATE locks the row until the producer commits: the row has no owner, and claims and promotions skip locked rows.
# A job that is due, was claimed before, or waits behind another one keeps its time. Held jobs are found by their key.
# The steps of the old payload are deleted with it, as the snapshot has them: if a run has ended since then, there
# may be more steps, so then there is no row in the answer.
DEBOUNCE = filled(
    """
WITH debounced AS (
  INSERT INTO jsworker.jobs AS j ({columns}, waiting_key, debounce_until){of_one}
  WHERE {is_new}
  ON CONFLICT (kind, waiting_key) WHERE waiting_key IS NOT NULL AND status IN ('scheduled', 'queued')
  DO UPDATE SET payload = CAST(:payload AS jsonb), checkpoint = NULL,
    limit_key = CASE WHEN j.held_by IS NULL THEN CAST(:limit_key AS text) ELSE coalesce(CAST(:limit_key AS text), '') END,
    run_at = j.run_at + CASE WHEN {moves}
      THEN greatest(least(excluded.run_at, j.debounce_until) - j.run_at, interval '0') ELSE interval '0' END,
    debounce_until = coalesce(j.debounce_until, excluded.debounce_until),
    expires_at = CASE WHEN {never_claimed} THEN excluded.expires_at ELSE j.expires_at END
  WHERE {never_claimed} OR EXISTS (
    SELECT FROM jsworker.jobs AS o WHERE o.id = j.id AND o.fencing_token = j.fencing_token AND {waited})
  RETURNING j.id, j.id = CAST(:id AS uuid) AS created, j.dispatch
), forgotten AS (
  DELETE FROM jsworker.job_steps AS s USING debounced WHERE s.job_id = debounced.id AND NOT debounced.created
)
SELECT id, created, dispatch FROM debounced
UNION ALL
SELECT j.id, false, j.dispatch FROM jsworker.jobs AS j
WHERE j.id = CAST(:id AS uuid) AND {waiting} AND NOT EXISTS (SELECT FROM debounced)
""",
    of_one=OF_ONE,
    live_key="NULL",
    is_new=_IS_NEW,
    waiting=condition(waiting),
    moves=condition(and_(scheduled, never_claimed, j.c.behind.is_(None))),
    never_claimed=condition(never_claimed),
    waited=condition(waiting).replace("j.", "o."),
    more=f", {KEY}, n.now + make_interval(secs => CAST(:debounce_max AS double precision))",
    **_one,
)
_ENQUEUE: Final = {
    "live": ENQUEUE_TERMS,
    "waiting": ENQUEUE_WAITING,
    "window": ENQUEUE_WINDOW,
    "debounce": DEBOUNCE,
}

ENQUEUE_MANY_TERMS = filled(
    enqueue.MANY,
    source=f"{_PRESENT}, input, {_INSTANT.format(delay='input.delay')}\nORDER BY unique_key, place",
    **_parts,
)


def values_of_terms(terms: JobTerms) -> dict[str, Any]:
    """Return the parameters that only these statements have."""
    more: dict[str, Any] = {"run_at": terms.run_at, "expires_in": terms.expires_in}
    if terms.unique_for is not None:
        more["unique_for"] = terms.unique_for
    if terms.debounce is not None:
        more |= {"delay": terms.debounce, "debounce_max": terms.debounce_max}
    return more


def statement_for(kind: str, job: NewJob) -> TextClause:
    """Return the statement that enqueues a job in any transaction; if it returns no row, execute it again.

    For a key that an expired job still holds, it returns no row until a worker has cancelled that job.
    """
    statement, values = unbound_statement_for(kind, job)
    return statement.bindparams(**values)


def unbound_statement_for(kind: str, job: NewJob) -> tuple[TextClause, dict[str, Any]]:
    """Return that statement without bound parameters, and the parameters."""
    values = values_of(kind, job, 0.0)
    if job.terms is None:
        return enqueue.ENQUEUE, values
    return _ENQUEUE[job.terms.scope], {**values, **values_of_terms(job.terms)}


async def enqueue_one(database: Database, kind: str, job: NewJob, *, publish_after: float) -> Enqueued:
    """Insert a job like ``enqueue.enqueue``, with the statement for its terms."""
    if job.terms is None:
        return await enqueue.enqueue(database, kind, job, publish_after=publish_after)
    statement = _ENQUEUE[job.terms.scope]
    return await enqueue.enqueue(
        database, kind, job, publish_after=publish_after, statement=statement, more=values_of_terms(job.terms)
    )


async def enqueue_many(
    database: Database, kind: str, new: Sequence[NewJob], *, publish_after: float = 0.0
) -> list[Enqueued]:
    """Insert jobs like ``enqueue.enqueue_many``; those with another scope than ``live`` one by one.

    Messages of jobs with terms are due at once, independent of ``publish_after``.
    """
    if all(job.terms is None for job in new):
        return await enqueue.enqueue_many(database, kind, new, publish_after=publish_after)
    terms = new[0].terms
    if terms is None or any(job.terms != terms or terms.scope != "live" for job in new):
        return [await enqueue_one(database, kind, job, publish_after=0.0) for job in new]
    return await enqueue.enqueue_many(
        database, kind, new, statement=ENQUEUE_MANY_TERMS, more=values_of_terms(terms)
    )


class WindowPlace(NamedTuple):
    """A place among the windows, in the order in which they end."""

    until: datetime
    kind: str
    key: str


FIRST_WINDOW: Final = WindowPlace(datetime.min.replace(tzinfo=UTC), "", "")


async def forget_windows(
    database: Database, *, behind: WindowPlace = FIRST_WINDOW, limit: int
) -> tuple[int, WindowPlace | None]:
    """Look at ``limit`` windows that have ended, and delete those whose jobs have ended, too.

    Returns how many were deleted, and behind which one to go on; None: all were looked at.
    """
    rows = await database.run(ENDED_WINDOWS, {**behind._asdict(), "limit": limit})
    if not rows:
        return 0, None
    ended = [WindowPlace(*row) for row in rows]
    values = {"kinds": [each.kind for each in ended], "keys": [each.key for each in ended]}
    forgotten = await database.run(FORGET_WINDOWS, values)
    return len(forgotten), ended[-1] if len(ended) == limit else None
