"""The frozen records of jobs that a client returns; ``to_dict`` makes values for any JSON encoder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, Self, TypeAlias
from uuid import UUID

from jsworker.core.errors import JobNotFound
from jsworker.core.priorities import PRIORITIES, Priority
from jsworker.core.strict_json import plain
from jsworker.ownership.transitions.enqueue import Enqueued

JobStatus: TypeAlias = Literal["scheduled", "queued", "processing", "completed", "failed", "cancelled"]

JobEventName: TypeAlias = Literal[
    "cancel_requested",
    "cancelled",
    "child_jobs",
    "claimed",
    "deferred",
    "error",
    "error_after_completion",
    "failed",
    "fenced",
    "held",
    "priority_set",
    "rejected",
    "released",
    "republished",
    "rescheduled",
    "reset",
    "retried",
    "skipped",
    "sleep",
    "snoozed",
    "step",
    "woken",
]
"""The events in the timeline of a job; a newer jsworker may write others, too."""


class _Record:
    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]  # the names of the fields, which dataclass writes

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the record of a row by column name; columns that only a newer jsworker has are left out."""
        return cls(**{name: row[name] for name in cls.__match_args__})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: ids as text, times in ISO 8601 in UTC, durations in seconds."""
        return {name: plain(getattr(self, name)) for name in self.__match_args__}


@dataclass(frozen=True, slots=True)
class JobInfo(_Record):
    """A job as it was when read, without payload, checkpoint and result; times are by the database's clock.

    Attributes:
        id: the job's id.
        kind: the kind, which names the processor.
        status: scheduled, queued, processing, completed, failed or cancelled.
        worker_id: the worker that runs it; None: it is not running.
        fencing_token: how often it was claimed.
        attempts: runs that count as attempts; equals ``attempt`` of the present run, or the last that counts.
        errors: attempts that ended in an error.
        stalls: runs that were taken back and counted.
        max_attempts: its limit; if the producer gave none, None until a claim sets the processor's.
        max_stalls: likewise.
        stage, progress, message: the last values of ``update_progress``.
        unique_key: the key under which at most one job is live; None: no key, or a ``waiting_key``.
        run_at: when a scheduled job is due.
        queued_at: when it entered the queue, which decides the order of jobs.
        claimed_at: when its present or last run began.
        last_activity_at: the last sign of life of its run; None: it is not running.
        deadline_at: when its run times out.
        cleared: whether its next or present run follows one that was taken back or handed back.
        clear_reason: why that run was taken back or handed back.
        cancel_requested: whether its run is asked to stop.
        last_error: text of the last error, with its traceback.
        failure_reason: why no attempt followed the last one, or why it was cancelled.
        created_at: when it was enqueued.
        started_at: when its first run began.
        finished_at: when it completed, failed or was cancelled.
        progress_at: when it reported progress last, saved a checkpoint, announced a quiet phase, or began in
            quarantine.
        held_by: what a scheduled job waits for instead of a time: limit, rate, paused or needs.
        held_at: since when it is held.
        due_at: the time before which it does not begin, even if it is not held any more.
        limit_key: the key under which limits, rates and pauses count it.
        priority: high, normal or low.
        expires_at: when it is cancelled, unless it has begun.
        waiting_key: the unique key of a job of ``unique="waiting"`` or ``debounce``.
        behind: the running job of its key for which it waits.
        debounce_until: the time beyond which further calls do not postpone it.
        batch_id: the batch of a workflow that it belongs to.
    """

    id: UUID
    kind: str
    status: JobStatus
    worker_id: str | None
    fencing_token: int
    attempts: int
    errors: int
    stalls: int
    max_attempts: int | None
    max_stalls: int | None
    stage: str | None
    progress: float | None
    message: str | None
    unique_key: str | None
    run_at: datetime | None
    queued_at: datetime | None
    claimed_at: datetime | None
    last_activity_at: datetime | None
    deadline_at: datetime | None
    cleared: bool
    clear_reason: str | None
    cancel_requested: bool
    last_error: str | None
    failure_reason: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress_at: datetime | None
    held_by: Literal["limit", "rate", "paused", "needs"] | None
    held_at: datetime | None
    due_at: datetime | None
    limit_key: str | None
    priority: Priority
    expires_at: datetime | None
    waiting_key: str | None
    behind: UUID | None
    debounce_until: datetime | None
    batch_id: UUID | None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """See ``_Record.of_row``."""
        named = {name: row[name] for name in cls.__match_args__}
        return cls(**named | {"priority": PRIORITIES[row["priority"]]})


@dataclass(frozen=True, slots=True)
class JobDetails(JobInfo):
    """Everything about a job: also payload, checkpoint and result, and jsworker's internal fields.

    Attributes:
        payload: the JSON value that was enqueued.
        checkpoint: the value that ``save_checkpoint`` stored last.
        result: the JSON value of what ``process`` returned.
        completed_by: the worker that completed it.
        schedule: the schedule that has enqueued it.
        scheduled_for: the schedule's due time for which it was enqueued.
        snoozes: runs that ended in ``Snooze``.
        stale_after: silence after which any worker may take its run back; None: silence alone never suffices.
        crash_after: silence after which a worker may do so if it finds the owner's process gone.
        traceparent, tracestate: the span that enqueued it, as W3C Trace Context.
        dispatch: how often it was put into the queue; a message of an earlier dispatch is skipped.
        needs_publish: whether its message waits to be published.
        publish_after: the time before which relays leave that to the client.
        published_at: when the message was stored.
        stream_seq, stream_created: the message's number in the stream, and when that stream was made.
    """

    payload: Any
    checkpoint: Any
    result: Any
    completed_by: str | None
    schedule: str | None
    scheduled_for: datetime | None
    snoozes: int
    stale_after: timedelta | None
    crash_after: timedelta | None
    traceparent: str | None
    tracestate: str | None
    dispatch: int
    needs_publish: bool
    publish_after: datetime | None
    published_at: datetime | None
    stream_seq: int | None
    stream_created: datetime | None


@dataclass(frozen=True, slots=True)
class JobEvent(_Record):
    """An entry of a job's timeline.

    Attributes:
        at: when it happened, by the database's clock.
        event: what happened: claimed, error, reset, released, cancelled ...
        worker_id: the worker that wrote it; None: a client or an operator did.
        fencing_token: the run that it is about.
        error: the error's text.
        detail: further fields of the event, by name.
    """

    at: datetime
    event: JobEventName
    worker_id: str | None
    fencing_token: int | None
    error: str | None
    detail: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class StepInfo(_Record):
    """A step of a job, or a sleep.

    Attributes:
        name: the step's name.
        result: the JSON value that it returned; also None if that takes more than 16 KiB.
        stored_bytes: the size of the result in the database.
        fencing_token: the run that made it.
        at: when it was done; of a sleep, when it began.
        sleeps_until: of a sleep, when it is over; None: it is a step.
    """

    name: str
    result: Any
    stored_bytes: int
    fencing_token: int
    at: datetime
    sleeps_until: datetime | None


def job_uuid(job_id: UUID | str) -> UUID:
    """Return a job id as a UUID; raise JobNotFound for text that no job can have as its id."""
    if isinstance(job_id, UUID):
        return job_id
    if not isinstance(job_id, str):
        hint = ""
        if isinstance(job_id, Enqueued | JobInfo | Mapping):
            hint = "; give its id"
        elif isinstance(job_id, Iterable):
            hint = "; each id is an argument of its own: (*ids)"
        raise TypeError(f"a job id is a UUID or its text, not {type(job_id).__name__}{hint}")
    try:
        return UUID(job_id)
    except ValueError:
        raise JobNotFound(f"no job has id {job_id!r}: a job id is a UUID") from None
