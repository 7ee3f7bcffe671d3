"""For producers and operators: enqueue jobs, read them, cancel, retry and clear them."""

from jsworker.client.enqueueing import enqueue_statement
from jsworker.client.job_client import JobClient
from jsworker.client.job_info import JobDetails, JobEvent, JobInfo, StepInfo
from jsworker.client.results import JobHandle
from jsworker.client.sync_client import SyncJobClient
from jsworker.client.sync_parts import SyncJobHandle
from jsworker.ownership.transitions.control import Cancelled
from jsworker.ownership.transitions.enqueue import Enqueued
from jsworker.ownership.transitions.reset import Reset

__all__ = [
    "Cancelled",
    "Enqueued",
    "JobClient",
    "JobDetails",
    "JobEvent",
    "JobHandle",
    "JobInfo",
    "Reset",
    "StepInfo",
    "SyncJobClient",
    "SyncJobHandle",
    "enqueue_statement",
]
