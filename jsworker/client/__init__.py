"""The producers' door: enqueue jobs, look at them, cancel, retry and clear them."""

from jsworker.client.enqueueing import enqueue_statement
from jsworker.client.job_client import JobClient
from jsworker.ownership.control import Cancelled
from jsworker.ownership.enqueue import Enqueued
from jsworker.ownership.reset import Reset

__all__ = ["Cancelled", "Enqueued", "JobClient", "Reset", "enqueue_statement"]
