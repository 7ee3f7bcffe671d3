"""A job has a priority, 0 high, 1 normal, 2 low, and so have the jobs of a schedule.

Producers that know nothing of it write normal jobs. 0020b lets PostgreSQL see that every row obeys the rule, and
builds the index.

Revision: 0020, after 0015
"""

import sqlalchemy as sa

from alembic import op

revision = "0020"
down_revision = "0015"
branch_labels = None
depends_on = None

RULE = "priority BETWEEN 0 AND 2"
ADD_RULE = f"ALTER TABLE jsworker.jobs ADD CONSTRAINT jobs_priority CHECK ({RULE}) NOT VALID"


def upgrade() -> None:
    for table in ("jobs", "schedules"):
        normal = sa.Column("priority", sa.SmallInteger(), server_default=sa.text("1"), nullable=False)
        op.add_column(table, normal, schema="jsworker")
    op.execute(ADD_RULE)
    op.create_check_constraint("schedules_priority", "schedules", RULE, schema="jsworker")


def downgrade() -> None:
    op.drop_column("schedules", "priority", schema="jsworker")
    op.drop_column("jobs", "priority", schema="jsworker")
