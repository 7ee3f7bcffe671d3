"""What ties a worker to whoever supervises its process."""

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID


class Supervision(Protocol):
    """What a worker tells whoever supervises it; every call returns at once and raises nothing."""

    def registered(self, worker_id: str) -> None:
        """Tell under which id the worker owns jobs, before it claims the first one."""
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
            boottime: the latest end of any announced quiet phase, in seconds of ``runtime.clock.boottime()``.
        """
        ...

    def condemn(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """Ask to be killed with the whole process: these runs ignore their stop.

        Args:
            culprits: job id and fencing token of each; their stalls are counted, all others' are not.
            reason: told to the next runs and in the logs.
        """
        ...
