"""How limits, rates and pauses are written and read; what they admit is decided in ``admission``."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import has_no_limit_key, mine, of_kind, pause_holds, processing_indexed
from jsworker.ownership.schema import limits
from jsworker.ownership.statements import NOW, compiled, filled, given, given_seconds, j
from jsworker.ownership.transitions.admission import (
    held_keys,
    state,
    waits_for_admission,
    waits_for_admission_indexed,
)
from jsworker.ownership.transitions.audit import AuditEntry, run_noted
from jsworker.ownership.transitions.heartbeat import Held, by_owner

_numbers: Final = {
    "max_running": given("max_running", sa.Integer),
    "rate": given("rate", sa.Integer),
    "per": given("per", sa.Double),
}
_kind, _key = given("kind", sa.Text), given("key", sa.Text)
_is_it: Final = sa.and_(limits.c.kind == _kind, limits.c.key == _key)
_new = insert(limits)


def _write(set_by: str) -> sa.TextClause:
    new = _new.values(kind=_kind, key=_key, set_by=set_by, **_numbers)
    written = {name: new.excluded[name] for name in (*_numbers, "set_by")}
    is_same = sa.and_(*(limits.c[name].is_not_distinct_from(new.excluded[name]) for name in written))
    may = limits.c.set_by.is_distinct_from("operator") if set_by == "code" else sa.true()
    changed = new.on_conflict_do_update(
        index_elements=[limits.c.kind, limits.c.key], set_=written, where=sa.and_(may, ~is_same)
    )
    return compiled(changed.returning(limits.c.kind))


# The code's numbers, unless an operator has set some; the worker that started last wins.
WRITE_CODE = _write("code")
WRITE_OPERATOR = _write("operator")

_NOTHING: Final = dict.fromkeys(("max_running", "rate", "per", "set_by"), sa.null())
# Removes the numbers of kinds whose code no longer sets any.
FORGET = compiled(
    sa.update(limits)
    .values(**_NOTHING)
    .where(limits.c.kind == sa.any_(given("kinds", sa.ARRAY(sa.Text))), limits.c.set_by == "code")
    .returning(limits.c.kind)
)
RESET = compiled(
    sa.update(limits).values(**_NOTHING).where(_is_it, limits.c.set_by == "operator").returning(limits.c.kind)
)

# A bucket that is full again later than a whole period from now gives no token until then: its period was longer
# before, or the clock was ahead. From here on it is empty, and fills as any other.
BOUND_RATES = sa.text("""
UPDATE jsworker.limits AS l SET full_at = statement_timestamp() + make_interval(secs => bound.per)
FROM (
  SELECT k.kind, k.key, n.per FROM jsworker.limits AS k
  LEFT JOIN jsworker.limits AS d ON d.kind = k.kind AND d.key = ''
  CROSS JOIN LATERAL (SELECT CASE WHEN k.rate IS NULL THEN d.per ELSE k.per END AS per) AS n
  WHERE k.full_at > statement_timestamp() + make_interval(secs => n.per)
  ORDER BY k.kind, k.key FOR NO KEY UPDATE OF k SKIP LOCKED) AS bound
