"""Members of a batch, and those that wait for its needs, are found by indexes.

A job without a batch takes no part in them. Where there are many jobs, `jsworker db upgrade` builds them beforehand, outside of
the transaction, while everybody goes on writing.

Revision: 0023, after 0022
"""

from alembic.util import CommandError

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_of_batch": (
        "CREATE INDEX CONCURRENTLY jobs_of_batch ON jsworker.jobs (batch_id, status, id) "
        "WHERE batch_id IS NOT NULL"
    ),
    "jobs_held_of_batch": (
        "CREATE INDEX CONCURRENTLY jobs_held_of_batch ON jsworker.jobs (batch_id, id) "
        "WHERE held_by = 'needs' AND status || '' = 'scheduled'"
    ),
}
DROP = {name: f"DROP INDEX IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
DROP_CONCURRENTLY = {name: f"DROP INDEX CONCURRENTLY IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
IS_VALID = "SELECT i.indisvalid FROM pg_index AS i WHERE i.indexrelid = to_regclass('jsworker.' || %s)"
# Among fewer an index is built in a moment.
ARE_MANY = "SELECT count(*) > 10000 FROM (SELECT FROM jsworker.jobs LIMIT 10001) AS first"


def upgrade() -> None:
    connection = op.get_bind()
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
