"""Every row is known to obey the rules of 0016, and what is held, limited, unique, urgent or of a batch has indexes.

By itself, for validation and indexes read the whole table. A job that uses none of it takes no part in the indexes. Where
there are many jobs, `jsworker db upgrade` builds them beforehand, outside of the transaction, while everybody goes on writing.

Revision: 0017, after 0016
"""

from alembic.util import CommandError

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

# In one statement, which reads the table once.
VALIDATE = """
ALTER TABLE jsworker.jobs
  VALIDATE CONSTRAINT jobs_scheduled_waits,
  VALIDATE CONSTRAINT jobs_held,
  VALIDATE CONSTRAINT jobs_limit_key,
  VALIDATE CONSTRAINT jobs_priority,
  VALIDATE CONSTRAINT jobs_expires_at,
  VALIDATE CONSTRAINT jobs_waiting_key
"""
CONCURRENTLY = {
    "jobs_held": (
        "CREATE INDEX CONCURRENTLY jobs_held ON jsworker.jobs (held_by, kind, id) "
        "WHERE status || '' = 'scheduled' AND held_by IS NOT NULL"
    ),
    "jobs_held_by_key": (
        "CREATE INDEX CONCURRENTLY jobs_held_by_key ON jsworker.jobs (kind, limit_key, priority, queued_at, id) "
        "WHERE status || '' = 'scheduled' AND held_by IN ('limit', 'rate', 'paused')"
    ),
    "jobs_held_of_batch": (
        "CREATE INDEX CONCURRENTLY jobs_held_of_batch ON jsworker.jobs (batch_id, id) "
        "WHERE held_by = 'needs' AND status || '' = 'scheduled'"
    ),
    "jobs_of_batch": (
        "CREATE INDEX CONCURRENTLY jobs_of_batch ON jsworker.jobs (batch_id, status, id) "
        "WHERE batch_id IS NOT NULL"
    ),
    "jobs_slots": (
        "CREATE INDEX CONCURRENTLY jobs_slots ON jsworker.jobs (kind, limit_key) "
        "WHERE status || '' = 'processing' AND limit_key IS NOT NULL"
    ),
    "jobs_queued_lanes": (
        "CREATE INDEX CONCURRENTLY jobs_queued_lanes ON jsworker.jobs (kind, priority, queued_at) "
        "WHERE status || '' = 'queued' AND priority <> 1"
    ),
    "jobs_expiring": (
        "CREATE INDEX CONCURRENTLY jobs_expiring ON jsworker.jobs (expires_at) "
        "WHERE expires_at IS NOT NULL AND status || '' IN ('scheduled', 'queued') AND fencing_token = 0"
    ),
    "jobs_unique_waiting": (
        "CREATE UNIQUE INDEX CONCURRENTLY jobs_unique_waiting ON jsworker.jobs (kind, waiting_key) "
        "WHERE waiting_key IS NOT NULL AND status IN ('scheduled', 'queued')"
    ),
    "jobs_unique_running": (
        "CREATE UNIQUE INDEX CONCURRENTLY jobs_unique_running ON jsworker.jobs (kind, waiting_key) "
        "WHERE waiting_key IS NOT NULL AND status = 'processing'"
    ),
}
DROP = {name: f"DROP INDEX IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
DROP_CONCURRENTLY = {name: f"DROP INDEX CONCURRENTLY IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
IS_VALID = "SELECT i.indisvalid FROM pg_index AS i WHERE i.indexrelid = to_regclass('jsworker.' || %s)"
# Among fewer an index is built in a moment.
ARE_MANY = "SELECT count(*) > 10000 FROM (SELECT FROM jsworker.jobs LIMIT 10001) AS first"
STILL_LOCKED = """
SELECT xmin = CAST(pg_current_xact_id() AS xid) AND EXISTS (SELECT FROM jsworker.jobs) FROM pg_constraint
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_held'
"""


def upgrade() -> None:
    connection = op.get_bind()
    if connection.exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0016 and 0017 in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0016` first"
        )
    op.execute(VALIDATE)
    for name, statement in CONCURRENTLY.items():
        if connection.exec_driver_sql(IS_VALID, (name,)).scalar():
            continue
        if connection.exec_driver_sql(ARE_MANY).scalar():
            raise CommandError(
                f"building {name} in a transaction would keep workers from their jobs: "
                "run `jsworker db upgrade`, which builds it beside them"
            )
        op.execute(DROP[name])
        op.execute(statement.replace(" CONCURRENTLY", ""))
