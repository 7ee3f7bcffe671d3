-- Eight roles in PostgreSQL, each with the least that it needs.
--
--   jsworker_owner     owns the tables and migrates them: `jsworker db upgrade`
--   jsworker_worker    `jsworker run` and the commands of operators
--   jsworker_operator  commands of operators and a dashboard that acts: enqueues, retries, cancels, clears, pauses, sets
--                      limits and schedules. It deletes no job, no timeline, and nothing of who did what.
--   jsworker_producer  enqueues: JobClient.enqueue, enqueue_many, enqueue_statement. It may INSERT jobs and workflows, and
--                      lock no row of a job. It may lock and change every row of unique_windows: enqueues of such a key wait,
--                      or find it taken or free. It may add needs to any batch whose id it knows, which waits for them.
--   jsworker_publisher beside jsworker_producer, for applications that you trust with more: notes in the rows what was
--                      published, and publishes what is due: JobClient.publish_pending. Without it workers do
--                      both. Who may write one column of a row may also lock the row, and so hold up that job.
--   jsworker_debouncer beside jsworker_producer, for applications that debounce and that you trust with all jobs: replaces the
--                      payload of jobs that wait and moves them back. The right is to columns, not to rows: it may write
--                      payload, checkpoint, limit_key, run_at, debounce_until and expires_at of any job, running or not. So it
--                      can cancel a job that has not begun (expires_at), let more jobs of a key run than its limit allows
--                      (limit_key), and change what the next attempt works on. It may delete the steps of any job, and
--                      lock rows, as jsworker_publisher may.
--   jsworker_reader    looks: `jsworker jobs`, `job`, `workers`. Payloads and results are among what it sees.
--   jsworker_metrics   counts: KEDA, dashboards. It sees kinds, states, times and counters: no payload, result, error or id.
--
-- Plain SQL for the database of the jobs, by a superuser or by the database's owner with CREATEROLE:
--   psql --set=ON_ERROR_STOP=1 --dbname=jsworker --file=deploy/postgres/roles.sql
-- Run it before the first migration and again after each one; twice does no harm, workers may run meanwhile.
-- Tables that somebody else has made before are handed over to jsworker_owner. If another transaction has one of them in
-- use, this ends with "canceling statement due to lock timeout" and has changed nothing: run it again when that has ended.
--
-- The roles cannot log in: deploy/postgres/logins.sql makes logins for six of them; make others as it does.
-- In a database that jsworker has for itself, deploy/postgres/own-database.sql shuts everybody else out.

BEGIN;

-- The lock that migrations take: neither meets the other half-way.
SELECT pg_advisory_xact_lock(1785952111);
-- Whoever waits to hand a table over makes all others wait for it, heartbeats too.
SET LOCAL lock_timeout = '1500ms';

DO $$
DECLARE
  role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY[
    'jsworker_owner', 'jsworker_worker', 'jsworker_producer', 'jsworker_publisher', 'jsworker_reader',
    'jsworker_metrics', 'jsworker_debouncer', 'jsworker_operator'
  ] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
      EXECUTE format('CREATE ROLE %I NOLOGIN', role_name);
    END IF;
  END LOOP;
  -- Who is no superuser may only give away what is also theirs.
  IF NOT pg_has_role('jsworker_owner', 'USAGE') THEN
    EXECUTE format('GRANT jsworker_owner TO %I', current_user);
  END IF;
  -- A migration asks for the schema even when it is there.
  EXECUTE format('GRANT CONNECT, CREATE ON DATABASE %I TO jsworker_owner', current_database());
END
$$;

CREATE SCHEMA IF NOT EXISTS jsworker AUTHORIZATION jsworker_owner;

-- What was made before these roles were there. Owned sequences and indexes follow their tables.
DO $$
DECLARE
  made record;
