"""Workers tell how they run each kind: attempts, time-outs, back-off and so on, for people to see.

A column of the registry that older workers leave empty.

Revision: 0025, after 0024
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("kind_settings", JSONB(), nullable=True), schema="jsworker")
