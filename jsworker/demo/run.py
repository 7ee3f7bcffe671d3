"""One run of the demo: enqueue, kill a worker in the middle, wait until every job has ended."""

import asyncio
import time
from collections.abc import Sequence

from jsworker.client import JobClient
from jsworker.demo.account import Account, draw_up
from jsworker.demo.fleet import Fleet
from jsworker.demo.live import View
from jsworker.demo.processor import CountLines
from jsworker.demo.victim import try_to_kill
from jsworker.demo.watch import Watch
from jsworker.demo.work import Project, Task, tasks_of
from jsworker.ownership.queries import listing

_FIRST_JOBS = 12
_FEWEST_RESERVED = 6
_RESERVED_SHARE = 0.25
_UNDERWAY_SHARE = 0.25
_UNDERWAY_SECONDS = 3.0
"""After the first completed job; a long run need not wait for its share."""

_HUNT_SECONDS = 20.0
_HUNT_STEP_SECONDS = 0.002
"""Shorter than any job: a frozen worker goes on for so long until somebody looks at it again."""

_SHORT_QUEUE = 4
_PORTION = 6
_WATCH_SECONDS = 0.1
_LIVE = ("scheduled", "queued", "processing")


async def cancel_leftovers(client: JobClient) -> None:
    """Cancel what an earlier run that was killed left behind, so that nobody spends time on it."""
    pages = listing.matching(client.database, statuses=_LIVE, kind=CountLines.kind, acting=True)
    async for leftovers in pages:
        await client.cancel(*(job_id for job_id, _ in leftovers))


class Run:
    """One run on registered workers."""

    def __init__(
        self, projects: Sequence[Project], *, client: JobClient, fleet: Fleet, view: View, kill: bool
    ) -> None:
        """Prepare a run.

        Args:
            projects: what to count.
            client: enqueues the jobs; its database is looked at.
            fleet: the workers.
            view: told how things stand.
            kill: whether to kill a worker in the middle.
        """
        self._projects = projects
        self._client = client
        self._fleet = fleet
        self._view = view
        self._kill = kill
        self._watch = Watch(client.database, projects)
        self._reserve: list[Task] = []
        self._shown_at = 0.0

    async def play(self) -> Account:
        """Do all the work and return the account.

        Raises:
            WorkerEnded: a worker ended that nobody killed.
            DatabaseUnavailable: PostgreSQL does not answer.
        """
        tasks = tasks_of(self._projects)
        if self._kill:
            await self._begin_and_kill(tasks)
        else:
            await self._enqueue(tasks)
        while self._watch.moving:
            await self._look()
            await asyncio.sleep(_WATCH_SECONDS)
        await self._watch.look()
        return await draw_up(self._watch, self._client.database, kill_wanted=self._kill)

    def show(self) -> None:
        """Show how things stand now."""
        self._shown_at = time.monotonic()
        self._view.show(self._watch.snapshot(self._fleet.workers))

    async def _begin_and_kill(self, tasks: Sequence[Task]) -> None:
        """Enqueue some jobs, kill a worker, and enqueue the others."""
        reserved = max(_FEWEST_RESERVED, round(len(tasks) * _RESERVED_SHARE), len(tasks) - _FIRST_JOBS)
        first, self._reserve = list(tasks[:-reserved]), list(tasks[-reserved:])
        await self._enqueue(first)
        await self._until_underway(round(len(first) * _UNDERWAY_SHARE))
        await self._hunt()
        self.show()
        await self._feed()

    async def _until_underway(self, enough: int) -> None:
        started_at: float | None = None
        while self._watch.moving and len(self._watch.ended) < max(1, enough):
            if self._watch.ended:
                started_at = started_at or time.monotonic()
                if time.monotonic() - started_at > _UNDERWAY_SECONDS:
                    return
            await self._look()
            await asyncio.sleep(_WATCH_SECONDS / 10)

    async def _hunt(self) -> None:
        """Kill a worker that holds jobs. When the jobs are over too soon, the reserve is the bait."""
        give_up_at = time.monotonic() + _HUNT_SECONDS
        look_at = 0.0
        while time.monotonic() < give_up_at:
            kill = await try_to_kill(self._fleet.alive, self._client.database)
            if kill is not None:
                self._watch.follow_kill(kill)
                return
            if time.monotonic() > look_at:
                await self._look()
                look_at = time.monotonic() + _WATCH_SECONDS
            if not self._watch.open:
                if not self._reserve:
                    return
                await self._enqueue_reserve()
            await asyncio.sleep(_HUNT_STEP_SECONDS)

    async def _feed(self) -> None:
        """Enqueue the rest; keep the queue short until the victim's jobs, which join its end, run again."""
        while self._reserve and self._watch.to_recover and self._watch.moving:
            if self._watch.queued < _SHORT_QUEUE:
                await self._enqueue_reserve(_PORTION)
            await self._look()
            await asyncio.sleep(_WATCH_SECONDS / 2)
        await self._enqueue_reserve()

    async def _enqueue_reserve(self, most: int | None = None) -> None:
        portion, self._reserve = self._reserve[:most], self._reserve[len(self._reserve[:most]) :]
        await self._enqueue(portion)

    async def _enqueue(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            return
        enqueued = await self._client.enqueue_many(CountLines, [task.payload for task in tasks])
        self._watch.follow({one.id: task for one, task in zip(enqueued, tasks, strict=True)})

    async def _look(self) -> None:
        await self._watch.look()
        self._fleet.check()
        if time.monotonic() - self._shown_at >= _WATCH_SECONDS:
            self.show()