BEGIN
  IF (SELECT nspowner <> 'jsworker_owner'::regrole FROM pg_namespace WHERE nspname = 'jsworker') THEN
    ALTER SCHEMA jsworker OWNER TO jsworker_owner;
  END IF;
  FOR made IN
    SELECT relname FROM pg_class
    WHERE relnamespace = 'jsworker'::regnamespace AND relkind IN ('r', 'p') AND relowner <> 'jsworker_owner'::regrole
  LOOP
    EXECUTE format('ALTER TABLE jsworker.%I OWNER TO jsworker_owner', made.relname);
  END LOOP;
  FOR made IN
    SELECT oid::regprocedure AS signature FROM pg_proc
    WHERE pronamespace = 'jsworker'::regnamespace AND proowner <> 'jsworker_owner'::regrole
  LOOP
    EXECUTE format('ALTER FUNCTION %s OWNER TO jsworker_owner', made.signature);
  END LOOP;
END
$$;

-- From here on everything is said anew, so that what an earlier version granted does not stay.
REVOKE ALL ON SCHEMA jsworker
  FROM PUBLIC, jsworker_worker, jsworker_producer, jsworker_publisher, jsworker_debouncer, jsworker_reader,
    jsworker_metrics, jsworker_operator;
REVOKE ALL ON ALL TABLES IN SCHEMA jsworker
  FROM PUBLIC, jsworker_worker, jsworker_producer, jsworker_publisher, jsworker_debouncer, jsworker_reader,
    jsworker_metrics, jsworker_operator;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA jsworker
  FROM PUBLIC, jsworker_worker, jsworker_producer, jsworker_publisher, jsworker_debouncer, jsworker_reader,
    jsworker_metrics, jsworker_operator;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA jsworker
  FROM PUBLIC, jsworker_worker, jsworker_producer, jsworker_publisher, jsworker_debouncer, jsworker_reader,
    jsworker_metrics, jsworker_operator;

GRANT USAGE ON SCHEMA jsworker
  TO jsworker_worker, jsworker_producer, jsworker_publisher, jsworker_debouncer, jsworker_reader,
    jsworker_metrics, jsworker_operator;
GRANT SELECT ON ALL TABLES IN SCHEMA jsworker TO jsworker_worker, jsworker_reader, jsworker_operator;

-- Tables of later migrations: readable at once, writable by workers, closed to producers until this file says more.
ALTER DEFAULT PRIVILEGES FOR ROLE jsworker_owner IN SCHEMA jsworker
  GRANT SELECT ON TABLES TO jsworker_reader, jsworker_operator;
ALTER DEFAULT PRIVILEGES FOR ROLE jsworker_owner IN SCHEMA jsworker
  GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO jsworker_worker;
ALTER DEFAULT PRIVILEGES FOR ROLE jsworker_owner REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
-- A function that a later migration makes anew stays with those who call it. All of them run with their caller's rights.
ALTER DEFAULT PRIVILEGES FOR ROLE jsworker_owner IN SCHEMA jsworker
  GRANT EXECUTE ON FUNCTIONS TO jsworker_worker, jsworker_producer, jsworker_operator;

