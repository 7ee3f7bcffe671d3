"""Ended jobs are found by their kind in the order of their ids, which is that of their creation.

A listing of one kind searched all others from the newest on. No version of a job is in this index but its last. Where there
are many jobs, `jsworker db upgrade` builds it beforehand, outside of the transaction, while everybody goes on writing; older
workers do without it.

Revision: 0024, after 0023
"""

from alembic.util import CommandError

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_ended_of_kind": (
        "CREATE INDEX CONCURRENTLY jobs_ended_of_kind ON jsworker.jobs (kind, id) WHERE finished_at IS NOT NULL"
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
        connection.exec_driver_sql(DROP[name])
        connection.exec_driver_sql(statement.replace(" CONCURRENTLY", ""))
