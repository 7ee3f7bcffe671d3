"""What the demo shows while it runs, as plain values: one snapshot for each moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WorkerState = Literal["starting", "running", "killed", "stopped"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """A time that is shorter in the demo than by default.

    Attributes:
        name: what it is called.
        seconds: its value in the demo.
        default_seconds: its value when nothing is set.
    """

    name: str
    seconds: float
    default_seconds: float


@dataclass(frozen=True, slots=True)
class RepositoryProgress:
    """How many jobs of a repository are completed."""

    name: str
    completed: int
    jobs: int


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job in a worker's hands: what to call it, and the stage and the share done that it reported last."""

    label: str
    stage: str | None = None
    progress: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker process.

    Attributes:
        name: what to call it.
        pid: its process id.
        state: what the demo knows about the process.
        completed: jobs that it has completed.
        running: jobs that it owns; of a killed worker: those that still wait to be taken back.
    """

    name: str
    pid: int
    state: WorkerState
    completed: int
    running: Sequence[RunningJob] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """A job of the killed worker.

    Attributes:
        label: what to call the job.
        seconds: since the kill; final once another worker has it.
        worker: who runs it again; None as long as nobody does.
    """

    label: str
    seconds: float
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the view shows at one moment.

    Attributes:
        seconds: since the first job was enqueued.
        thresholds: the short times in force.
        repositories: in the order given by the user.
        workers: in the order of their names.
        recoveries: one for each job that the victim owned, always in the same order.
    """

    seconds: float
    thresholds: Sequence[Threshold]
    repositories: Sequence[RepositoryProgress]
    workers: Sequence[WorkerView]
    recoveries: Sequence[Recovery] = ()


def thresholds_line(thresholds: Sequence[Threshold]) -> str:
    """Return the sentence that states the short times in force, and what they are by default."""
    short = " · ".join(f"{each.name} {each.seconds:g} s" for each in thresholds)
    usual = " · ".join(f"{each.default_seconds:g}" for each in thresholds)
    return f"Short for the demo: {short} (defaults: {usual})"


def jobs(count: int) -> str:
    """Return a number of jobs in words."""
    return "1 job" if count == 1 else f"{count:,} jobs"