WHERE l.kind = bound.kind AND l.key = bound.key
""")

# Runs that were claimed before their kind had a limit take slots too.
_uncounted = sa.and_(processing_indexed, has_no_limit_key, of_kind)
_free = sa.select(j.c.id).where(_uncounted).with_for_update(key_share=True, skip_locked=True).cte("free")
_counted = (
    sa.update(j).values(limit_key="").where(j.c.id == _free.c.id, _uncounted).returning(j.c.id).cte("counted")
)
# Skips rows that others have locked, and returns one of these if there is any.
COUNT_RUNNING = compiled(
    sa.select(j.c.id).where(_uncounted, j.c.id.not_in(sa.select(_counted.c.id))).limit(1)
)


# A role that enqueues or debounces can hold a job without a key, where no search of a key finds it.
_lost = sa.and_(waits_for_admission_indexed, has_no_limit_key)
_found = sa.select(j.c.id).where(_lost).limit(1_000).with_for_update(key_share=True, skip_locked=True)
_keyless = _found.cte("keyless")
GIVE_KEYS = compiled(
    sa.update(j)
    .values(limit_key="")
    .where(j.c.id == _keyless.c.id, waits_for_admission, has_no_limit_key)
    .returning(j.c.id)
)

_until = NOW + given_seconds("seconds")
_is_over: Final = limits.c.paused_until <= NOW
_paused = {
    "paused_at": sa.case((_is_over, NOW), else_=sa.func.coalesce(limits.c.paused_at, NOW)),
    "paused_until": _until,
    "paused_by": given("paused_by", sa.Text),
    "reason": given("reason", sa.Text),
}
PAUSE = compiled(
    _new.values(kind=_kind, key=_key, **_paused | {"paused_at": NOW})
    .on_conflict_do_update(index_elements=[limits.c.kind, limits.c.key], set_=_paused)
    .returning(limits.c.paused_until)
)
_new_pause = {"kind": _kind, "key": _key, **_paused, "paused_at": NOW}
_by_owner = sa.select(*_new_pause.values()).where(j.c.id == sa.bindparam("id"), mine(sa.bindparam("token")))
# The pause that a running job asks for, under its fence: it shortens no pause, and replaces no endless one.
PAUSE_FOR = compiled(
    insert(limits)
    .from_select(list(_new_pause), _by_owner)
    .on_conflict_do_update(
        index_elements=[limits.c.kind, limits.c.key],
        set_=_paused,
        where=sa.or_(limits.c.paused_at.is_(None), limits.c.paused_until < _until),
    )
    .returning(limits.c.kind)
)
# What else pauses jobs of a key: its kind; what else pauses those of a kind: keys of it.
_other = limits.alias("other")
_holds: Final = sa.and_(
    _other.c.kind == _kind,
    (_other.c.key == "") == (_key != ""),
    _other.c.paused_at.is_not(None),
    sa.or_(_other.c.paused_until.is_(None), _other.c.paused_until > NOW),
)
RESUME = compiled(
    sa.update(limits)
    .values(**dict.fromkeys(("paused_at", "paused_until", "paused_by", "reason"), sa.null()))
    .where(_is_it, limits.c.paused_at.is_not(None))
    .returning(sa.select(sa.func.count()).select_from(_other).where(_holds).scalar_subquery().label("pauses"))
)

# The pause of a kind or of one of its keys, unless it has ended.
PAUSED = compiled(
    sa.select(*limits.c["paused_at", "paused_until", "paused_by", "reason"]).where(_is_it, pause_holds)
)

# The numbers of a kind and, in the row after it, those of one of its keys, which override them.
NUMBERS = compiled(
    sa.select(limits.c.max_running, limits.c.rate, limits.c.per)
    .where(limits.c.kind == _kind, limits.c.key.in_(["", _key]))
    .order_by(limits.c.key)
)

_TIDIED_AT_ONCE: Final = 1_000

# Rows of keys unused for an hour without numbers, a pause, held jobs, or a rate of which a token is missing.
TIDY = sa.text("""
DELETE FROM jsworker.limits AS l WHERE l.ctid = ANY(ARRAY(
  SELECT t.ctid FROM jsworker.limits AS t
  WHERE t.key <> '' AND t.set_by IS NULL AND t.used_at < clock_timestamp() - interval '1 hour'
    AND coalesce(t.paused_until < clock_timestamp(), t.paused_at IS NULL)
    AND coalesce(t.full_at < clock_timestamp(), true)
    AND NOT EXISTS (
      SELECT FROM jsworker.jobs AS j WHERE j.status || '' = 'scheduled'
        AND j.held_by IN ('limit', 'rate', 'paused') AND j.kind = t.kind AND j.limit_key = t.key)
  LIMIT 1000 FOR UPDATE SKIP LOCKED))
RETURNING l.key
""")

# Most keys may be at rest: unless all are asked for, the state is counted only of those that can be listed.
LIST = filled(
    """
WITH RECURSIVE {leap}, used AS (
  SELECT l.kind, l.key FROM jsworker.limits AS l WHERE l.set_by IS NOT NULL OR l.paused_at IS NOT NULL
  UNION ALL
  SELECT leap.kind, leap.limit_key FROM leap
  UNION ALL
  SELECT j.kind, j.limit_key FROM jsworker.jobs AS j WHERE j.status || '' = 'processing' AND j.limit_key IS NOT NULL
)
SELECT l.kind, l.key, state.max_running, state.rate, state.per, l.set_by, state.running,
  nullif(state.jobs, 1000000) AS free,
  held.jobs AS held,
  held.oldest AS held_since, {paused}
FROM ({state}) AS state JOIN jsworker.limits AS l ON l.kind = state.kind AND l.key = state.key
CROSS JOIN LATERAL (
  SELECT count(*) AS jobs, min(few.held_at) AS oldest FROM (
    SELECT j.held_at FROM jsworker.jobs AS j
    WHERE j.status || '' = 'scheduled' AND j.held_by IN ('limit', 'rate', 'paused')
      AND j.kind = state.kind AND j.limit_key = state.key LIMIT 10001) AS few
) AS held
WHERE CAST(:all AS boolean) OR l.set_by IS NOT NULL OR held.jobs > 0 OR state.running > 0
  OR l.paused_at IS NOT NULL AND coalesce(l.paused_until > clock_timestamp(), true)
