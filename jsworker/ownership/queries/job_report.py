"""What the tables show: which jobs wait and for what, which workers hold jobs, and what was left undone.

Each statement reads an index that holds only what it asks for, however many jobs have ended, and nearly every
count ends at a bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.schedule_rules import ON_TIME_SECONDS
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import in_lane_indexed, pause_holds, queued_indexed, refused
from jsworker.ownership.schema import HELD_BY
from jsworker.ownership.statements import KINDS_BY_LEAPS, condition, filled
from jsworker.ownership.transitions.admission import HELD, held_keys, state
from jsworker.ownership.transitions.workers import IS_ALIVE
from jsworker.ownership.transitions.workflows import HAS_LIVE_MEMBER

T = TypeVar("T")

Statement: TypeAlias = TextClause

BOUND: Final = 1_001
"""Counting ends here: this number means more than a thousand."""
MOST_QUEUES: Final = 100
"""The most kinds whose queues are read, besides the kinds that workers serve."""
MOST_SCHEDULED_KINDS: Final = 100
"""The most kinds whose schedules are read: those with the next due times."""
MOST_HELD_KEYS: Final = 1_000
"""The most keys with held jobs, and the most pauses, that are read."""
MOST_HELD: Final = 10_000
"""The most held jobs of one kind and reason that metrics count, which every worker does every ten seconds."""
_MOST_HELD_KINDS: Final = 1_000
MOST_MARKS: Final = 100_001
"""The most dead messages, and the most refused rows, that are counted."""
_MOST_OPEN: Final = 10_000
"""The most open batches, and the most open workflows, that are read: the oldest."""

# The predicates are those of the partial indexes, word for word. statement_timestamp() can be searched for in
# an index; clock_timestamp() would be compared with every row.
_LATE = """
SELECT count(*) AS jobs, coalesce(max(late.seconds), 0) AS oldest FROM (
  SELECT extract(epoch FROM statement_timestamp() - {due}) AS seconds FROM jsworker.jobs
  WHERE {which} AND {due} < statement_timestamp() - make_interval(secs => CAST(:older_than AS float))
    AND NOT EXISTS (
      SELECT FROM jsworker.refused_rows AS r WHERE r.job_id = jobs.id AND r.attempted IN ({attempted}))
  ORDER BY {due} LIMIT {bound}) AS late
""".replace("{bound}", str(BOUND))
UNPUBLISHED = filled(
    _LATE, due="publish_after", which="CAST(needs_publish AS integer) = 1", attempted="'publish', 'mark'"
)
OVERDUE = filled(_LATE, due="run_at", which="status || '' = 'scheduled'", attempted="'promote'")

QUEUED = filled(
    """
WITH RECURSIVE {kinds}, several AS (
  SELECT kind FROM (SELECT kind FROM kinds WHERE kind IS NOT NULL LIMIT {most}) AS first
  UNION SELECT unnest(CAST(:served AS text[]))
), queues AS MATERIALIZED (
SELECT k.kind,
  (SELECT count(*) FROM (
     SELECT FROM jsworker.jobs AS j WHERE j.status || '' = 'queued' AND j.kind = k.kind LIMIT {bound}) AS few) AS jobs,
  coalesce(extract(epoch FROM statement_timestamp() - (
    SELECT j.queued_at FROM jsworker.jobs AS j WHERE j.status || '' = 'queued' AND j.kind = k.kind
    ORDER BY j.queued_at LIMIT 1)), 0) AS oldest
FROM several AS k)
SELECT * FROM queues WHERE jobs > 0 ORDER BY kind
""",
    kinds=KINDS_BY_LEAPS.replace("{which}", ""),
    queued=condition(queued_indexed),
    most=str(MOST_QUEUES),
    bound=str(BOUND),
)

WORKERS = text(f"""
SELECT w.id, w.kinds, w.concurrency, w.version, w.state, {IS_ALIVE} AS alive,
  coalesce(w.kinds_without_timeout, '{{}}') AS kinds_without_timeout, w.limits
FROM jsworker.workers AS w ORDER BY w.last_seen_at DESC LIMIT 1000
""")  # noqa: S608 -- a constant

# A kind that all workers run with the same settings has one row. The column is read from the row as JSON, so
# that it is NULL on an older schema.
KIND_SETTINGS = text(f"""
SELECT kind.name, kind.settings, count(*) AS workers
FROM jsworker.workers AS w CROSS JOIN LATERAL (SELECT to_jsonb(w) -> 'kind_settings' AS document) AS stored
CROSS JOIN LATERAL jsonb_each(
  CASE WHEN jsonb_typeof(stored.document) = 'object' THEN stored.document END) AS kind(name, settings)
