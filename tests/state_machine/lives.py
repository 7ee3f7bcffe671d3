"""Simulated workers: what a worker process knows by itself, and the runs it believes to have in hand."""

from dataclasses import dataclass, field
from uuid import UUID

from jsworker.ownership.transitions.heartbeat import Held
from jsworker.ownership.transitions.workers import WorkerRow

from .model import KIND, Job
from .stream import Message

HOSTNAMES = ("worker-1", "worker-10", "worker_1")
"""One begins like another, and to LIKE the last one is a pattern of the first."""


@dataclass(eq=False, repr=False)
class Run:
    """One execution of a job.

    Attributes:
        dispatch: at which the job was claimed.
        message: that brought it, if one did; acknowledged once the run has ended.
        in_hand: False once its worker knows that the run has ended or is lost.
    """

    life: "Life"
    job: Job
    token: int
    dispatch: int
    message: Message | None
    in_hand: bool = True

    def __repr__(self) -> str:
        return f"{self.job} token {self.token} of {self.life}"

    @property
    def held(self) -> Held:
        return self.job.id, self.token


@dataclass(eq=False, repr=False)
class Life:
    """One life of a worker process.

    Attributes:
        unclear: jobs of claims whose answer was lost; they count as in hand until they are read back.
        buried: whether somebody has noted that it is dead.
    """

    id: str
    hostname: str
    alive: bool = True
    buried: bool = False
    runs: list[Run] = field(default_factory=list)
    unclear: set[UUID] = field(default_factory=set)

    def __repr__(self) -> str:
        return self.id

    @property
    def in_hand(self) -> list[Run]:
        return [run for run in self.runs if run.in_hand]

    @property
    def hand(self) -> list[Held]:
        return [run.held for run in self.in_hand]

    @property
    def busy_with(self) -> set[UUID]:
        """Return the jobs that are in no second claim, read-back or run of this process."""
        return {run.job.id for run in self.in_hand} | self.unclear

    def running(self, job_id: UUID) -> Run | None:
        """Return the run of a job that is in hand."""
        return next((run for run in self.in_hand if run.job.id == job_id), None)

    def registration(self) -> WorkerRow:
        """Return its row in the registry."""
        return WorkerRow(
            id=self.id,
            hostname=self.hostname,
            pod_uid=None,
            container=None,
            boot_id="boot",
            pid_namespace="namespace",
            pid=1,
            process_started="1",
            kinds=[KIND],
            concurrency=16,  # more than anybody has in hand: nothing waits for a slot
            version="0",
            heartbeat_interval=600.0,
        )


@dataclass(eq=False, repr=False)
class ClaimInFlight:
    """A CLAIM that was sent and has not reached the database yet; its process may be dead by then."""

    life: Life
    kind: str
    ids: list[UUID]
    names: str

    def __repr__(self) -> str:
        return f"claim of {self.names} by {self.life}"
