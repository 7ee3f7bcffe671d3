"""A client that answers from rows in memory, with the columns that the real one returns."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any
from uuid import UUID, uuid4

from code_evolution.history import Commit, Repository
from code_evolution.run import tasks_of
from code_evolution.watch import Kill, Watch
from code_evolution.workers import WorkerProcess

START = datetime(2021, 1, 10, 12, tzinfo=UTC)
ENDED = ("completed", "failed", "cancelled")


class FakeClient:
    """Jobs and their timelines; ``answers`` are what the next calls of ``list`` return, if there are any."""

    def __init__(self) -> None:
        self.jobs: dict[UUID, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.answers: list[list[Record]] = []

    async def list(self, *, limit: int, status: str | None = None, kind: object) -> Sequence[Record]:  # noqa: ARG002 -- the client's shape
        if self.answers:
            return self.answers.pop(0)
        return [Record(**row) for row in self.jobs.values() if status in (None, row["status"])]

    async def get(self, job_id: UUID) -> Record:
        return Record(**self.jobs[job_id])

    async def timeline(self, job_id: UUID) -> Sequence[Record]:
        return [Record(**event) for event in self.events if event["job_id"] == job_id]

    def record(
        self, job_id: UUID, event: str, token: int, worker_id: str = "id-2", seconds: float = 0
    ) -> None:
        """Add a line to a job's timeline, so many seconds after the kill."""
        at = START + timedelta(seconds=seconds)
        line = {"job_id": job_id, "event": event, "fencing_token": token, "worker_id": worker_id, "at": at}
        self.events.append(line)


def new_watch(client: FakeClient, *states: str, repositories: int = 1, **columns: Any) -> Watch:
    """Follow repositories with as many commits as there are states, with one job for each of them."""
    commits = [Commit(f"{place:040x}", START + timedelta(days=place)) for place in range(len(states))]
    folders = [Path(f"/srv/project-{number}") for number in range(repositories)]
    watch = Watch(client, [Repository(each, each / ".git", commits, len(commits), False) for each in folders])  # type: ignore[arg-type]  # what Watch uses of it
    tasks = {uuid4(): task for task in tasks_of(watch.repositories)}
    for place, (job_id, task) in enumerate(tasks.items()):
        status = states[place % len(states)]
        client.jobs[job_id] = {
            "id": job_id,
            "status": status,
            "worker_id": None,
            "fencing_token": 1,
            "stage": None,
            "progress": None,
            "last_error": None,
            "created_at": START,
            "finished_at": START + timedelta(seconds=8) if status in ENDED else None,
            "result": result_of(task.payload.commit) if status == "completed" else None,
            **columns,
        }
    watch.follow(tasks)
    return watch


def result_of(commit: str) -> dict[str, Any]:
    return {"date": START.isoformat(), "commit": commit, "lines": {"Python": 2}, "pid": 4711}


class FakeProcess:
    """What the view asks of a worker's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


def new_worker(number: int, worker_id: str | None = "") -> WorkerProcess:
    """Return a worker that has started, or has not (None)."""
    process: Any = FakeProcess(4710 + number)
    started = f"id-{number}" if worker_id == "" else worker_id
    return WorkerProcess(f"worker-{number}", Path("/dev/null"), process, started)


def kill(worker: WorkerProcess, *held: tuple[UUID, int]) -> Kill:
    worker.killed = True
    return Kill(worker, START, frozenset(held))