WHERE {IS_ALIVE} AND kind.name = ANY(CAST(:kinds AS text[]))
GROUP BY kind.name, kind.settings ORDER BY kind.name, workers DESC, kind.settings LIMIT 1000
""")  # noqa: S608 -- a constant

SCHEDULES = text(f"""
SELECT kind, (array_agg(name ORDER BY next_at, name))[1] AS next, count(*) AS schedules,
  count(*) FILTER (WHERE next_at < statement_timestamp() - interval '{ON_TIME_SECONDS} s') AS late,
  extract(epoch FROM statement_timestamp() - min(next_at)) AS seconds_late,
  (array_agg(name ORDER BY last_at DESC NULLS LAST, name))[1] AS furthest,
  count(*) FILTER (WHERE last_at > statement_timestamp() + interval '{ON_TIME_SECONDS} s') AS ahead,
  coalesce(extract(epoch FROM max(last_at)) - extract(epoch FROM statement_timestamp()), 0) AS seconds_ahead
FROM jsworker.schedules WHERE NOT paused GROUP BY kind ORDER BY min(next_at), kind LIMIT {MOST_SCHEDULED_KINDS}
""")  # noqa: S608 -- constants

# Keys with held jobs, with and without a row of their own, and pauses in force. Epochs are subtracted,
# because older servers cannot subtract infinite times, which somebody may have written by hand.
LIMITS = filled(
    """
WITH RECURSIVE {leap}, found AS MATERIALIZED (
  SELECT leap.kind, leap.limit_key AS key FROM leap
  UNION
  (SELECT l.kind, l.key FROM jsworker.limits AS l
   WHERE l.paused_at IS NOT NULL AND coalesce(l.paused_until > statement_timestamp(), true)
   ORDER BY l.key <> '' LIMIT {most})  -- kinds first: a pause of one stops the most
)
SELECT state.kind, state.key, state.jobs AS free, held.jobs AS held, held.seconds AS held_for,
  CASE WHEN coalesce(l.paused_until > statement_timestamp(), true)
    THEN extract(epoch FROM statement_timestamp()) - extract(epoch FROM l.paused_at) END AS paused_for,
  l.paused_by, l.reason,
  extract(epoch FROM statement_timestamp()) - extract(epoch FROM l.used_at) AS unused_for
FROM ({state}) AS state LEFT JOIN jsworker.limits AS l ON l.kind = state.kind AND l.key = state.key
CROSS JOIN LATERAL (
  SELECT count(*) AS jobs, extract(epoch FROM statement_timestamp() - min(few.held_at)) AS seconds FROM (
    SELECT j.held_at FROM jsworker.jobs AS j
    WHERE {held} AND j.kind = state.kind AND j.limit_key = state.key LIMIT {bound}) AS few
) AS held
ORDER BY held_for DESC NULLS LAST
""",
    leap=held_keys(MOST_HELD_KEYS),
    state=state("SELECT found.kind, found.key FROM found", locked=False),
    held=HELD,
    most=str(MOST_HELD_KEYS),
    bound=str(BOUND),
)

# What has been left undone for a minute, in which every worker's scan would have found it: finished batches
# that are not propagated, unfinished sealed batches without a live member, open workflows whose batches have
# all finished, and jobs that wait for needs but have no batch, or whose batch has no unfinished need.
LEFT_BATCHES = filled(
    """
