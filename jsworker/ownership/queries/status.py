"""The state of everything: how many jobs of each kind wait, run and fail, how fast, and the workers.

However many jobs there are, each count ends at a bound, along an index that holds only what is counted.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.predicates import queued_indexed
from jsworker.ownership.queries.job_report import UNPUBLISHED
from jsworker.ownership.statements import KINDS_BY_LEAPS, condition, filled
from jsworker.ownership.transitions.workers import IS_ALIVE

BOUND: Final = 10_000
"""Counting ends here: this number means at least as many."""
RATE_SECONDS: Final = 300.0
"""Rates are measured over the last so many seconds, or the last ``RATE_JOBS`` jobs if there were more."""
RATE_JOBS: Final = 2_000
_LEAST_RATE_SECONDS: Final = 0.2
"""The least time over which rates are measured: jobs that one transaction has written are no measure."""
_MOST_RUNNING: Final = 100_000
_FIRST_HELD: Final = 100
_LATE_SECONDS: Final = 5.0
_MOST_WORKERS: Final = 10_000
_MOST_PAUSED: Final = 20

_FIRST_KINDS: Final = """WITH RECURSIVE {kinds}
SELECT kind FROM kinds WHERE kind IS NOT NULL LIMIT :most"""
_BEHIND: Final = " AND j.kind > CAST(:after AS text)"


def _kinds(which: str) -> str:
    """Return SQL for the first kinds that have such jobs, found by leaps through an index."""
    leaps = KINDS_BY_LEAPS.replace("{queued}", which).replace("{which}", _BEHIND)
    return f"({_FIRST_KINDS.replace('{kinds}', leaps)})"


_QUEUED: Final = condition(queued_indexed)
_SCHEDULED: Final = "'' || j.status = 'scheduled'"
_ENDED_BADLY: Final = "'' || j.status IN ('failed', 'cancelled')"

KINDS = text(f"""
SELECT kind FROM (
  {_kinds(_QUEUED)} UNION {_kinds(_SCHEDULED)} UNION {_kinds(_ENDED_BADLY)}
  UNION (SELECT DISTINCT kind FROM (
    SELECT j.kind FROM jsworker.jobs AS j WHERE j.status || '' = 'processing'
    ORDER BY j.worker_id LIMIT {_MOST_RUNNING}) AS running)
  UNION (SELECT unnest(w.kinds) FROM jsworker.workers AS w WHERE {IS_ALIVE})
  UNION (SELECT unnest(CAST(:lately AS text[])))
) AS every WHERE kind > CAST(:after AS text) ORDER BY kind LIMIT :most
""")  # noqa: S608 -- constants

# In the order of the index, so that the index is read no further than to the bound.
_FEW: Final = """(SELECT count(*) FROM (
    SELECT FROM jsworker.jobs AS j WHERE {which} AND j.kind = k.kind ORDER BY {order} LIMIT {bound}) AS few)"""


def _count(which: str, order: str) -> str:
    return _FEW.replace("{which}", which).replace("{order}", order).replace("{bound}", str(BOUND))


# The last queued jobs first: after a flood the index still holds entries of jobs that wait no longer, and
# each such entry leads to its row.
COUNTS = text(f"""
SELECT k.kind, {_count(_QUEUED, "j.queued_at DESC")} AS queued,
  extract(epoch FROM statement_timestamp() - (
    SELECT j.queued_at FROM jsworker.jobs AS j WHERE {_QUEUED} AND j.kind = k.kind
    ORDER BY j.queued_at LIMIT 1)) AS oldest_seconds,
  {_count(f"{_SCHEDULED} AND j.run_at IS NOT NULL", "j.run_at")} AS scheduled,
  {_count(f"{_ENDED_BADLY} AND j.status = 'failed'", "j.id")} AS failed,
  {_count(f"{_ENDED_BADLY} AND j.status = 'cancelled'", "j.id")} AS cancelled
