"""When a job last told its progress is kept, so that those that hang are found by it; and which kinds of a worker have
no time-out of their own.

A column that may be NULL is added at once, however many rows there are.

Revision: 0011, after 0010
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("progress_at", sa.DateTime(timezone=True), nullable=True), schema="jsworker"
    )
    op.add_column(
        "workers",
        sa.Column("kinds_without_timeout", postgresql.ARRAY(sa.Text()), nullable=True),
        schema="jsworker",
    )