WITH open AS MATERIALIZED (
  SELECT b.id, b.sealed, b.created_at FROM jsworker.batches AS b WHERE b.finished_at IS NULL ORDER BY b.id LIMIT {most}
)
SELECT (SELECT count(*) FROM (
    (SELECT FROM jsworker.batches AS b WHERE b.finished_at IS NOT NULL AND NOT b.propagated
       AND b.finished_at < {a_minute_ago} LIMIT 1000)
    UNION ALL
    (SELECT FROM open AS b WHERE b.sealed AND b.created_at < {a_minute_ago} AND NOT {has_live_member} AND NOT EXISTS (
         SELECT FROM jsworker.jobs AS j WHERE j.batch_id = b.id AND j.finished_at > {a_minute_ago}) LIMIT 1000)
  ) AS batches) AS batches,
  (SELECT count(*) FROM (SELECT FROM (
      SELECT w.id, w.created_at FROM jsworker.workflows AS w WHERE w.finished_at IS NULL ORDER BY w.id LIMIT {most}
     ) AS w WHERE w.created_at < {a_minute_ago} AND NOT EXISTS (
       SELECT FROM jsworker.batches AS b WHERE b.workflow = w.id
         AND (b.finished_at IS NULL OR b.finished_at > {a_minute_ago})) LIMIT 1000) AS workflows) AS workflows,
  (SELECT count(*) FROM (
    (SELECT FROM jsworker.jobs AS j WHERE {held_by_needs} AND j.batch_id IS NULL LIMIT 1000)
    UNION ALL
    (SELECT FROM open AS b CROSS JOIN LATERAL (
       SELECT FROM jsworker.jobs AS j WHERE j.batch_id = b.id AND {held_by_needs} LIMIT 1000) AS waiting
     WHERE NOT EXISTS (
       SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS need ON need.id = n.needs
       WHERE n.batch = b.id AND (
         need.finished_at IS NULL OR NOT need.propagated OR need.finished_at > {a_minute_ago})) LIMIT 1000)
   ) AS jobs) AS without_needs
""",
    has_live_member=HAS_LIVE_MEMBER,
    held_by_needs="j.held_by = 'needs' AND j.status || '' = 'scheduled' AND j.held_at < {a_minute_ago}",
    a_minute_ago="statement_timestamp() - interval '1 minute'",
    most=str(_MOST_OPEN),
)

# A worker without a row that still sends heartbeats registers itself again.
SILENT_OWNERS = text("""
SELECT held.worker_id, count(*) AS jobs, max(held.seconds) AS seconds_silent, w.id IS NOT NULL AS registered,
  bool_or(held.stale_after IS NULL) AS never_stale
FROM (
  SELECT worker_id, extract(epoch FROM stale_after) AS stale_after,
    extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_activity_at) AS seconds
  FROM jsworker.jobs WHERE status || '' = 'processing' LIMIT 10000) AS held
LEFT JOIN jsworker.workers AS w ON w.id = held.worker_id
WHERE held.seconds > CASE WHEN w.id IS NULL THEN 30 ELSE greatest(coalesce(held.stale_after, 300), 30) END
GROUP BY held.worker_id, w.id ORDER BY count(*) DESC, held.worker_id LIMIT 20
""")

INSTALLATION = text("SELECT (SELECT id FROM jsworker.installation) AS id")

DEAD_MESSAGES = text(f"""
SELECT count(*) AS messages, extract(epoch FROM statement_timestamp() - max(at)) AS newest
FROM (SELECT at FROM jsworker.dead_messages ORDER BY id DESC LIMIT {MOST_MARKS}) AS last
""")  # noqa: S608 -- a constant

REFUSED = text(f"""
SELECT attempted, sqlstate, constraint_name AS "constraint", count(*) AS jobs,
  (array_agg(job_id ORDER BY first_at))[1] AS job_id,
  extract(epoch FROM statement_timestamp() - min(first_at)) AS oldest
FROM (SELECT * FROM jsworker.refused_rows LIMIT {MOST_MARKS}) AS marks
GROUP BY attempted, sqlstate, constraint_name ORDER BY count(*) DESC, attempted LIMIT 20
""")  # noqa: S608 -- a constant

ENDED = filled(
    """
SELECT count(*) AS jobs, count(*) FILTER (WHERE last.status = 'failed') AS failed,
  extract(epoch FROM statement_timestamp() - min(last.finished_at)) AS within,
  extract(epoch FROM statement_timestamp() - (
    SELECT j.finished_at FROM jsworker.jobs AS j
    WHERE j.status || '' NOT IN ('scheduled', 'queued', 'processing') AND {may_be_pruned}
    ORDER BY j.finished_at LIMIT 1)) AS oldest
FROM (
  SELECT j.status, j.finished_at FROM jsworker.jobs AS j
  WHERE j.status || '' NOT IN ('scheduled', 'queued', 'processing') ORDER BY j.finished_at DESC LIMIT 1000) AS last
