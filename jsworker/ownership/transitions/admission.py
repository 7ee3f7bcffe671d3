"""Admission: CLAIM for jobs with limits, rates or pauses, HOLD for those that do not fit, and WAKE.

Each is one transaction of two statements. The first locks the rows of the keys; the second counts, because its
snapshot is newer than the locks. If one statement locked and counted, two claimers could both see the slot free.
There is no counter: an owned row itself is the slot, so every end of processing frees it.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.refusals import RowRefused, in_halves
from jsworker.ownership.statements import NOT_HELD, condition, filled, j, sql
from jsworker.ownership.transitions import hold
from jsworker.ownership.transitions.claim import PICKED, ClaimedJob, RunLimits, Taken, claimed_of
from jsworker.ownership.transitions.refused_rows import RefusedRows

MOST_KEYS: Final = 200
"""The most keys that one look returns."""
_MOST_WOKEN: Final = 1_000

waits_for_admission: Final = predicates.held_by("limit", "rate", "paused")
_may_begin: Final = sa.and_(predicates.may_begin, predicates.none_of_its_key_runs)
admissible: Final = sa.and_(sa.or_(predicates.queued, waits_for_admission), _may_begin)
"""Jobs that admission may claim: queued ones, and those that wait for a slot, a token or the end of a pause."""

waits_for_admission_indexed: Final = sa.and_(
    predicates.scheduled_indexed, j.c.held_by.in_(("limit", "rate", "paused"))
)
HELD: Final = condition(waits_for_admission_indexed)
_NOT_ASIDE: Final = condition(~predicates.set_aside("wake"))

# Locks the row of each key, in the order of the keys, and makes missing ones. The conflict locks the row even if
# nothing is written. The occasional write keeps used keys from being tidied away.
_LOCK = """
INSERT INTO jsworker.limits AS l (kind, key)
SELECT DISTINCT CAST(:kind AS text), k.key FROM (
  {keys}
) AS k(key) ORDER BY 2
ON CONFLICT (kind, key) DO UPDATE SET used_at = clock_timestamp()
  WHERE l.used_at < clock_timestamp() - interval '1 minute'
"""
_GIVEN_KEYS: Final = "SELECT unnest(CAST(:keys AS text[]))"
LOCK = filled(
    _LOCK,
    keys="""SELECT coalesce(j.limit_key, '') FROM jsworker.jobs AS j
  WHERE j.id = ANY(CAST(:ids AS uuid[])) AND {of_kind}
  UNION {given}""",
    of_kind=condition(predicates.of_kind),
    given=_GIVEN_KEYS,
)
LOCK_KEYS = filled(_LOCK, keys=_GIVEN_KEYS)

# How many jobs of each key may begin now. The bucket of a rate (GCRA) is stored as the instant at which it is full
# again: each job moves it by ``step``, at most ``per`` ahead; one that is further ahead gives no token until
# ``limits.BOUND_RATES`` has brought it back. Pauses subtract epochs, because older servers cannot subtract infinite
# times, which may have been written by hand.
STATE: Final = """
SELECT {row}.kind, {row}.key, x.paused, x.max_running, x.rate, x.per, x.running, r.step, r.full_at, r.tokens,
  CASE WHEN x.paused THEN 0 ELSE greatest(0, least(x.max_running - x.running, r.tokens, 1000000)) END AS jobs,
  CASE WHEN x.paused THEN 'paused' WHEN x.max_running - x.running <= coalesce(r.tokens, 0)
    OR r.tokens IS NULL THEN 'limit' ELSE 'rate' END AS held_by,
  CASE WHEN x.paused THEN extract(epoch FROM x.until) - extract(epoch FROM x.now)
    WHEN r.tokens < 1 OR x.max_running IS NULL OR r.tokens < x.max_running - x.running
      THEN extract(epoch FROM r.full_at - x.now) + (r.tokens + 1) * r.step - x.per END AS seconds