DO $$
BEGIN
  IF to_regclass('jsworker.jobs') IS NULL THEN
    RAISE NOTICE 'there are no tables yet: run this file again after `jsworker db upgrade`';
    RETURN;
  END IF;

  -- Workers. That no live job is deleted, no final one changed and no token lowered, triggers and constraints see
  -- to. INSERT is for processors and operators who enqueue; without those, REVOKE INSERT ON jsworker.jobs.
  GRANT INSERT, UPDATE, DELETE ON jsworker.jobs, jsworker.workers TO jsworker_worker;
  GRANT INSERT, DELETE ON jsworker.job_events, jsworker.dead_messages TO jsworker_worker;
  GRANT INSERT ON jsworker.installation TO jsworker_worker;

  -- Producers: a job that waits. With the table's constraints these columns make nothing but queued and scheduled
  -- jobs: no owner, no token, no counter, no result. Without UPDATE of any column no row of a job can be locked.
  GRANT INSERT (
    id, kind, payload, unique_key, max_attempts, max_stalls, traceparent, tracestate,
    status, run_at, dispatch, needs_publish, publish_after, queued_at
  ) ON jsworker.jobs TO jsworker_producer;
  GRANT SELECT (id, kind, unique_key, status, dispatch) ON jsworker.jobs TO jsworker_producer;
  -- The function writes those columns, with its caller's rights.
  IF to_regproc('jsworker.enqueue') IS NOT NULL THEN
    GRANT EXECUTE ON FUNCTION jsworker.enqueue TO jsworker_worker, jsworker_producer, jsworker_operator;
  END IF;
  -- The first who asks for the installation's id makes it; there is room for one.
  GRANT SELECT (id), INSERT (id) ON jsworker.installation TO jsworker_producer;
  GRANT SELECT ON jsworker.alembic_version TO jsworker_producer;
  -- What workers note of rows that were refused; older schemas have no such table.
  IF to_regclass('jsworker.refused_rows') IS NOT NULL THEN
    GRANT INSERT, UPDATE, DELETE ON jsworker.refused_rows TO jsworker_worker;
  END IF;
  -- What operators took back, until a worker tells it.
  IF to_regclass('jsworker.untold_resets') IS NOT NULL THEN
    GRANT INSERT, DELETE ON jsworker.untold_resets TO jsworker_worker;
    GRANT UPDATE (at) ON jsworker.untold_resets TO jsworker_worker;  -- what locking an entry takes
  END IF;
  -- Until when a job may begin, and keys of which one job may wait beside one that runs.
  IF EXISTS (
    SELECT FROM pg_attribute WHERE attrelid = 'jsworker.jobs'::regclass AND attname = 'expires_at' AND NOT attisdropped
  ) THEN
    GRANT INSERT (expires_at, waiting_key) ON jsworker.jobs TO jsworker_producer;
    GRANT SELECT (waiting_key, expires_at, fencing_token) ON jsworker.jobs TO jsworker_producer;
    -- Who debounces writes the job of the key that waits, and may write any other: of jobs that have ended, a trigger
    -- refuses another payload.
    GRANT INSERT (debounce_until) ON jsworker.jobs TO jsworker_debouncer;
    GRANT SELECT (
      id, kind, status, dispatch, waiting_key, fencing_token, run_at, behind, held_by, debounce_until, expires_at
    ) ON jsworker.jobs TO jsworker_debouncer;
    GRANT UPDATE (payload, checkpoint, limit_key, run_at, debounce_until, expires_at)
      ON jsworker.jobs TO jsworker_debouncer;
  END IF;
  -- Keys of which one job is enqueued in a window: who enqueues it takes the window, or could move any other.
  IF to_regclass('jsworker.unique_windows') IS NOT NULL THEN
    GRANT INSERT, UPDATE, DELETE ON jsworker.unique_windows TO jsworker_worker;
    GRANT SELECT, INSERT, UPDATE ON jsworker.unique_windows TO jsworker_producer;
  END IF;
  -- What enqueues jobs by the clock.
  IF to_regclass('jsworker.schedules') IS NOT NULL THEN
    GRANT INSERT, UPDATE, DELETE ON jsworker.schedules TO jsworker_worker;
  END IF;
  -- How many may run; whoever claims a job with a limit locks the row of its key.
  IF to_regclass('jsworker.limits') IS NOT NULL THEN
    GRANT INSERT, UPDATE, DELETE ON jsworker.limits TO jsworker_worker;
    GRANT SELECT (kind, max_running, rate, per, paused_at, paused_until) ON jsworker.limits TO jsworker_metrics;
  END IF;
  -- Their jobs' priority; older schemas have no such column.
  IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'jsworker.jobs'::regclass AND attname = 'priority') THEN
    GRANT INSERT (priority) ON jsworker.jobs TO jsworker_producer;
    GRANT SELECT (priority) ON jsworker.jobs TO jsworker_publisher, jsworker_metrics;
  END IF;
  -- What steps of jobs returned. A step is never changed.
  IF to_regclass('jsworker.job_steps') IS NOT NULL THEN
    REVOKE UPDATE ON jsworker.job_steps FROM jsworker_worker;
    GRANT INSERT, DELETE ON jsworker.job_steps TO jsworker_worker;
    -- With a payload the steps that were made of it go.
    GRANT SELECT (job_id), DELETE ON jsworker.job_steps TO jsworker_debouncer;
  END IF;
  -- Figures by the minute, which workers keep. Entries of who did what are added, and deleted when they are old.
  IF to_regclass('jsworker.audit') IS NOT NULL THEN
    GRANT INSERT, UPDATE, DELETE ON jsworker.statistics TO jsworker_worker;
    GRANT SELECT ON jsworker.statistics TO jsworker_metrics;
    REVOKE UPDATE ON jsworker.audit FROM jsworker_worker;
    GRANT INSERT, DELETE ON jsworker.audit TO jsworker_worker;
    -- Operators act on jobs, kinds and schedules, each time with such an entry.
    GRANT INSERT ON jsworker.audit, jsworker.job_events, jsworker.untold_resets TO jsworker_operator;
    GRANT INSERT, UPDATE ON jsworker.jobs, jsworker.unique_windows TO jsworker_operator;
    GRANT INSERT, UPDATE, DELETE ON jsworker.limits, jsworker.schedules TO jsworker_operator;
    GRANT INSERT, UPDATE ON jsworker.workflows, jsworker.batches TO jsworker_operator;
    GRANT INSERT ON jsworker.batch_needs TO jsworker_operator;
    GRANT DELETE ON jsworker.dead_messages TO jsworker_operator;
  END IF;
  -- Workflows: producers enqueue them whole. Of one that is there they could only add needs to a batch.
  IF to_regclass('jsworker.workflows') IS NOT NULL THEN
    GRANT INSERT, UPDATE, DELETE ON jsworker.workflows, jsworker.batches TO jsworker_worker;
    GRANT INSERT ON jsworker.batch_needs TO jsworker_worker;  -- a workflow takes them along
    GRANT INSERT (id, name) ON jsworker.workflows TO jsworker_producer;
    GRANT INSERT (id, workflow, name, kind, place, on_failure) ON jsworker.batches TO jsworker_producer;
    GRANT INSERT (batch, needs) ON jsworker.batch_needs TO jsworker_producer;
    GRANT INSERT (batch_id, held_by, held_at) ON jsworker.jobs TO jsworker_producer;
  END IF;
  -- Producers that publish: the note that a message was sent, and whose turn it is to send it.
  GRANT SELECT (
    id, kind, status, dispatch, needs_publish, publish_after, cleared, clear_reason, traceparent, tracestate
  ) ON jsworker.jobs TO jsworker_publisher;
  GRANT UPDATE (needs_publish, publish_after, published_at, stream_seq, stream_created)
    ON jsworker.jobs TO jsworker_publisher;
  -- Figures: what is counted and what it is grouped by.
  GRANT SELECT (
    kind, status, created_at, queued_at, run_at, claimed_at, started_at, last_activity_at, deadline_at, finished_at,
    needs_publish, publish_after, published_at, attempts, errors, stalls, max_attempts, max_stalls
  ) ON jsworker.jobs TO jsworker_metrics;
  -- Older schemas hold no rows.
  IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'jsworker.jobs'::regclass AND attname = 'held_by') THEN
    GRANT INSERT (held_by, held_at, due_at, limit_key) ON jsworker.jobs TO jsworker_producer;
    GRANT SELECT (held_by, held_at, due_at) ON jsworker.jobs TO jsworker_metrics;
  END IF;
  -- Operators say which worker is to claim nothing more; older schemas have no such column.
  IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'jsworker.workers'::regclass AND attname = 'drained_at') THEN
    GRANT UPDATE (drained_at) ON jsworker.workers TO jsworker_operator;
  END IF;
  GRANT SELECT (state, kinds, concurrency, version, started_at, last_seen_at) ON jsworker.workers TO jsworker_metrics;
  -- alembic_version is the migrations' own.
  REVOKE INSERT, UPDATE, DELETE ON jsworker.alembic_version FROM jsworker_worker;
END
$$;

COMMIT;
