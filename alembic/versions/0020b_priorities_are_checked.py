"""Every row is known to have a priority, and waiting jobs that are not normal are found by an index.

By itself, for both read the whole table. A normal job takes no part in the index. Where there are many jobs,
`jsworker db upgrade` builds it beforehand, outside of the transaction, while everybody goes on writing.

Revision: 0020b, after 0020
"""

from alembic.util import CommandError

from alembic import op

revision = "0020b"
down_revision = "0020"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_queued_lanes": (
        "CREATE INDEX CONCURRENTLY jobs_queued_lanes ON jsworker.jobs (kind, priority, queued_at) "
        "WHERE status || '' = 'queued' AND priority <> 1"
    ),
}
DROP = {name: f"DROP INDEX IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
DROP_CONCURRENTLY = {name: f"DROP INDEX CONCURRENTLY IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
IS_VALID = "SELECT i.indisvalid FROM pg_index AS i WHERE i.indexrelid = to_regclass('jsworker.' || %s)"
# Among fewer an index is built in a moment.
ARE_MANY = "SELECT count(*) > 10000 FROM (SELECT FROM jsworker.jobs LIMIT 10001) AS first"
STILL_LOCKED = """
SELECT xmin = CAST(pg_current_xact_id() AS xid) AND EXISTS (SELECT FROM jsworker.jobs) FROM pg_constraint
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_priority'
"""


def upgrade() -> None:
    connection = op.get_bind()
    if connection.exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0020 and 0020b in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0020` first"
        )
    op.execute("ALTER TABLE jsworker.jobs VALIDATE CONSTRAINT jobs_priority")
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
