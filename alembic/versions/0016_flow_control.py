r"""Flow control: limits, priorities, uniqueness in a window or among waiting jobs, steps, workflows.

All columns come at once, so that the table is locked once, and for a moment: what may be NULL, or has a constant
default, is written into no row. Producers and workers that know nothing of them go on working. 0017 lets PostgreSQL see that
every row obeys the new rules, and builds the indexes.

The trigger that keeps ended jobs as they are lets two more through: a job that was cancelled because its needs failed, or
that failed itself, may be held again until its needs have finished.

Revision: 0016, after 0015
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BOUNDS = "BETWEEN TIMESTAMPTZ '2000-01-01 00:00:00+00' AND TIMESTAMPTZ '9999-12-31 00:00:00+00'"
IS_PRINTABLE = r"!~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]'"
KIND = "kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64"
NAME = f"name {IS_PRINTABLE} AND char_length(name) BETWEEN 1 AND 255"
OUTCOME = (
    "(outcome IS NOT NULL) = (finished_at IS NOT NULL) AND outcome IN ('completed', 'failed', 'cancelled')"
)
PRIORITY = "priority BETWEEN 0 AND 2"

JOBS = f"""
ALTER TABLE jsworker.jobs
  ADD COLUMN held_by text,
  ADD COLUMN held_at timestamptz,
  ADD COLUMN due_at timestamptz,
  ADD COLUMN limit_key text,
  ADD COLUMN priority smallint NOT NULL DEFAULT 1,
  ADD COLUMN expires_at timestamptz,
  ADD COLUMN waiting_key text,
  ADD COLUMN behind uuid,
  ADD COLUMN debounce_until timestamptz,
  ADD COLUMN snoozes integer NOT NULL DEFAULT 0,
  ADD COLUMN batch_id uuid,
  DROP CONSTRAINT jobs_scheduled_has_run_at,
  ADD CONSTRAINT jobs_scheduled_waits CHECK (
    status <> 'scheduled' OR (run_at IS NULL) = (held_by IS NOT NULL)
  ) NOT VALID,
  ADD CONSTRAINT jobs_held CHECK (
    CASE WHEN held_by IS NULL THEN held_at IS NULL AND due_at IS NULL
    ELSE held_by IN ('limit', 'rate', 'paused', 'needs') AND held_at IS NOT NULL
      AND status IN ('scheduled', 'cancelled') AND held_at {BOUNDS} AND coalesce(due_at, held_at) {BOUNDS} END
  ) NOT VALID,
  ADD CONSTRAINT jobs_limit_key CHECK (limit_key {IS_PRINTABLE} AND char_length(limit_key) <= 255) NOT VALID,
  ADD CONSTRAINT jobs_priority CHECK ({PRIORITY}) NOT VALID,
  ADD CONSTRAINT jobs_expires_at CHECK (expires_at {BOUNDS} AND debounce_until {BOUNDS}) NOT VALID,
  ADD CONSTRAINT jobs_waiting_key CHECK (
    waiting_key IS NULL
    OR (unique_key IS NULL AND waiting_key {IS_PRINTABLE} AND char_length(waiting_key) BETWEEN 1 AND 255)
  ) NOT VALID
"""

SCHEDULES = f"""
ALTER TABLE jsworker.schedules
  ADD COLUMN priority smallint NOT NULL DEFAULT 1,
  ADD COLUMN limit_key text,
  ADD CONSTRAINT schedules_priority CHECK ({PRIORITY}),
  ADD CONSTRAINT schedules_limit_key CHECK (limit_key {IS_PRINTABLE} AND char_length(limit_key) <= 255)
