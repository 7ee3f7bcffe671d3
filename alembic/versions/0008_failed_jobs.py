"""Failed and cancelled jobs are found by an index: all of them, and those of a kind; so are a kind's scheduled ones.

A job that is enqueued, claimed and completed takes no part in them. Where there are many jobs, `jsworker db upgrade` builds them
beforehand, outside of the transaction, while everybody goes on writing.

Revision: 0008, after 0007
"""

from alembic.util import CommandError

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_due_of_kind": (
        "CREATE INDEX CONCURRENTLY jobs_due_of_kind ON jsworker.jobs (kind, run_at, id) "
        "WHERE '' || status = 'scheduled'"
    ),
    "jobs_failed": (
        "CREATE INDEX CONCURRENTLY jobs_failed ON jsworker.jobs (status, id) "
        "WHERE status || '' IN ('failed', 'cancelled')"
    ),
    "jobs_failed_of_kind": (
        "CREATE INDEX CONCURRENTLY jobs_failed_of_kind ON jsworker.jobs (kind, status, id) "
        "WHERE '' || status IN ('failed', 'cancelled')"
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