""",
    may_be_pruned=condition(~refused("prune")),
)

# Includes the kinds of stopped workers until their rows are deleted: these kinds are known, too.
SERVED = text("""
SELECT DISTINCT kind FROM (
  SELECT kinds FROM jsworker.workers ORDER BY last_seen_at DESC LIMIT 1000
) AS w CROSS JOIN LATERAL unnest(w.kinds) AS kind
WHERE kind IS NOT NULL AND kind <> ALL(CAST(:besides AS text[])) ORDER BY kind LIMIT :most
""")

_WAITING = {
    "queued": "status || '' = 'queued'",
    "scheduled": "status || '' = 'scheduled' AND run_at IS NOT NULL",  # the others are counted as held
    "processing": "status || '' = 'processing'",
    "outbox": "CAST(needs_publish AS integer) = 1",
}
# Epochs are subtracted, because older servers cannot subtract infinite times, and bounded by three centuries.
_BY_KIND = """
SELECT CASE WHEN kind = ANY(CAST(:kinds AS text[])) THEN kind END AS kind, '{what}' AS what, count(*) AS number,
  CAST(least(greatest(extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(queued_at)), 0), 1e10)
    AS double precision) AS oldest
FROM jsworker.jobs WHERE {which} GROUP BY 1
"""
# Bounded, because a foreign key may keep any number of ended jobs from being pruned, each with a refused row.
_OTHERS = """
SELECT attempted, 'refused rows', count(*), NULL
FROM (SELECT attempted FROM jsworker.refused_rows LIMIT 100000) AS r GROUP BY attempted
UNION ALL
SELECT NULL, 'dead messages', count(*), NULL FROM jsworker.dead_messages
"""
# The time held is that since the job was last held. Each kind's jobs are counted up to a bound: they may be
# held for weeks, and reading a million of them again and again would slow down all other statements.
_HELD = """
(WITH RECURSIVE held AS (
  (SELECT j.held_by, j.kind FROM jsworker.jobs AS j WHERE {is_held} ORDER BY j.held_by, j.kind LIMIT 1)
  UNION ALL
  SELECT next.held_by, next.kind FROM held CROSS JOIN LATERAL (
    SELECT j.held_by, j.kind FROM jsworker.jobs AS j
    WHERE {is_held} AND (j.held_by, j.kind) > (held.held_by, held.kind) ORDER BY j.held_by, j.kind LIMIT 1) AS next
)
SELECT CASE WHEN held.kind = ANY(CAST(:kinds AS text[])) THEN held.kind END AS kind, 'held by ' || held.held_by AS what,
  CAST(sum(counted.jobs) AS bigint) AS number,
  CAST(least(greatest(extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(counted.first)), 0), 1e10)
    AS double precision) AS oldest
FROM (SELECT * FROM held LIMIT {most_kinds}) AS held CROSS JOIN LATERAL (
  SELECT count(*) AS jobs, min(few.held_at) AS first FROM (
    SELECT j.held_at FROM jsworker.jobs AS j
    WHERE {is_held} AND j.held_by = held.held_by AND j.kind = held.kind
    ORDER BY j.id LIMIT {most}) AS few) AS counted
GROUP BY 1, 2)
"""
# Along an index without jobs of normal priority.
_LANES = """
SELECT CASE WHEN j.kind = ANY(CAST(:kinds AS text[])) THEN j.kind END AS kind,
  CASE j.priority WHEN 0 THEN 'high' ELSE 'low' END AS what, count(*) AS number,
  CAST(least(greatest(extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(j.queued_at)), 0), 1e10)
    AS double precision) AS oldest
FROM jsworker.jobs AS j WHERE {queued} AND {in_lane} GROUP BY 1, 2
"""
# For how long the first schedule of a kind has been due without being fired.
_SCHEDULES = """
SELECT CASE WHEN kind = ANY(CAST(:kinds AS text[])) THEN kind END AS kind, 'schedules' AS what, count(*) AS number,
  CAST(least(greatest(extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(next_at)), 0), 1e10)
    AS double precision) AS oldest
