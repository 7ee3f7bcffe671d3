"""The interface between a worker and its supervisor, and the measurement of a worker's silence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError

_MOST_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class DeadOwner:
    """A worker that is proven to have ended.

    Attributes:
        reason: the reason that the next runs of its jobs get.
        settled_at: the boot time from which on no CLAIM of this worker can commit any more.
        counted: whether stalls are counted.
        culprits: if there are any, stalls are counted for these jobs only; without ``counted``, only for
            those of them that were taken or handed back before.
    """

    worker_id: str
    reason: str
    settled_at: float
    counted: bool = True
    culprits: tuple[UUID, ...] = ()


class Supervision(Protocol):
    """A worker's reports to its supervisor; every call returns at once and raises nothing."""

    def registered(self, worker_id: str) -> None:
        """Report the worker's id, before it claims the first job."""

    def began(self, job_id: UUID) -> None:
        """Note that a job's run begins, before any of its code runs: the job may be the cause of a death."""

    def waits(self, job_id: UUID) -> object:
        """Note that a run waits again before any of its job's code has run."""

    def ended(self, job_id: UUID) -> None:
        """Note that a run has ended and its outcome is written; does nothing if it never began."""

    def quiet_until(self, boottime: float) -> None:
        """Announce that the event loop may be silent until this boot time."""

    def request_kill(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """Ask the supervisor to kill the process, because these runs ignore the request to stop.

        Stalls are counted for these runs only; ``reason`` is logged and passed to the next runs.
        """

    def stops_runs(self, died_of: JsworkerError | None) -> None:
        """Note that the worker stops and is about to stop runs that have not ended in time.

        ``died_of``: the error for which it stops; None: it was asked to. Ends the process instead, so that
        stalls are counted, if the supervisor has not requested the stop: one of the runs may be its cause.
        """


class Silence:
    """Counts the seconds without a tick of a child, as far as its parent could receive one.

    Only time in which the parent itself ran counts: after the parent was stopped or suspended, a child gets
    its full time again. Nothing counts before the first tick, because a process that imports has no event
    loop.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.quiet_until = 0.0
        """The boot time until which silence is not counted."""
        self._heard = False
        self._looked_at = boottime()
        self.seconds = 0.0

    def note_tick(self) -> None:
        """Note a tick, and count from zero again."""
        self._heard = True
        self.seconds = 0.0

    def is_quiet(self, now: float) -> bool:
        """Return whether an announced quiet phase lasts at the boot time ``now``."""
        return now < self.quiet_until

    def pass_round(self, seconds: float, *, now: float) -> bool:
        """Call ``pass_by`` with the time since the last round, of which there is one every ``seconds``.

        After a pause in which the parent itself stood still, that is at most two rounds.
        """
        passed, self._looked_at = min(now - self._looked_at, _MOST_ROUNDS * seconds), now
        return self.pass_by(passed, now=now)

    def pass_by(self, seconds: float, *, now: float) -> bool:
        """Add seconds without a tick, and return whether the silence exceeds the time-out now."""
        if self.is_quiet(now):
            self.seconds = 0.0
        elif self._heard:
            self.seconds += seconds
        return self.seconds > self.timeout
