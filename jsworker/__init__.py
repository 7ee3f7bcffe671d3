"""jsworker: jobs that must not get lost. NATS JetStream delivers, PostgreSQL decides who owns each job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsworker.client import JobClient, JobHandle, SyncJobClient, SyncJobHandle, enqueue_statement
    from jsworker.core.errors import (
        DatabaseUnavailable,
        Fail,
        JobCancelled,
        JobFailed,
        JobGone,
        JobNotFound,
        JsworkerError,
        OwnershipLost,
        Retry,
        Snooze,
        TransitionRefused,
        UsageError,
        WorkflowFailed,
    )
    from jsworker.core.job import Job
    from jsworker.core.limits import Limit, Rate
    from jsworker.core.processor import Backoff, JobProcessor
    from jsworker.core.schedule_rules import Cron, Every
    from jsworker.core.settings import Settings, load_settings
    from jsworker.worker.worker import Worker

__all__ = [
    "Backoff",
    "Cron",
    "DatabaseUnavailable",
    "Every",
    "Fail",
    "Job",
    "JobCancelled",
    "JobClient",
    "JobFailed",
    "JobGone",
    "JobHandle",
    "JobNotFound",
    "JobProcessor",
    "JsworkerError",
    "Limit",
    "OwnershipLost",
    "Rate",
    "Retry",
    "Settings",
    "Snooze",
    "SyncJobClient",
    "SyncJobHandle",
    "TransitionRefused",
    "UsageError",
    "Worker",
    "WorkflowFailed",
    "__version__",
    "enqueue_statement",
    "load_settings",
]

_HOMES = {
    "Backoff": "jsworker.core.processor",
    "Cron": "jsworker.core.schedule_rules",
    "DatabaseUnavailable": "jsworker.core.errors",
    "Every": "jsworker.core.schedule_rules",
    "Fail": "jsworker.core.errors",
    "Job": "jsworker.core.job",
    "JobCancelled": "jsworker.core.errors",
    "JobClient": "jsworker.client",
    "JobFailed": "jsworker.core.errors",
    "JobGone": "jsworker.core.errors",
    "JobHandle": "jsworker.client",
    "JobNotFound": "jsworker.core.errors",
    "JobProcessor": "jsworker.core.processor",
    "JsworkerError": "jsworker.core.errors",
    "Limit": "jsworker.core.limits",
    "OwnershipLost": "jsworker.core.errors",
    "Rate": "jsworker.core.limits",
    "Retry": "jsworker.core.errors",
    "Settings": "jsworker.core.settings",
    "Snooze": "jsworker.core.errors",
    "SyncJobClient": "jsworker.client",
    "SyncJobHandle": "jsworker.client",
    "TransitionRefused": "jsworker.core.errors",
    "UsageError": "jsworker.core.errors",
    "Worker": "jsworker.worker.worker",
    "WorkflowFailed": "jsworker.core.errors",
    "enqueue_statement": "jsworker.client",
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
