"""Queued jobs are found by their kind in the order of (queued_at, id), not only of queued_at.

Jobs that were enqueued in one statement have one queued_at. The search for lost messages goes from row to row; by an index
of queued_at alone each step would pass all others of the same instant. Where there are many jobs, `jsworker db upgrade`
builds the index beforehand, outside of the transaction, while everybody goes on writing; older workers can use it, too.

Revision: 0020, after 0019
"""

from alembic.util import CommandError

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_queued_in_order": (
        "CREATE INDEX CONCURRENTLY jobs_queued_in_order ON jsworker.jobs (kind, queued_at, id) "
        "WHERE status || '' = 'queued'"
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
    op.execute("DROP INDEX jsworker.jobs_queued")
