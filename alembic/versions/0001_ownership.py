"""The ownership protocol's tables, constraints and guard trigger.

Revision: 0001, after nothing
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "jsworker"
NOW = sa.text("clock_timestamp()")

REFUSE_JOB_UPDATE = """
CREATE FUNCTION jsworker.refuse_job_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'jsworker refuses % token % dispatch % -> % token % dispatch %',
    OLD.status, OLD.fencing_token, OLD.dispatch, NEW.status, NEW.fencing_token, NEW.dispatch
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_guard', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""

JOBS_GUARD = """
CREATE TRIGGER jobs_guard BEFORE UPDATE OF status, fencing_token, dispatch ON jsworker.jobs
FOR EACH ROW WHEN (
     (OLD.status IN ('completed', 'cancelled') AND NEW.status <> OLD.status)
  OR (OLD.status = 'failed' AND NEW.status NOT IN ('failed', 'queued'))
  OR NEW.fencing_token < OLD.fencing_token
  OR NEW.dispatch < OLD.dispatch
  OR (NEW.status = 'processing' AND NEW.fencing_token = OLD.fencing_token
      AND NEW.worker_id IS DISTINCT FROM OLD.worker_id)
) EXECUTE FUNCTION jsworker.refuse_job_update()
"""


def upgrade() -> None:
    op.create_table(
        "dead_messages",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("stream_seq", sa.BigInteger(), nullable=True),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("truncated", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        schema=SCHEMA,
    )
    op.create_table(
        "installation",
        sa.Column("singleton", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.CheckConstraint("singleton = 1", name="installation_one_row"),
        sa.PrimaryKeyConstraint("singleton"),
        schema=SCHEMA,
    )
    op.create_table(
        "job_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("fencing_token", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("detail", postgresql.JSONB(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        schema=SCHEMA,
    )
    op.create_index("job_events_job", "job_events", ["job_id", "id"], unique=False, schema=SCHEMA)
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("fencing_token", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_activity_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stale_after", sa.Interval(), nullable=True),
        sa.Column("crash_after", sa.Interval(), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("errors", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("stalls", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=True),
        sa.Column("max_stalls", sa.Integer(), nullable=True),
        sa.Column("run_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("dispatch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("needs_publish", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("publish_after", sa.DateTime(timezone=True), nullable=True),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stream_seq", sa.BigInteger(), nullable=True),
        sa.Column("stream_created", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cleared", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("clear_reason", sa.Text(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stage", sa.Text(), nullable=True),
        sa.Column("progress", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("checkpoint", postgresql.JSONB(), nullable=True),
        sa.Column("unique_key", sa.Text(), nullable=True),
        sa.Column("result", postgresql.JSONB(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("traceparent", sa.Text(), nullable=True),
        sa.Column("tracestate", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled'))",
            name="jobs_finished_iff_final",
        ),
        sa.CheckConstraint(
            "(last_activity_at IS NOT NULL) = (status = 'processing')", name="jobs_activity_iff_processing"
        ),
        sa.CheckConstraint("(run_at IS NOT NULL) OR status <> 'scheduled'", name="jobs_scheduled_has_run_at"),
        sa.CheckConstraint(
            "(worker_id IS NOT NULL) = (status = 'processing')", name="jobs_owner_iff_processing"
        ),
        sa.CheckConstraint(
            "NOT cancel_requested OR status NOT IN ('queued', 'scheduled')", name="jobs_cancel_is_not_waiting"
        ),
        sa.CheckConstraint("NOT needs_publish OR status = 'queued'", name="jobs_publish_only_queued"),
        sa.CheckConstraint(
            "attempts = errors + stalls + CASE WHEN status IN ('completed', 'processing') THEN 1 ELSE 0 END",
            name="jobs_conservation",
        ),
        sa.CheckConstraint("kind ~ '^[a-z0-9][a-z0-9_-]{0,63}$'", name="jobs_kind"),
        sa.CheckConstraint(
            "status IN ('scheduled', 'queued', 'processing', 'completed', 'failed', 'cancelled')",
            name="jobs_status",
        ),
        sa.CheckConstraint("unique_key ~ '^[a-z0-9][a-z0-9_.-]{0,63}$'", name="jobs_unique_key"),
        sa.CheckConstraint("errors >= 0 AND stalls >= 0", name="jobs_counters"),
        sa.CheckConstraint("max_attempts >= 1 AND max_stalls >= 1", name="jobs_limits"),
        sa.CheckConstraint("progress >= 0 AND progress <= 1", name="jobs_progress"),
        sa.CheckConstraint("publish_after IS NOT NULL OR NOT needs_publish", name="jobs_publish_has_time"),
        sa.PrimaryKeyConstraint("id"),
        schema=SCHEMA,
    )
    op.create_index(
        "jobs_due",
        "jobs",
        ["run_at"],
        unique=False,
        schema=SCHEMA,
        postgresql_where=sa.text("status || '' = 'scheduled'"),
    )
    op.create_index(
        "jobs_finished",
        "jobs",
        ["finished_at"],
        unique=False,
        schema=SCHEMA,
        postgresql_where=sa.text("status || '' NOT IN ('scheduled', 'queued', 'processing')"),
    )
    op.create_index(
        "jobs_owned",
        "jobs",
        ["worker_id"],
        unique=False,
        schema=SCHEMA,
        postgresql_where=sa.text("status || '' = 'processing'"),
    )
    op.create_index(
        "jobs_queued",
        "jobs",
        ["kind", "queued_at"],
        unique=False,
        schema=SCHEMA,
        postgresql_where=sa.text("status || '' = 'queued'"),
    )
    op.create_index(
        "jobs_to_publish",
        "jobs",
        ["publish_after"],
        unique=False,
        schema=SCHEMA,
        postgresql_where=sa.text("CAST(needs_publish AS integer) = 1"),
    )
    op.create_index(
        "jobs_unique_live",
        "jobs",
        ["kind", "unique_key"],
        unique=True,
        schema=SCHEMA,
        postgresql_where=sa.text(
            "unique_key IS NOT NULL AND status IN ('scheduled', 'queued', 'processing')"
        ),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("pod_uid", sa.Text(), nullable=True),
        sa.Column("container", sa.Text(), nullable=True),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("pid_namespace", sa.Text(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("process_started", sa.Text(), nullable=True),
        sa.Column("kinds", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("concurrency", sa.Integer(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("heartbeat_interval", sa.Interval(), nullable=False),
        sa.Column("answers", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.CheckConstraint("state IN ('running', 'draining', 'stopped')", name="workers_state"),
        sa.PrimaryKeyConstraint("id"),
        schema=SCHEMA,
    )
    op.create_index("workers_hostname", "workers", ["hostname"], unique=False, schema=SCHEMA)
    op.execute("ALTER TABLE jsworker.jobs SET (fillfactor = 70)")  # SQLAlchemy 2.0 has no argument for it
    op.execute("ALTER TABLE jsworker.workers SET (fillfactor = 70)")
    op.execute(REFUSE_JOB_UPDATE)
    op.execute(JOBS_GUARD)
