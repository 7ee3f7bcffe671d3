"""The tables of schema ``jsworker``: states, counters and the rules that PostgreSQL itself enforces.

The constraints, and triggers that only the migrations create, are a second check on every statement of this
package: PostgreSQL refuses a write that would break an invariant of the protocol, no matter who sends it.
"""

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

SCHEMA = "jsworker"

STATUSES = ("scheduled", "queued", "processing", "completed", "failed", "cancelled")
FINAL = ("completed", "failed", "cancelled")
HELD_BY = ("limit", "rate", "paused", "needs")
"""The events that a scheduled job without a time can wait for."""

_MOST = 2**53
"""The largest value of a counter: exact in every language's JSON, and never reached by counting."""
_FIRST_MOST = 2**52
"""The largest dispatch of a job never claimed: a worker that claims it can put it back, however often."""
_FIRST, _LAST = "TIMESTAMPTZ '2000-01-01 00:00:00+00'", "TIMESTAMPTZ '9999-12-31 00:00:00+00'"
"""A Python datetime can hold ``_LAST`` in every time zone."""
_BOUNDED = ("run_at", "queued_at", "publish_after", "published_at", "stream_created", "created_at")


def _is_line(name: str, length: str = "BETWEEN 1 AND 255") -> str:
    # Python checks that a key is printable; this refuses only what would break a line or a terminal.
    return rf"{name} !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length({name}) {length}"


_JOB_RULES = {
    # Checked for every new version of a row. The length as {0,63} in the pattern would cost 20 times as much.
    "jobs_kind": "kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64",
    "jobs_unique_key": _is_line("unique_key"),
    "jobs_status": "status IN ('scheduled', 'queued', 'processing', 'completed', 'failed', 'cancelled')",
    "jobs_owner_iff_processing": "(worker_id IS NOT NULL) = (status = 'processing')",
    "jobs_activity_iff_processing": "(last_activity_at IS NOT NULL) = (status = 'processing')",
    "jobs_finished_iff_final": "(finished_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled'))",
    "jobs_scheduled_waits": "status <> 'scheduled' OR (run_at IS NULL) = (held_by IS NOT NULL)",
    # The CANCEL of an older version does not know held_by: cancelled rows may keep their values.
    "jobs_held": (
        "CASE WHEN held_by IS NULL THEN held_at IS NULL AND due_at IS NULL"
        " ELSE held_by IN ('limit', 'rate', 'paused', 'needs') AND held_at IS NOT NULL"
        f" AND status IN ('scheduled', 'cancelled') AND held_at BETWEEN {_FIRST} AND {_LAST}"
        f" AND coalesce(due_at, held_at) BETWEEN {_FIRST} AND {_LAST} END"
    ),
    "jobs_limit_key": _is_line("limit_key", "<= 255"),
    "jobs_publish_only_queued": "NOT needs_publish OR status = 'queued'",
    "jobs_publish_has_time": "publish_after IS NOT NULL OR NOT needs_publish",
    "jobs_cancel_is_not_waiting": "NOT cancel_requested OR status NOT IN ('queued', 'scheduled')",
    "jobs_conservation": (
        "attempts = errors + stalls + CASE WHEN status IN ('completed', 'processing') THEN 1 ELSE 0 END"
    ),
    "jobs_counters": "errors >= 0 AND stalls >= 0",
    # What producers may write. A job that was claimed has its owner's limits where the producer has set none.
    "jobs_limits": (
        "max_attempts BETWEEN 1 AND 1000000 AND max_stalls >= 1 AND (max_stalls <= 100 OR fencing_token > 0)"
    ),
    "jobs_numbers": (
        f"dispatch BETWEEN 0 AND {_MOST} AND fencing_token BETWEEN 0 AND {_MOST} AND stream_seq BETWEEN 0 AND {_MOST}"
        f" AND (fencing_token > 0 OR dispatch < {_FIRST_MOST} OR dispatch = {_FIRST_MOST} AND status <> 'scheduled')"
    ),
    "jobs_times": (
        " AND ".join(f"{each} BETWEEN {_FIRST} AND {_LAST}" for each in _BOUNDED)
        + " AND (queued_at IS NOT NULL OR status <> 'queued')"
    ),
    "jobs_progress": "progress >= 0 AND progress <= 1",
    "jobs_priority": "priority BETWEEN 0 AND 2",
    "jobs_waiting_key": f"waiting_key IS NULL OR (unique_key IS NULL AND {_is_line('waiting_key')})",
    "jobs_expires_at": (
        f"expires_at BETWEEN {_FIRST} AND {_LAST} AND debounce_until BETWEEN {_FIRST} AND {_LAST}"
    ),
}