FROM ({keys}) AS k(kind, key)
LEFT JOIN jsworker.limits AS l ON l.kind = k.kind AND l.key = k.key{locked}
LEFT JOIN jsworker.limits AS d ON d.kind = k.kind AND d.key = ''
CROSS JOIN (SELECT clock_timestamp() AS now) AS c
CROSS JOIN LATERAL (
  SELECT c.now, coalesce(l.max_running, d.max_running) AS max_running,
    CASE WHEN l.rate IS NULL THEN d.rate ELSE l.rate END AS rate,
    CASE WHEN l.rate IS NULL THEN d.per ELSE l.per END AS per,
    {is_paused_l} OR {is_paused_d} AS paused,
    CASE WHEN ({is_paused_l} AND l.paused_until IS NULL) OR ({is_paused_d} AND d.paused_until IS NULL) THEN NULL
      ELSE greatest(l.paused_until, d.paused_until) END AS until
) AS v
CROSS JOIN LATERAL (
  SELECT v.*, CASE WHEN v.max_running IS NOT NULL THEN (
    SELECT count(*) FROM jsworker.jobs AS j WHERE j.status || '' = 'processing' AND j.limit_key IS NOT NULL
      AND j.kind = k.kind AND j.limit_key = k.key) END AS running
  OFFSET 0  -- counted once, however often it is named
) AS x
CROSS JOIN LATERAL (
  SELECT x.per / x.rate AS step,
    least(greatest(l.full_at, x.now), x.now + make_interval(secs => x.per)) AS full_at
) AS b
CROSS JOIN LATERAL (
  SELECT b.step, b.full_at,
    CAST(floor((x.per - extract(epoch FROM b.full_at - x.now)) / b.step + 1e-6) AS integer) AS tokens
) AS r"""


def _is_paused(alias: str) -> str:
    return (
        f"coalesce({alias}.paused_at IS NOT NULL AND"
        f" ({alias}.paused_until IS NULL OR {alias}.paused_until > c.now), false)"
    )


# A key whose row this same transaction has made or locked. A key of a job that came between the two statements is
# not: it has no state, and its jobs are neither claimed nor held.
_LOCKED: Final = " AND CAST(pg_current_xact_id() AS xid) IN (l.xmin, l.xmax)"


def state(keys: str, *, locked: bool = True) -> str:
    """Return the SQL of ``STATE`` for keys, given as SQL that returns pairs of kind and key.

    If not ``locked``, keys without a row are included, with the numbers of their kind.
    """
    found = STATE.replace("{locked}", _LOCKED if locked else "").replace("{row}", "l" if locked else "k")
    found = found.replace("{is_paused_l}", _is_paused("l")).replace("{is_paused_d}", _is_paused("d"))
    return found.replace("{keys}", keys)


def _assigned(values: Mapping[str, Any]) -> str:
    """Return the assignments of an UPDATE of ``jsworker.jobs AS j`` as SQL."""
    update = sql(sa.update(j).values(**values))
    return update.partition(" SET ")[2]


_PICKED = sa.table("picked", *(sa.column(each.name, each.type) for each in PICKED))
_stored_bytes = sql(sa.select(PICKED[2])).partition("SELECT ")[2].partition(" AS stored_bytes")[0]
_CLAIMED = sql(
    claimed_of(_PICKED, admissible, also={"limit_key": sa.func.coalesce(j.c.limit_key, ""), **NOT_HELD})
).removeprefix("WITH ")

# A held job keeps its turn: it comes before the job of a message if it was queued earlier. Locked rows are skipped:
# queued ones are claimed again, held ones are found by the next search.
ADMIT = filled(
    """
