"""Workflows: batches of jobs, and which batch waits for which.

The trigger that keeps final jobs as they are lets two more through: a job that was cancelled because its needs failed, or
that failed itself, may be held again until its needs have finished.

Revision: 0022, after 0017
"""

import sqlalchemy as sa

from alembic import op

revision = "0022"
down_revision = "0019"
branch_labels = None
depends_on = None

NAME = r"name !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(name) BETWEEN 1 AND 255"
OUTCOME = (
    "(outcome IS NOT NULL) = (finished_at IS NOT NULL) AND outcome IN ('completed', 'failed', 'cancelled')"
)
KIND = "kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64"

TABLES = rf"""
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

REFUSES = """
CREATE OR REPLACE FUNCTION jsworker.refuse_job_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN{but}
  RAISE EXCEPTION 'jsworker refuses % token % dispatch % -> % token % dispatch %',
    OLD.status, OLD.fencing_token, OLD.dispatch, NEW.status, NEW.fencing_token, NEW.dispatch || CASE
      WHEN OLD.status IN ('completed', 'failed', 'cancelled') THEN ': what a job was and came to stays' ELSE '' END
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_guard', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""
BUT_HELD_AGAIN = """
  IF NEW.status = 'scheduled' AND NEW.held_by = 'needs' AND NEW.batch_id = OLD.batch_id
    AND NEW.fencing_token = OLD.fencing_token AND NEW.dispatch = OLD.dispatch
    AND (NEW.id, NEW.kind, NEW.payload, NEW.unique_key, NEW.result, NEW.last_error) IS NOT DISTINCT FROM
      (OLD.id, OLD.kind, OLD.payload, OLD.unique_key, OLD.result, OLD.last_error)
    AND (OLD.status = 'failed' OR OLD.status = 'cancelled' AND OLD.failure_reason = 'needs')
  THEN
    RETURN NEW;
  END IF;"""


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("jobs", sa.Column("batch_id", sa.Uuid(), nullable=True), schema="jsworker")
    for statement in TABLES.split(";"):
        connection.exec_driver_sql(statement)
    connection.exec_driver_sql(REFUSES.replace("{but}", BUT_HELD_AGAIN).replace("%", "%%"))


def downgrade() -> None:
    op.get_bind().exec_driver_sql(REFUSES.replace("{but}", "").replace("%", "%%"))
    for table in ("batch_needs", "batches", "workflows"):
        op.drop_table(table, schema="jsworker")
    op.drop_column("jobs", "batch_id", schema="jsworker")
