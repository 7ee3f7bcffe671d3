"""Producers in any language enqueue by a function, in their own transactions.

Revision: 0018, after 0017

What the function takes is a contract (docs/other-languages.md): a later version adds parameters with defaults at the
end. It has to drop the function for that, so it belongs into one transaction with making it anew.
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

# As ENQUEUE and its kin in jsworker/ownership/transitions/enqueue.py and enqueue_terms.py, but that a twin which is
# committed meanwhile is looked for by another statement, with a snapshot of its own. Names of parameters that are
# columns too are qualified.
ENQUEUE = r"""
CREATE FUNCTION jsworker.enqueue(
  kind text,
  payload jsonb DEFAULT '{}',
  unique_key text DEFAULT NULL,
  delay interval DEFAULT NULL,
  max_attempts integer DEFAULT NULL,
  max_stalls integer DEFAULT NULL,
  traceparent text DEFAULT NULL,
  tracestate text DEFAULT NULL,
  max_payload_bytes integer DEFAULT 1048576,
  limit_key text DEFAULT NULL,
  priority text DEFAULT 'normal',
  run_at timestamptz DEFAULT NULL,
  expires_in interval DEFAULT NULL,
  unique_scope text DEFAULT NULL,
  unique_for interval DEFAULT NULL,
  debounce interval DEFAULT NULL,
  debounce_max interval DEFAULT NULL,
  OUT id uuid,
  OUT created boolean
) LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  wait double precision := coalesce(extract(epoch FROM delay), 0);
  present timestamptz := clock_timestamp();
  expiry double precision := extract(epoch FROM expires_in);
  window_seconds double precision := extract(epoch FROM unique_for);
  debounce_seconds double precision := extract(epoch FROM debounce);
  debounce_max_seconds double precision := extract(epoch FROM debounce_max);
  of_keys text := coalesce('unique_scope=' || unique_scope, 'unique_for=' || unique_for, 'debounce=' || debounce,
    'debounce_max=' || debounce_max);
  scope text := CASE WHEN debounce IS NOT NULL THEN 'debounce' WHEN unique_for IS NOT NULL THEN 'window'
    ELSE coalesce(unique_scope, 'live') END;
  due timestamptz;
  is_later boolean;
  is_over boolean;
  size bigint := octet_length(payload::text);
  -- UUIDv7: 48 bits of milliseconds, so that new rows share warm index pages, then version, variant and chance.
  new_id uuid := encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) PLACING
    substring(int8send(floor(extract(epoch FROM present) * 1000)::bigint) FROM 3) FROM 1 FOR 6), 52, 1), 53, 1), 'hex');
  wrong text := CASE
    WHEN kind IS NULL OR kind !~ '^[a-z0-9][a-z0-9_-]*$' OR octet_length(kind) > 64
      THEN 'kind ' || coalesce(to_json(left(kind, 64))::text, 'NULL') || ' must match ^[a-z0-9][a-z0-9_-]{0,63}$'
    WHEN payload IS NULL THEN 'payload must be JSON, not NULL'
    WHEN max_payload_bytes IS NULL OR size > max_payload_bytes
      THEN 'payload of ' || size || ' bytes exceeds max_payload_bytes=' || coalesce(max_payload_bytes::text, 'NULL')
    WHEN char_length(unique_key) NOT BETWEEN 1 AND 255 OR unique_key ~ E'[\\u0001-\\u001f\\u007f-\\u009f\\u2028\\u2029]'
      THEN 'unique_key ' || to_json(left(unique_key, 64))::text || ' must be text of 1 to 255 printable characters'
    WHEN wait NOT BETWEEN 0 AND 316224000
      THEN 'delay=' || delay || ' must be from 0 to 316224000 seconds'
    WHEN max_attempts NOT BETWEEN 1 AND 1000000
      THEN 'max_attempts=' || max_attempts || ' must be from 1 to 1000000'
    WHEN max_stalls NOT BETWEEN 1 AND 100 THEN 'max_stalls=' || max_stalls || ' must be from 1 to 100'
    WHEN traceparent !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$'
      THEN 'traceparent ' || to_json(left(traceparent, 64))::text || ' must be a traceparent of W3C Trace Context'
    WHEN tracestate !~ '^[ -~]+$' OR octet_length(tracestate) > 512
      THEN 'tracestate ' || to_json(left(tracestate, 64))::text || ' must be 1 to 512 printable characters of ASCII'
    WHEN char_length(limit_key) NOT BETWEEN 1 AND 255 OR limit_key ~ E'[\\u0001-\\u001f\\u007f-\\u009f\\u2028\\u2029]'
      THEN 'limit_key ' || to_json(left(limit_key, 64))::text || ' must be text of 1 to 255 printable characters'
    WHEN priority IS NULL OR priority NOT IN ('high', 'normal', 'low')
      THEN 'priority ' || coalesce(to_json(left(priority, 64))::text, 'NULL') || ' must be high, normal or low'
    WHEN run_at IS NOT NULL AND wait <> 0 THEN 'delay and run_at: give one of them'
    WHEN run_at NOT BETWEEN TIMESTAMPTZ '2000-01-01 00:00:00+00' AND present + INTERVAL '3660 days'
      THEN 'run_at=' || run_at || ' must be from 2000 on and at most ten years ahead'
    WHEN expiry NOT BETWEEN 0 AND 316224000 OR expiry = 0
      THEN 'expires_in=' || expires_in || ' must be more than 0 and at most 316224000 seconds'
    WHEN unique_scope NOT IN ('live', 'waiting')
      THEN 'unique_scope ' || to_json(left(unique_scope, 64))::text || ' must be live or waiting'
    WHEN unique_key IS NULL AND of_keys IS NOT NULL THEN of_keys || ' needs a unique_key'
    WHEN window_seconds NOT BETWEEN 0 AND 316224000 OR window_seconds = 0
      THEN 'unique_for=' || unique_for || ' must be more than 0 and at most 316224000 seconds'
    WHEN debounce_seconds NOT BETWEEN 0 AND 316224000 OR debounce_seconds = 0
      THEN 'debounce=' || debounce || ' must be more than 0 and at most 316224000 seconds'
    WHEN debounce_max_seconds NOT BETWEEN 0 AND 316224000 OR debounce_max_seconds = 0
      THEN 'debounce_max=' || debounce_max || ' must be more than 0 and at most 316224000 seconds'
    WHEN unique_for IS NOT NULL AND unique_scope = 'waiting'
      THEN 'unique_for=' || unique_for || ' and unique_scope=waiting: give one of them'
    WHEN debounce IS NOT NULL AND unique_scope = 'live'
      THEN 'debounce=' || debounce || ' and unique_scope=live: give one of them'
    WHEN debounce IS NOT NULL AND unique_for IS NOT NULL
      THEN 'debounce=' || debounce || ' and unique_for=' || unique_for || ': give one of them'
    WHEN debounce IS NOT NULL AND (wait <> 0 OR run_at IS NOT NULL)
      THEN 'debounce=' || debounce || ' and ' || coalesce('run_at=' || run_at, 'delay=' || delay) || ': give one of them'
    WHEN debounce_max IS NOT NULL AND debounce IS NULL THEN 'debounce_max=' || debounce_max || ' needs debounce'
    WHEN debounce_seconds > debounce_max_seconds
      THEN 'debounce=' || debounce || ' must not be longer than debounce_max=' || debounce_max
  END;