FROM jsworker.schedules WHERE NOT paused GROUP BY 1
"""
# Which of the kinds are paused: found by key, however many keys have limits.
_PAUSES = """
SELECT kind, 'paused', 1, NULL FROM jsworker.limits WHERE kind = ANY(CAST(:kinds AS text[])) AND key = '' AND {pause_holds}
"""
_IN_LANES = filled(_LANES, queued=condition(queued_indexed), in_lane=condition(in_lane_indexed)).text
_COUNTS = [filled(_BY_KIND, what=what, which=which).text for what, which in _WAITING.items()]
_HELD_OF_KINDS = filled(
    _HELD,
    is_held="j.status || '' = 'scheduled' AND j.held_by IS NOT NULL",
    most_kinds=str(_MOST_HELD_KINDS),
    most=str(MOST_HELD),
).text
_PAUSED = filled(_PAUSES, pause_holds=condition(pause_holds)).text
BACKLOG = text("UNION ALL".join([*_COUNTS, _HELD_OF_KINDS, _IN_LANES, _SCHEDULES, _PAUSED, _OTHERS]))

# For each kind the key that is nearest to its limit, and how many keys have reached theirs.
LIMIT_USE = text("""
WITH used AS MATERIALIZED (
  SELECT j.kind, j.limit_key AS key, count(*) AS running FROM jsworker.jobs AS j
  WHERE j.status || '' = 'processing' AND j.limit_key IS NOT NULL GROUP BY j.kind, j.limit_key
), keys AS (
  SELECT CASE WHEN k.kind = ANY(CAST(:kinds AS text[])) THEN k.kind END AS kind,
    coalesce(used.running, 0) AS running, coalesce(l.max_running, d.max_running) AS max_running
  FROM (SELECT kind, key FROM used UNION SELECT kind, key FROM jsworker.limits WHERE max_running IS NOT NULL) AS k
  LEFT JOIN used ON used.kind = k.kind AND used.key = k.key
  LEFT JOIN jsworker.limits AS l ON l.kind = k.kind AND l.key = k.key
  LEFT JOIN jsworker.limits AS d ON d.kind = k.kind AND d.key = ''
  WHERE coalesce(l.max_running, d.max_running) IS NOT NULL
)
SELECT DISTINCT ON (kind) kind, running, max_running,
  count(*) FILTER (WHERE running >= max_running) OVER (PARTITION BY kind) AS full_keys
FROM keys ORDER BY kind, CAST(running AS double precision) / max_running DESC
""")


class Late(NamedTuple):
    """Late jobs, counted up to ``BOUND``; ``oldest``: for how many seconds the first of them has been due."""

    jobs: int
    oldest: float


class QueuedKind(NamedTuple):
    """Jobs of a kind that wait for a worker, counted up to ``BOUND``; ``oldest`` in seconds."""

    kind: str
    jobs: int
    oldest: float


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """A worker's row; ``alive``: see ``list_workers``.

    ``limits``: for each kind the limits that its class declares, see ``WorkerRow``; None: an older worker.
    """

    id: str
    kinds: Sequence[str]
    concurrency: int
    version: str
    state: str
    alive: bool
    kinds_without_timeout: Sequence[str] = ()
    limits: Mapping[str, Mapping[str, Any]] | None = None


def declared_limit(limits: Any, kind: str) -> Mapping[str, Any]:
    """Return the limit of a kind in the ``limits`` of a worker's row, which may be any JSON; else an empty one."""
    found = limits.get(kind) if isinstance(limits, dict) else None
    return found if isinstance(found, dict) else {}


class SilentOwner(NamedTuple):
    """A silent worker that holds running jobs; ``never_stale``: some of these have no stale time-out."""

    worker_id: str
    jobs: int
    seconds_silent: float
    registered: bool
    never_stale: bool


class RefusalGroup(NamedTuple):
    """Jobs set aside because PostgreSQL refuses a transition for one reason, first ``oldest`` seconds ago."""

    attempted: str
    sqlstate: str
    constraint: str | None
    jobs: int
    job_id: UUID
    oldest: float


class SchedulesOfKind(NamedTuple):
    """The schedules of a kind that are not paused: the next one, how many there are, and how many are late.

    ``seconds_late``: for how many seconds the next one has been due; negative: it is not due. ``ahead`` of them had
    a job for a due time that is still to come, because the clock was ahead; that of ``furthest`` in ``seconds_ahead``.
    """

    kind: str
    next: str
    schedules: int
    late: int
    seconds_late: float
    furthest: str = ""
    ahead: int = 0
    seconds_ahead: float = 0.0


class KeyLimit(NamedTuple):
    """A kind or one of its keys: how many jobs may begin now, how many are held, for how long, and its pause.

    ``unused_for``: seconds since its last noted claim or wake (noted once a minute); None: it has no row.
    """

    kind: str
    key: str
    free: int
    held: int
    held_for: float | None
    paused_for: float | None = None
    paused_by: str | None = None
    reason: str | None = None
    unused_for: float | None = None


