"""What the protocol says, in plain Python: a job, and each transition as it should be.

Every method returns the answer that the code under test has to give, and changes the jobs as it has to
change their rows.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from jsworker.ownership.transitions.claim import RunLimits
from jsworker.ownership.transitions.heartbeat import Beat, Held
from jsworker.ownership.transitions.publish import Sent
from jsworker.ownership.transitions.reset import Suspect
from jsworker.ownership.transitions.settle import Completion, Failure, Return, Settled, Snoozing

KIND = "walk"
OTHER_KIND = "talk"
LIMITS = RunLimits(stale_after=3000.0, crash_after=1500.0, timeout=None, max_attempts=2, max_stalls=3)
CRASHED = 2000.0
"""Seconds of silence: beyond the crash threshold, not stale."""
STALE = 4000.0
MISSED_HEARTBEATS = 1200.0
"""Two heartbeats of a sweeper, in seconds."""

FINAL = frozenset({"completed", "failed", "cancelled"})


@dataclass(eq=False, repr=False)
class Batch:
    """A batch of a workflow as its row should be; ``members`` are in the model."""

    name: str
    id: UUID
    needs: list["Batch"]
    on_failure: str
    generation: int = 0
    outcome: str | None = None
    propagated: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def ready(self) -> bool:
        return all(need.outcome for need in self.needs)

    @property
    def runs(self) -> bool:
        return self.on_failure == "run" or all(need.outcome == "completed" for need in self.needs)

    def columns(self) -> dict[str, object]:
        """Return the columns that a machine compares."""
        return {"generation": self.generation, "outcome": self.outcome, "propagated": self.propagated}


@dataclass(eq=False, repr=False)
class Job:
    """A job as its row should be.

    Attributes:
        publish_due, due, queued_long, claimed_long: what only the clock changes.
        silence: seconds since the owner's last sign of life, as far as rules let them pass.
        activity: counts the changes of ``last_activity_at``.
        has_written: whether the present run has written anything of its own.
        written: what each run, by worker id and token, got when it settled the job.
    """

    name: str
    id: UUID
    unique_key: str | None
    max_attempts: int | None
    max_stalls: int | None
    status: str
    worker_id: str | None = None
    token: int = 0
    attempts: int = 0
    errors: int = 0
    stalls: int = 0
    snoozes: int = 0
    dispatch: int = 0
    needs_publish: bool = False
    cleared: bool = False
    clear_reason: str | None = None
    cancel_requested: bool = False
    failure_reason: str | None = None
    held_by: str | None = None
    limit_key: str | None = None
    batch: Batch | None = None
    last_error: str | None = None
    progress: float | None = None
    checkpoint: str | None = None
    result: str | None = None
    step: str | None = None
    stale_after: float | None = None
    crash_after: float | None = None
    publish_due: bool = False
    due: bool = False
    queued_long: bool = False
    claimed_long: bool = False
    silence: float = 0.0
    activity: int = 0
    has_written: bool = False
    written: dict[tuple[str, int], Settled] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    @property
    def live(self) -> bool:
        return self.status not in FINAL

    @property
    def key(self) -> str:
        return self.limit_key or ""

    @property
    def is_cancelled_for_needs(self) -> bool:
        return (self.status, self.failure_reason) == ("cancelled", "needs")

    @property
    def late(self) -> bool:
        thresholds = [one for one in (self.stale_after, self.crash_after) if one is not None]
        return bool(thresholds) and self.silence > min(*thresholds, MISSED_HEARTBEATS)

    @property
    def stale(self) -> bool:
        return self.stale_after is not None and self.silence > self.stale_after

    @property
    def may_have_begun(self) -> bool:
        """Whether its owner's death may be its fault: one that runs alone says first that it begins."""
        return self.has_written or self.stalls < min(2, _known(self.max_stalls) - 1)

    @property
    def crashed(self) -> bool:
        return self.crash_after is not None and self.silence > self.crash_after

    def columns(self) -> dict[str, object]:
        """Return the columns that a machine compares."""
        return {
            "status": self.status,
            "worker_id": self.worker_id,
            "fencing_token": self.token,
            "attempts": self.attempts,
            "errors": self.errors,
            "stalls": self.stalls,
            "snoozes": self.snoozes,
            "max_attempts": self.max_attempts,
            "max_stalls": self.max_stalls,
            "dispatch": self.dispatch,
            "needs_publish": self.needs_publish,
            "cleared": self.cleared,
            "clear_reason": self.clear_reason if self.cleared else None,
            "cancel_requested": self.cancel_requested,
            "finished": self.status in FINAL,
            "failure_reason": self.failure_reason,
            "held_by": self.held_by,
            "limit_key": self.limit_key,
            "last_error": self.last_error,
            "progress": self.progress,
            "checkpoint": self.checkpoint and json.loads(self.checkpoint),
            "result": self.result and json.loads(self.result),
            "step": self.step and json.loads(self.step),
        }

    def show_life(self) -> None:
        self.silence = 0.0
        self.activity += 1

    def own(self, worker_id: str) -> None:
        self.status = "processing"
        self.held_by = None
        self.worker_id = worker_id
        self.token += 1
        self.attempts += 1
        self.max_attempts = self.max_attempts or LIMITS.max_attempts
        self.max_stalls = self.max_stalls or LIMITS.max_stalls
        self.stale_after, self.crash_after = LIMITS.stale_after, LIMITS.crash_after
        self.needs_publish = self.claimed_long = self.has_written = False
        self.show_life()

    def enter(self, status: str) -> None:
        """Go to a status that no worker owns."""
        self.status = status
        self.worker_id = self.held_by = None
        self.needs_publish = status == "queued"
        if status == "queued":
            self.dispatch += 1
            self.publish_due = True
            self.queued_long = False
        self.due = False

    def hold(self, why: str) -> None:
        """Wait for an event."""
        self.enter("scheduled")
        self.held_by = why

    def clear(self, reason: str | None) -> None:
        self.cleared = reason is not None
        self.clear_reason = reason

    def take_back(self, reason: str, *, counted: bool) -> None:
        """RESET, whichever rule allowed it."""
        before = self.stalls
        if counted:
            self.stalls += 1
        else:
            self.attempts -= 1
        if self.cancel_requested:
            self.enter("cancelled")
        elif counted and self.stalls >= _known(self.max_stalls):
            self.enter("failed")
            self.failure_reason = "stalled"
        elif not counted or before == 0:
            self.enter("queued")
        else:
            self.enter("scheduled")
        self.clear(reason if self.live else None)