ORDER BY l.kind, l.key LIMIT :most
""",
    leap=held_keys(
        "CAST(:most AS integer)",
        which=" AND (CAST(:kinds AS text[]) IS NULL OR j.kind = ANY(CAST(:kinds AS text[])))",
    ),
    state=state(
        """SELECT every.kind, every.key FROM jsworker.limits AS every
  WHERE (CAST(:kinds AS text[]) IS NULL OR every.kind = ANY(CAST(:kinds AS text[])))
    AND (NOT CAST(:own AS boolean) OR every.key = '')
    AND (CAST(:all AS boolean) OR CAST(:own AS boolean) OR (every.kind, every.key) IN (SELECT used.kind, used.key FROM used))
    AND (every.kind, every.key) > (CAST(:after_kind AS text), CAST(:after_key AS text))""",
        locked=False,
    ),
    # A pause in the key's own row that has ended is not shown; a pause of its kind is in the kind's row.
    paused=", ".join(
        f"CASE WHEN l.paused_until <= clock_timestamp() THEN NULL ELSE l.{name} END AS {name}"
        for name in ("paused_at", "paused_until", "paused_by", "reason")
    ),
)
MOST_LISTED: Final = 10_000
"""The most limits that one call lists, and the most keys of a kind that are counted."""

# The keys of kinds that LIST would list.
COUNT_KEYS = sa.text(f"""
SELECT k.kind, (SELECT count(*) FROM (
  SELECT FROM jsworker.limits AS l LEFT JOIN jsworker.limits AS d ON d.kind = l.kind AND d.key = ''
  WHERE l.kind = k.kind AND l.key <> '' AND (l.set_by IS NOT NULL
    OR l.paused_at IS NOT NULL AND coalesce(l.paused_until > clock_timestamp(), true)
    OR EXISTS (SELECT FROM jsworker.jobs AS j WHERE j.status || '' = 'scheduled'
      AND j.held_by IN ('limit', 'rate', 'paused') AND j.kind = l.kind AND j.limit_key = l.key)
    OR coalesce(l.max_running, d.max_running) IS NOT NULL AND EXISTS (
      SELECT FROM jsworker.jobs AS j WHERE j.status || '' = 'processing' AND j.limit_key IS NOT NULL
        AND j.kind = l.kind AND j.limit_key = l.key))
  LIMIT {MOST_LISTED}) AS few) AS keys
FROM unnest(CAST(:kinds AS text[])) AS k(kind)
""")  # noqa: S608 -- a constant


class Numbers(NamedTuple):
    """At most ``max_running`` jobs run at once, and ``rate`` begin within ``per`` seconds; None: no limit."""

    max_running: int | None
    rate: int | None = None
    per: float | None = None


async def write_code(database: Database, new: dict[str, Numbers | None]) -> list[str]:
    """Write the numbers that the code of these kinds has, and return the kinds whose numbers were changed.

    For None, earlier numbers of the code are removed. Numbers that an operator has set stay.
    """
    changed: list[str] = []
    for kind, numbers in new.items():
        if numbers is not None and await database.run(
            WRITE_CODE, {"kind": kind, "key": "", **numbers._asdict()}
        ):
            changed.append(kind)
            await count_running(database, kind)
    if changed:
        await database.run(BOUND_RATES)
    without = [kind for kind, numbers in new.items() if numbers is None]
    if without:
        changed += [row.kind for row in await database.run(FORGET, {"kinds": without})]
    return changed


async def set_numbers(
    database: Database, kind: str, key: str, numbers: Numbers, *, entry: AuditEntry | None = None
) -> None:
    """Write an operator's numbers for a kind, or for one of its keys; they stay until they are reset."""
    await run_noted(database, WRITE_OPERATOR, {"kind": kind, "key": key, **numbers._asdict()}, entry)
    await database.run(BOUND_RATES)
    if not key:
        await count_running(database, kind)


async def numbers_of(database: Database, kind: str, key: str) -> Numbers:
    """Return the numbers that hold for a kind, or for one of its keys."""
    found = Numbers(None)
    for row in await database.run(NUMBERS, {"kind": kind, "key": key}):
        if row.max_running is not None:
            found = found._replace(max_running=row.max_running)
        if row.rate is not None:
            found = found._replace(rate=row.rate, per=row.per)
    return found


async def count_running(database: Database, kind: str) -> bool:
    """Make runs that were claimed without admission take slots of their kind.

    Return False if the rows of some of them are locked by others.
    """
    return not await database.run(COUNT_RUNNING, {"kind": kind})


