"""Workers tell their memory, the delay of their event loop and their supervisor; an operator may drain one.

Columns of the registry that older workers leave empty, and a state that they do not take.

Revision: 0023, after 0022
"""

import sqlalchemy as sa

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

COLUMNS = (
    ("supervisor_pid", sa.Integer()),
    ("memory_bytes", sa.BigInteger()),
    ("loop_lag_seconds", sa.Double()),
    ("drained_at", sa.DateTime(timezone=True)),
)
STATES = "state IN ('running', 'drained', 'draining', 'stopped')"


def upgrade() -> None:
    for name, of_type in COLUMNS:
        op.add_column("workers", sa.Column(name, of_type, nullable=True), schema="jsworker")
    op.drop_constraint("workers_state", "workers", schema="jsworker")
    op.create_check_constraint("workers_state", "workers", STATES, schema="jsworker")
