"""Every row is known to obey the rules that 0018 wrote, and what expires or has a key is found by an index.

Revision: 0018b, after 0018
"""

from alembic.util import CommandError

from alembic import op

revision = "0018b"
down_revision = "0018"
branch_labels = None
depends_on = None

# In one statement, which reads the table once.
VALIDATE = """
ALTER TABLE jsworker.jobs VALIDATE CONSTRAINT jobs_expires_at, VALIDATE CONSTRAINT jobs_waiting_key
"""
CONCURRENTLY = {
    "jobs_expiring": (
        "CREATE INDEX CONCURRENTLY jobs_expiring ON jsworker.jobs (expires_at) "
        "WHERE expires_at IS NOT NULL AND status || '' IN ('scheduled', 'queued')"
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
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_expires_at'
"""


def upgrade() -> None:
    connection = op.get_bind()
    if connection.exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0018 and 0018b in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0018` first"
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