WITH asked AS MATERIALIZED (
  SELECT j.id, coalesce(j.limit_key, '') AS key, j.priority, j.queued_at FROM jsworker.jobs AS j
  WHERE j.id = ANY(CAST(:ids AS uuid[])) AND {queued} AND {may_begin} AND {of_kind}
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), state AS MATERIALIZED ({state}
), held AS MATERIALIZED (
  SELECT row.id, state.key, row.priority, row.queued_at FROM state CROSS JOIN LATERAL (
    SELECT j.id, j.priority, j.queued_at FROM jsworker.jobs AS j
    WHERE {held} AND {may_begin} AND {of_kind} AND j.limit_key = state.key
      AND j.id <> ALL(CAST(:besides AS uuid[])) AND {not_aside}
    ORDER BY j.priority, j.queued_at, j.id LIMIT least(state.jobs, CAST(:most_held AS integer))
    FOR NO KEY UPDATE OF j SKIP LOCKED
  ) AS row
), ranked AS MATERIALIZED (
  SELECT c.id, c.key, c.priority, c.queued_at, state.held_by,
    row_number() OVER (PARTITION BY c.key ORDER BY c.priority, c.queued_at, c.id) <= state.jobs AS fits
  FROM (SELECT * FROM asked UNION ALL SELECT * FROM held) AS c JOIN state ON state.key = c.key
), admitted AS MATERIALIZED (
  SELECT id, key FROM ranked WHERE fits ORDER BY priority, queued_at, id LIMIT CAST(:most AS integer)
), spent AS (
  UPDATE jsworker.limits AS l SET full_at = state.full_at + make_interval(secs => state.step * a.jobs)
  FROM (SELECT key, count(*) AS jobs FROM admitted GROUP BY key) AS a JOIN state ON state.key = a.key
  WHERE l.kind = :kind AND l.key = a.key AND state.step IS NOT NULL
), kept AS (
  UPDATE jsworker.jobs AS j SET {hold}
  FROM ranked WHERE j.id = ranked.id AND NOT ranked.fits AND {queued} AND {of_kind}
  RETURNING j.id, j.fencing_token, j.held_by, j.limit_key
), held_entry AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'held', CAST(:worker_id AS text), fencing_token, jsonb_build_object('held_by', held_by, 'key', limit_key) FROM kept
), picked AS MATERIALIZED (
  SELECT j.id, j.worker_id AS owner, {stored_bytes} AS stored_bytes
  FROM jsworker.jobs AS j JOIN admitted ON admitted.id = j.id
), {claimed}""",
    queued=condition(predicates.queued),
    may_begin=condition(_may_begin),
    of_kind=condition(predicates.of_kind),
    held=HELD,
    not_aside=_NOT_ASIDE,
    state=state(
        "SELECT CAST(:kind AS text), asked.key FROM asked UNION SELECT CAST(:kind AS text), unnest(CAST(:keys AS text[]))"
    ),
    hold=_assigned(
        hold.held_now(sa.literal_column("ranked.held_by")) | {"limit_key": sa.literal_column("ranked.key")}
    ),
    stored_bytes=_stored_bytes,
    claimed=_CLAIMED,
)

# Wakes as many jobs as there are free slots and tokens, in their order; one that is woken too many is held again.
WAKE = filled(
    """
WITH state AS MATERIALIZED ({state}
), due AS MATERIALIZED (
  SELECT row.id, row.held_by FROM state CROSS JOIN LATERAL (
    SELECT j.id, j.held_by FROM jsworker.jobs AS j
    WHERE {held} AND {of_kind} AND j.limit_key = state.key
      AND (CAST(:only AS uuid[]) IS NULL OR j.id = ANY(CAST(:only AS uuid[]))) AND {not_aside}
    ORDER BY j.priority, j.queued_at, j.id LIMIT least(state.jobs, {most})
    FOR NO KEY UPDATE OF j SKIP LOCKED
  ) AS row LIMIT {most}
), woken AS (
  UPDATE jsworker.jobs AS j SET {woken}
  FROM due WHERE j.id = due.id AND {waits}
  RETURNING j.id, j.fencing_token, due.held_by, j.limit_key
), woken_entry AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'woken', CAST(:worker_id AS text), fencing_token, jsonb_build_object('held_by', held_by, 'key', limit_key)
  FROM woken
)
SELECT id FROM woken
""",
    state=state("SELECT CAST(:kind AS text), unnest(CAST(:keys AS text[]))"),
    held=HELD,
    not_aside=_NOT_ASIDE,
    of_kind=condition(predicates.of_kind),
    waits=condition(waits_for_admission),
    woken=_assigned(hold.WOKEN),
    most=str(_MOST_WOKEN),
)

# Keys with held jobs, found by leaps through the index, from a place on. Held rows without a key, which no statement
# makes, are left out: they have no row of a key to be locked, until ``limits.tidy`` gives them the key of their kind.
_LEAP: Final = """leap AS (
  (SELECT j.kind, j.limit_key, 1 AS place FROM jsworker.jobs AS j
   WHERE {held} AND (j.kind, j.limit_key) > (CAST(:after_kind AS text), CAST(:after_key AS text))
   ORDER BY j.kind, j.limit_key LIMIT 1)
  UNION ALL
  SELECT next.kind, next.limit_key, leap.place + 1 FROM leap CROSS JOIN LATERAL (
    SELECT j.kind, j.limit_key FROM jsworker.jobs AS j
    WHERE {held} AND (j.kind, j.limit_key) > (leap.kind, leap.limit_key)
    ORDER BY j.kind, j.limit_key LIMIT 1
  ) AS next
  WHERE leap.place < {most}
)"""


def held_keys(most: int | str, *, which: str = "") -> str:
    """Return the SQL of ``leap``: up to ``most`` keys with held jobs, behind :after_kind and :after_key."""
    return _LEAP.replace("{held}", f"{HELD} AND j.limit_key IS NOT NULL{which}").replace("{most}", str(most))


# The state of these keys.
WAITING_KEYS = filled(
    """
