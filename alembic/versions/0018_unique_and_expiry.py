"""A job may expire before it has begun.

Revision: 0018, after 0015

Columns that may be NULL are added at once, however many rows there are; the next migration checks and indexes them.
"""

from alembic import op

revision = "0018"
down_revision = "0015"
branch_labels = None
depends_on = None

BOUNDS = "BETWEEN TIMESTAMPTZ '2000-01-01 00:00:00+00' AND TIMESTAMPTZ '9999-12-31 00:00:00+00'"
COLUMNS = f"""
ALTER TABLE jsworker.jobs
  ADD COLUMN expires_at timestamptz,
  ADD CONSTRAINT jobs_expires_at CHECK (expires_at {BOUNDS}) NOT VALID
"""


def upgrade() -> None:
    op.execute(COLUMNS)


def downgrade() -> None:
    op.execute("ALTER TABLE jsworker.jobs DROP COLUMN expires_at")