_OUTCOME = (
    "(outcome IS NOT NULL) = (finished_at IS NOT NULL) AND outcome IN ('completed', 'failed', 'cancelled')"
)

FAILURE = (
    "(lpad(to_hex(hashtextextended(COALESCE(NULLIF(failure_reason = 'stalled'::text, false)::text, "
    """regexp_replace(split_part("left"(COALESCE(last_error, ''::text), 200), chr(10), 1), """
    """'''[^'']*''|"[^"]*"|[0-9a-f]*[0-9][-0-9a-f]*'::text, '#'::text, 'g'::text)), 0::bigint)), 32, '0'::text)::uuid)"""
)
"""What failed jobs are grouped by: a hash of their last error's first line, up to 200 characters, without
numbers and quoted text.

Jobs that failed as stalled have one value. The text is exactly what PostgreSQL prints, so that alembic finds
no difference to the index. md5 is not used: a server in FIPS mode refuses it, and so each job that fails.
"""
IS_FAILURE = """status COLLATE "C" = 'failed'"""
"""Worded unlike other conditions, so that no other statement uses the index of failures; and cheap, because
it is evaluated for each version of a row."""

metadata = sa.MetaData(schema=SCHEMA)


def _instant(name: str, *, nullable: bool = True) -> sa.Column[datetime]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _now(name: str) -> sa.Column[datetime]:
    now = sa.func.clock_timestamp()
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False, server_default=now)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False, server_default=sa.text("0"))


def _large_count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))


def _priority() -> sa.Column[int]:
    return sa.Column("priority", sa.SmallInteger, nullable=False, server_default=sa.text("1"))


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False, server_default=sa.text("false"))


def _partial(name: str, *columns: str | sa.TextClause, where: str, unique: bool = False) -> sa.Index:
    return sa.Index(name, *columns, unique=unique, postgresql_where=sa.text(where))


jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("payload", JSONB, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("worker_id", sa.Text),
    _large_count("fencing_token"),
    _instant("claimed_at"),
    _instant("last_activity_at"),
    sa.Column("stale_after", sa.Interval),
    sa.Column("crash_after", sa.Interval),
    _instant("deadline_at"),
    _count("attempts"),
    _count("errors"),
    _count("stalls"),
    sa.Column("max_attempts", sa.Integer),
    sa.Column("max_stalls", sa.Integer),
    _instant("run_at"),
    _large_count("dispatch"),
    _flag("needs_publish"),
    _instant("publish_after"),
    _instant("published_at"),
    sa.Column("stream_seq", sa.BigInteger),
    _instant("stream_created"),
    _flag("cleared"),
    sa.Column("clear_reason", sa.Text),
    _flag("cancel_requested"),
    _instant("queued_at"),
    sa.Column("stage", sa.Text),
    sa.Column("progress", sa.Double),
    sa.Column("message", sa.Text),
    sa.Column("checkpoint", JSONB),
    sa.Column("unique_key", sa.Text),
    sa.Column("result", JSONB),
    sa.Column("last_error", sa.Text),
    sa.Column("failure_reason", sa.Text),
    sa.Column("traceparent", sa.Text),
    sa.Column("tracestate", sa.Text),
    _now("created_at"),
    _instant("started_at"),
    _instant("finished_at"),
    _instant("progress_at"),
    sa.Column("completed_by", sa.Text),
    sa.Column("schedule", sa.Text),
    _instant("scheduled_for"),
    sa.Column("held_by", sa.Text),
    _instant("held_at"),
    _instant("due_at"),
    sa.Column("limit_key", sa.Text),
    _priority(),
    _instant("expires_at"),
    sa.Column("waiting_key", sa.Text),
    sa.Column("behind", sa.Uuid),
    _instant("debounce_until"),
    _count("snoozes"),
    sa.Column("batch_id", sa.Uuid),
    *(sa.CheckConstraint(rule, name=name) for name, rule in _JOB_RULES.items()),
    # Owned rows are found by worker; last_activity_at is in no index, so heartbeats stay HOT updates.
    # The predicates are written so that only searches that repeat them can use these indexes. With plain
    # ones the planner may answer "these ids, if queued" by reading every queued row, because it expects few.
    _partial("jobs_owned", "worker_id", where="status || '' = 'processing'"),
    _partial("jobs_to_publish", "publish_after", where="CAST(needs_publish AS integer) = 1"),
    _partial("jobs_due", "run_at", where="status || '' = 'scheduled'"),
    # With the id: thousands of jobs enqueued together share one queued_at, and searches go from row to row.
    _partial("jobs_queued_in_order", "kind", "queued_at", "id", where="status || '' = 'queued'"),
    # Negated, because the planner expects few rows to match an equation that it has no statistics for: it
    # would sort every ended job rather than read the first ones along the index.
    _partial(
        "jobs_finished", "finished_at", where="status || '' NOT IN ('scheduled', 'queued', 'processing')"
    ),
    # Like the index before, this one holds only the last version of a job.
    _partial("jobs_ended_of_kind", "kind", "id", where="finished_at IS NOT NULL"),
    # No version of a normal job that is enqueued, claimed and completed is in the indexes down to
    # jobs_failed_of_kind, so that they cost it no write. Predicates by kind are worded unlike those of all
    # kinds: otherwise the planner sometimes takes the wrong index.
    _partial("jobs_due_of_kind", "kind", "run_at", "id", where="'' || status = 'scheduled'"),
    # This one holds no version of a job of normal priority.
    _partial(
        "jobs_queued_lanes",
        "kind",
        "priority",
        "queued_at",
        where="status || '' = 'queued' AND priority <> 1",
    ),
    _partial("jobs_failed", "status", "id", where="status || '' IN ('failed', 'cancelled')"),
    # Groups of failures, by when their jobs ended. The columns change only when a run ends or a job is retried.
    _partial("jobs_failures", "kind", sa.text(FAILURE), "finished_at", "id", where=IS_FAILURE),
    _partial("jobs_failed_of_kind", "kind", "status", "id", where="'' || status IN ('failed', 'cancelled')"),
    # These three hold only rows that wait for an event, and rows that take a slot of a limit.
    _partial(
        "jobs_held", "held_by", "kind", "id", where="status || '' = 'scheduled' AND held_by IS NOT NULL"
    ),
    _partial(
        "jobs_held_by_key",
        *("kind", "limit_key", "priority", "queued_at", "id"),
        where="status || '' = 'scheduled' AND held_by IN ('limit', 'rate', 'paused')",
    ),
    _partial(
        "jobs_slots", "kind", "limit_key", where="status || '' = 'processing' AND limit_key IS NOT NULL"
    ),
    # A key may have one job that waits and one that runs.
    _partial(
        "jobs_unique_waiting",
        "kind",
        "waiting_key",
        where="waiting_key IS NOT NULL AND status IN ('scheduled', 'queued')",
        unique=True,
    ),
    _partial(
        "jobs_unique_running",
        "kind",
        "waiting_key",
        where="waiting_key IS NOT NULL AND status = 'processing'",
        unique=True,
    ),
    _partial(
        "jobs_expiring",
        "expires_at",
        where="expires_at IS NOT NULL AND status || '' IN ('scheduled', 'queued') AND fencing_token = 0",
    ),
    # Members of a batch by status, searched from the youngest on; and those that wait for the batch's needs.
    _partial("jobs_of_batch", "batch_id", "status", "id", where="batch_id IS NOT NULL"),
    _partial(
        "jobs_held_of_batch", "batch_id", "id", where="held_by = 'needs' AND status || '' = 'scheduled'"
    ),
    _partial(
        "jobs_unique_live",
        "kind",
        "unique_key",
        where="unique_key IS NOT NULL AND status IN ('scheduled', 'queued', 'processing')",
        unique=True,
    ),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("hostname", sa.Text, nullable=False),
    sa.Column("pod_uid", sa.Text),
    sa.Column("container", sa.Text),
    sa.Column("boot_id", sa.Text),
    sa.Column("pid_namespace", sa.Text),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("process_started", sa.Text),
    sa.Column("kinds", ARRAY(sa.Text), nullable=False),
    sa.Column("concurrency", sa.Integer, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("heartbeat_interval", sa.Interval, nullable=False),
    _flag("answers"),
    sa.Column("state", sa.Text, nullable=False),
    _now("started_at"),
    _now("last_seen_at"),
    sa.Column("kinds_without_timeout", ARRAY(sa.Text)),
    sa.Column("limits", JSONB),
    sa.Column("supervisor_pid", sa.Integer),
    sa.Column("memory_bytes", sa.BigInteger),
    sa.Column("loop_lag_seconds", sa.Double),
    # When an operator asked the worker to drain; ``state`` shows whether the worker does so.
    _instant("drained_at"),
    sa.Column("kind_settings", JSONB),
    sa.CheckConstraint("state IN ('running', 'drained', 'draining', 'stopped')", name="workers_state"),
    sa.Index("workers_hostname", "hostname"),
)

job_events = sa.Table(
    "job_events",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("job_id", sa.Uuid, nullable=False),
    _now("at"),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("worker_id", sa.Text),
    sa.Column("fencing_token", sa.BigInteger),
    sa.Column("error", sa.Text),
    sa.Column("detail", JSONB),
    sa.Index("job_events_job", "job_id", "id"),
)

installation = sa.Table(
    "installation",
    metadata,
    sa.Column("singleton", sa.SmallInteger, primary_key=True, server_default=sa.text("1")),
    sa.Column("id", sa.Uuid, nullable=False),
    _now("created_at"),
    sa.CheckConstraint("singleton = 1", name="installation_one_row"),
)

dead_messages = sa.Table(
    "dead_messages",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    _now("at"),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("stream_seq", sa.BigInteger),
    sa.Column("stored_at", sa.DateTime(timezone=True)),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    _flag("truncated"),
)

# No foreign key to jobs: a mark must never block a write to a job.
refused_rows = sa.Table(
    "refused_rows",
    metadata,
    sa.Column("job_id", sa.Uuid, primary_key=True),
    sa.Column("attempted", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("dispatch", sa.BigInteger, nullable=False),
    sa.Column("sqlstate", sa.Text, nullable=False),
    sa.Column("constraint_name", sa.Text),
    sa.Column("worker_id", sa.Text),
    sa.Column("tries", sa.Integer, nullable=False, server_default=sa.text("1")),
    _now("first_at"),
    _now("last_at"),
    _instant("retry_at", nullable=False),
)

# No foreign key to jobs: a reset that is still to be reported outlives its job.
untold_resets = sa.Table(
    "untold_resets",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    _now("at"),
    sa.Column("job_id", sa.Uuid, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("dispatch", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("stalls", sa.Integer, nullable=False),
)

schedules = sa.Table(
    "schedules",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("payload", JSONB, nullable=False),
    sa.Column("rule", sa.Text, nullable=False),
    sa.Column("tz", sa.Text, nullable=False),
    sa.Column("missed", sa.Text, nullable=False),
    sa.Column("overlap", sa.Text, nullable=False),
    _instant("next_at", nullable=False),
    _instant("last_at"),
    sa.Column("last_job", sa.Uuid),
    sa.Column("revision", sa.BigInteger, nullable=False, server_default=sa.text("1")),
    sa.Column("set_by", sa.Text, nullable=False),
    _flag("paused"),
    _priority(),
    sa.Column("limit_key", sa.Text),
    sa.CheckConstraint(_JOB_RULES["jobs_kind"], name="schedules_kind"),
    sa.CheckConstraint(_JOB_RULES["jobs_priority"], name="schedules_priority"),
    sa.CheckConstraint(_JOB_RULES["jobs_limit_key"], name="schedules_limit_key"),
    sa.CheckConstraint(
        "missed IN ('coalesce', 'skip') OR missed ~ '^catch_up=[1-9][0-9]{0,3}$'", name="schedules_missed"
    ),
    sa.CheckConstraint("overlap IN ('allow', 'skip')", name="schedules_overlap"),
    sa.CheckConstraint("set_by IN ('code', 'operator')", name="schedules_set_by"),
    sa.CheckConstraint(f"next_at BETWEEN {_FIRST} AND {_LAST}", name="schedules_next_at"),
    _partial("schedules_next", "next_at", where="NOT paused"),
)

# The row with the empty key is that of the kind: its numbers hold for each key that has none of its own.
limits = sa.Table(
    "limits",
    metadata,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("max_running", sa.Integer),
    sa.Column("rate", sa.Integer),
    sa.Column("per", sa.Double),
    sa.Column("set_by", sa.Text),
    _instant("full_at"),
    _instant("paused_at"),
    _instant("paused_until"),
    sa.Column("paused_by", sa.Text),
    sa.Column("reason", sa.Text),
    _now("used_at"),
    sa.CheckConstraint(_JOB_RULES["jobs_kind"], name="limits_kind"),
    sa.CheckConstraint(_is_line("key", "<= 255"), name="limits_key"),
    sa.CheckConstraint("max_running BETWEEN 1 AND 1000000", name="limits_max_running"),
    sa.CheckConstraint(
        "CASE WHEN rate IS NULL THEN per IS NULL"
        " ELSE rate BETWEEN 1 AND 1000000 AND coalesce(per > 0 AND per <= 31622400, false) END",
        name="limits_rate",
    ),
    sa.CheckConstraint(
        "CASE WHEN set_by IS NULL THEN max_running IS NULL AND rate IS NULL"
        " ELSE set_by IN ('code', 'operator') END",
        name="limits_set_by",
    ),
    sa.CheckConstraint(
        "paused_at IS NOT NULL OR (paused_until IS NULL AND paused_by IS NULL AND reason IS NULL)",
        name="limits_paused",
    ),
)

# A key has one job in a window of time, however it ends. No foreign key: the job may be pruned earlier.
unique_windows = sa.Table(
    "unique_windows",
    metadata,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("job_id", sa.Uuid, nullable=False),
    _instant("until", nullable=False),
    sa.CheckConstraint(_JOB_RULES["jobs_kind"], name="unique_windows_kind"),
    sa.CheckConstraint(_is_line("key"), name="unique_windows_key"),
    sa.CheckConstraint(f"until BETWEEN {_FIRST} AND {_LAST}", name="unique_windows_until"),
    sa.Index("unique_windows_until", "until"),
)

# No foreign key to jobs: a step must never block a write to a job; PRUNE deletes both.
job_steps = sa.Table(
    "job_steps",
    metadata,
    sa.Column("job_id", sa.Uuid, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("result", JSONB),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    _now("at"),
    _instant("sleeps_until"),
    sa.CheckConstraint("char_length(name) BETWEEN 1 AND 255", name="job_steps_name"),
    sa.CheckConstraint(f"sleeps_until BETWEEN {_FIRST} AND {_LAST}", name="job_steps_sleeps_until"),
)

workflows = sa.Table(
    "workflows",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    _now("created_at"),
    # Incremented when a batch is opened again or the workflow cancelled: earlier decisions take no effect.
    _large_count("revision"),
    _instant("cancelled_at"),
    _instant("finished_at"),
    sa.Column("outcome", sa.Text),
    sa.CheckConstraint(_is_line("name"), name="workflows_name"),
    sa.CheckConstraint(_OUTCOME, name="workflows_outcome"),
    _partial("workflows_open", "id", where="finished_at IS NULL"),
    _partial("workflows_finished", "finished_at", where="finished_at IS NOT NULL"),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column(
        "workflow", sa.Uuid, sa.ForeignKey("jsworker.workflows.id", ondelete="CASCADE"), nullable=False
    ),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("on_failure", sa.Text, nullable=False, server_default=sa.text("'cancel'")),
    sa.Column("sealed", sa.Boolean, nullable=False, server_default=sa.text("true")),
    # Incremented when a member is added or runs again: what was decided without it takes no effect.
    _large_count("generation"),
    _now("created_at"),
    _instant("finished_at"),
    sa.Column("outcome", sa.Text),
    # Whether nothing is left to do, since it finished, for the batches that need it: none of them has held
    # members although all its needs have finished.
    _flag("propagated"),
    sa.CheckConstraint(_is_line("name"), name="batches_name"),
    sa.CheckConstraint(_OUTCOME, name="batches_outcome"),
    sa.CheckConstraint(_JOB_RULES["jobs_kind"], name="batches_kind"),
    sa.CheckConstraint("on_failure IN ('cancel', 'run')", name="batches_on_failure"),
    sa.Index("batches_of_workflow", "workflow", "place"),
    _partial("batches_open", "id", where="finished_at IS NULL"),
    _partial("batches_to_propagate", "id", where="finished_at IS NOT NULL AND NOT propagated"),
)

batch_needs = sa.Table(
    "batch_needs",
    metadata,
    sa.Column("batch", sa.Uuid, sa.ForeignKey("jsworker.batches.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("needs", sa.Uuid, sa.ForeignKey("jsworker.batches.id", ondelete="CASCADE"), primary_key=True),
    sa.CheckConstraint("batch <> needs", name="batch_needs_other"),
    sa.Index("batch_needs_needs", "needs"),
)

# What workers have done, added up by the minute: figures for people, on which nothing depends.
statistics = sa.Table(
    "statistics",
    metadata,
    sa.Column("minute", sa.DateTime(timezone=True), primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    *(_large_count(name) for name in ("started", "completed", "errors", "failed", "cancelled", "expired")),
    sa.Column("wait_seconds", sa.Double, nullable=False, server_default=sa.text("0")),
    sa.Column("run_seconds", sa.Double, nullable=False, server_default=sa.text("0")),
    # How many durations lie in each interval of DURATION_BUCKETS; the last number counts the longer ones.
    sa.Column("waits", ARRAY(sa.BigInteger), nullable=False),
    sa.Column("runs", ARRAY(sa.BigInteger), nullable=False),
)

# Who did what to jobs, kinds, schedules. An action may write several parts, each in its change's transaction.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("action_id", sa.Uuid, primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True),
    _now("at"),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("login", sa.Text, nullable=False, server_default=sa.text("CURRENT_USER")),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("target", JSONB, nullable=False),
    sa.Column("matched", sa.BigInteger, nullable=False),
    sa.Column("changed", sa.BigInteger, nullable=False),
    sa.CheckConstraint("char_length(actor) BETWEEN 1 AND 255", name="audit_actor"),
    sa.CheckConstraint("matched >= changed AND changed >= 0", name="audit_counts"),
    sa.Index("audit_at", "at"),
)
