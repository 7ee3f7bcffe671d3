"""Every row is known to obey the bounds of 0005.

By itself, for it reads the whole table: its lock lets everybody write meanwhile, that of 0005 would not.

Revision: 0006, after 0005
"""

from alembic.util import CommandError
from sqlalchemy.exc import IntegrityError

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


STILL_LOCKED = """
SELECT xmin = CAST(pg_current_xact_id() AS xid) AND EXISTS (SELECT FROM jsworker.jobs) FROM pg_constraint
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_times'
"""

VALIDATE = """
ALTER TABLE jsworker.jobs
  VALIDATE CONSTRAINT jobs_limits, VALIDATE CONSTRAINT jobs_numbers, VALIDATE CONSTRAINT jobs_times
"""


def upgrade() -> None:
    if op.get_bind().exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0005 and 0006 in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0005` first"
        )
    try:
        op.execute(VALIDATE)
    except IntegrityError as error:
        raise CommandError(
            "rows beyond the bounds were written while 0005 looked for such: "
            "run `jsworker db upgrade`, which brings them to the nearest"
        ) from error
