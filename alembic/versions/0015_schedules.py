"""Schedules enqueue jobs at their instants; a job tells which one it is for.

Revision: 0015, after 0014
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

FIRST, LAST = "TIMESTAMPTZ '2000-01-01 00:00:00+00'", "TIMESTAMPTZ '9999-12-31 00:00:00+00'"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("schedule", sa.Text(), nullable=True), schema="jsworker")
    op.add_column(
        "jobs", sa.Column("scheduled_for", sa.DateTime(timezone=True), nullable=True), schema="jsworker"
    )
    op.create_table(
        "schedules",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payload", JSONB(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("tz", sa.Text(), nullable=False),
        sa.Column("missed", sa.Text(), nullable=False),
        sa.Column("overlap", sa.Text(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_job", sa.Uuid(), nullable=True),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("set_by", sa.Text(), nullable=False),
        sa.Column("paused", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sa.CheckConstraint(
            "kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64", name="schedules_kind"
        ),
        sa.CheckConstraint(
            "missed IN ('coalesce', 'skip') OR missed ~ '^catch_up=[1-9][0-9]{0,3}$'", name="schedules_missed"
        ),
        sa.CheckConstraint("overlap IN ('allow', 'skip')", name="schedules_overlap"),
        sa.CheckConstraint("set_by IN ('code', 'operator')", name="schedules_set_by"),
        sa.CheckConstraint(f"next_at BETWEEN {FIRST} AND {LAST}", name="schedules_next_at"),
        schema="jsworker",
    )
    op.create_index(
        "schedules_next", "schedules", ["next_at"], schema="jsworker", postgresql_where=sa.text("NOT paused")
    )