FROM unnest(CAST(:kinds AS text[])) AS k(kind)
""")  # noqa: S608 -- constants

_IS_HELD: Final = (
    "j.status || '' = 'scheduled' AND j.held_by IS NOT NULL AND j.held_by = why.held_by AND j.kind = k.kind"
)
# No index has ``held_at``: the oldest is looked for among the ``_FIRST_HELD`` jobs that were enqueued first.
HELD = text(f"""
SELECT k.kind, why.held_by, few.jobs,
  extract(epoch FROM statement_timestamp() - (SELECT min(first.held_at) FROM (
    SELECT j.held_at FROM jsworker.jobs AS j WHERE {_IS_HELD} ORDER BY j.id LIMIT {_FIRST_HELD}) AS first
  )) AS oldest_seconds
FROM unnest(CAST(:kinds AS text[])) AS k(kind)
CROSS JOIN unnest(CAST('{{limit,rate,paused,needs}}' AS text[])) AS why(held_by)
CROSS JOIN LATERAL (SELECT count(*) AS jobs FROM (
  SELECT FROM jsworker.jobs AS j WHERE {_IS_HELD} ORDER BY j.id LIMIT {BOUND}) AS held) AS few
WHERE few.jobs > 0
""")  # noqa: S608 -- constants

# In the order of the index, so that it is an index scan, which marks the entries of ended runs as dead: a
# bitmap scan would read the rows of all runs that ended since the last VACUUM, each time anew.
RUNNING = text(f"""
SELECT kind, count(*) AS jobs, extract(epoch FROM statement_timestamp() - min(claimed_at)) AS longest_seconds
FROM (SELECT j.kind, j.claimed_at FROM jsworker.jobs AS j WHERE j.status || '' = 'processing'
  ORDER BY j.worker_id LIMIT {_MOST_RUNNING}) AS running
GROUP BY kind
""")  # noqa: S608 -- constants

# The jobs that ended last, and those that were enqueued last; the ids are in the order of creation.
_RATES: Final = """
SELECT kind, status, count(*) AS jobs, sum(count(*)) OVER () AS all_jobs,
  extract(epoch FROM statement_timestamp() - min(min(at)) OVER ()) AS seconds
FROM ({last}) AS last WHERE at > statement_timestamp() - make_interval(secs => {seconds}) GROUP BY kind, status
"""
ENDED = filled(
    _RATES,
    last="SELECT j.kind, j.status, j.finished_at AS at FROM jsworker.jobs AS j"
    " WHERE j.status || '' NOT IN ('scheduled', 'queued', 'processing')"
    " ORDER BY j.finished_at DESC LIMIT {most}",
    most=str(RATE_JOBS),
    seconds=str(RATE_SECONDS),
)
ENQUEUED = filled(
    _RATES,
    last="SELECT j.kind, 'enqueued' AS status, j.created_at AS at FROM jsworker.jobs AS j"
    " ORDER BY j.id DESC LIMIT {most}",
    most=str(RATE_JOBS),
    seconds=str(RATE_SECONDS),
)

WORKERS = text(f"""
SELECT w.kinds, w.state, w.concurrency, {IS_ALIVE} AS alive,
  (SELECT count(*) FROM (SELECT FROM jsworker.jobs AS j
    WHERE j.worker_id = w.id AND j.status || '' = 'processing' LIMIT {BOUND}) AS few) AS processing
FROM jsworker.workers AS w WHERE w.state <> 'stopped' ORDER BY w.last_seen_at DESC LIMIT {_MOST_WORKERS}
""")  # noqa: S608 -- constants

OTHERS = text(f"""
SELECT (SELECT count(*) FROM (SELECT FROM jsworker.dead_messages LIMIT {BOUND}) AS few) AS dead_messages,
  (SELECT count(*) FROM (SELECT FROM jsworker.refused_rows LIMIT {BOUND}) AS few) AS refused_rows