BEGIN
  IF wrong IS NULL THEN
    due := coalesce(run_at, present + make_interval(secs => coalesce(debounce_seconds, wait)));
    is_later := due > present;
    IF present + make_interval(secs => expiry) <= due THEN
      wrong := 'expires_in=' || expires_in || ' ends before the job is due: '
        || coalesce('run_at=' || run_at, 'debounce=' || debounce, 'delay=' || delay, 'now');
    END IF;
  END IF;
  IF wrong IS NOT NULL THEN
    RAISE EXCEPTION USING MESSAGE = wrong, ERRCODE = 'invalid_parameter_value';
  END IF;
  FOR _try IN 1..3 LOOP
    -- Who takes the window inserts the job; twins wait for the window's row.
    IF scope = 'window' THEN
      INSERT INTO jsworker.unique_windows AS w (kind, key, job_id, until)
      VALUES (enqueue.kind, enqueue.unique_key, new_id, clock_timestamp() + make_interval(secs => window_seconds))
      ON CONFLICT ON CONSTRAINT unique_windows_pkey DO UPDATE SET job_id = excluded.job_id, until = excluded.until
      WHERE w.until <= clock_timestamp() AND NOT EXISTS (
        SELECT FROM jsworker.jobs AS j WHERE j.id = w.job_id AND j.status IN ('scheduled', 'queued', 'processing')
          AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp() OR j.fencing_token > 0));
      IF NOT FOUND THEN
        SELECT w.job_id, false INTO id, created FROM jsworker.unique_windows AS w
        WHERE w.kind = enqueue.kind AND w.key = enqueue.unique_key;
        IF FOUND THEN
          RETURN;
        END IF;
        CONTINUE;
      END IF;
    END IF;
    -- It waits for a twin that is not committed yet, and never for its owner's work.
    INSERT INTO jsworker.jobs (
      id, kind, payload, unique_key, max_attempts, max_stalls, traceparent, tracestate, limit_key, priority,
      status, run_at, dispatch, needs_publish, publish_after, queued_at, expires_at, waiting_key)
    VALUES (
      new_id, enqueue.kind, enqueue.payload, CASE WHEN scope = 'live' THEN enqueue.unique_key END, enqueue.max_attempts, enqueue.max_stalls,
      enqueue.traceparent, enqueue.tracestate, enqueue.limit_key,
      CASE enqueue.priority WHEN 'high' THEN 0 WHEN 'low' THEN 2 ELSE 1 END,
      CASE WHEN is_later THEN 'scheduled' ELSE 'queued' END, due, CASE WHEN is_later THEN 0 ELSE 1 END, NOT is_later,
      CASE WHEN NOT is_later THEN present END, CASE WHEN NOT is_later THEN present END,
      present + make_interval(secs => expiry), CASE WHEN scope IN ('waiting', 'debounce') THEN enqueue.unique_key END)
    ON CONFLICT DO NOTHING;
    created := FOUND;
    IF created AND scope <> 'debounce' THEN
      id := new_id;
      RETURN;
    END IF;
    -- Of the new one, too, so that whoever may not debounce learns it at the first call. What is due already, was
    -- claimed before, or waits behind another keeps its place, as in DEBOUNCE. The row is locked when the steps go,
    -- and that statement's snapshot is newer than the lock: it sees those of every run that has ended.
    IF scope = 'debounce' THEN
      UPDATE jsworker.jobs AS j SET payload = enqueue.payload, checkpoint = NULL,
        limit_key = CASE WHEN j.held_by IS NULL THEN enqueue.limit_key ELSE coalesce(enqueue.limit_key, '') END,
        run_at = j.run_at + CASE WHEN j.status = 'scheduled' AND j.fencing_token = 0 AND j.behind IS NULL
          THEN greatest(least(due, j.debounce_until) - j.run_at, interval '0') ELSE interval '0' END,
        debounce_until = coalesce(j.debounce_until, present + make_interval(secs => debounce_max_seconds)),
        expires_at = CASE WHEN j.fencing_token = 0 THEN present + make_interval(secs => expiry) ELSE j.expires_at END
      WHERE j.kind = enqueue.kind AND j.waiting_key = enqueue.unique_key AND j.status IN ('scheduled', 'queued')
      RETURNING j.id INTO id;
      IF FOUND THEN
        DELETE FROM jsworker.job_steps AS s WHERE s.job_id = enqueue.id;
        RETURN;
      END IF;
      CONTINUE;
    END IF;
    SELECT held.id, held.fencing_token = 0 AND held.expires_at <= clock_timestamp() INTO id, is_over
    FROM (
      SELECT j.id, j.fencing_token, j.expires_at FROM jsworker.jobs AS j
      WHERE scope = 'live' AND j.kind = enqueue.kind AND j.unique_key = enqueue.unique_key
        AND j.status IN ('scheduled', 'queued', 'processing')
      UNION ALL
      SELECT j.id, j.fencing_token, j.expires_at FROM jsworker.jobs AS j
      WHERE scope = 'waiting' AND j.kind = enqueue.kind AND j.waiting_key = enqueue.unique_key
        AND j.status IN ('scheduled', 'queued')
    ) AS held;
    IF FOUND AND is_over IS NOT TRUE THEN
      RETURN;
    END IF;
    -- It has expired, and no worker will begin it: who may, cancels it, as EXPIRE does.
    IF is_over AND NOT has_table_privilege('jsworker.jobs', 'UPDATE') THEN
      RAISE EXCEPTION USING
        MESSAGE = 'unique_key ' || to_json(left(unique_key, 64))::text || ' of kind ' || kind || ' is held by job ' || id
          || ', which has expired; this login may not cancel it, and no worker has done so yet; try again',
        ERRCODE = 'object_in_use';
    END IF;
    IF is_over THEN
      WITH expired AS (
        UPDATE jsworker.jobs AS j SET status = 'cancelled', needs_publish = false, finished_at = clock_timestamp(),
          failure_reason = 'expired', held_by = NULL, held_at = NULL, due_at = NULL
        WHERE j.id = enqueue.id AND j.status IN ('scheduled', 'queued') AND j.fencing_token = 0
          AND j.expires_at <= clock_timestamp()
        RETURNING j.id, j.fencing_token, j.expires_at
      )
      INSERT INTO jsworker.job_events (job_id, event, fencing_token, detail)
      SELECT e.id, 'cancelled', e.fencing_token, jsonb_build_object('reason', 'expired', 'expires_at', e.expires_at)
      FROM expired AS e;
    END IF;
  END LOOP;
  RAISE EXCEPTION USING
    MESSAGE = 'unique_key ' || coalesce(to_json(left(unique_key, 64))::text, 'NULL') || ' of kind ' || kind
      || ' is taken and freed too fast; try again',
    ERRCODE = 'serialization_failure';
END
$$
"""
CONTRACT = "COMMENT ON FUNCTION jsworker.enqueue IS 'jsworker SQL contract 1: docs/other-languages.md'"


def upgrade() -> None:
    op.get_bind().exec_driver_sql(ENQUEUE.replace("%", "%%"))
    op.execute(CONTRACT)
