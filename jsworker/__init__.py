"""jsworker: jobs that must not get lost. NATS JetStream delivers, PostgreSQL decides who owns each job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsworker.client.enqueueing import enqueue_statement
    from jsworker.client.job_client import JobClient
    from jsworker.client.job_info import JobDetails, JobEvent, JobInfo, StepInfo
    from jsworker.client.results import JobHandle
    from jsworker.client.sync_client import SyncJobClient
    from jsworker.client.sync_parts import SyncJobHandle
    from jsworker.core.aes_gcm import AesGcmCodec
    from jsworker.core.codec import Codec
    from jsworker.core.errors import (
        ContentRefused,
        DatabaseRefused,
        DatabaseUnavailable,
        Fail,
        InvalidJson,
        InvalidName,
        InvalidPayload,
        InvalidStep,
        InvalidTarget,
        JobCancelled,
        JobFailed,
        JobGone,
        JobNotFound,
        JsworkerError,
        KeyMissing,
        MigrationMissing,
        OwnershipLost,
        Retry,
        ServersUnavailable,
        SettingsError,
        Snooze,
        StreamRefused,
        StreamUnavailable,
        TransitionRefused,
        UsageError,
        WorkflowFailed,
        WorkflowNotFound,
    )
    from jsworker.core.events import Event, EventName
    from jsworker.core.functions import job
    from jsworker.core.job import Job
    from jsworker.core.limits import Limit, Rate
    from jsworker.core.processor import Backoff, JobProcessor
    from jsworker.core.schedule_rules import Cron, Every
    from jsworker.core.settings import Settings, load_settings
    from jsworker.worker.worker import SetupFailed, Worker

__all__ = [
    "AesGcmCodec",
    "Backoff",
    "Codec",
    "ContentRefused",
    "Cron",
    "DatabaseRefused",
    "DatabaseUnavailable",
    "Event",
    "EventName",
    "Every",
    "Fail",
    "InvalidJson",
    "InvalidName",
    "InvalidPayload",
    "InvalidStep",
    "InvalidTarget",
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
    "MigrationMissing",
    "OwnershipLost",
    "Rate",
    "Retry",
    "ServersUnavailable",
    "Settings",
    "SettingsError",
    "SetupFailed",
    "Snooze",
    "StepInfo",
    "StreamRefused",
    "StreamUnavailable",
    "SyncJobClient",
    "SyncJobHandle",
    "TransitionRefused",
    "UsageError",
    "Worker",
    "WorkflowFailed",
    "WorkflowNotFound",
    "__version__",
    "enqueue_statement",
    "job",
    "load_settings",
]

_NAMES = {
    "jsworker.client.enqueueing": "enqueue_statement",
    "jsworker.client.job_client": "JobClient",
    "jsworker.client.job_info": "JobDetails JobEvent JobInfo StepInfo",
    "jsworker.client.results": "JobHandle",
    "jsworker.client.sync_client": "SyncJobClient",
    "jsworker.client.sync_parts": "SyncJobHandle",
    "jsworker.core.aes_gcm": "AesGcmCodec",
    "jsworker.core.codec": "Codec",
    "jsworker.core.errors": (
        "ContentRefused DatabaseRefused DatabaseUnavailable Fail InvalidJson InvalidName "
        "InvalidPayload InvalidStep InvalidTarget JobCancelled JobFailed JobGone JobNotFound "
        "JsworkerError KeyMissing MigrationMissing OwnershipLost Retry ServersUnavailable "
        "SettingsError Snooze StreamRefused StreamUnavailable TransitionRefused UsageError "
        "WorkflowFailed WorkflowNotFound"
    ),
    "jsworker.core.events": "Event EventName",
    "jsworker.core.functions": "job",
    "jsworker.core.job": "Job",
    "jsworker.core.limits": "Limit Rate",
    "jsworker.core.processor": "Backoff JobProcessor",
    "jsworker.core.schedule_rules": "Cron Every",
    "jsworker.core.settings": "Settings load_settings",
    "jsworker.worker.worker": "SetupFailed Worker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that a producer does not load the worker."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 -- reading metadata costs milliseconds

        return version("jsworker")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
