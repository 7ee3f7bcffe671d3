"""What a job slot is held in: whoever waits inside a job for another one has to know."""

from contextvars import ContextVar
from typing import Final

kinds_of_slot: Final[ContextVar[frozenset[str]]] = ContextVar("kinds_of_slot", default=frozenset())
"""Within a run: the kinds whose jobs need the job slots of its process. Empty outside of jobs."""
