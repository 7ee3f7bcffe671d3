"""The kinds that share a run's job slots: a job that waits for another one must not block it."""

from contextvars import ContextVar
from typing import Final

kinds_of_slot: Final[ContextVar[frozenset[str]]] = ContextVar("kinds_of_slot", default=frozenset())
"""Within a run: the kinds whose jobs need the job slots of its process. Empty outside of jobs."""
