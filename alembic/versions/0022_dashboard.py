"""What a dashboard shows: figures by the minute, failures in groups, and who did what.

Two tables that older workers do not know, and an index of failed jobs, which have them already. Where there are many jobs,
`jsworker db upgrade` builds it beforehand, outside of the transaction, while everybody goes on writing.

Revision: 0022, after 0021
"""

import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

CONCURRENTLY = {
    "jobs_failures": r"""
CREATE INDEX CONCURRENTLY jobs_failures ON jsworker.jobs (kind, CAST(lpad(to_hex(hashtextextended(
  coalesce(CAST(nullif(failure_reason = 'stalled', false) AS text), regexp_replace(
    split_part(left(coalesce(last_error, ''), 200), chr(10), 1),
    '''[^'']*''|"[^"]*"|[0-9a-f]*[0-9][-0-9a-f]*', '#', 'g')), 0)), 32, '0') AS uuid), finished_at, id)
WHERE status COLLATE "C" = 'failed'
""".strip(),
}
DROP = {name: f"DROP INDEX IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
DROP_CONCURRENTLY = {name: f"DROP INDEX CONCURRENTLY IF EXISTS jsworker.{name}" for name in CONCURRENTLY}
IS_VALID = "SELECT i.indisvalid FROM pg_index AS i WHERE i.indexrelid = to_regclass('jsworker.' || %s)"
# Among fewer an index is built in a moment.
ARE_MANY = "SELECT count(*) > 10000 FROM (SELECT FROM jsworker.jobs LIMIT 10001) AS first"

NOW = sa.text("clock_timestamp()")
ZERO = sa.text("0")


def upgrade() -> None:
    connection = op.get_bind()
    for name, statement in CONCURRENTLY.items():
        if connection.exec_driver_sql(IS_VALID, (name,)).scalar():
            continue
        if connection.exec_driver_sql(ARE_MANY).scalar():
            raise CommandError(
                f"building {name} in a transaction would keep workers from their jobs: "
                "run `jsworker db upgrade`, which builds it beside them"
            )
        connection.exec_driver_sql(DROP[name])
        connection.exec_driver_sql(statement.replace(" CONCURRENTLY", ""))
    op.create_table(
        "statistics",
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), server_default=ZERO, nullable=False)
            for name in ("started", "completed", "errors", "failed", "cancelled", "expired")
        ),
        sa.Column("wait_seconds", sa.Double(), server_default=ZERO, nullable=False),
        sa.Column("run_seconds", sa.Double(), server_default=ZERO, nullable=False),
        sa.Column("waits", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("runs", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.PrimaryKeyConstraint("minute", "kind"),
        schema="jsworker",
    )
    # SQLAlchemy 2.0 has no argument for it.
    op.execute("ALTER TABLE jsworker.statistics SET (fillfactor = 50)")
    op.create_table(
        "audit",
        sa.Column("action_id", sa.Uuid(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("login", sa.Text(), server_default=sa.text("CURRENT_USER"), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", postgresql.JSONB(), nullable=False),
        sa.Column("matched", sa.BigInteger(), nullable=False),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("char_length(actor) BETWEEN 1 AND 255", name="audit_actor"),
        sa.CheckConstraint("matched >= changed AND changed >= 0", name="audit_counts"),
        sa.PrimaryKeyConstraint("action_id", "part"),
        schema="jsworker",
    )
    op.create_index("audit_at", "audit", ["at"], schema="jsworker")
