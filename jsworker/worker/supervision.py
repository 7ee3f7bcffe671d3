"""What a worker and the supervisor of its process report to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class DeadOwner:
    """A worker that is proven to have ended.

    Attributes:
        worker_id: the owner of what is to be taken back.
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
        ...

    def began(self, job_id: UUID) -> None:
        """Note that a job's run begins, before anything of the job can do harm: it is counted for a death."""
        ...

    def ended(self, job_id: UUID) -> None:
        """Note that a run is over and its outcome written; nothing for one that never began."""
        ...

    def quiet_until(self, boottime: float) -> None:
        """Announce that the event loop may be silent.

        Args:
            boottime: the latest end of any announced quiet phase, in seconds of ``core.clock.boottime()``.
        """
        ...

    def request_kill(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """Ask to be killed with the whole process: these runs ignore their stop.

        Args:
            culprits: job id and fencing token of each; their stalls are counted, all others' are not.
            reason: given to the next runs and logged.
        """
        ...
