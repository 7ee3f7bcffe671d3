"""What admission, schedules and workflows must keep, as SQL: at each commit, every half second, in the end.

A1: never more of a key run than its limit. A2: each due instant has one job. A3: each batch finishes once,
after its last member. L6: nothing is held while its reason is gone; nor does it lose its place in the order.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

import psycopg

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable

OVER_LIMIT: Final = "A1: more of a key than its limit"
INSTANTS: Final = "A2: an instant without its one job"
BATCHES: Final = "A3: a batch that did not finish once, after its last member"
PLACES: Final = "held rows that lost their place"

Broken = tuple[str, str, str]
"""The rule, what broke it, and how."""

# At the commit of whatever begins a run: who holds the lock sees every run that was committed before it.
TRIGGERS = f"""
CREATE TABLE faults.broken (rule text NOT NULL, subject text NOT NULL, found text NOT NULL);
CREATE TABLE faults.finishes (batch uuid NOT NULL, generation bigint NOT NULL);

CREATE FUNCTION faults.count_runs() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  running bigint;
  most integer;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended(NEW.kind || ' ' || NEW.limit_key, 7));
  SELECT count(*) INTO running FROM jsworker.jobs AS j
  WHERE j.status || '' = 'processing' AND j.limit_key IS NOT NULL
    AND j.kind = NEW.kind AND j.limit_key = NEW.limit_key;
  SELECT coalesce(max(l.max_running) FILTER (WHERE l.key = NEW.limit_key), max(l.max_running)) INTO most
  FROM jsworker.limits AS l WHERE l.kind = NEW.kind AND l.key IN ('', NEW.limit_key);
  IF running > most THEN
    INSERT INTO faults.broken VALUES (
      '{OVER_LIMIT}', NEW.id,
      format('%s run of key %L of %s, at most %s may', running, NEW.limit_key, NEW.kind, most));
  END IF;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER count_runs AFTER UPDATE ON jsworker.jobs DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.status = 'processing' AND OLD.status <> 'processing' AND NEW.limit_key IS NOT NULL)
EXECUTE FUNCTION faults.count_runs();

CREATE FUNCTION faults.note_lost_place() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  INSERT INTO faults.broken VALUES (
    '{PLACES}', NEW.id,
    format('%s (%s) -> %s (%s) moved it from %s to %s', OLD.status, OLD.held_by, NEW.status, NEW.held_by,
      OLD.queued_at, NEW.queued_at));
  RETURN NULL;
END $$;
CREATE TRIGGER note_lost_place AFTER UPDATE OF queued_at, held_by ON jsworker.jobs FOR EACH ROW
WHEN (NEW.queued_at IS DISTINCT FROM OLD.queued_at AND (
  (OLD.held_by IN ('limit', 'rate', 'paused') AND NEW.status IN ('queued', 'processing')
    AND OLD.queued_at IS NOT NULL)
  OR (OLD.status = 'queued' AND NEW.held_by IN ('limit', 'rate', 'paused'))))
EXECUTE FUNCTION faults.note_lost_place();

CREATE FUNCTION faults.note_finish() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  INSERT INTO faults.finishes VALUES (NEW.id, NEW.generation);
  RETURN NULL;
END $$;
CREATE TRIGGER note_finish AFTER UPDATE OF finished_at ON jsworker.batches FOR EACH ROW
WHEN (NEW.finished_at IS NOT NULL AND NEW.finished_at IS DISTINCT FROM OLD.finished_at)
EXECUTE FUNCTION faults.note_finish();
"""  # noqa: S608 -- constants

# In every moment, whatever goes on.
ALWAYS: Final = f"""
SELECT rule, subject, found FROM faults.broken
UNION ALL
SELECT '{INSTANTS}', j.schedule || ' at ' || j.scheduled_for, count(*) || ' jobs'
FROM jsworker.jobs AS j WHERE j.schedule IS NOT NULL GROUP BY j.schedule, j.scheduled_for HAVING count(*) > 1
UNION ALL
SELECT '{BATCHES}', f.batch::text, 'finished ' || count(*) || ' times at generation ' || f.generation
FROM faults.finishes AS f GROUP BY f.batch, f.generation HAVING count(*) > 1
UNION ALL
SELECT '{BATCHES}', b.id::text, b.name || ' has finished and has a live member' FROM jsworker.batches AS b
WHERE b.finished_at IS NOT NULL AND EXISTS (SELECT FROM jsworker.jobs AS j
  WHERE j.batch_id = b.id AND j.status IN ('scheduled', 'queued', 'processing'))
"""  # noqa: S608 -- constants

# Once everything has ended. What needs a batch that was opened again may have begun before it finished anew.
IN_THE_END: Final = f"""
SELECT '{BATCHES}' AS rule, b.id::text AS subject, b.name || ' never finished' AS found
FROM jsworker.batches AS b WHERE b.finished_at IS NULL
UNION ALL
SELECT '{BATCHES}', b.id::text, b.name || ' was not propagated' FROM jsworker.batches AS b
WHERE b.finished_at IS NOT NULL AND NOT b.propagated
UNION ALL
SELECT '{BATCHES}', b.id::text, b.name || ' finished before its last member' FROM jsworker.batches AS b
WHERE b.finished_at < (SELECT max(j.finished_at) FROM jsworker.jobs AS j WHERE j.batch_id = b.id)
UNION ALL
SELECT '{BATCHES}', w.id::text, w.name || ' never finished' FROM jsworker.workflows AS w
WHERE w.finished_at IS NULL
UNION ALL
SELECT '{BATCHES}', j.id::text, 'began before a need of its batch had finished' FROM jsworker.jobs AS j
JOIN jsworker.batch_needs AS n ON n.batch = j.batch_id JOIN jsworker.batches AS b ON b.id = n.needs
WHERE b.generation = 0 AND j.started_at < b.finished_at
UNION ALL
SELECT '{BATCHES}', j.id::text, 'was cancelled for its needs, all of which were completed'
FROM jsworker.jobs AS j
WHERE j.status = 'cancelled' AND j.failure_reason = 'needs' AND NOT EXISTS (
  SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS b ON b.id = n.needs
  WHERE n.batch = j.batch_id AND b.outcome <> 'completed')
