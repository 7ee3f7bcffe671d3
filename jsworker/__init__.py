"""jsworker: jobs that must not get lost. NATS JetStream delivers, PostgreSQL decides who owns each job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsworker.client import (
        JobClient,
        JobDetails,
        JobEvent,
        JobHandle,
        JobInfo,
        StepInfo,
        SyncJobClient,
        SyncJobHandle,
        enqueue_statement,
    )
    from jsworker.core.aes_gcm import AesGcmCodec
    from jsworker.core.codec import Codec
    from jsworker.core.errors import (
        ContentRefused,
        DatabaseUnavailable,
        Fail,
        InvalidJson,
        JobCancelled,
        JobFailed,
        JobGone,
        JobNotFound,
        JsworkerError,
        KeyMissing,
        OwnershipLost,
        Retry,
        Snooze,
        TransitionRefused,
        UsageError,
        WorkflowFailed,
    )
    from jsworker.core.events import Event, EventName
    from jsworker.core.functions import job
    from jsworker.core.job import Job
    from jsworker.core.limits import Limit, Rate
    from jsworker.core.processor import Backoff, JobProcessor
    from jsworker.core.schedule_rules import Cron, Every
    from jsworker.core.settings import Settings, load_settings
    from jsworker.worker.worker import Worker

__all__ = [
    "AesGcmCodec",
    "Backoff",
    "Codec",
    "ContentRefused",
    "Cron",
    "DatabaseUnavailable",
    "Event",
    "EventName",
    "Every",
    "Fail",
    "InvalidJson",
    "Job",
    "JobCancelled",
    "JobClient",
    "JobDetails",
    "JobEvent",
    "JobFailed",
    "JobGone",
    "JobHandle",
    "JobInfo",
    "JobNotFound",
    "JobProcessor",
    "JsworkerError",
    "KeyMissing",
    "Limit",
    "OwnershipLost",
    "Rate",
    "Retry",
    "Settings",
    "Snooze",
    "StepInfo",
    "SyncJobClient",
    "SyncJobHandle",
    "TransitionRefused",
    "UsageError",
    "Worker",
    "WorkflowFailed",
    "__version__",
    "enqueue_statement",
    "job",
    "load_settings",
]

_HOMES = {
    "AesGcmCodec": "jsworker.core.aes_gcm",
    "Backoff": "jsworker.core.processor",
    "Codec": "jsworker.core.codec",
    "ContentRefused": "jsworker.core.errors",
    "Cron": "jsworker.core.schedule_rules",
    "DatabaseUnavailable": "jsworker.core.errors",
    "Event": "jsworker.core.events",
    "EventName": "jsworker.core.events",
    "Every": "jsworker.core.schedule_rules",
    "Fail": "jsworker.core.errors",
    "InvalidJson": "jsworker.core.errors",
    "Job": "jsworker.core.job",
    "JobCancelled": "jsworker.core.errors",
    "JobClient": "jsworker.client",
    "JobDetails": "jsworker.client",
    "JobEvent": "jsworker.client",
    "JobFailed": "jsworker.core.errors",
    "JobGone": "jsworker.core.errors",
    "JobHandle": "jsworker.client",
    "JobInfo": "jsworker.client",
    "JobNotFound": "jsworker.core.errors",
    "JobProcessor": "jsworker.core.processor",
    "JsworkerError": "jsworker.core.errors",
    "KeyMissing": "jsworker.core.errors",
    "Limit": "jsworker.core.limits",
    "OwnershipLost": "jsworker.core.errors",
    "Rate": "jsworker.core.limits",
    "Retry": "jsworker.core.errors",
    "Settings": "jsworker.core.settings",
    "Snooze": "jsworker.core.errors",
    "StepInfo": "jsworker.client",
    "SyncJobClient": "jsworker.client",
    "SyncJobHandle": "jsworker.client",
    "TransitionRefused": "jsworker.core.errors",
    "UsageError": "jsworker.core.errors",
    "Worker": "jsworker.worker.worker",
    "WorkflowFailed": "jsworker.core.errors",
    "enqueue_statement": "jsworker.client",
    "job": "jsworker.core.functions",
    "load_settings": "jsworker.core.settings",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: a producer need not load the worker."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 -- reading metadata costs milliseconds

        return version("jsworker")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
