"""The tables of schema ``jsworker``: states, counters and the rules that PostgreSQL itself enforces.

The constraints and the guard trigger are the last net under every statement of this package: a write
that would break an invariant of the protocol is refused, no matter who sends it.
"""

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    Interval,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

SCHEMA = "jsworker"

STATUSES = ("scheduled", "queued", "processing", "completed", "failed", "cancelled")
FINAL = ("completed", "failed", "cancelled")

_MOST = 2**53
"""Of what is counted up: exact in every language's JSON, and never reached by counting."""
_FIRST_MOST = 2**52
"""Of the dispatch of a job that was never claimed: a worker that claims it can put it back, however often."""
_FIRST, _LAST = "TIMESTAMPTZ '2000-01-01 00:00:00+00'", "TIMESTAMPTZ '9999-12-31 00:00:00+00'"
"""A datetime of Python holds the last in every time zone."""
_BOUNDED = ("run_at", "queued_at", "publish_after", "published_at", "stream_created", "created_at")

metadata = MetaData(schema=SCHEMA)


def _instant(name: str, *, nullable: bool = True) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


def _count(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False, server_default=text("0"))


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False, server_default=text("false"))


jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("status", Text, nullable=False),
    Column("worker_id", Text),
    Column("fencing_token", BigInteger, nullable=False, server_default=text("0")),
    _instant("claimed_at"),
    _instant("last_activity_at"),
    Column("stale_after", Interval),
    Column("crash_after", Interval),
    _instant("deadline_at"),
    _count("attempts"),
    _count("errors"),
    _count("stalls"),
    Column("max_attempts", Integer),
    Column("max_stalls", Integer),
    _instant("run_at"),
    Column("dispatch", BigInteger, nullable=False, server_default=text("0")),
    _flag("needs_publish"),
    _instant("publish_after"),
    _instant("published_at"),
    Column("stream_seq", BigInteger),
    _instant("stream_created"),
    _flag("cleared"),
    Column("clear_reason", Text),
    _flag("cancel_requested"),
    _instant("queued_at"),
    Column("stage", Text),
    Column("progress", Double),
    Column("message", Text),
    Column("checkpoint", JSONB),
    Column("unique_key", Text),
    Column("result", JSONB),
    Column("last_error", Text),
    Column("failure_reason", Text),
    Column("traceparent", Text),
    Column("tracestate", Text),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    _instant("started_at"),
    _instant("finished_at"),
    _instant("progress_at"),
    Column("completed_by", Text),
    Column("schedule", Text),
    _instant("scheduled_for"),
    # Every new version of a row is checked. As {0,63} the length would cost twenty times as much.
    CheckConstraint("kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64", name="jobs_kind"),
    # Python decides what is printable; here, what would break a line or a terminal.
    CheckConstraint(
        r"unique_key !~ '[\u0001-\u001f\u007f-\u009f\u2028\u2029]' AND char_length(unique_key) BETWEEN 1 AND 255",
        name="jobs_unique_key",
    ),
    CheckConstraint(
        "status IN ('scheduled', 'queued', 'processing', 'completed', 'failed', 'cancelled')",
        name="jobs_status",
    ),
    CheckConstraint("(worker_id IS NOT NULL) = (status = 'processing')", name="jobs_owner_iff_processing"),
    CheckConstraint(
        "(last_activity_at IS NOT NULL) = (status = 'processing')", name="jobs_activity_iff_processing"
    ),
    CheckConstraint(
        "(finished_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled'))",
        name="jobs_finished_iff_final",
    ),
    CheckConstraint("(run_at IS NOT NULL) OR status <> 'scheduled'", name="jobs_scheduled_has_run_at"),
    CheckConstraint("NOT needs_publish OR status = 'queued'", name="jobs_publish_only_queued"),
    CheckConstraint("publish_after IS NOT NULL OR NOT needs_publish", name="jobs_publish_has_time"),
    CheckConstraint(
        "NOT cancel_requested OR status NOT IN ('queued', 'scheduled')", name="jobs_cancel_is_not_waiting"
    ),
    CheckConstraint(
        "attempts = errors + stalls + CASE WHEN status IN ('completed', 'processing') THEN 1 ELSE 0 END",
        name="jobs_conservation",
    ),
    CheckConstraint("errors >= 0 AND stalls >= 0", name="jobs_counters"),
    # What producers may write. A job that was claimed holds what its owner's class or settings allow.
    CheckConstraint(
        "max_attempts BETWEEN 1 AND 1000000 AND max_stalls >= 1 AND (max_stalls <= 100 OR fencing_token > 0)",
        name="jobs_limits",
    ),
    CheckConstraint(
        f"dispatch BETWEEN 0 AND {_MOST} AND fencing_token BETWEEN 0 AND {_MOST} AND stream_seq BETWEEN 0 AND {_MOST}"
        f" AND (fencing_token > 0 OR dispatch < {_FIRST_MOST} OR dispatch = {_FIRST_MOST} AND status <> 'scheduled')",
        name="jobs_numbers",
    ),
    CheckConstraint(
        " AND ".join(f"{each} BETWEEN {_FIRST} AND {_LAST}" for each in _BOUNDED)
        + " AND (queued_at IS NOT NULL OR status <> 'queued')",
        name="jobs_times",
    ),
    CheckConstraint("progress >= 0 AND progress <= 1", name="jobs_progress"),
    # Owned rows are found by worker; last_activity_at is in no index, so heartbeats stay HOT updates.
    # The predicates are written so that only the sweeps, which repeat them, can use these indexes. With
    # plain ones the planner may answer "these ids, if queued" by reading every queued row: it expects few.
    Index("jobs_owned", "worker_id", postgresql_where=text("status || '' = 'processing'")),
    Index("jobs_to_publish", "publish_after", postgresql_where=text("CAST(needs_publish AS integer) = 1")),
    Index("jobs_due", "run_at", postgresql_where=text("status || '' = 'scheduled'")),
    Index("jobs_queued", "kind", "queued_at", postgresql_where=text("status || '' = 'queued'")),
    # Negated, for the planner takes few rows to fulfil an equation that it has no statistics of: it would sort
    # every ended job rather than read the first ones along the index.
    Index(
        "jobs_finished",
        "finished_at",
        postgresql_where=text("status || '' NOT IN ('scheduled', 'queued', 'processing')"),
    ),
    # No write for a job that is enqueued, claimed and completed: none of its versions is in these three.
    # Those of a kind are written unlike those of all kinds, for the planner takes the wrong one now and then.
    Index("jobs_due_of_kind", "kind", "run_at", "id", postgresql_where=text("'' || status = 'scheduled'")),
    Index("jobs_failed", "status", "id", postgresql_where=text("status || '' IN ('failed', 'cancelled')")),
    Index(
        "jobs_failed_of_kind",
        "kind",
        "status",
        "id",
        postgresql_where=text("'' || status IN ('failed', 'cancelled')"),
    ),
    Index(
        "jobs_unique_live",
        "kind",
        "unique_key",
        unique=True,
        postgresql_where=text("unique_key IS NOT NULL AND status IN ('scheduled', 'queued', 'processing')"),
    ),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("hostname", Text, nullable=False),
    Column("pod_uid", Text),
    Column("container", Text),
    Column("boot_id", Text),
    Column("pid_namespace", Text),
    Column("pid", Integer, nullable=False),
    Column("process_started", Text),
    Column("kinds", ARRAY(Text), nullable=False),
    Column("concurrency", Integer, nullable=False),
    Column("version", Text, nullable=False),
    Column("heartbeat_interval", Interval, nullable=False),
    _flag("answers"),
    Column("state", Text, nullable=False),
    Column("started_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("last_seen_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("kinds_without_timeout", ARRAY(Text)),
    CheckConstraint("state IN ('running', 'draining', 'stopped')", name="workers_state"),
    Index("workers_hostname", "hostname"),
)

