"""A job that waits or runs cannot be deleted, by whatever mistake.

Revision: 0002, after 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

REFUSE_JOB_DELETE = """
CREATE FUNCTION jsworker.refuse_job_delete() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'jsworker refuses to delete a job that is %: cancel it first', OLD.status
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_live_stay', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""

JOBS_LIVE_STAY = """
CREATE TRIGGER jobs_live_stay BEFORE DELETE ON jsworker.jobs
FOR EACH ROW WHEN (OLD.status IN ('scheduled', 'queued', 'processing'))
EXECUTE FUNCTION jsworker.refuse_job_delete()
"""


REFUSE_JOBS_TRUNCATE = """
CREATE FUNCTION jsworker.refuse_jobs_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT FROM jsworker.jobs WHERE status IN ('scheduled', 'queued', 'processing')) THEN
    RAISE EXCEPTION 'jsworker refuses to truncate jobs: some wait or run, cancel them first'
      USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_live_stay', SCHEMA = 'jsworker', TABLE = 'jobs';
  END IF;
  RETURN NULL;
END
$$
"""

JOBS_LIVE_STAY_AT_ONCE = """
CREATE TRIGGER jobs_live_stay_at_once BEFORE TRUNCATE ON jsworker.jobs
FOR EACH STATEMENT EXECUTE FUNCTION jsworker.refuse_jobs_truncate()
"""


def upgrade() -> None:
    for statement in (REFUSE_JOB_DELETE, JOBS_LIVE_STAY, REFUSE_JOBS_TRUNCATE, JOBS_LIVE_STAY_AT_ONCE):
        op.execute(statement)