@dataclass(frozen=True)
class Sighting:
    """A late row as a sweeper saw it, and which ``last_activity_at`` that was."""

    job: Job
    token: int
    activity: int
    suspect: Suspect

    def __repr__(self) -> str:
        return f"{self.job} silent at token {self.token}, activity {self.activity}"

    @property
    def unchanged(self) -> bool:
        job = self.job
        return job.status == "processing" and (job.token, job.activity) == (self.token, self.activity)


@dataclass(frozen=True)
class Gone:
    """A job whose message a sweeper has proven gone, at the dispatch at which it was published."""

    job: Job
    dispatch: int

    def __repr__(self) -> str:
        return f"{self.job} at dispatch {self.dispatch}"


@dataclass
class Advance:
    """What came of looking after batches."""

    finished: list[UUID] = field(default_factory=list)
    woken: int = 0
    cancelled: int = 0


class Model:
    """All jobs of one example."""

    def __init__(self) -> None:
        self.jobs: dict[UUID, Job] = {}
        self.batches: list[Batch] = []
        self.paused: set[str] = set()  # keys; empty: the kind

    def all(self) -> list[Job]:
        return list(self.jobs.values())

    def in_order(self, ids: Iterable[UUID]) -> list[Job]:
        """Return jobs by age: no answer's order may decide what comes next."""
        wanted = set(ids)
        return [job for job in self.jobs.values() if job.id in wanted]

    def having(self, *statuses: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.status in statuses]

    def owned_by(self, worker_id: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.worker_id == worker_id]

    def holder(self, unique_key: str | None) -> Job | None:
        """Return the live job that holds a unique key."""
        holders = (job for job in self.jobs.values() if unique_key and job.unique_key == unique_key)
        return next((job for job in holders if job.live), None)

    def add(
        self, job_id: UUID, *, unique_key: str | None, delayed: bool, attempts: int | None, stalls: int | None
    ) -> Job:
        job = Job(f"job{len(self.jobs) + 1}", job_id, unique_key, attempts, stalls, "scheduled")
        if not delayed:
            job.enter("queued")
        self.jobs[job_id] = job
        return job

    # -- outbox and sweeps of the queue

    def take_outgoing(self) -> dict[UUID, tuple[int, bool, str | None]]:
        taken = [job for job in self.having("queued") if job.needs_publish and job.publish_due]
        for job in taken:
            job.publish_due = False
        return {job.id: (job.dispatch, job.cleared, job.clear_reason) for job in taken}

    def mark(self, sent: Iterable[Sent]) -> int:
        marked = 0
        for one in sent:
            job = self.jobs[one.id]
            if job.needs_publish and job.dispatch == one.dispatch:
                job.needs_publish = False
                marked += 1
        return marked

    def promote(self) -> int:
        due = [job for job in self.having("scheduled") if job.due]
        for job in due:
            job.enter("queued")
        return len(due)

    def republish(self, gone: Iterable[tuple[UUID, int]]) -> set[UUID]:
        again = set()
        for job_id, dispatch in gone:
            job = self.jobs[job_id]
            if job.status == "queued" and not job.needs_publish and job.dispatch == dispatch:
                job.dispatch += 1
                job.needs_publish = job.publish_due = True
                again.add(job_id)
        return again

    # -- claims

    def claim(self, worker_id: str, kind: str, ids: Iterable[UUID]) -> dict[UUID, int]:
        wanted = [self.jobs[job_id] for job_id in ids if job_id in self.jobs and kind == KIND]
        taken = [job for job in wanted if job.status == "queued"]
        for job in taken:
            job.own(worker_id)
        return {job.id: job.token for job in taken}

    def claim_stale(self, worker_id: str, seen: Iterable[Sighting]) -> dict[UUID, int]:
        taken = [
            one.job
            for one in seen
            if one.unchanged
            and one.job.stale
            and one.job.stalls == 0
            and _known(one.job.max_stalls) >= 2
            and not one.job.cancel_requested
            and not self.paused & {one.job.key or "", ""}
        ]
        for job in taken:
            job.clear(f"worker {job.worker_id} stopped responding")
            job.stalls += 1
            job.own(worker_id)
        return {job.id: job.token for job in taken}

    # -- the owner

    def mine(self, worker_id: str, held: Held) -> Job | None:
        job = self.jobs[held[0]]
        return job if job.worker_id == worker_id and job.token == held[1] else None

    def heartbeat(self, worker_id: str, hand: Collection[Held]) -> Beat:
        alive = {held: job for held in hand if (job := self.mine(worker_id, held))}
        for job in alive.values():
            job.show_life()
        completed = {held for held in hand if self._completed(held)}
        return Beat(
            alive=frozenset(alive),
            cancelled=frozenset(held for held, job in alive.items() if job.cancel_requested),
            lost=frozenset(hand) - frozenset(alive) - completed,
            locked=frozenset(),
            completed=frozenset(completed),
            silences={
                held: job.crash_after if job.stale_after is None else job.stale_after
                for held, job in alive.items()
            },
            activities={},  # the model has no clock
        )

    def complete(self, worker_id: str, runs: Sequence[Completion]) -> list[Settled]:
        for run in runs:
            if job := self.mine(worker_id, (run.id, run.token)):
                job.enter("completed")
                job.result = run.result
                job.written[worker_id, run.token] = Settled.COMPLETED
        return [self._verdict(worker_id, run) for run in runs]

    def fail(self, worker_id: str, runs: Sequence[Failure]) -> list[Settled]:
        for run in runs:
            if job := self.mine(worker_id, (run.id, run.token)):
                self._fail(job, run)
                job.written[worker_id, run.token] = Settled(job.status)
        return [self._verdict(worker_id, run) for run in runs]

    def _fail(self, job: Job, run: Failure) -> None:
        if run.stalled:
            job.stalls += 1
        elif job.cancel_requested:
            job.attempts -= 1
        else:
            job.errors += 1
        used_up = (
            job.stalls >= _known(job.max_stalls) if run.stalled else job.errors >= _known(job.max_attempts)
        )
        job.last_error = run.error
        job.clear(None)
        if job.cancel_requested:
            job.enter("cancelled")
        elif run.permanent or used_up:
            job.enter("failed")
            job.failure_reason = run.permanent or ("stalled" if run.stalled else "attempts")
        else:
            job.enter("scheduled")

    def release(self, worker_id: str, runs: Sequence[Return]) -> list[Settled]:
        for run in runs:
            if job := self.mine(worker_id, (run.id, run.token)):
                job.attempts -= 1
                if job.cancel_requested:
                    job.enter("cancelled")
                    job.clear(None)
                else:
                    job.enter("queued")
                    job.clear(run.reason)
                job.written[worker_id, run.token] = Settled(job.status)
        return [self._verdict(worker_id, run) for run in runs]

    def snooze(self, worker_id: str, runs: Sequence[Snoozing]) -> list[Settled]:
        for run in runs:
            if job := self.mine(worker_id, (run.id, run.token)):
                self._snooze(job, run)
                again = job.status == "scheduled"
                job.written[worker_id, run.token] = Settled.SNOOZED if again else Settled(job.status)
        return [self._verdict(worker_id, run) for run in runs]

    def _snooze(self, job: Job, run: Snoozing) -> None:
        job.clear(None)
        if job.cancel_requested:
            job.attempts -= 1
            job.enter("cancelled")
        elif run.most is not None and job.snoozes >= run.most:
            job.errors += 1
            job.last_error = run.error
            job.enter("failed")
            job.failure_reason = "snoozes"
        else:
            job.attempts -= 1
            job.snoozes += run.most is not None
            job.enter("scheduled")

    def _verdict(self, worker_id: str, run: Completion | Failure | Return | Snoozing) -> Settled:
        if self._completed((run.id, run.token)):
            return Settled.COMPLETED
        return self.jobs[run.id].written.get((worker_id, run.token), Settled.LOST)

    def _completed(self, held: Held) -> bool:
        job = self.jobs[held[0]]
        return job.status == "completed" and job.token == held[1]

    def retry(self, job: Job) -> bool:
        """RETRY; False when it must be refused. It opens a member's batch, and what was cancelled for it."""
        may_be = job.status == "failed" or (job.status == "cancelled" and not job.is_cancelled_for_needs)
        if not may_be or self.holder(job.unique_key):
            return False
        opened = self._reopen(job.batch) if job.batch else []
        job.attempts = job.errors = job.stalls = job.snoozes = 0
        job.failure_reason = None
        job.cancel_requested = False
        job.clear(None)
        if job.batch and not job.batch.ready:
            job.hold("needs")
        else:
            job.enter("queued")
        for one in self.all():
            if one.batch in opened and one.is_cancelled_for_needs:
                one.failure_reason = None
                one.hold("needs")
        return True

    # -- batches

    def members(self, batch: Batch) -> list[Job]:
        return [job for job in self.jobs.values() if job.batch is batch]

    def advance(self, touched: Iterable[Batch | None], *, needs: Iterable[Batch] = ()) -> Advance:
        """FINISH and NEEDS, until nothing moves."""
        done = Advance()
        batches, finished = {batch for batch in touched if batch}, set(needs)
        while batches or finished:
            for batch in batches:
                if batch.outcome is None and not any(job.live for job in self.members(batch)):
                    statuses = {job.status for job in self.members(batch)}
                    batch.outcome = next(
                        (bad for bad in ("failed", "cancelled") if bad in statuses), "completed"
                    )
                    done.finished.append(batch.id)
                    batch.propagated = not self._dependants(batch)
                    if not batch.propagated:
                        finished.add(batch)
            batches = self._propagate(finished, done)
            finished = set()
        return done

    def _propagate(self, finished: Iterable[Batch], done: Advance) -> set[Batch]:
        emptied: set[Batch] = set()
        for batch in finished:
            batch.propagated = True
            for other in self._dependants(batch):
                held = [job for job in self.members(other) if job.held_by == "needs"]
                for job in held if other.ready else []:
                    if other.runs:
                        job.enter("queued")
                        done.woken += 1
                    else:
                        job.enter("cancelled")
                        job.failure_reason = "needs"
                        done.cancelled += 1
                        emptied.add(other)
        return emptied

    def _dependants(self, batch: Batch) -> list[Batch]:
        return [other for other in self.batches if batch in other.needs]

    def _reopen(self, first: Batch) -> list[Batch]:
        opened = [first]
        for batch in opened:
            opened += [
                other
                for other in self._dependants(batch)
                if other not in opened and any(job.is_cancelled_for_needs for job in self.members(other))
            ]
        for batch in opened:
            batch.generation += 1
            batch.outcome, batch.propagated = None, False
        for batch in opened:
            for need in batch.needs:
                if need.outcome:
                    need.propagated = False
        return opened


def _known(limit: int | None) -> int:
    assert limit is not None, "a claimed job has its limits"
    return limit
