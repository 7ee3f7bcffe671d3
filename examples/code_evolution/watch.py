"""Follows the jobs of one run, look by look, with the public client."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from code_evolution.history import Repository
from code_evolution.jobs import CommitToCount, CountLines
from code_evolution.workers import WorkerProcess
from jsworker import JobClient, JobDetails, JobEvent, JobInfo

STUCK_SECONDS = 60.0
"""The run is given up if no job has moved for so long."""

_MOVES = ("status", "fencing_token", "stage", "progress")
"""The columns that change when a job moves; those of its heartbeats are not among them."""

Held = tuple[UUID, int]
"""One run of a job: its id and its fencing token."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one job does: the place of its repository among all, the name that is shown, and the payload."""

    repository: int
    label: str
    payload: CommitToCount


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed, when, and the runs that it held: those that others must take over."""

    worker: WorkerProcess
    at: datetime
    held: frozenset[Held]


@dataclass(frozen=True, slots=True)
class Recovery:
    """A job of the killed worker: seconds from the kill until it ran again, or so far if it still waits."""

    label: str
    seconds: float
    worker_id: str | None


class Watch:
    """Follows the jobs of one run.

    Attributes:
        repositories: the repositories to count.
        tasks: what each enqueued job does, by job id.
        live: jobs that have not ended, as they were at the last look.
        ended: jobs that have ended, as they were when their end was first seen, with their results.
        kill: the kill; None until a worker was killed.
        takeovers: the next claim of each job of the killed worker that runs again.
    """

    def __init__(self, client: JobClient, repositories: Sequence[Repository]) -> None:
        self._client = client
        self._began_at = self._moved_at = time.monotonic()
        self.repositories = repositories
        self.tasks: dict[UUID, Task] = {}
        self.live: dict[UUID, JobInfo] = {}
        self.ended: dict[UUID, JobDetails] = {}
        self.kill: Kill | None = None
        self.takeovers: dict[UUID, JobEvent] = {}

    @property
    def open(self) -> int:
        """How many enqueued jobs have not ended."""
        return len(self.tasks) - len(self.ended)

    @property
    def moving(self) -> bool:
        """Whether there are open jobs, and one of them has moved within ``STUCK_SECONDS``."""
        return self.open > 0 and time.monotonic() - self._moved_at <= STUCK_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds since the first job was enqueued, until the last one ended."""
        return (time.monotonic() if self.open else self._moved_at) - self._began_at

    def completed(self) -> list[tuple[Task, JobDetails]]:
        """Return the completed jobs in the order in which they were enqueued."""
        ended = [(task, self.ended.get(job_id)) for job_id, task in self.tasks.items()]
        return [(task, row) for task, row in ended if row is not None and row.status == "completed"]

    def progress(self) -> list[tuple[str, int, int]]:
        """Return the name of each repository, its completed jobs, and all its jobs."""
        completed = Counter(task.repository for task, _ in self.completed())
        return [
            (repository.name, completed[place], len(repository.commits))
            for place, repository in enumerate(self.repositories)
        ]

    def recoveries(self) -> list[Recovery]:
        """Return how far the jobs of the killed worker are, always in the same order."""
        recoveries = []
        for job_id, _ in sorted(self.kill.held) if self.kill else ():
            claim = self.takeovers.get(job_id)
            at = datetime.now(UTC) if claim is None else claim.at
            seconds = (at - self.kill.at).total_seconds() if self.kill else 0.0
            worker_id = None if claim is None else claim.worker_id
            recoveries.append(Recovery(self.tasks[job_id].label, seconds, worker_id))
        return recoveries

    def follow(self, tasks: Mapping[UUID, Task]) -> None:
        """Follow jobs that have just been enqueued."""
        self._moved_at = time.monotonic()
        if not self.tasks:
            self._began_at = self._moved_at
        self.tasks |= tasks

    async def rows(self) -> dict[UUID, JobInfo]:
        """Return the rows of these jobs: the newest rows, because no other program enqueues here."""
        rows = await self._client.list(kind=CountLines, limit=max(1, len(self.tasks)))
        return {row.id: row for row in rows if row.id in self.tasks}

    async def look(self) -> None:
        """Read the jobs, and note which have ended, moved or been claimed again since the kill."""
        live: dict[UUID, JobInfo] = {}
        for job_id, row in (await self.rows()).items():
            if row.finished_at is None:
                live[job_id] = row
            elif job_id not in self.ended:
                self.ended[job_id] = await self._client.get(job_id)
        if _moves(live) != _moves(self.live):
            self._moved_at = time.monotonic()
        self.live = live
        for job_id, token in self.kill.held if self.kill else ():
            now = self.ended.get(job_id) or live.get(job_id)
            if job_id not in self.takeovers and now is not None and now.fencing_token > token:
                for event in await self._client.timeline(job_id):
                    if event.event == "claimed" and (event.fencing_token or 0) > token:
                        self.takeovers.setdefault(job_id, event)

    async def resets(self) -> set[Held]:
        """Return the runs that were taken back from their workers."""
        resets: set[Held] = set()
        for job_id, row in (await self.rows()).items():
            if row.fencing_token > 1 or row.finished_at is None:  # else it was claimed once, and ended
                events = await self._client.timeline(job_id)
                resets |= {(job_id, each.fencing_token or 0) for each in events if each.event == "reset"}
        return resets


def _moves(rows: Mapping[UUID, JobInfo]) -> dict[UUID, list[Any]]:
    return {job_id: [getattr(row, column) for column in _MOVES] for job_id, row in rows.items()}
