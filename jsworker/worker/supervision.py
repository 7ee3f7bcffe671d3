"""What a worker and the supervisor of its process report to each other, and how long one has been silent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class DeadOwner:
    """A worker that is proven to have ended.

    Attributes:
        reason: given to the next runs of its jobs.
        settled_at: boot time from which on no CLAIM of its own can commit any more.
        counted: whether the stalls count.
        culprits: if there are any, only these jobs' stalls count.
    """

    worker_id: str
    reason: str
    settled_at: float
    counted: bool = True
    culprits: tuple[UUID, ...] = ()


class Supervision(Protocol):
    """What a worker reports to its supervisor; every call returns at once and raises nothing."""

    def registered(self, worker_id: str) -> None:
        """Report under which id the worker owns jobs, before it claims the first one."""

    def began(self, job_id: UUID) -> None:
        """Note that a job's run begins, before anything of the job can do harm: it is counted for a death."""

    def waits(self, job_id: UUID) -> None:
        """Note that a run waits, before anything of its job is executed, until it begins again."""

    def ended(self, job_id: UUID) -> None:
        """Note that a run is over and its outcome written; nothing for one that never began."""

    def quiet_until(self, boottime: float) -> None:
        """Announce until which boot time, at the latest, the event loop may be silent."""

    def request_kill(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """Ask to be killed with the whole process: these runs ignore their stop.

        Their stalls are counted, all others' are not; ``reason`` is given to the next runs and logged.
        """


class Silence:
    """Counts the seconds for which a child has not ticked, as far as its parent could hear it.

    Only time in which the parent itself came round counts: after it was stopped or suspended, a child gets
    fresh time. Before the first tick nothing counts: a process that imports has no event loop yet.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.quiet_until = 0.0
        """Boot time until which nothing counts."""
        self._heard = False
        self.seconds = 0.0

    def note_tick(self) -> None:
        """Begin to count from zero."""
        self._heard = True
        self.seconds = 0.0

    def is_quiet(self, now: float) -> bool:
        """Return whether an announced quiet phase lasts, by boot time."""
        return now < self.quiet_until

    def pass_by(self, seconds: float, *, now: float) -> bool:
        """Let seconds pass in which the parent heard nothing, and return whether they are too many now."""
        if self.is_quiet(now):
            self.seconds = 0.0
        elif self._heard:
            self.seconds += seconds
        return self.seconds > self.timeout
