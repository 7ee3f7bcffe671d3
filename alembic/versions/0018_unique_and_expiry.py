"""A job may expire before it has begun; a key may have one job that waits beside one that runs.

Revision: 0018, after 0015

Columns that may be NULL are added at once, however many rows there are; the next migration checks and indexes them.
"""

from alembic import op

revision = "0018"
down_revision = "0015"
branch_labels = None
depends_on = None

BOUNDS = "BETWEEN TIMESTAMPTZ '2000-01-01 00:00:00+00' AND TIMESTAMPTZ '9999-12-31 00:00:00+00'"
KEY = r"waiting_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(waiting_key) BETWEEN 1 AND 255"
COLUMNS = f"""
ALTER TABLE jsworker.jobs
  ADD COLUMN expires_at timestamptz,
  ADD COLUMN waiting_key text,
  ADD COLUMN behind uuid,
  ADD CONSTRAINT jobs_expires_at CHECK (expires_at {BOUNDS}) NOT VALID,
  ADD CONSTRAINT jobs_waiting_key CHECK (waiting_key IS NULL OR (unique_key IS NULL AND {KEY})) NOT VALID
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(COLUMNS)


def downgrade() -> None:
    op.execute(
        "ALTER TABLE jsworker.jobs DROP COLUMN expires_at, DROP COLUMN waiting_key, DROP COLUMN behind"
    )