UNION ALL
SELECT '{BATCHES}', j.id::text, 'was not cancelled, although a need was not completed' FROM jsworker.jobs AS j
JOIN jsworker.batches AS d ON d.id = j.batch_id AND d.on_failure = 'cancel'
WHERE j.status = 'completed' AND EXISTS (
  SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS b ON b.id = n.needs
  WHERE n.batch = d.id AND b.outcome <> 'completed')
UNION ALL
SELECT '{INSTANTS}', s.name || ' at ' || due.instant, 'no job'
FROM jsworker.schedules AS s CROSS JOIN LATERAL (
  SELECT generate_series(min(j.scheduled_for), max(j.scheduled_for), interval '1 second') AS instant
  FROM jsworker.jobs AS j WHERE j.schedule = s.name) AS due
WHERE s.rule = 'every 1 s' AND NOT EXISTS (
  SELECT FROM jsworker.jobs AS j WHERE j.schedule = s.name AND j.scheduled_for = due.instant)
"""  # noqa: S608 -- constants

# What somebody should look after by now. Where jobs wait in the queue nobody has room for those of a key.
IDLE: Final = """
SELECT 'key ' || h.limit_key || ' of ' || h.kind AS what
FROM (SELECT DISTINCT j.kind, j.limit_key FROM jsworker.jobs AS j
  WHERE j.status || '' = 'scheduled' AND j.held_by IN ('limit', 'rate', 'paused')) AS h
LEFT JOIN jsworker.limits AS l ON l.kind = h.kind AND l.key = h.limit_key
LEFT JOIN jsworker.limits AS d ON d.kind = h.kind AND d.key = ''
WHERE coalesce(l.paused_until < clock_timestamp(), l.paused_at IS NULL)
  AND coalesce(d.paused_until < clock_timestamp(), d.paused_at IS NULL)
  AND (SELECT count(*) FROM jsworker.jobs AS j WHERE j.status || '' = 'processing' AND j.limit_key IS NOT NULL
    AND j.kind = h.kind AND j.limit_key = h.limit_key) < coalesce(l.max_running, d.max_running, 1000000)
  AND coalesce(l.full_at <= clock_timestamp()
    + make_interval(secs => coalesce(l.per, d.per) - coalesce(l.per / l.rate, d.per / d.rate)), true)
  AND NOT EXISTS (SELECT FROM jsworker.jobs AS j
    WHERE j.status = 'queued' AND j.queued_at < clock_timestamp() - interval '1 second')
UNION ALL
SELECT 'needs of batch ' || d.id FROM jsworker.batches AS d
WHERE EXISTS (SELECT FROM jsworker.jobs AS j
    WHERE j.batch_id = d.id AND j.status = 'scheduled' AND j.held_by = 'needs')
  AND NOT EXISTS (SELECT FROM jsworker.batch_needs AS n JOIN jsworker.batches AS b ON b.id = n.needs
    WHERE n.batch = d.id AND b.finished_at IS NULL)
UNION ALL
SELECT 'end of batch ' || b.id FROM jsworker.batches AS b
WHERE b.finished_at IS NULL AND NOT EXISTS (SELECT FROM jsworker.jobs AS j
    WHERE j.batch_id = b.id AND j.status IN ('scheduled', 'queued', 'processing'))
UNION ALL
SELECT 'schedule ' || s.name || ' at ' || s.next_at FROM jsworker.schedules AS s
WHERE NOT s.paused AND s.next_at < clock_timestamp()
"""

_LOOK_SECONDS = 0.5

Ask = Callable[[str], Awaitable[Iterable[Iterable[object]]]]
"""Runs a query and gives its rows."""


class Watch:
    """Asks again and again, for as long as a run goes on.

    Attributes:
        broken: what was ever seen broken.
        idle: what was left alone, from when to when; what still is when the watch ends is among it.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._since: dict[str, float] = {}
        self.broken: set[Broken] = set()
        self.idle: list[tuple[str, float, float]] = []

    async def watch(self) -> None:
        """Watch until cancelled; while the database does not answer nothing is known."""
        try:
            while True:
                with suppress(psycopg.Error, OSError, DatabaseUnavailable):
                    await self._look()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._note([])

    async def _look(self) -> None:
        try:
            for rule, subject, found in await self._ask(ALWAYS):
                self.broken.add((str(rule), str(subject), str(found)))
            self._note([str(what) for [what] in await self._ask(IDLE)])
        except BaseException:
            self._note([])
            raise

    def _note(self, idle: list[str]) -> None:
        now = boottime()
        self.idle += [(what, since, now) for what, since in self._since.items() if what not in idle]
        self._since = {what: self._since.get(what, now) for what in idle}