class LeftBatches(NamedTuple):
    """Batches and workflows left unfinished for a minute, and jobs that wait for needs that are not open."""

    batches: int
    workflows: int
    without_needs: int


class EndedSample(NamedTuple):
    """The jobs that ended last, and the seconds ``within`` which they did.

    ``oldest``: how many seconds ago the first of all ended jobs ended, without those that PostgreSQL refuses
    to delete.
    """

    jobs: int
    failed: int
    within: float | None
    oldest: float | None


class DeadMessages(NamedTuple):
    """Messages that no worker could use; ``newest``: seconds since the last one, None: there are none."""

    messages: int
    newest: float | None


class LimitUse(NamedTuple):
    """A kind's key that is nearest to its limit: jobs that run, and may run; and how many keys are full."""

    running: int
    max_running: int
    full_keys: int


@dataclass(slots=True)
class Waiting:
    """One kind's live jobs by status, queued jobs whose message is still to be sent, and held jobs by reason.

    The ``oldest`` figures are the seconds for which the first of them has been queued, or held; 0: there are
    none. ``lanes``: how many queued jobs are of high and of low priority, and the age of the oldest, where
    there are any. ``limit``: None: the kind has none. ``schedule_lag_seconds``: for how long the first of its
    schedules has been due, 0: none is due, None: it has no schedule. ``is_paused``: the whole kind is, not only a key.
    """

    jobs: dict[str, int] = field(default_factory=lambda: {"scheduled": 0, "queued": 0, "processing": 0})
    oldest_seconds: float = 0.0
    to_publish: int = 0
    to_publish_oldest_seconds: float = 0.0
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HELD_BY, 0))
    held_oldest_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HELD_BY, 0.0))
    lanes: dict[str, tuple[int, float]] = field(default_factory=dict)
    limit: LimitUse | None = None
    schedule_lag_seconds: float | None = None
    is_paused: bool = False


class Backlog(NamedTuple):
    """What waits in the whole table.

    Attributes:
        kinds: what waits of each kind: the kinds asked for and those of other workers, even without a job.
        others: all other kinds together; None: they have no live jobs.
        refused_rows: jobs that are set aside because PostgreSQL refuses their row, by what was attempted.
    """

    kinds: dict[str, Waiting]
    others: Waiting | None
    dead_messages: int
    refused_rows: dict[str, int]


async def served(database: Database, *, besides: Sequence[str], most: int) -> list[str]:
    """Return up to ``most`` further kinds of all workers that are registered, in the order of their names."""
    return [row.kind for row in await database.run(SERVED, {"besides": list(besides), "most": most})]


async def backlog(database: Database, kinds: Sequence[str], *, most: int) -> Backlog:
    """Return what waits, by kind for up to ``most`` kinds: these first, then those of other workers."""
    named = list(kinds[:most])
    if len(named) < most:
        named += await served(database, besides=named, most=most - len(named))
    found: dict[Any, Waiting] = {kind: Waiting() for kind in named}
    dead_messages = 0
    refused_rows: dict[str, int] = {}
    for row in await database.run_along_index(BACKLOG, {"kinds": named}):
        match row.what:
            case "dead messages":
                dead_messages = row.number
            case "refused rows":
                refused_rows[row.kind] = row.number
            case "outbox":
                waiting = found.setdefault(row.kind, Waiting())
                waiting.to_publish, waiting.to_publish_oldest_seconds = row.number, row.oldest
            case what if what.startswith("held by "):
                waiting, why = found.setdefault(row.kind, Waiting()), what.removeprefix("held by ")
                waiting.held[why], waiting.held_oldest_seconds[why] = row.number, row.oldest
                waiting.jobs["scheduled"] += row.number
            case "schedules":
                found.setdefault(row.kind, Waiting()).schedule_lag_seconds = row.oldest
            case "paused":
                found[row.kind].is_paused = True
            case "high" | "low" as priority:
                waiting = found.setdefault(row.kind, Waiting())
                waiting.lanes[priority] = row.number, row.oldest
            case status:
                waiting = found.setdefault(row.kind, Waiting())
                waiting.jobs[status] += row.number
                if status == "queued":
                    waiting.oldest_seconds = row.oldest
    for row in await database.run(LIMIT_USE, {"kinds": named}):
        found.setdefault(row.kind, Waiting()).limit = LimitUse(row.running, row.max_running, row.full_keys)
    others = found.pop(None, None)
    return Backlog(found, others, dead_messages, refused_rows)
