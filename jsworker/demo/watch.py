"""What the database says about the demo's jobs, look by look, and the picture that it gives."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

from jsworker.demo.fleet import WorkerProcess
from jsworker.demo.snapshot import (
    Recovery,
    RepositoryProgress,
    RunningJob,
    Snapshot,
    WorkerState,
    WorkerView,
)
from jsworker.demo.thresholds import shown_thresholds
from jsworker.demo.victim import Kill
from jsworker.demo.work import Project, Task
from jsworker.ownership.database import Database
from jsworker.ownership.queries import survey
from jsworker.ownership.queries.survey import Standing, Takeover

STUCK_SECONDS = 60.0
"""Without any move of any job for so long the run is given up."""


class Watch:
    """Follows the jobs of one run of the demo.

    Attributes:
        projects: what is to be counted.
        tasks: what each enqueued job does, by job id.
        ended: jobs that have ended, by job id.
        kill: the kill, once there was one.
    """

    def __init__(self, database: Database, projects: Sequence[Project]) -> None:
        self._database = database
        self.projects = projects
        self._waiting: dict[UUID, Standing] = {}
        self._takeovers: dict[UUID, Takeover] = {}
        self._begun_at = self._moved_at = self._killed_at = time.monotonic()
        self.tasks: dict[UUID, Task] = {}
        self.ended: dict[UUID, Standing] = {}
        self.kill: Kill | None = None

    @property
    def open(self) -> int:
        """How many enqueued jobs have not ended."""
        return len(self.tasks) - len(self.ended)

    @property
    def queued(self) -> int:
        """How many jobs wait for a worker."""
        return sum(job.status == "queued" for job in self._waiting.values())

    @property
    def to_recover(self) -> int:
        """How many of the victim's jobs do not run again yet."""
        return len(self.kill.held) - len(self._takeovers) if self.kill else 0

    @property
    def moving(self) -> bool:
        """Whether there are open jobs, and one of them has moved lately."""
        return self.open > 0 and time.monotonic() - self._moved_at <= STUCK_SECONDS

    def follow(self, tasks: Mapping[UUID, Task]) -> None:
        """Follow jobs that have just been enqueued."""
        if not self.tasks:
            self._begun_at = time.monotonic()
        self._moved_at = time.monotonic()
        self.tasks |= tasks

    def follow_kill(self, kill: Kill) -> None:
        """Follow the victim's jobs until others have taken them over."""
        self._killed_at = time.monotonic()
        self.kill = kill

    async def look(self) -> None:
        """Ask the database how far things are."""
        rows = await survey.standings(self._database, self.tasks.keys() - self.ended.keys())
        waiting = {job.id: job for job in rows if job.finished_at is None}
        self.ended |= {job.id: job for job in rows if job.finished_at is not None}
        if waiting != self._waiting:
            self._waiting = waiting
            self._moved_at = time.monotonic()
        if self.kill is not None and self.to_recover:
            taken = await survey.takeovers(self._database, self.kill.held)
            self._takeovers = {takeover.job_id: takeover for takeover in taken}

    def recovered(self) -> dict[UUID, float]:
        """Return the victim's jobs that run again, with the seconds from the kill to their next claim."""
        if self.kill is None:
            return {}
        killed_at = self.kill.at
        return {job_id: (each.at - killed_at).total_seconds() for job_id, each in self._takeovers.items()}

    def snapshot(self, workers: Sequence[WorkerProcess]) -> Snapshot:
        """Return the picture of this moment."""
        return Snapshot(
            seconds=(time.monotonic() if self.open else self._moved_at) - self._begun_at,
            thresholds=shown_thresholds(),
            repositories=self._progress(),
            workers=self._workers(workers),
            recoveries=self._recoveries(workers),
        )

    def _progress(self) -> list[RepositoryProgress]:
        completed = Counter(self.tasks[job.id].project for job in self.ended.values() if _is_completed(job))
        return [
            RepositoryProgress(project.repository.name, completed[place], len(project.commits))
            for place, project in enumerate(self.projects)
        ]

    def _workers(self, workers: Sequence[WorkerProcess]) -> list[WorkerView]:
        completed = Counter(job.result["pid"] for job in self.ended.values() if _is_completed(job))
        return [
            WorkerView(worker.name, worker.pid, _state(worker), completed[worker.pid], self._in_hand(worker))
            for worker in workers
        ]

    def _in_hand(self, worker: WorkerProcess) -> list[RunningJob]:
        if worker.killed:
            held = self.kill.held if self.kill else ()
            return [
                RunningJob(self.tasks[job].label) for job, _ in sorted(held) if job not in self._takeovers
            ]
        owned = sorted(job.id for job in self._waiting.values() if job.worker_id == worker.id is not None)
        rows = [self._waiting[job] for job in owned]
        return [RunningJob(self.tasks[row.id].label, row.stage, row.progress) for row in rows]

    def _recoveries(self, workers: Sequence[WorkerProcess]) -> list[Recovery]:
        if self.kill is None:
            return []
        names = {worker.id: worker.name for worker in workers}
        waited = time.monotonic() - self._killed_at
        seconds = self.recovered()
        return [
            Recovery(
                self.tasks[job_id].label,
                seconds.get(job_id, waited),
                names.get(self._takeovers[job_id].worker_id) if job_id in self._takeovers else None,
            )
            for job_id, _ in sorted(self.kill.held)
        ]


def _is_completed(job: Standing) -> bool:
    return job.status == "completed"


def _state(worker: WorkerProcess) -> WorkerState:
    if worker.killed:
        return "killed"
    if worker.exit_code is not None:
        return "stopped"
    return "running" if worker.id else "starting"
