"""The function takes no window of a job that its snapshot cannot see.

A producer whose transaction outlasts the window commits a job that lives, and a window that is over. Another one
that has waited for this row sees both only in its next statement; it took the window and enqueued a second job.

Revision: 0026, after 0025
"""

from alembic.util import CommandError

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

BEFORE = "WHERE w.until <= clock_timestamp() AND NOT EXISTS ("
AFTER = """WHERE w.until <= clock_timestamp() AND EXISTS (
        SELECT FROM jsworker.unique_windows AS seen
        WHERE seen.kind = w.kind AND seen.key = w.key AND seen.job_id = w.job_id) AND NOT EXISTS ("""

IS_OTHER = """
SELECT 1 WHERE (position(%s IN pg_get_functiondef(to_regproc('jsworker.enqueue'))) > 0) IS NOT TRUE
"""
"""Whether the function lacks a text, is missing or stands twice."""
BY_HAND = "jsworker.enqueue was changed by hand: make it anew as migrations 0018 to 0025 do, then upgrade"

# The function's owner and its privileges stay.
TAKE_WHAT_IS_SEEN = f"""
DO $do$
DECLARE
  definition text := pg_get_functiondef(CAST('jsworker.enqueue' AS regproc));
BEGIN
  IF position($old${BEFORE}$old$ IN definition) = 0 THEN
    RAISE EXCEPTION '{BY_HAND}';
  END IF;
  EXECUTE replace(definition, $old${BEFORE}$old$, $new${AFTER}$new$);
END $do$"""


def upgrade() -> None:
    # The refusal of the block itself would be shown without its text, which may be that of a trigger about a row.
    if op.get_bind().exec_driver_sql(IS_OTHER, (BEFORE,)).scalar():
        raise CommandError(BY_HAND)
    op.execute(TAKE_WHAT_IS_SEEN)
