"""jsworker: jobs that must not get lost. NATS JetStream delivers, PostgreSQL decides who owns each job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsworker.client import JobClient, enqueue_statement
    from jsworker.errors import Fail, JsworkerError, OwnershipLost, Retry
    from jsworker.job import Job
    from jsworker.processor import Backoff, JobProcessor
    from jsworker.runtime.worker import Worker
    from jsworker.settings import Settings, load_settings

__all__ = [
    "Backoff",
    "Fail",
    "Job",
    "JobClient",
    "JobProcessor",
    "JsworkerError",
    "OwnershipLost",
    "Retry",
    "Settings",
    "Worker",
    "__version__",
    "enqueue_statement",
    "load_settings",
]

_HOMES = {
    "Backoff": "jsworker.processor",
    "Fail": "jsworker.errors",
    "Job": "jsworker.job",
    "JobClient": "jsworker.client",
    "JobProcessor": "jsworker.processor",
    "JsworkerError": "jsworker.errors",
    "OwnershipLost": "jsworker.errors",
    "Retry": "jsworker.errors",
    "Settings": "jsworker.settings",
    "Worker": "jsworker.runtime.worker",
    "enqueue_statement": "jsworker.client",
    "load_settings": "jsworker.settings",
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
