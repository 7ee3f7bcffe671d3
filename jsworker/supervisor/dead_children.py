"""What a dead child held goes back to the others, at once, and again for what was on its way when it died."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

import structlog

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.telemetry.worker_status import KindLabels
from jsworker.worker.supervision import DeadOwner

if TYPE_CHECKING:
    from jsworker.ownership.database import Database
    from jsworker.ownership.transitions.reset import TakenBack

_REMIND_SECONDS: Final = 60.0
_WAKING: Final = "queued"


@dataclass(slots=True, eq=False)
class _DeadChild:
    """A dead child whose jobs are not all taken back yet.

    Attributes:
        jobs: how many were taken back, by where they went.
        found: whether the database has answered once.
        refused: jobs that were reported because PostgreSQL refuses their rows.
    """

    owner: DeadOwner
    died_at: float = field(default_factory=boottime)
    jobs: Counter[str] = field(default_factory=Counter)
    found: bool = False
    refused: set[UUID] = field(default_factory=set)


class DeadChildren:
    """The dead whose jobs are not all taken back yet. Nothing waits for them but the parent's end.

    Attributes:
        stalls: how many runs the parent itself has taken back, by their kind's label and whether it counted.
    """

    def __init__(
        self, settings: Settings, *, worker_id: str, events: Events, on_requeued: Callable[[], None]
    ) -> None:
        """Begin with an empty list; ``on_requeued`` is called when jobs wait to be published."""
        self._settings = settings
        self._worker_id = worker_id
        self._events = events
        self._on_requeued = on_requeued
        self.stalls: Counter[tuple[str, bool]] = Counter()
        self._labels = KindLabels()
        self._dead: dict[asyncio.Task[None], _DeadChild] = {}
        self._failed: list[_DeadChild] = []
        self._database: Database | None = None
        self._database_users = 0
        self._complain_at = 0.0
        self._logger = structlog.get_logger()

    def add(self, owner: DeadOwner, *, asked_sibling: bool) -> None:
        """Take back what it held.

        If a sibling was asked, which does so right now, this looks once more at the end of the time in which
        a claim of the dead child may still commit.
        """
        failed, self._failed = self._failed, []
        for dead in [_DeadChild(owner), *failed]:
            first_look = owner.settled_at if dead.owner is owner and asked_sibling else dead.died_at
            task = asyncio.create_task(self._take_back(dead, first_look), name=f"reset {owner.worker_id}")
            self._dead[task] = dead
            task.add_done_callback(self._note_end)

    def expect(self, kinds: Iterable[str]) -> None:
        """Show as zero what has not happened yet: Prometheus sees no increase in what was not there."""
        for kind in kinds:
            self.stalls[self._labels.label(kind), True] += 0

    def waiting(self) -> list[str]:
        """Return the dead whose jobs are not all taken back yet."""
        return [dead.owner.worker_id for dead in [*self._dead.values(), *self._failed]]

    async def finish(self, seconds: float) -> None:
        """Wait until all is taken back, and give up what is not done in time; others find it later."""
        late: set[asyncio.Task[None]] = set()
        if self._dead:
            _, late = await asyncio.wait(self._dead, timeout=seconds)
        given_up = [dead.owner.worker_id for dead in [*map(self._dead.__getitem__, late), *self._failed]]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        for worker_id in given_up:
            self._logger.warning("burial.given_up", worker_id=worker_id, reason="the supervisor ended")

    async def _take_back(self, dead: _DeadChild, first_look: float) -> None:
        await asyncio.sleep(first_look - boottime())
        # Loaded for the first dead child: SQLAlchemy would double the memory of every parent that needs none.
        from jsworker.worker.recovery.resets import reset_dead_owner  # noqa: PLC0415 -- see above

        async with self._connected() as database:
            unmarked = await reset_dead_owner(
                database,
                dead.owner,
                worker_id=self._worker_id,
                statement_timeout=self._settings.statement_timeout,
                report=partial(self._report, dead),
                failed=partial(self._complain, dead),
            )
        if unmarked is not None:
            self._logger.warning("burial.refused", worker_id=dead.owner.worker_id, reason=unmarked)

    @asynccontextmanager
    async def _connected(self) -> "AsyncIterator[Database]":
        """Yield a connection that all use at the same time, the last one to leave closes it."""
        from jsworker.ownership.database import Database  # noqa: PLC0415 -- with SQLAlchemy, see above

        if self._database is None:
            self._database = Database(
                self._settings.database_dsn(),
                statement_timeout=self._settings.statement_timeout,
                pool_size=1,
            )
        database = self._database
        self._database_users += 1
        try:
            yield database
        finally:
            self._database_users -= 1
            if not self._database_users:
                self._database = None
                await database.close()

    async def _report(self, dead: _DeadChild, taken: "TakenBack") -> None:
        from jsworker.worker.recovery.resets import report_resets  # noqa: PLC0415 -- with SQLAlchemy, see above

        worker_id = dead.owner.worker_id
        jobs = Counter(reset.status for reset in taken.resets)
        dead.jobs += jobs
        self.stalls.update((self._labels.label(reset.kind), reset.counted) for reset in taken.resets)
        report_resets(taken.resets, cause="dead", events=self._events)
        if jobs[_WAKING]:
            self._on_requeued()
        if jobs or not dead.found:
            seconds = round(boottime() - dead.died_at, 3)
            self._logger.info("child.buried", worker_id=worker_id, seconds=seconds, jobs=dict(dead.jobs))
        dead.found = True
        for job_id, error in taken.refused.items():
            if job_id not in dead.refused:
                dead.refused.add(job_id)
                self._logger.warning(
                    "burial.refused", worker_id=worker_id, job_id=str(job_id), reason=str(error)
                )

    def _complain(self, dead: _DeadChild, error: JsworkerError) -> None:
        if time.monotonic() >= self._complain_at:  # an outage may last for hours
            self._complain_at = time.monotonic() + _REMIND_SECONDS
            self._logger.warning(
                "burial.waiting", worker_id=dead.owner.worker_id, dead=len(self._dead), reason=str(error)
            )

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Forget a dead child; after an unexpected error the next death tries again."""
        dead = self._dead.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(dead)
            self._logger.error("burial.failed", dead=len(self.waiting()), exc_info=error)
