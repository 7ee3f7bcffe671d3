"""What producers may write is bounded, and what an ended job was and came to stays as it is.

A row with a dispatch, a time or a limit beyond all reason stopped who read it or counted on. Rows that break the
new rules are found before the table is locked, and brought to the nearest bound while it is, by their ids. A row that
is written between the two is found by a second look (``afterwards``); behind the lock none can be written any more.
0006 lets PostgreSQL see that every row obeys.

A producer may number a dispatch only so high that whoever claims its job has room to put it back.

Revision: 0005, after 0004
"""

from sqlalchemy import Connection

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

FIRST, LAST = "TIMESTAMPTZ '2000-01-01 00:00:00+00'", "TIMESTAMPTZ '9999-12-31 00:00:00+00'"
TIMES = ("run_at", "queued_at", "publish_after", "published_at", "stream_created", "created_at")
MOST = 9007199254740992
FIRST_MOST = 4503599627370496

LIMITS = "max_attempts BETWEEN 1 AND 1000000 AND max_stalls >= 1 AND (max_stalls <= 100 OR fencing_token > 0)"
NUMBERS = (
    f"dispatch BETWEEN 0 AND {MOST} AND fencing_token BETWEEN 0 AND {MOST} AND stream_seq BETWEEN 0 AND {MOST}"
    f" AND (fencing_token > 0 OR dispatch < {FIRST_MOST} OR dispatch = {FIRST_MOST} AND status <> 'scheduled')"
)
WITHIN = " AND ".join(f"{column} BETWEEN {FIRST} AND {LAST}" for column in TIMES)
# No search for jobs that no message brings finds one that is queued since nobody knows when.
TIMELY = f"{WITHIN} AND (queued_at IS NOT NULL OR status <> 'queued')"

BEYOND = f"SELECT id FROM jsworker.jobs WHERE NOT ({LIMITS}) OR NOT ({NUMBERS}) OR NOT ({TIMELY})"  # noqa: S608 -- constants
BEYOND_OR_WITHOUT_ROOM = f"{BEYOND} OR dispatch > {FIRST_MOST} OR fencing_token > {FIRST_MOST}"

NEAREST = f"""
UPDATE jsworker.jobs SET
  max_attempts = CASE WHEN max_attempts IS NOT NULL THEN least(max_attempts, 1000000) END,
  max_stalls = CASE WHEN fencing_token > 0 OR max_stalls IS NULL THEN max_stalls ELSE least(max_stalls, 100) END,
  dispatch = greatest(0, least(dispatch, {FIRST_MOST} - 1)),
  fencing_token = greatest(0, least(fencing_token, {FIRST_MOST})),
  stream_seq = CASE WHEN stream_seq BETWEEN 0 AND {MOST} THEN stream_seq END,
  {", ".join(f"{each} = CASE WHEN {each} IS NOT NULL THEN greatest({FIRST}, least({each}, {LAST})) END" for each in TIMES if each != "queued_at")},
  queued_at = CASE WHEN queued_at IS NOT NULL OR status = 'queued'
    THEN greatest({FIRST}, least(coalesce(queued_at, created_at), {LAST})) END
WHERE id = ANY(%s)
"""  # noqa: S608 -- constants

BOUNDS = f"""
ALTER TABLE jsworker.jobs
  DROP CONSTRAINT jobs_limits,
  ADD CONSTRAINT jobs_limits CHECK ({LIMITS}) NOT VALID,
  ADD CONSTRAINT jobs_numbers CHECK ({NUMBERS}) NOT VALID,
  ADD CONSTRAINT jobs_times CHECK ({TIMELY}) NOT VALID
"""

REFUSE_JOB_UPDATE = """
CREATE OR REPLACE FUNCTION jsworker.refuse_job_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'jsworker refuses % token % dispatch % -> % token % dispatch %',
    OLD.status, OLD.fencing_token, OLD.dispatch, NEW.status, NEW.fencing_token, NEW.dispatch || CASE
      WHEN OLD.status IN ('completed', 'failed', 'cancelled') THEN ': what a job was and came to stays' ELSE '' END
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_guard', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""

JOBS_GUARD = """
CREATE TRIGGER jobs_guard BEFORE UPDATE OF status, fencing_token, dispatch,
  id, kind, payload, unique_key, result, attempts, errors, stalls, last_error, failure_reason ON jsworker.jobs
FOR EACH ROW WHEN (
     (OLD.status IN ('completed', 'failed', 'cancelled') AND (
          (OLD.status <> NEW.status AND NOT (OLD.status = 'failed' AND NEW.status = 'queued'))
       OR (NEW.id, NEW.kind, NEW.payload, NEW.unique_key, NEW.result, NEW.last_error) IS DISTINCT FROM
          (OLD.id, OLD.kind, OLD.payload, OLD.unique_key, OLD.result, OLD.last_error)
       OR (OLD.status = NEW.status AND
          (NEW.attempts, NEW.errors, NEW.stalls, NEW.failure_reason) IS DISTINCT FROM
          (OLD.attempts, OLD.errors, OLD.stalls, OLD.failure_reason))))
  OR NEW.fencing_token < OLD.fencing_token
  OR NEW.dispatch < OLD.dispatch
  OR (NEW.status = 'processing' AND NEW.fencing_token = OLD.fencing_token
      AND NEW.worker_id IS DISTINCT FROM OLD.worker_id)
) EXECUTE FUNCTION jsworker.refuse_job_update()
"""


def upgrade() -> None:
    connection = op.get_bind()
    beyond = [row.id for row in connection.exec_driver_sql(BEYOND_OR_WITHOUT_ROOM)]
    op.execute("DROP TRIGGER jobs_guard ON jsworker.jobs")  # locks the table until the end
    if beyond:
        connection.exec_driver_sql(NEAREST, (beyond,))
    op.execute(BOUNDS)
    connection.exec_driver_sql(REFUSE_JOB_UPDATE.replace("%", "%%"))
    op.execute(JOBS_GUARD)


def afterwards(connection: Connection) -> bool:
    """Bring rows that were written while the first look was under way to the nearest bound; tell whether there were any."""
    beyond = [row.id for row in connection.exec_driver_sql(BEYOND)]
    if beyond:
        connection.exec_driver_sql("DROP TRIGGER jobs_guard ON jsworker.jobs")
        connection.exec_driver_sql(NEAREST, (beyond,))
        connection.exec_driver_sql(JOBS_GUARD)
    return bool(beyond)