job_events = Table(
    "job_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("job_id", Uuid, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("event", Text, nullable=False),
    Column("worker_id", Text),
    Column("fencing_token", BigInteger),
    Column("error", Text),
    Column("detail", JSONB),
    Index("job_events_job", "job_id", "id"),
)

installation = Table(
    "installation",
    metadata,
    Column("singleton", SmallInteger, primary_key=True, server_default=text("1")),
    Column("id", Uuid, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    CheckConstraint("singleton = 1", name="installation_one_row"),
)

dead_messages = Table(
    "dead_messages",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("subject", Text, nullable=False),
    Column("stream_seq", BigInteger),
    Column("stored_at", DateTime(timezone=True)),
    Column("reason", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    _flag("truncated"),
)

# No foreign key to jobs: a mark must never stand in the way of a job.
refused_rows = Table(
    "refused_rows",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("attempted", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("fencing_token", BigInteger, nullable=False),
    Column("dispatch", BigInteger, nullable=False),
    Column("sqlstate", Text, nullable=False),
    Column("constraint_name", Text),
    Column("worker_id", Text),
    Column("tries", Integer, nullable=False, server_default=text("1")),
    Column("first_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("last_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    _instant("retry_at", nullable=False),
)

# No foreign key to jobs: what is to be reported outlives them.
untold_resets = Table(
    "untold_resets",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("job_id", Uuid, nullable=False),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("fencing_token", BigInteger, nullable=False),
    Column("dispatch", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("stalls", Integer, nullable=False),
)

schedules = Table(
    "schedules",
    metadata,
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("rule", Text, nullable=False),
    Column("tz", Text, nullable=False),
    Column("missed", Text, nullable=False),
    Column("overlap", Text, nullable=False),
    _instant("next_at", nullable=False),
    _instant("last_at"),
    Column("last_job", Uuid),
    Column("revision", BigInteger, nullable=False, server_default=text("1")),
    Column("set_by", Text, nullable=False),
    _flag("paused"),
    CheckConstraint("kind ~ '^[a-z0-9][a-z0-9_-]*$' AND octet_length(kind) <= 64", name="schedules_kind"),
    CheckConstraint(
        "missed IN ('coalesce', 'skip') OR missed ~ '^catch_up=[1-9][0-9]{0,3}$'", name="schedules_missed"
    ),
    CheckConstraint("overlap IN ('allow', 'skip')", name="schedules_overlap"),
    CheckConstraint("set_by IN ('code', 'operator')", name="schedules_set_by"),
    CheckConstraint(f"next_at BETWEEN {_FIRST} AND {_LAST}", name="schedules_next_at"),
    Index("schedules_next", "next_at", postgresql_where=text("NOT paused")),
)

GUARD_FUNCTION = """
CREATE FUNCTION jsworker.refuse_job_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'jsworker refuses % token % dispatch % -> % token % dispatch %',
    OLD.status, OLD.fencing_token, OLD.dispatch, NEW.status, NEW.fencing_token, NEW.dispatch || CASE
      WHEN OLD.status IN ('completed', 'failed', 'cancelled') THEN ': what a job was and came to stays' ELSE '' END
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_guard', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""

LIVE_STAY_FUNCTION = """
CREATE FUNCTION jsworker.refuse_job_delete() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'jsworker refuses to delete a job that is %: cancel it first', OLD.status
    USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_live_stay', SCHEMA = 'jsworker', TABLE = 'jobs';
END
$$
"""

LIVE_STAY_TRIGGER = """
CREATE TRIGGER jobs_live_stay BEFORE DELETE ON jsworker.jobs
FOR EACH ROW WHEN (OLD.status IN ('scheduled', 'queued', 'processing'))
EXECUTE FUNCTION jsworker.refuse_job_delete()
"""

TRUNCATE_FUNCTION = """
CREATE FUNCTION jsworker.refuse_jobs_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT FROM jsworker.jobs WHERE status IN ('scheduled', 'queued', 'processing')) THEN
    RAISE EXCEPTION 'jsworker refuses to truncate jobs: some wait or run, cancel them first'
      USING ERRCODE = 'restrict_violation', CONSTRAINT = 'jobs_live_stay', SCHEMA = 'jsworker', TABLE = 'jobs';
  END IF;
  RETURN NULL;
END
$$
"""

TRUNCATE_TRIGGER = """
CREATE TRIGGER jobs_live_stay_at_once BEFORE TRUNCATE ON jsworker.jobs
FOR EACH STATEMENT EXECUTE FUNCTION jsworker.refuse_jobs_truncate()
"""

GUARD_TRIGGER = """
CREATE TRIGGER jobs_guard BEFORE UPDATE OF status, fencing_token, dispatch,
  id, kind, payload, unique_key, result, attempts, errors, stalls, last_error, failure_reason ON jsworker.jobs
FOR EACH ROW WHEN (
     (OLD.status IN ('completed', 'failed', 'cancelled') AND (
          (OLD.status <> NEW.status AND NOT (OLD.status = 'failed' AND NEW.status = 'queued'))
       OR (NEW.id, NEW.kind, NEW.payload, NEW.unique_key, NEW.result, NEW.last_error) IS DISTINCT FROM
          (OLD.id, OLD.kind, OLD.payload, OLD.unique_key, OLD.result, OLD.last_error)
       OR (OLD.status = NEW.status AND
          (NEW.attempts, NEW.errors, NEW.stalls, NEW.failure_reason) IS DISTINCT FROM
          (OLD.attempts, OLD.errors, OLD.stalls, OLD.failure_reason))))
  OR NEW.fencing_token < OLD.fencing_token
  OR NEW.dispatch < OLD.dispatch
  OR (NEW.status = 'processing' AND NEW.fencing_token = OLD.fencing_token
      AND NEW.worker_id IS DISTINCT FROM OLD.worker_id)
) EXECUTE FUNCTION jsworker.refuse_job_update()
"""


def _after_create(table: Table, *statements: str) -> None:
    for statement in statements:
        event.listen(table, "after_create", DDL(statement.replace("%", "%%")))  # type: ignore[no-untyped-call] # SQLAlchemy has not typed it


_after_create(
    jobs,
    GUARD_FUNCTION,
    GUARD_TRIGGER,
    LIVE_STAY_FUNCTION,
    LIVE_STAY_TRIGGER,
    TRUNCATE_FUNCTION,
    TRUNCATE_TRIGGER,
    # Room for a second version of two rows in three: one statement renews all running jobs of a page.
    "ALTER TABLE jsworker.jobs SET (fillfactor = 60)",  # SQLAlchemy 2.0 has no argument for it
)
_after_create(workers, "ALTER TABLE jsworker.workers SET (fillfactor = 70)")
