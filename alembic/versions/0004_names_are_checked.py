"""Every row is known to obey the rules that 0003 wrote anew.

By itself, for it reads the whole table: its lock lets everybody write meanwhile, that of 0003 would not.

Revision: 0004, after 0003
"""

from alembic.util import CommandError

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


STILL_LOCKED = """
SELECT xmin = CAST(pg_current_xact_id() AS xid) AND EXISTS (SELECT FROM jsworker.jobs) FROM pg_constraint
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_kind'
"""

VALIDATE = "ALTER TABLE jsworker.jobs VALIDATE CONSTRAINT jobs_kind, VALIDATE CONSTRAINT jobs_unique_key"


def upgrade() -> None:
    if op.get_bind().exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0003 and 0004 in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0003` first"
        )
    op.execute(VALIDATE)
