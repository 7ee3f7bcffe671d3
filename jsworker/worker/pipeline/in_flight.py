"""The runs and claims that a worker has in flight; a run is one execution of a job, from claim to answer."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import UsageError
from jsworker.core.job import Job, JobCall
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.stream.message import Delivery
from jsworker.worker.pipeline.kinds import Kind

if TYPE_CHECKING:
    from jsworker.core.spans import RunSpans
    from jsworker.worker.pipeline.child_jobs import ChildJobs
    from jsworker.worker.pipeline.intake import Consumer
    from jsworker.worker.pipeline.steps import Steps


_SAME_SECONDS: Final = 0.001
"""Thresholds differ by less if they differ only because the database rounds them."""


class Phase(Enum):
    """The progress of a run: it waits for a job slot, its processor runs, or its outcome is written."""

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

    # Defaults on the class make the creation of a run cheaper: most runs never change them.
    phase: Phase = Phase.WAITING
    task: asyncio.Task[None] | None = None
    began_at: float = math.inf
    thread_id: int | None = None
    has_thread: bool = False  # whether the last thread that it needed, also for a step, was started
    stop: StopReason | None = None  # the first reason stays, but LOST overrides it
    cancelled_for: StopReason | None = None
    first_cancelled_at: float | None = None
    cancelled_at: float = 0.0
    cancellations: int = 0
    # It may go on for so many intervals after a stop, a coroutine after each of two cancellations. The fence
    # lowers this, so that it ends before others may run its job.
    grace_heartbeats: float = 2.0
    ignores_stop: bool = False
    left_task: asyncio.Task[None] | None = None  # the task in which it goes on although it was given up
    should_stop: bool = False  # visible to the processor; also True while the worker drains
    cancelled: bool = False
    in_block: bool = False  # whether the job's own transaction is open
    completed: bool = False  # whether the job's own transaction has completed it
    child_jobs: "ChildJobs | None" = None  # to be written with its completion
    takes_child_jobs: bool = True
    interrupted: tuple[BaseException, str] | None = None  # error and server's fault of its transaction
    unfinished: BaseException | None = None  # the error, while another try is due; or a job's sleep
    never_awaited: str | None = None  # the name of a call of its job that was not awaited
    job: Job[Any] | None = None  # None until the payload has been read
    isolated: bool = False  # it runs in another process, which can be killed alone
    quarantined: bool = False  # it runs in a process that runs no other job
    steps: "Steps | None" = None  # the steps of its job
    steps_in_threads: int = 0  # steps of a coroutine that run in threads; a stop waits for their ends
    on_drain: Callable[[], None] | None = None
    abandoned: bool = False  # nothing waits for its end any more
    spans: "RunSpans | None" = None
    noting: asyncio.Future[None] | None = None  # done when the row names its span, or that has failed
    refusal: str | None = None  # why its original outcome could not be written
    quiet_seconds: float = 0.0  # additional silence that its row allows, for a quiet phase of any run here
    quiet_until: float = 0.0  # the end of its own quiet phase
    progress_seen: datetime | None = None  # the time of progress in its row, as its last write returned it
    silence_found: float | None = None  # the silence that its row allowed at the last heartbeat
    thresholds_at: float = 0.0  # when ``quiet_seconds`` was written last

    def __init__(
        self, claimed: ClaimedJob, kind: Kind, delivery: Delivery | None, *, beaten_at: float, now: float
    ) -> None:
        self.id = claimed.id
        self.claimed = claimed
        self.kind = kind
        self.delivery = delivery  # None when the row was found without a message
        self.beaten_at = beaten_at  # when the last successful heartbeat, or at first the claim, was sent
        self.sign_at = now  # the last sign of life of the job itself: progress or a checkpoint
        self.in_progress_at = now
        self.claimed_at = now

    @property
    def held(self) -> tuple[UUID, int]:
        """Job id and fencing token, which guard every write of this run."""
        return self.id, self.claimed.fencing_token

    @cached_property
    def order_lock(self) -> asyncio.Lock:
        """Held by a write in order: each other write that came between would make it repeat itself."""
        return asyncio.Lock()

    @cached_property
    def thresholds_lock(self) -> asyncio.Lock:
        """Held while the thresholds of silence in the run's row are changed."""
        return asyncio.Lock()

    @property
    def stop_in_words(self) -> str:
        """Why the run was stopped; empty if it was not."""
        return "" if self.stop is None else self.stop.value

    @property
    def is_handed_back(self) -> bool:
        """Whether a run that ends without an outcome is handed back: this worker drains or is fenced."""
        return self.should_stop and self.stop in {None, StopReason.FENCED, StopReason.SHUTDOWN}

    def is_overdue(self, now: float) -> bool:
        """Return whether the time-out of a running run has passed that has no timer and is not isolated."""
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

    def refuse_coroutine(self, returned: Coroutine[Any, Any, Any]) -> NoReturn:
        """Raise UsageError for a coroutine that the processor has returned in place of its result."""
        if isinstance(returned, JobCall):
            self.never_awaited = returned.__name__
        returned.close()  # else Python warns that it was never awaited
        self.refuse_never_awaited()
        raise UsageError(
            "process returned a coroutine that was never awaited: write return await;"
            " a decorator of a coroutine function needs functools.wraps"
        )

    def thresholds(self, quiet_seconds: float) -> dict[str, float | None]:
        """Return the thresholds of silence while the run is quiet for ``quiet_seconds``."""
        limits = self.kind.limits_when_quiet(quiet_seconds)
        return {"stale_after": limits.stale_after, "crash_after": limits.crash_after}

    def note_written(self, quiet_seconds: float) -> None:
        """Note that the row allows so many seconds of additional silence now."""
        self.quiet_seconds, self.thresholds_at = quiet_seconds, boottime()

    def note_silence(self, seconds: float | None, *, read_at: float) -> None:
        """Note the silence that the row was found to allow, by a statement that was sent at ``read_at``.

        It differs from what was written last if an earlier write that was given up has been executed since.
        It must be found twice: an isolated process may have written it, and reports so a moment later.
        """
        usual, before, self.silence_found = self.kind.limits.silence, self.silence_found, seconds
        if seconds is None or usual is None or abs(seconds - usual - self.quiet_seconds) < _SAME_SECONDS:
            return
        if seconds == before and read_at > self.thresholds_at and not self.thresholds_lock.locked():
            self.quiet_seconds = seconds - usual

    def facts(self) -> dict[str, object]:
        """Return the fields of every event about this run."""
        return {
            "job_id": str(self.claimed.id),
            "kind": self.kind.name,
            "fencing_token": self.claimed.fencing_token,
            "attempt": self.claimed.attempt,
        }

    def drain(self) -> None:
        """Let the processor know that the worker is about to end; the processor may ignore it."""
        self.should_stop = True
        if self.on_drain is not None:
            self.on_drain()

    def leave_thread(self) -> None:
        """Note that a step in a thread has ended; the grace period of a stopped coroutine starts again."""
        self.steps_in_threads -= 1
        if self.first_cancelled_at is not None:
            self.cancelled_at = boottime()

    def lose(self) -> None:
        """Note that a statement of the run itself found the job lost; the run is not cancelled."""
        self.stop, self.should_stop = StopReason.LOST, True

    def signal(self, reason: StopReason) -> None:
        """Stop the run: let the processor know, and cancel it where it waits, unless it is settling."""
        if self.stop is None or reason is StopReason.LOST:
            self.stop = reason
        self.should_stop = True
        self.cancelled |= reason is StopReason.CANCELLED
        # A repeated reason does not cancel again: not every heartbeat may interrupt a slow clean-up.
        # After another reason only LOST and SHUTDOWN cancel once more, and FENCED an isolated run, whose
        # process has a fixed time for its end.
        urgent = {StopReason.LOST, StopReason.SHUTDOWN, *([StopReason.FENCED] if self.isolated else [])}
        escalates = reason in urgent and self.cancelled_for is not reason
        if self.phase is Phase.RUNNING and (self.cancelled_for is None or escalates):
            self.cancelled_for = reason
            self.first_cancelled_at = self.first_cancelled_at or boottime()
            self._cancel(self.task)

    def cancel_again(self) -> None:
        """Cancel again a coroutine that goes on; it may have swallowed the first cancellation."""
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
    """A claim under way, and the messages that wait for it; none if the row was found in the table."""

    consumer: "Consumer"  # another consumer of the same kind may get the job
    deliveries: list[Delivery]
    is_surplus: bool = False  # there is no room for the job; it is asked for because it is most likely held
    times_locked: int = 0


