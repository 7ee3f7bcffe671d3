"""For producers and operators: enqueue jobs, read them, cancel, retry and clear them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsworker.client.enqueueing import enqueue_statement
    from jsworker.client.job_client import JobClient
    from jsworker.ownership.transitions.control import Cancelled
    from jsworker.ownership.transitions.enqueue import Enqueued
    from jsworker.ownership.transitions.reset import Reset

__all__ = ["Cancelled", "Enqueued", "JobClient", "Reset", "enqueue_statement"]

_HOMES = {
    "Cancelled": "jsworker.ownership.transitions.control",
    "Enqueued": "jsworker.ownership.transitions.enqueue",
    "JobClient": "jsworker.client.job_client",
    "Reset": "jsworker.ownership.transitions.reset",
    "enqueue_statement": "jsworker.client.enqueueing",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: a worker publishes without a client."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
