"""One run: enqueue a job for each commit, kill a worker in the middle, follow the jobs to their ends."""

import asyncio
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from code_evolution.history import Repository
from code_evolution.jobs import CommitToCount, CountLines
from code_evolution.view import Show
from code_evolution.watch import Held, Kill, Task, Watch
from code_evolution.workers import WorkerProcess
from jsworker import JobClient

_FIRST_JOBS = 12
_FEWEST_RESERVED = 6
_COMPLETED_BEFORE_KILL = 3

_KILL_SECONDS = 20.0
_KILL_STEP_SECONDS = 0.002
"""Between two attempts workers go on for so long, or as long as the attempt took; shorter than any job."""

_SETTLE_SECONDS = 0.05
"""After this time, statements that a worker sent just before it was frozen are committed."""

_LOOKS = 3
_SHORT_QUEUE = 4
_PORTION = 6
_WATCH_SECONDS = 0.1
_MOST_LISTED = 1000


def tasks_of(repositories: Sequence[Repository]) -> list[Task]:
    """Return the jobs of all repositories, one repository after the other."""
    return [
        Task(
            place,
            f"{repository.name} {commit.id[:8]}",
            CommitToCount(repository=str(repository.git_dir), commit=commit.id, date=commit.date),
        )
        for place, repository in enumerate(repositories)
        for commit in repository.commits
    ]


async def cancel_leftovers(client: JobClient) -> None:
    """Cancel jobs that an earlier run left when it was killed, so that no worker spends time on them."""
    for status in ("scheduled", "queued", "processing"):
        while leftovers := await client.list(status=status, kind=CountLines, limit=_MOST_LISTED):
            await client.cancel(*(row.id for row in leftovers))
            if status == "processing":
                break  # they end once a worker has taken them back


class Run:
    """One run on workers that have started."""

    def __init__(
        self,
        repositories: Sequence[Repository],
        *,
        client: JobClient,
        workers: Sequence[WorkerProcess],
        show: Show,
    ) -> None:
        """Prepare a run; ``show`` is called with each new picture."""
        self._client = client
        self._workers = workers
        self._show = show
        self._shown_at = 0.0
        self._reserve = tasks_of(repositories)
        self.watch = Watch(client, repositories)

    async def begin_and_kill(self) -> None:
        """Enqueue some jobs, kill a worker that holds some of them, and wait until these run again.

        Meanwhile the queue is kept short, because jobs that are taken back join its end.
        """
        watch, jobs = self.watch, len(self._reserve)
        await self._enqueue(max(0, min(_FIRST_JOBS, jobs * 3 // 4, jobs - _FEWEST_RESERVED)))
        while watch.moving and len(watch.ended) < _COMPLETED_BEFORE_KILL:
            await self._look()
            await asyncio.sleep(_WATCH_SECONDS / 10)
        await self._kill_a_worker()
        self.show()
        while self._reserve and watch.kill and len(watch.takeovers) < len(watch.kill.held) and watch.moving:
            if sum(row.status == "queued" for row in watch.live.values()) < _SHORT_QUEUE:
                await self._enqueue(_PORTION)
            await self._look()
            await asyncio.sleep(_WATCH_SECONDS / 2)

    async def finish(self) -> None:
        """Enqueue the rest and wait until every job has ended, or none has moved for a minute."""
        await self._enqueue(len(self._reserve))
        while self.watch.moving:
            await self._look()
            await asyncio.sleep(_WATCH_SECONDS)
        self.show()

    def show(self) -> None:
        """Show the present state."""
        self._shown_at = time.monotonic()
        self._show(self.watch, self._workers)

    async def _enqueue(self, most: int) -> None:
        tasks, self._reserve = self._reserve[:most], self._reserve[most:]
        if tasks:
            enqueued = await self._client.enqueue_many(CountLines, [task.payload for task in tasks])
            self.watch.follow({one.id: task for one, task in zip(enqueued, tasks, strict=True)})

    async def _kill_a_worker(self) -> None:
        give_up_at = time.monotonic() + _KILL_SECONDS
        look_at = 0.0
        while (froze_at := time.monotonic()) < give_up_at:
            if kill := await try_to_kill(self._workers, self._client):
                self.watch.kill = kill
                return
            await asyncio.sleep(max(_KILL_STEP_SECONDS, time.monotonic() - froze_at))
            if time.monotonic() > look_at:
                await self._look()
                look_at = time.monotonic() + _WATCH_SECONDS
            if not self.watch.open:  # all ended too soon: try with the other jobs
                if not self._reserve:
                    return
                await self._enqueue(len(self._reserve))

    async def _look(self) -> None:
        await self.watch.look()
        for worker in self._workers:
            worker.check()
        if time.monotonic() - self._shown_at >= _WATCH_SECONDS:
            self.show()


async def try_to_kill(workers: Sequence[WorkerProcess], client: JobClient) -> Kill | None:
    """Freeze workers for a moment and kill the one that owns most jobs; None when none owns any.

    A worker is killed only if two looks, some time apart, find the very same runs owned by it while it is
    frozen: none of them can have ended in between. The others go on after at most 0.2 seconds.
    """
    try:
        for worker in workers:
            worker.send(signal.SIGSTOP)
        before = await _held_by(workers, client)
        for _ in range(_LOOKS if before else 0):
            await asyncio.sleep(_SETTLE_SECONDS)
            now = await _held_by(workers, client)
            if unchanged := [worker for worker, held in now.items() if before.get(worker) == held]:
                victim = max(unchanged, key=lambda worker: len(now[worker]))
                victim.kill()
                return Kill(victim, datetime.now(UTC), now[victim])
            before = now
        return None
    finally:
        for worker in workers:
            if not worker.killed:  # sending a signal would take its exit code from asyncio
                worker.send(signal.SIGCONT)


async def _held_by(
    workers: Sequence[WorkerProcess], client: JobClient
) -> dict[WorkerProcess, frozenset[Held]]:
    rows = await client.list(status="processing", kind=CountLines, limit=_MOST_LISTED)
    held = {
        worker: frozenset((row.id, row.fencing_token) for row in rows if row.worker_id == worker.id)
        for worker in workers
    }
    return {worker: runs for worker, runs in held.items() if runs}
