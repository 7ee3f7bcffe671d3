"""A worker's row tells the limits that its classes declare, so that those who disagree are found.

A column that may be NULL is added at once; rows of older workers leave it NULL.

Revision: 0019, after 0018
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("limits", postgresql.JSONB(), nullable=True), schema="jsworker")
