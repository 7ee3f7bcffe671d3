"""An operator may put a cancelled job back into the queue, or let a member of a batch wait for its needs again.

The trigger that keeps ended jobs as they are lets these two through; all else of an ended job stays as it was. What was
cancelled because its needs failed is still only held again.

Revision: 0021, after 0020
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

# Percent signs are doubled, for the driver.
REFUSES = """
CREATE OR REPLACE FUNCTION jsworker.refuse_job_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.fencing_token = OLD.fencing_token
    AND (NEW.id, NEW.kind, NEW.payload, NEW.unique_key, NEW.result, NEW.last_error) IS NOT DISTINCT FROM
      (OLD.id, OLD.kind, OLD.payload, OLD.unique_key, OLD.result, OLD.last_error)
    AND (NEW.status = 'scheduled' AND NEW.held_by = 'needs' AND NEW.batch_id = OLD.batch_id
      AND NEW.dispatch = OLD.dispatch AND OLD.status IN ('failed', 'cancelled')
      OR NEW.status = 'queued' AND NEW.dispatch = OLD.dispatch + 1 AND NEW.needs_publish
      AND OLD.status = 'cancelled' AND OLD.failure_reason IS DISTINCT FROM 'needs')
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
    op.get_bind().exec_driver_sql(REFUSES)