async def reset_numbers(database: Database, kind: str, key: str, *, entry: AuditEntry | None = None) -> None:
    """Remove an operator's numbers; the next worker that starts writes those of the code again.

    Raises:
        TransitionRefused: an operator has set none.
    """
    if not await run_noted(database, RESET, {"kind": kind, "key": key}, entry):
        raise TransitionRefused(f"no operator has set a limit of {named(kind, key)}")


async def pause(
    database: Database,
    kind: str,
    key: str,
    *,
    seconds: float | None,
    paused_by: str,
    reason: str | None,
    entry: AuditEntry | None = None,
) -> datetime | None:
    """Pause a kind or one of its keys for ``seconds`` (None: until it is resumed); return the pause's end."""
    values = {"kind": kind, "key": key, "seconds": seconds, "paused_by": paused_by, "reason": reason}
    [row] = await run_noted(database, PAUSE, values, entry)
    until: datetime | None = row.paused_until
    return until


async def pause_for(
    database: Database,
    kind: str,
    key: str,
    *,
    seconds: float,
    worker_id: str,
    held: Held,
    reason: str,
) -> bool:
    """Pause a key because one of its running jobs asks for it.

    Return False if the key is already paused for longer, or if the run no longer owns the job.
    """
    values = {"kind": kind, "key": key, "seconds": seconds, "paused_by": worker_id, "reason": reason}
    return bool(await database.run(PAUSE_FOR, values | by_owner(worker_id, held)))


async def resume(database: Database, kind: str, key: str, *, entry: AuditEntry | None = None) -> int:
    """End the pause of a kind or of one of its keys.

    Returns how many other pauses keep jobs of it from starting: that of the key's kind, or those of the
    kind's keys.

    Raises:
        TransitionRefused: it is not paused.
    """
    rows = await run_noted(database, RESUME, {"kind": kind, "key": key}, entry)
    if not rows:
        raise TransitionRefused(f"{named(kind, key)} is not paused")
    pauses: int = rows[0].pauses
    return pauses


async def pause_of(database: Database, kind: str, key: str) -> dict[str, Any] | None:
    """Return the pause of a kind or of one of its keys, by column name; None: it is not paused itself."""
    rows = await database.run(PAUSED, {"kind": kind, "key": key})
    return rows[0]._asdict() if rows else None


async def list_limits(
    database: Database,
    *,
    all_keys: bool = False,
    kind: str | None = None,
    after: tuple[str, str] = ("", ""),
    limit: int = MOST_LISTED,
) -> list[dict[str, Any]]:
    """Return limits, each as a dict by column name, with the numbers of running and held jobs.

    ``running`` is None without a ``max_running``. Without ``all_keys``, rows that have neither numbers of
    their own nor jobs that are counted nor a pause are left out. The list is sorted by kind and key, and
    begins behind ``after``, which need not exist any more.
    """
    place = {"after_kind": after[0], "after_key": after[1]}
    which = {"kinds": None if kind is None else [kind], "own": False}
    rows = await database.run_along_index(LIST, {"all": all_keys, "most": limit, **which, **place})
    return [row._asdict() for row in rows]


async def limits_of_kinds(database: Database, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what ``list_limits`` would return of these kinds themselves, without their keys, by kind."""
    which = {"kinds": list(kinds), "own": True, "after_kind": "", "after_key": ""}
    rows = await database.run_along_index(LIST, {"all": False, "most": len(kinds), **which})
    return {row.kind: row._asdict() for row in rows}


async def count_keys(database: Database, kinds: Sequence[str]) -> dict[str, int]:
    """Return how many keys of each of these kinds ``list_limits`` would list, up to ``MOST_LISTED``."""
    rows = await database.run(COUNT_KEYS, {"kinds": list(kinds)})
    return {row.kind: row.keys for row in rows}


async def tidy(database: Database) -> bool:
    """Delete rows of keys unused for an hour, and give held jobs without a key that of their kind.

    At most a thousand of each. Return whether more may be left.
    """
    written = [len(await database.run(statement)) for statement in (TIDY, GIVE_KEYS)]
    return max(written) >= _TIDIED_AT_ONCE


def named(kind: str, key: str) -> str:
    """Return a kind or one of its keys in words."""
    return f"key {key!r} of kind {kind}" if key else f"kind {kind}"


def resumed(key: str, pauses: int) -> str:
    """Return in words what follows from ``resume``, which has returned this number of other pauses."""
    if not pauses:
        return "goes on"
    if key:
        return "is resumed; its jobs wait until its kind is resumed, too"
    return f"goes on, but {pauses} of its keys {'is' if pauses == 1 else 'are'} still paused"