class InFlight:
    """Everything that this process has in flight. An id is in at most one claim, read-back or run at a time.

    Otherwise two job slots could run the job with one fencing token, which no guard can tell apart.
    """

    def __init__(self) -> None:
        self.claiming: dict[UUID, Claiming] = {}
        self.surplus = 0  # the number of surplus claims among these
        self.runs: dict[UUID, Run] = {}  # changed only by ``add`` and ``remove``
        # The number of runs of each batch, by its ``UUID.int``, because hashing a UUID takes longer.
        self._members: Counter[int] = Counter()
        self.is_awaiting_lock = False  # a claim waits for a lock: one at once, for each uses a connection
        self.given_up: set[Run] = set()  # runs that go on although they are settled; each keeps its job slot
        # No read-back may adopt these: orphaned claims, and ended runs whose rows are still owned.
        self.releasing: set[tuple[UUID, int]] = set()
        self.unsettled: set[tuple[UUID, int]] = set()

    def __contains__(self, job_id: UUID) -> bool:
        return job_id in self.runs or job_id in self.claiming

    def add(self, run: Run) -> None:
        """Add the run of a claimed job."""
        self.runs[run.id] = run
        if (batch := run.claimed.batch_id) is not None:
            self._members[batch.int] += 1

    def remove(self, run: Run) -> None:
        """Remove a run that is settled, or that this worker can no longer settle."""
        if self.runs.pop(run.id, None) is not None and (batch := run.claimed.batch_id) is not None:
            left = self._members[batch.int] - 1
            if left:
                self._members[batch.int] = left
            else:
                del self._members[batch.int]

    def has_member_of(self, batch: UUID) -> bool:
        """Return whether one of the runs is a member of a batch."""
        return batch.int in self._members
