"""Stories of jobs, made by hand: rows and timelines as the transitions write them."""

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID

from jsworker.client.job_info import JobDetails, JobEvent, JobEventName

BEGIN: Final = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)


def after(seconds: float) -> datetime:
    """Return the time so many seconds after the job was enqueued."""
    return BEGIN + timedelta(seconds=seconds)


def job(**columns: Any) -> JobDetails:
    """Return a job with these columns, and what a new row has in the others."""
    names: dict[str, Any] = dict.fromkeys(field.name for field in fields(JobDetails))
    usual: dict[str, Any] = {"id": UUID(int=1), "kind": "send-mail", "status": "queued", "fencing_token": 0}
    usual |= dict.fromkeys(("attempts", "errors", "stalls", "snoozes", "dispatch"), 0)
    usual |= dict.fromkeys(("cleared", "cancel_requested", "needs_publish"), False)
    usual |= {"priority": "normal", "created_at": BEGIN}
    return JobDetails(**names | usual | columns)


def event(
    seconds: float, name: str, token: int, worker: str | None = None, error: str | None = None, **detail: Any
) -> JobEvent:
    """Return an entry of the timeline; a row may hold any name."""
    return JobEvent(after(seconds), cast("JobEventName", name), worker, token, error, detail or None)


def zombie() -> tuple[JobDetails, list[JobEvent]]:
    """Return a job whose first owner was frozen, lost it, woke, and was refused."""
    found = job(
        status="completed",
        fencing_token=2,
        attempts=2,
        stalls=1,
        started_at=after(0.004),
        claimed_at=after(306.2),
        finished_at=after(371),
        completed_by="beta-1",
        stale_after=timedelta(seconds=300),
        crash_after=timedelta(seconds=15),
        published_at=after(0.002),
        stream_seq=4711,
        dispatch=1,
    )
    lost: dict[str, Any] = {
        "cause": "crashed",
        "owner": "alpha-0",
        "to": "queued",
        "counted": True,
        "stalls": 1,
        "dispatch": 1,
    }
    return found, [
        event(306, "reset", 1, "gamma-2", **lost, reason="worker alpha-0 fell silent and does not answer"),
        event(
            306.2, "claimed", 2, "beta-1", attempt=2, cleared=True, clear_reason="worker alpha-0 fell silent"
        ),
        event(340, "rejected", 1, "alpha-0", write="complete"),
    ]


def retried() -> tuple[JobDetails, list[JobEvent]]:
    """Return a job of milliseconds that waited for hours, failed, was retried, and runs with steps."""
    found = job(
        status="processing",
        worker_id="worker-7b9f6c-0",
        fencing_token=4,
        attempts=1,
        run_at=after(10_800),
        started_at=after(10_800.2),
        claimed_at=after(20_000),
        last_activity_at=after(20_060),
        published_at=after(19_999.9),
        crash_after=timedelta(seconds=15),
    )
    error = "ValueError: no such mailbox <script>alert(1)</script>\nTraceback"
    return found, [
        event(10_800.205, "error", 1, "worker-7b9f6c-0", error, errors=1, run_at=after(10_801.3).isoformat()),
        event(10_801.35, "claimed", 2, "worker-7b9f6c-1", attempt=2, cleared=False),
        event(10_801.36, "released", 2, "worker-7b9f6c-1", reason="the worker stops"),
        event(
            *(10_801.40, "claimed", 3, "worker-7b9f6c-0"),
            attempt=2,
            cleared=True,
            clear_reason="the worker stops",
        ),
        event(10_801.41, "failed", 3, "worker-7b9f6c-0", error, errors=2, reason="attempts"),
        event(19_999, "retried", 3, None, was="failed", failed_for="attempts"),
        event(19_999.4, "held", 3, "worker-7b9f6c-1", held_by="limit", key="tenant-9"),
        event(19_999.9, "woken", 3, "worker-7b9f6c-1", held_by="limit", key="tenant-9"),
        event(20_000, "claimed", 4, "worker-7b9f6c-0", attempt=1, cleared=False),
        event(20_010, "step", 4, "worker-7b9f6c-0", step="charge"),
        event(20_030, "step", 4, "worker-7b9f6c-0", step="ship"),
        event(20_050, "cancel_requested", 4, None, owner="worker-7b9f6c-0"),
    ]


def endless() -> tuple[JobDetails, list[JobEvent]]:
    """Return a job of hundreds of runs by dozens of workers."""
    events = []
    for token in range(1, 301):
        worker = f"worker-{token % 40}"
        if token > 1:
            events.append(event(token * 10, "claimed", token, worker, attempt=token))
        events.append(event(token * 10 + 1, "error", token, worker, "OSError: gone", errors=token))
    found = job(
        status="failed",
        fencing_token=300,
        attempts=300,
        errors=300,
        started_at=after(10),
        claimed_at=after(3_000),
        finished_at=after(3_001),
        failure_reason="attempts",
    )
    return found, events
