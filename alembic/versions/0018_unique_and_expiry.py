"""A job may expire before it has begun; a key may have one job that waits beside one that runs, or one in a window.

Revision: 0018, after 0015

Columns that may be NULL are added at once, however many rows there are; the next migration checks and indexes them.
"""

import sqlalchemy as sa

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

BOUNDS = "BETWEEN TIMESTAMPTZ '2000-01-01 00:00:00+00' AND TIMESTAMPTZ '9999-12-31 00:00:00+00'"
KEY = r"waiting_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(waiting_key) BETWEEN 1 AND 255"
WINDOW_KEY = r"key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(key) BETWEEN 1 AND 255"
COLUMNS = f"""
ALTER TABLE jsworker.jobs
  ADD COLUMN expires_at timestamptz,
  ADD COLUMN waiting_key text,
  ADD COLUMN behind uuid,
  ADD COLUMN debounce_until timestamptz,
  ADD CONSTRAINT jobs_expires_at CHECK (expires_at {BOUNDS} AND debounce_until {BOUNDS}) NOT VALID,
  ADD CONSTRAINT jobs_waiting_key CHECK (waiting_key IS NULL OR (unique_key IS NULL AND {KEY})) NOT VALID
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(COLUMNS)
    op.create_table(
        "unique_windows",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("kind", "key"),
        sa.CheckConstraint(
            "kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64", name="unique_windows_kind"
        ),
        sa.CheckConstraint(WINDOW_KEY, name="unique_windows_key"),
        sa.CheckConstraint(f"until {BOUNDS}", name="unique_windows_until"),
        schema="jsworker",
    )
    op.create_index("unique_windows_until", "unique_windows", ["until"], schema="jsworker")


def downgrade() -> None:
    op.drop_table("unique_windows", schema="jsworker")
    op.execute(
        "ALTER TABLE jsworker.jobs DROP COLUMN expires_at, DROP COLUMN waiting_key, DROP COLUMN behind, "
        "DROP COLUMN debounce_until"
    )
