"""The function takes no window of a job that its snapshot cannot see.

A producer whose transaction outlasts the window commits a job that lives, and a window that is over. Another one
that has waited for this row sees both only in its next statement; it took the window and enqueued a second job.

Revision: 0026, after 0025
"""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

BEFORE = "WHERE w.until <= clock_timestamp() AND NOT EXISTS ("
AFTER = """WHERE w.until <= clock_timestamp() AND EXISTS (
        SELECT FROM jsworker.unique_windows AS seen
        WHERE seen.kind = w.kind AND seen.key = w.key AND seen.job_id = w.job_id) AND NOT EXISTS ("""


def upgrade() -> None:
    replace(BEFORE, AFTER)


def downgrade() -> None:
    replace(AFTER, BEFORE)


def replace(old: str, new: str) -> None:
    """Make the function anew; its owner and its privileges stay."""
    op.execute(f"""
DO $do$
DECLARE
  definition text := pg_get_functiondef(CAST('jsworker.enqueue' AS regproc));
BEGIN
  ASSERT position($old${old}$old$ IN definition) > 0;
  EXECUTE replace(definition, $old${old}$old$, $new${new}$new$);
END $do$""")
