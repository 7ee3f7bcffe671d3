"""Every row is known to obey the rule that 0009 wrote: by itself, its lock lets everybody write meanwhile.

Revision: 0010, after 0009
"""

from alembic.util import CommandError

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

STILL_LOCKED = """
SELECT xmin = CAST(pg_current_xact_id() AS xid) AND EXISTS (SELECT FROM jsworker.jobs) FROM pg_constraint
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_unique_key'
"""

VALIDATE = "ALTER TABLE jsworker.jobs VALIDATE CONSTRAINT jobs_unique_key"


def upgrade() -> None:
    if op.get_bind().exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0009 and 0010 in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0009` first"
        )
    op.execute(VALIDATE)
