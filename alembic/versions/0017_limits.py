"""Held rows and those that take a slot of a limit are found by indexes; every row is known to obey the rules of 0016.

A job that is held by nothing and has no key takes no part in these indexes. Where there are many jobs, `jsworker db
upgrade` builds them beforehand, outside of the transaction, while everybody goes on writing.

Revision: 0017, after 0016
"""

from alembic.util import CommandError

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_held": (
        "CREATE INDEX CONCURRENTLY jobs_held ON jsworker.jobs (held_by, kind, id) "
        "WHERE status || '' = 'scheduled' AND held_by IS NOT NULL"
    ),
    "jobs_held_by_key": (
        "CREATE INDEX CONCURRENTLY jobs_held_by_key ON jsworker.jobs (kind, limit_key, queued_at, id) "
        "WHERE status || '' = 'scheduled' AND held_by IN ('limit', 'rate', 'paused')"
    ),
    "jobs_slots": (
        "CREATE INDEX CONCURRENTLY jobs_slots ON jsworker.jobs (kind, limit_key) "
        "WHERE status || '' = 'processing' AND limit_key IS NOT NULL"
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
VALIDATE = """
ALTER TABLE jsworker.jobs
  VALIDATE CONSTRAINT jobs_scheduled_waits, VALIDATE CONSTRAINT jobs_held, VALIDATE CONSTRAINT jobs_limit_key
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


def downgrade() -> None:
    for name in CONCURRENTLY:
        op.execute(DROP[name])
