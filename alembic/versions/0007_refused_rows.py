"""Rows that PostgreSQL refuses to write are set aside, for every worker.

Revision: 0007, after 0006
"""

import sqlalchemy as sa

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.create_table(
        "refused_rows",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("attempted", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("fencing_token", sa.BigInteger(), nullable=False),
        sa.Column("dispatch", sa.BigInteger(), nullable=False),
        sa.Column("sqlstate", sa.Text(), nullable=False),
        sa.Column("constraint_name", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("tries", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("first_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempted"),
        schema="jsworker",
    )
