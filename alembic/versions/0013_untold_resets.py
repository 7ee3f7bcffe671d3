"""What operators take back is noted, for one worker to tell it as an event and to count it.

Revision: 0013, after 0011
"""

import sqlalchemy as sa

from alembic import op

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.create_table(
        "untold_resets",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("fencing_token", sa.BigInteger(), nullable=False),
        sa.Column("dispatch", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("stalls", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        schema="jsworker",
    )
