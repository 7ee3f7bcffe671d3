"""Runs end in snoozes, which are counted apart; what a job's steps returned is kept.

Revision: 0019, after 0015
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "0019"
down_revision = "0018b"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "jobs",
        sa.Column("snoozes", sa.Integer(), server_default=sa.text("0"), nullable=False),
        schema="jsworker",
    )
    op.create_table(
        "job_steps",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("result", JSONB(), nullable=True),
        sa.Column("fencing_token", sa.BigInteger(), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("sleeps_until", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "name"),
        sa.CheckConstraint("char_length(name) BETWEEN 1 AND 255", name="job_steps_name"),
        sa.CheckConstraint(
            "sleeps_until BETWEEN TIMESTAMPTZ '2000-01-01 00:00:00+00' AND TIMESTAMPTZ '9999-12-31 00:00:00+00'",
            name="job_steps_sleeps_until",
        ),
        schema="jsworker",
    )


def downgrade() -> None:
    op.drop_table("job_steps", schema="jsworker")
    op.drop_column("jobs", "snoozes", schema="jsworker")
