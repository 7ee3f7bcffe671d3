"""What a worker has in flight: runs, each one execution of a job from the claim to the answer, and claims."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import UsageError
from jsworker.core.job import Job
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.stream.message import Delivery
from jsworker.worker.pipeline.kinds import Kind

if TYPE_CHECKING:
    from jsworker.core.spans import RunSpans
    from jsworker.worker.pipeline.child_jobs import ChildJobs
    from jsworker.worker.pipeline.intake import Consumer
    from jsworker.worker.pipeline.steps import Steps


class Phase(Enum):
    """How far a run is: it waits for a job slot, is in the processor's hands, or its outcome is written."""

    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"


class StopReason(Enum):
    """Why a run was stopped."""

    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    NO_PROGRESS = "no progress"
    LOST = "lost"
    FENCED = "fenced"
    SHUTDOWN = "shutdown"


class Run:
    """One execution of a job. Moments are boot times."""

    # Defaults of the class: most runs never change them, and one is made for every job.
    phase: Phase = Phase.WAITING
    task: asyncio.Task[None] | None = None
    began_at: float = math.inf
    thread_id: int | None = None
    stop: StopReason | None = None  # the first reason stays, but LOST overrides it
    cancelled_for: StopReason | None = None
    first_cancelled_at: float | None = None
    cancelled_at: float = 0.0
    cancellations: int = 0
    is_urgent: bool = False  # others may soon run its job, which is still its own
    ignores_stop: bool = False
    left_task: asyncio.Task[None] | None = None  # in which it goes on although it was given up
    should_stop: bool = False  # shown to the processor; also True while the worker drains
    cancelled: bool = False
    completed: bool = False  # by the job's own transaction
    child_jobs: "ChildJobs | None" = None  # to be written with its completion
    takes_child_jobs: bool = True
    interrupted: tuple[BaseException, str] | None = None  # what ended that, and which fault of a server
    unfinished: BaseException | None = None  # that error, while another try is due; or a sleep
    never_awaited: str | None = None  # a call of its job that was dropped, and so has done nothing
    job: Job[Any] | None = None  # None until the payload has been read
    isolated: bool = False  # it runs in another process, which is ended without ours
    quarantined: bool = False  # in one that runs no other job
    steps: "Steps | None" = None  # those that it has asked for
    steps_in_threads: int = 0  # of a coroutine; their ends are waited for
    on_drain: Callable[[], None] | None = None
    abandoned: bool = False  # its end is not waited for any more
    spans: "RunSpans | None" = None
    noting: asyncio.Future[None] | None = None  # done when its row names the span, or cannot
    refusal: str | None = None  # why its outcome could not be written as it was
    quiet_seconds: float = 0.0  # more than usual that its row allows, for a quiet phase of a run here
    quiet_until: float = 0.0  # the end of its own quiet phase

    def __init__(
        self, claimed: ClaimedJob, kind: Kind, delivery: Delivery | None, *, beaten_at: float, now: float
    ) -> None:
        self.id = claimed.id
        self.claimed = claimed
        self.kind = kind
        self.delivery = delivery  # None when the row was found without a message
        self.beaten_at = beaten_at  # when the last successful sign of life was sent; at first, the claim
        self.sign_at = now  # of the job itself: progress, checkpoint
        self.in_progress_at = now
        self.claimed_at = now

    @property
    def held(self) -> tuple[UUID, int]:
        """Job id and fencing token: what every write of this run is guarded by."""
        return self.id, self.claimed.fencing_token

    @cached_property
    def thresholds_lock(self) -> asyncio.Lock:
        """Held while the limits of silence in the run's row are changed."""
        return asyncio.Lock()

    @property
    def stop_in_words(self) -> str:
        """Why it was stopped; empty: it was not."""
        return "" if self.stop is None else self.stop.value

    @property
    def is_handed_back(self) -> bool:
        """Whether an end without an outcome gives the job to another worker: this one drains or is fenced."""
        return self.should_stop and self.stop in {None, StopReason.FENCED, StopReason.SHUTDOWN}

    def is_overdue(self, now: float) -> bool:
        """Return whether its time-out has passed; False for a run that is limited by a timer."""
        timeout = self.kind.limits.timeout
        if timeout is None or now - self.began_at <= timeout or self.phase is not Phase.RUNNING:
            return False
        return not (self.isolated or self.kind.needs_timers)

    def refuse_never_awaited(self) -> None:
        """Raise UsageError if a call of the job was dropped without being awaited: it must not complete."""
        if self.never_awaited is not None:
            call = f"job.{self.never_awaited}()"
            raise UsageError(
                f"{call} has done nothing, for it was never awaited: write await {call}, in a plain function"
                f" job.sync.{self.never_awaited}()"
            )

    def thresholds(self, quiet_seconds: float) -> dict[str, float | None]:
        """Return the limits of silence while the run is quiet for so long."""
        limits = self.kind.limits_when_quiet(quiet_seconds)
        return {"stale_after": limits.stale_after, "crash_after": limits.crash_after}

    def facts(self) -> dict[str, object]:
        """Return the fields of every event about this run."""
        return {
            "job_id": str(self.claimed.id),
            "kind": self.kind.name,
            "fencing_token": self.claimed.fencing_token,
            "attempt": self.claimed.attempt,
        }

    def drain(self) -> None:
        """Let the processor know that the worker is about to end; it may ignore that."""
        self.should_stop = True
        if self.on_drain is not None:
            self.on_drain()

    def leave_thread(self) -> None:
        """Note that a step in a thread is over; a coroutine that is to stop has time for it from now on."""
        self.steps_in_threads -= 1
        if self.first_cancelled_at is not None:
            self.cancelled_at = boottime()

    def lose(self) -> None:
        """Note that a statement of the run itself found the job lost; nothing is cancelled."""
        self.stop, self.should_stop = StopReason.LOST, True

    def signal(self, reason: StopReason) -> None:
        """Stop the run: let the processor know, and cancel it where it waits, unless it is settling."""
        if self.stop is None or reason is StopReason.LOST:
            self.stop = reason
        self.should_stop = True
        self.cancelled |= reason is StopReason.CANCELLED
        self.is_urgent |= reason is StopReason.FENCED
        # Else the same reason cancels once: a slow clean-up is not interrupted by every heartbeat again.
        escalates = reason in {StopReason.LOST, StopReason.SHUTDOWN} and self.cancelled_for is not reason
        if self.phase is Phase.RUNNING and (self.cancelled_for is None or escalates):
            self.cancelled_for = reason
            self.first_cancelled_at = self.first_cancelled_at or boottime()
            self._cancel(self.task)

    def cancel_again(self) -> None:
        """Cancel a coroutine that goes on although it was cancelled; it may have swallowed that."""
        if self.phase is Phase.RUNNING and self.kind.is_async and not self.isolated:
            self._cancel(self.task)
        elif self.left_task is not None:
            self._cancel(self.left_task)

    def _cancel(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self.cancelled_at = boottime()
            self.cancellations += 1
            task.cancel()


@dataclass(slots=True)
class Claiming:
    """A claim on its way, and the messages that wait for it: none when the row was found in the table."""

    consumer: "Consumer"  # it may be granted to another one of the same kind
    deliveries: list[Delivery]
    times_locked: int = 0


class InFlight:
    """Everything that this process has in flight. An id is in at most one claim, read-back or run at a time.

    Otherwise two job slots could adopt one fencing token and run it twice, which no fence can distinguish.
    """

    def __init__(self) -> None:
        self.claiming: dict[UUID, Claiming] = {}
        self.runs: dict[UUID, Run] = {}  # changed by ``add`` and ``remove`` alone
        # How many runs are of a batch, by its ``UUID.int``: a UUID's own hash takes longer.
        self._members: Counter[int] = Counter()
        self.given_up: set[Run] = set()  # they go on although they are settled; each keeps its job slot
        # No read-back may adopt these: orphaned claims, and runs that ended while their rows stayed owned.
        self.releasing: set[tuple[UUID, int]] = set()
        self.unsettled: set[tuple[UUID, int]] = set()

    def __contains__(self, job_id: UUID) -> bool:
        return job_id in self.runs or job_id in self.claiming

    def add(self, run: Run) -> None:
        """Note that a job was claimed."""
        self.runs[run.id] = run
        if (batch := run.claimed.batch_id) is not None:
            self._members[batch.int] += 1

    def remove(self, run: Run) -> None:
        """Note that a run is over and settled, or that nothing can be done about it here any more."""
        if self.runs.pop(run.id, None) is not None and (batch := run.claimed.batch_id) is not None:
            left = self._members[batch.int] - 1
            if left:
                self._members[batch.int] = left
            else:
                del self._members[batch.int]

    def has_member_of(self, batch: UUID) -> bool:
        """Return whether one of the runs is a member of a batch."""
        return batch.int in self._members