"""

# No foreign keys to jobs: nothing may stand in a job's way.
TABLES = f"""
CREATE TABLE jsworker.limits (
  kind text NOT NULL,
  key text NOT NULL,
  max_running integer,
  rate integer,
  per double precision,
  set_by text,
  full_at timestamptz,
  paused_at timestamptz,
  paused_until timestamptz,
  paused_by text,
  reason text,
  used_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (kind, key),
  CONSTRAINT limits_kind CHECK ({KIND}),
  CONSTRAINT limits_key CHECK (key {IS_PRINTABLE} AND char_length(key) <= 255),
  CONSTRAINT limits_max_running CHECK (max_running BETWEEN 1 AND 1000000),
  CONSTRAINT limits_rate CHECK (
    CASE WHEN rate IS NULL THEN per IS NULL
    ELSE rate BETWEEN 1 AND 1000000 AND coalesce(per > 0 AND per <= 31622400, false) END
  ),
  CONSTRAINT limits_set_by CHECK (
    CASE WHEN set_by IS NULL THEN max_running IS NULL AND rate IS NULL ELSE set_by IN ('code', 'operator') END
  ),
  CONSTRAINT limits_paused CHECK (
    paused_at IS NOT NULL OR (paused_until IS NULL AND paused_by IS NULL AND reason IS NULL)
  )
);
CREATE TABLE jsworker.unique_windows (
  kind text NOT NULL,
  key text NOT NULL,
  job_id uuid NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (kind, key),
  CONSTRAINT unique_windows_kind CHECK ({KIND}),
  CONSTRAINT unique_windows_key CHECK (key {IS_PRINTABLE} AND char_length(key) BETWEEN 1 AND 255),
  CONSTRAINT unique_windows_until CHECK (until {BOUNDS})
);
CREATE INDEX unique_windows_until ON jsworker.unique_windows (until);
CREATE TABLE jsworker.job_steps (
  job_id uuid NOT NULL,
  name text NOT NULL,
  result jsonb,
  fencing_token bigint NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  sleeps_until timestamptz,
  PRIMARY KEY (job_id, name),
  CONSTRAINT job_steps_name CHECK (char_length(name) BETWEEN 1 AND 255),
  CONSTRAINT job_steps_sleeps_until CHECK (sleeps_until {BOUNDS})
);
CREATE TABLE jsworker.workflows (
  id uuid PRIMARY KEY,
  name text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  revision bigint NOT NULL DEFAULT 0,
  cancelled_at timestamptz,
  finished_at timestamptz,
  outcome text,
  CONSTRAINT workflows_name CHECK ({NAME}),
  CONSTRAINT workflows_outcome CHECK ({OUTCOME})
);
CREATE INDEX workflows_open ON jsworker.workflows (id) WHERE finished_at IS NULL;
CREATE INDEX workflows_finished ON jsworker.workflows (finished_at) WHERE finished_at IS NOT NULL;
CREATE TABLE jsworker.batches (
  id uuid PRIMARY KEY,
  workflow uuid NOT NULL REFERENCES jsworker.workflows (id) ON DELETE CASCADE,
  name text NOT NULL,
  kind text NOT NULL,
  place integer NOT NULL,
  on_failure text NOT NULL DEFAULT 'cancel',
  sealed boolean NOT NULL DEFAULT true,
  generation bigint NOT NULL DEFAULT 0,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  finished_at timestamptz,
  outcome text,
  propagated boolean NOT NULL DEFAULT false,
  CONSTRAINT batches_name CHECK ({NAME}),
  CONSTRAINT batches_outcome CHECK ({OUTCOME}),
  CONSTRAINT batches_kind CHECK ({KIND}),
  CONSTRAINT batches_on_failure CHECK (on_failure IN ('cancel', 'run'))
);
CREATE INDEX batches_of_workflow ON jsworker.batches (workflow, place);
CREATE INDEX batches_open ON jsworker.batches (id) WHERE finished_at IS NULL;
CREATE INDEX batches_to_propagate ON jsworker.batches (id) WHERE finished_at IS NOT NULL AND NOT propagated;
CREATE TABLE jsworker.batch_needs (
  batch uuid NOT NULL REFERENCES jsworker.batches (id) ON DELETE CASCADE,
  needs uuid NOT NULL REFERENCES jsworker.batches (id) ON DELETE CASCADE,
  PRIMARY KEY (batch, needs),
  CONSTRAINT batch_needs_other CHECK (batch <> needs)
);
CREATE INDEX batch_needs_needs ON jsworker.batch_needs (needs)
"""

# Percent signs are doubled, for the driver.
REFUSES = """
CREATE OR REPLACE FUNCTION jsworker.refuse_job_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.status = 'scheduled' AND NEW.held_by = 'needs' AND NEW.batch_id = OLD.batch_id
    AND NEW.fencing_token = OLD.fencing_token AND NEW.dispatch = OLD.dispatch
    AND (NEW.id, NEW.kind, NEW.payload, NEW.unique_key, NEW.result, NEW.last_error) IS NOT DISTINCT FROM
      (OLD.id, OLD.kind, OLD.payload, OLD.unique_key, OLD.result, OLD.last_error)
    AND (OLD.status = 'failed' OR OLD.status = 'cancelled' AND OLD.failure_reason = 'needs')
  THEN
    RETURN NEW;
  END IF;
  RAISE EXCEPTION 'jsworker refuses %% token %% dispatch %% -> %% token %% dispatch %%',
    OLD.status, OLD.fencing_token, OLD.dispatch, NEW.status, NEW.fencing_token, NEW.dispatch || CASE
      WHEN OLD.status IN ('completed', 'failed', 'cancelled') THEN ': what a job was and came to stays' ELSE '' END
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_guard', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql(JOBS)
    connection.exec_driver_sql(SCHEDULES)
    for statement in TABLES.split(";"):
        connection.exec_driver_sql(statement)
    connection.exec_driver_sql(REFUSES)
