"""A completed job's row tells who completed it.

Revision: 0014, after 0013
"""

import sqlalchemy as sa

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("completed_by", sa.Text(), nullable=True), schema="jsworker")
