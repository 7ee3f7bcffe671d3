"""A scheduled job waits for a time, run_at, or for an event, held_by; and a job may have a key that limits count.

The rows that are there wait for a time. 0017 lets PostgreSQL see that they obey the new rules.

Revision: 0016, after 0015
"""

import sqlalchemy as sa

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

FIRST, LAST = "TIMESTAMPTZ '2000-01-01 00:00:00+00'", "TIMESTAMPTZ '9999-12-31 00:00:00+00'"

RULES = rf"""
ALTER TABLE jsworker.jobs
  DROP CONSTRAINT jobs_scheduled_has_run_at,
  ADD CONSTRAINT jobs_scheduled_waits CHECK (
    status <> 'scheduled' OR (run_at IS NULL) = (held_by IS NOT NULL)
  ) NOT VALID,
  ADD CONSTRAINT jobs_held CHECK (
    CASE WHEN held_by IS NULL THEN held_at IS NULL AND due_at IS NULL
    ELSE held_by IN ('limit', 'rate', 'paused', 'needs') AND held_at IS NOT NULL
      AND status IN ('scheduled', 'cancelled') AND held_at BETWEEN {FIRST} AND {LAST}
      AND coalesce(due_at, held_at) BETWEEN {FIRST} AND {LAST} END
  ) NOT VALID,
  ADD CONSTRAINT jobs_limit_key CHECK (
    limit_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(limit_key) <= 255
  ) NOT VALID
"""

# What is held becomes due; an older version knows no other way to wait.
EARLIER_RULES = (
    "ALTER TABLE jsworker.jobs DROP CONSTRAINT jobs_scheduled_waits, DROP CONSTRAINT jobs_held, DROP CONSTRAINT jobs_limit_key",
    "UPDATE jsworker.jobs SET run_at = coalesce(due_at, clock_timestamp()) WHERE status = 'scheduled' AND run_at IS NULL",
    "ALTER TABLE jsworker.jobs ADD CONSTRAINT jobs_scheduled_has_run_at CHECK (run_at IS NOT NULL OR status <> 'scheduled')",
)

COLUMNS = {
    "held_by": sa.Text(),
    "held_at": sa.DateTime(timezone=True),
    "due_at": sa.DateTime(timezone=True),
    "limit_key": sa.Text(),
}


def upgrade() -> None:
    for name, type_ in COLUMNS.items():
        op.add_column("jobs", sa.Column(name, type_, nullable=True), schema="jsworker")
    op.get_bind().exec_driver_sql(RULES)


def downgrade() -> None:
    for statement in EARLIER_RULES:
        op.execute(statement)
    for name in COLUMNS:
        op.drop_column("jobs", name, schema="jsworker")
