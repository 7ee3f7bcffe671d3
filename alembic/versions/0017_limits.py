"""Limits, and the indexes that find held rows and taken slots; every row is known to obey the rules of 0016.

A job that is held by nothing and has no key takes no part in these indexes. Where there are many jobs, `jsworker db
upgrade` builds them beforehand, outside of the transaction, while everybody goes on writing.

Revision: 0017, after 0016
"""

import sqlalchemy as sa
from alembic.util import CommandError

from alembic import op

revision = "0017"
down_revision = "0020b"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_held": (
        "CREATE INDEX CONCURRENTLY jobs_held ON jsworker.jobs (held_by, kind, id) "
        "WHERE status || '' = 'scheduled' AND held_by IS NOT NULL"
    ),
    "jobs_held_by_key": (
        "CREATE INDEX CONCURRENTLY jobs_held_by_key ON jsworker.jobs (kind, limit_key, priority, queued_at, id) "
        "WHERE status || '' = 'scheduled' AND held_by IN ('limit', 'rate', 'paused')"
    ),
    "jobs_slots": (
        "CREATE INDEX CONCURRENTLY jobs_slots ON jsworker.jobs (kind, limit_key) "
        "WHERE status || '' = 'processing' AND limit_key IS NOT NULL"
    ),
}
DROP = {name: f"DROP INDEX IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
DROP_CONCURRENTLY = {name: f"DROP INDEX CONCURRENTLY IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
IS_VALID = "SELECT i.indisvalid FROM pg_index AS i WHERE i.indexrelid = to_regclass('jsworker.' || %s)"
# Among fewer an index is built in a moment.
ARE_MANY = "SELECT count(*) > 10000 FROM (SELECT FROM jsworker.jobs LIMIT 10001) AS first"

STILL_LOCKED = """
SELECT xmin = CAST(pg_current_xact_id() AS xid) AND EXISTS (SELECT FROM jsworker.jobs) FROM pg_constraint
WHERE conrelid = CAST('jsworker.jobs' AS regclass) AND conname = 'jobs_held'
"""
VALIDATE = """
ALTER TABLE jsworker.jobs
  VALIDATE CONSTRAINT jobs_scheduled_waits, VALIDATE CONSTRAINT jobs_held, VALIDATE CONSTRAINT jobs_limit_key
"""
KEY_RULE = r"key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(key) <= 255"
RATE_RULE = (
    "CASE WHEN rate IS NULL THEN per IS NULL"
    " ELSE rate BETWEEN 1 AND 1000000 AND coalesce(per > 0 AND per <= 31622400, false) END"
)
SET_BY_RULE = (
    "CASE WHEN set_by IS NULL THEN max_running IS NULL AND rate IS NULL"
    " ELSE set_by IN ('code', 'operator') END"
)
PAUSED_RULE = "paused_at IS NOT NULL OR (paused_until IS NULL AND paused_by IS NULL AND reason IS NULL)"


def create_limits() -> None:
    op.create_table(
        "limits",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("rate", sa.Integer(), nullable=True),
        sa.Column("per", sa.Double(), nullable=True),
        sa.Column("set_by", sa.Text(), nullable=True),
        sa.Column("full_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_by", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column(
            "used_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("kind", "key"),
        sa.CheckConstraint("kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64", name="limits_kind"),
        sa.CheckConstraint(KEY_RULE, name="limits_key"),
        sa.CheckConstraint("max_running BETWEEN 1 AND 1000000", name="limits_max_running"),
        sa.CheckConstraint(RATE_RULE, name="limits_rate"),
        sa.CheckConstraint(SET_BY_RULE, name="limits_set_by"),
        sa.CheckConstraint(PAUSED_RULE, name="limits_paused"),
        schema="jsworker",
    )


def upgrade() -> None:
    connection = op.get_bind()
    if connection.exec_driver_sql(STILL_LOCKED).scalar():
        raise CommandError(
            "0016 and 0017 in one transaction would keep workers from their jobs while all are read: "
            "run `jsworker db upgrade`, or `alembic upgrade 0016` first"
        )
    op.execute(VALIDATE)
    create_limits()
    for name, statement in CONCURRENTLY.items():
        if connection.exec_driver_sql(IS_VALID, (name,)).scalar():
            continue
        if connection.exec_driver_sql(ARE_MANY).scalar():
            raise CommandError(
                f"building {name} in a transaction would keep workers from their jobs: "
                "run `jsworker db upgrade`, which builds it beside them"
            )
        op.execute(DROP[name])
        op.execute(statement.replace(" CONCURRENTLY", ""))


def downgrade() -> None:
    op.drop_table("limits", schema="jsworker")
    for name in CONCURRENTLY:
        op.execute(DROP[name])