""")  # noqa: S608 -- constants
PAUSED = text(f"""
SELECT l.kind, l.key, l.paused_at, l.paused_until, l.paused_by, l.reason FROM jsworker.limits AS l
WHERE l.paused_at IS NOT NULL AND (l.paused_until IS NULL OR l.paused_until > statement_timestamp())
ORDER BY l.key <> '', l.paused_at DESC LIMIT {_MOST_PAUSED}
""")  # noqa: S608 -- constants

SERVICES = text(f"""
SELECT k.kind,
  (SELECT l.paused_at FROM jsworker.limits AS l WHERE l.kind = k.kind AND l.key = ''
    AND (l.paused_until IS NULL OR l.paused_until > statement_timestamp())) AS paused_at,
  EXISTS (SELECT FROM jsworker.workers AS w
    WHERE {IS_ALIVE} AND w.state = 'running' AND k.kind = ANY(w.kinds)) AS is_served,
  EXISTS (SELECT FROM jsworker.workers AS w WHERE {IS_ALIVE} AND k.kind = ANY(w.kinds)) AS has_workers
FROM unnest(CAST(:kinds AS text[])) AS k(kind)
""")  # noqa: S608 -- a constant


class Service(NamedTuple):
    """What keeps jobs of a kind from beginning.

    Attributes:
        paused_at: since when the kind is paused; None: it is not.
        is_served: whether a live worker claims its jobs.
        has_workers: whether a live worker is for the kind, though it may be drained or ending.
    """

    paused_at: datetime | None
    is_served: bool
    has_workers: bool

    @property
    def unserved(self) -> str:
        """Why no worker claims jobs of the kind, in words; empty: one does."""
        if self.is_served:
            return ""
        if self.has_workers:
            return "every live worker for its kind is drained or ending"
        return "no live worker serves its kind"


@dataclass(slots=True)
class HeldJobs:
    """Jobs of a kind that wait for one event; ``oldest_seconds``: the longest wait of the first enqueued."""

    jobs: int
    oldest_seconds: float


@dataclass(slots=True)
class KindState:
    """The state of a kind. A number of jobs that is ``BOUND`` means at least as many.

    Attributes:
        queued, oldest_seconds: jobs that wait for a worker, and for how long the first; None: none waits.
        running, longest_seconds: jobs that workers hold, and for how long the first; None: none runs.
        scheduled: jobs that wait for a time.
        held: jobs that wait for an event, by ``limit``, ``rate``, ``paused`` or ``needs``.
        failed, cancelled: all that have not been pruned.
        per_minute: rates of the last minutes, by ``enqueued``, ``completed``, ``failed``, ``cancelled``.
        workers: live workers that serve the kind and claim jobs: neither drained nor ending.
    """

    kind: str
    queued: int = 0
    oldest_seconds: float | None = None
    running: int = 0
    longest_seconds: float | None = None
    scheduled: int = 0
    held: dict[str, HeldJobs] = field(default_factory=dict)
    failed: int = 0
    cancelled: int = 0
    per_minute: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("enqueued", "completed", "failed", "cancelled"), 0.0)
    )
    workers: int = 0


@dataclass(slots=True)
class WorkersState:
    """How many workers there are, and how many of the job slots of live workers hold a job.

    ``drained`` workers claim nothing, so their free slots are not counted. ``silent`` workers did not stop,
    but have sent no heartbeat for long: they were killed, or cannot reach PostgreSQL.
    """

    alive: int = 0
    drained: int = 0
    draining: int = 0
    silent: int = 0
    slots: int = 0
    busy: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused kind, or a paused key of one; ``until`` None: until it is resumed."""

    kind: str
    key: str
    since: datetime
    until: datetime | None
    by: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of everything; ``after``: the kind behind which the next page begins, None: there is none.

    ``unpublished``: jobs whose message is late. ``rate_seconds``: over how many seconds the rates of jobs
    that were ``enqueued`` and that ``ended`` were measured.
    """

    kinds: list[KindState]
    workers: WorkersState
    paused: list[Pause]
    unpublished: int
    unpublished_oldest_seconds: float
    dead_messages: int
    refused_rows: int
    rate_seconds: Mapping[str, float]
    after: str | None
    bound: int = BOUND


async def read_status(database: Database, *, limit: int, after: str | None = None) -> Status:
    """Return the state of at most ``limit`` kinds, in the order of their names, and of the workers."""
    enqueued = await database.run_along_index(ENQUEUED, {})
    ended = await database.run_along_index(ENDED, {})
    lately = list({row.kind for row in (*enqueued, *ended)})
    rows = await database.run_along_index(KINDS, {"most": limit + 1, "after": after or "", "lately": lately})
    named = [row.kind for row in rows[:limit]]
    kinds = {kind: KindState(kind) for kind in named}
    for row in await database.run_along_index(COUNTS, {"kinds": named}):
        kind = kinds[row.kind]
        kind.queued, kind.scheduled = row.queued, row.scheduled
        kind.failed, kind.cancelled = row.failed, row.cancelled
        kind.oldest_seconds = None if row.oldest_seconds is None else float(row.oldest_seconds)
    for row in await database.run_along_index(HELD, {"kinds": named}):
        kinds[row.kind].held[row.held_by] = HeldJobs(row.jobs, float(row.oldest_seconds))
    for row in await database.run_along_index(RUNNING, {}):
        if row.kind in kinds:
            kinds[row.kind].running = row.jobs
            kinds[row.kind].longest_seconds = float(row.longest_seconds)
    seconds = {"enqueued": _add_rates(kinds, enqueued), "ended": _add_rates(kinds, ended)}
    [late] = await database.run(UNPUBLISHED, {"older_than": _LATE_SECONDS})
    [others] = await database.run(OTHERS)
    return Status(
        kinds=list(kinds.values()),
        workers=_workers(kinds, await database.run(WORKERS)),
        paused=[Pause(*row) for row in await database.run(PAUSED)],
        unpublished=late.jobs,
        unpublished_oldest_seconds=float(late.oldest),
        dead_messages=others.dead_messages,
        refused_rows=others.refused_rows,
        rate_seconds=seconds,
        after=named[-1] if len(rows) > limit else None,
    )


async def services_of(database: Database, kinds: Collection[str]) -> dict[str, Service]:
    """Return for each kind whether its jobs can begin."""
    rows = await database.run(SERVICES, {"kinds": list(kinds)}) if kinds else []
    return {row.kind: Service(row.paused_at, row.is_served, row.has_workers) for row in rows}


async def service_of(database: Database, kind: str) -> Service:
    """Return whether jobs of a kind can begin."""
    return (await services_of(database, [kind]))[kind]


def _add_rates(kinds: Mapping[str, KindState], rows: Iterable[Any]) -> float:
    """Set the rates of each kind per minute, and return over how many seconds they were measured."""
    seconds = RATE_SECONDS
    for row in rows:
        if row.all_jobs >= RATE_JOBS:  # there were more, which were not read
            seconds = max(float(row.seconds), _LEAST_RATE_SECONDS)
        if row.kind in kinds:
            kinds[row.kind].per_minute[row.status] = row.jobs * 60 / seconds
    return seconds


def _workers(kinds: Mapping[str, KindState], rows: Iterable[Any]) -> WorkersState:
    found = WorkersState()
    for row in rows:
        if not row.alive:
            found.silent += 1
            continue
        found.alive += 1
        busy, claims = min(row.processing, row.concurrency), row.state == "running"
        found.drained += row.state == "drained"
        found.draining += row.state == "draining"
        found.slots += row.concurrency if claims else busy
        found.busy += busy
        for kind in row.kinds if claims else ():
            if kind in kinds:
                kinds[kind].workers += 1
    return found