WITH RECURSIVE {leap}
SELECT state.kind, state.key, state.jobs,
  CASE WHEN state.seconds < 1e9 THEN greatest(state.seconds, 0) END AS seconds, state.step
FROM ({state}) AS state
ORDER BY 1, 2
""",
    leap=held_keys(MOST_KEYS),
    state=state("SELECT leap.kind, leap.limit_key FROM leap", locked=False),
)


HELD_OF_KEYS = filled(
    """
SELECT row.id FROM unnest(CAST(:keys AS text[])) AS k(key) CROSS JOIN LATERAL (
  SELECT j.id FROM jsworker.jobs AS j
  WHERE {held} AND {of_kind} AND j.limit_key = k.key AND {not_aside} ORDER BY j.queued_at, j.id LIMIT 100
) AS row LIMIT {most}
""",
    held=HELD,
    of_kind=condition(predicates.of_kind),
    not_aside=_NOT_ASIDE,
    most=str(_MOST_WOKEN),
)


class WaitingKey(NamedTuple):
    """A key with held jobs: how many may begin now, and in how many ``seconds`` one more may.

    ``seconds`` None: only when a slot becomes free or an operator resumes the key. ``step``: seconds between
    two tokens of its rate.
    """

    kind: str
    key: str
    jobs: int
    seconds: float | None
    step: float | None


async def admit(
    database: Database,
    *,
    worker_id: str,
    kind: str,
    limits: RunLimits,
    ids: Sequence[UUID] = (),
    keys: Collection[str] = (),
    most: int | None = None,
    besides: Collection[UUID] = (),
) -> Taken:
    """Claim jobs within their limits: of ``ids``, and of the held jobs of their keys and of ``keys``.

    Jobs of ``ids`` that do not fit are held. The answer may have other jobs than ``ids``; else see ``claim``.

    Args:
        database: the database.
        worker_id, kind, limits: as for ``claim``.
        ids: queued jobs, whose messages have come.
        keys: further keys of which a slot or a token may be free.
        most: the most jobs to claim; None: as many as there are ``ids``.
        besides: jobs that this process runs or is claiming.
    """
    values = {"worker_id": worker_id, "kind": kind, **limits._asdict(), "besides": uuid_array(besides)}

    async def ask(most_held: int, batch: Sequence[UUID]) -> Sequence[Row]:
        given = {"ids": uuid_array(batch), "keys": list(keys)}
        wanted = len(batch) if most is None else most
        # Lock and sort no more held rows than can be claimed, even if a key has very many.
        room = {"most": wanted, "most_held": min(most_held, wanted)}
        return await database.run_by_key(ADMIT, values | given | room, first=LOCK)

    refused: Mapping[UUID, RowRefused] = {}
    try:
        rows = await ask(1_000_000, ids)
    except RowRefused:
        if not ids:
            raise
        # The refused row may be a held one. Without those, it must be among these.
        found, bad = await in_halves(ids, partial(ask, 0))
        rows, refused = found, dict(bad)
    return Taken([ClaimedJob._make(row) for row in rows], refused)


async def wake(
    database: Database,
    *,
    worker_id: str | None,
    kind: str,
    keys: Collection[str],
    refused_rows: RefusedRows | None = None,
) -> int:
    """Queue as many held jobs of the keys as may begin now, and return their number.

    Refused rows are set aside in ``refused_rows``; without it, one refused row refuses all.
    """
    values = {"worker_id": worker_id, "kind": kind, "keys": list(keys)}

    async def ask(only: Sequence[UUID] | None) -> Sequence[Row]:
        chosen = {"only": None if only is None else uuid_array(only)}
        return await database.run_by_key(WAKE, values | chosen, first=LOCK_KEYS)

    try:
        return len(await ask(None))
    except RowRefused:
        if refused_rows is None:
            raise
    found = await database.run(HELD_OF_KEYS, {"kind": kind, "keys": list(keys)})
    woken, refused = await in_halves([row.id for row in found], ask)
    await refused_rows.note("wake", refused)
    return len(woken)


async def waiting_keys(database: Database, *, after: tuple[str, str] = ("", "")) -> list[WaitingKey]:
    """Return at most ``MOST_KEYS`` keys with held jobs, in their order, behind ``after``."""
    values = {"after_kind": after[0], "after_key": after[1]}
    return [WaitingKey._make(row) for row in await database.run_along_index(WAITING_KEYS, values)]
