"""What a dead child held goes back to the others, at once, and again for what was on its way when it died."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
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
    from jsworker.ownership.transitions.reset import TakenBack

_REMIND_SECONDS: Final = 60.0


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
        self._dead: dict[asyncio.Task[None], str] = {}
        self._complain_at = 0.0
        self._logger = structlog.get_logger()

    def add(self, owner: DeadOwner, *, asked_sibling: bool) -> None:
        """Take back what it held.

        If a sibling was asked, which does so right now, this looks once more at the end of the time in which
        a claim of the dead child may still commit.
        """
        taking = self._take_back(_DeadChild(owner), owner.settled_at if asked_sibling else boottime())
        task = asyncio.create_task(taking, name=f"reset {owner.worker_id}")
        self._dead[task] = owner.worker_id
        task.add_done_callback(self._dead.pop)

    def expect(self, kinds: Iterable[str]) -> None:
        """Show as zero what has not happened yet: Prometheus sees no increase in what was not there."""
        for kind in kinds:
            self.stalls[self._labels.label(kind), True] += 0

    def waiting(self) -> list[str]:
        """Return the dead whose jobs are not all taken back yet."""
        return list(self._dead.values())

    async def finish(self, seconds: float) -> None:
        """Wait until all is taken back, and give up what is not done in time; others find it later."""
        if self._dead:
            await asyncio.wait(self._dead, timeout=seconds)
        for task, worker_id in list(self._dead.items()):
            task.cancel()
            self._logger.warning("burial.given_up", worker_id=worker_id, reason="the supervisor ended")
        if self._dead:
            await asyncio.wait(self._dead)

    async def _take_back(self, dead: _DeadChild, first_look: float) -> None:
        await asyncio.sleep(first_look - boottime())
        while True:
            try:
                return await self._reset(dead)
            except Exception:  # a mistake of ours
                self._logger.exception("burial.failed", dead=len(self._dead))
                await asyncio.sleep(_REMIND_SECONDS)

    async def _reset(self, dead: _DeadChild) -> None:
        # Loaded for the first dead child: SQLAlchemy would double the memory of every parent that needs none.
        from jsworker.ownership.database import Database  # noqa: PLC0415 -- see above
        from jsworker.worker.recovery.resets import reset_dead_owner  # noqa: PLC0415 -- see above

        timeout = self._settings.statement_timeout
        database = Database(self._settings.database_dsn(), statement_timeout=timeout, pool_size=1)
        try:
            unmarked = await reset_dead_owner(
                database,
                dead.owner,
                worker_id=self._worker_id,
                statement_timeout=timeout,
                report=partial(self._report, dead),
                failed=partial(self._complain, dead),
            )
        finally:
            await database.close()
        if unmarked is not None:
            self._logger.warning("burial.refused", worker_id=dead.owner.worker_id, reason=unmarked)

    async def _report(self, dead: _DeadChild, taken: "TakenBack") -> None:
        from jsworker.worker.recovery.resets import report_resets  # noqa: PLC0415 -- with SQLAlchemy, see above

        worker_id = dead.owner.worker_id
        jobs = Counter(reset.status for reset in taken.resets)
        dead.jobs += jobs
        self.stalls.update((self._labels.label(reset.kind), reset.counted) for reset in taken.resets)
        report_resets(taken.resets, cause="dead", events=self._events)
        if jobs["queued"]:
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
