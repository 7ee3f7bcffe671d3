"""Takes back the jobs of dead children: at once, and again once no claim of theirs can commit any more."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.telemetry.logs import own_logger
from jsworker.telemetry.worker_status import KindLabels
from jsworker.worker.supervision import DeadOwner

if TYPE_CHECKING:
    from jsworker.ownership.transitions.reset import TakenBack

_REMIND_SECONDS: Final = 60.0


class DeadChildren:
    """The dead children whose jobs are not all taken back yet. Only the end of the parent waits for them.

    Attributes:
        worker_id: the parent's own id, under which it takes jobs back.
        events: events of the jobs that the parent itself takes back.
        stalls: the numbers of these jobs, by the kind's label and whether a stall was counted.
    """

    def __init__(self, settings: Settings, *, on_requeued: Callable[[], None]) -> None:
        """Begin without any; ``on_requeued`` is called when jobs taken back wait to be published."""
        self.worker_id = f"supervisor-{settings.hostname}-{os.getpid()}"
        self.events = Events()
        self.stalls: Counter[tuple[str, bool]] = Counter()
        self._settings = settings
        self._on_requeued = on_requeued
        self._labels = KindLabels()
        self._dead: dict[asyncio.Task[None], str] = {}
        self._complain_at = 0.0
        self._logger = own_logger()

    def add(self, owner: DeadOwner, *, asked_sibling: bool) -> None:
        """Take back the owner's jobs; if a sibling was asked to, only once no claim can commit any more."""
        now = boottime()
        taking = self._take_back(owner, now, owner.settled_at if asked_sibling else now)
        task = asyncio.create_task(taking, name=f"reset {owner.worker_id}")
        self._dead[task] = owner.worker_id
        task.add_done_callback(self._dead.pop)

    def expect(self, kinds: Iterable[str]) -> None:
        """Add counters of zero for these kinds: Prometheus sees no increase in a new counter."""
        for kind in kinds:
            self.stalls[self._labels.label(kind), True] += 0

    def waiting(self) -> list[str]:
        """Return the worker ids of dead children whose jobs are not all taken back yet."""
        return list(self._dead.values())

    async def finish(self, seconds: float) -> None:
        """Wait at most ``seconds`` until all jobs are taken back; other workers find the rest later."""
        if self._dead:
            await asyncio.wait(self._dead, timeout=seconds)
        for task, worker_id in self._dead.items():
            task.cancel()
            self._logger.warning("dead_owner.given_up", worker_id=worker_id, reason="the supervisor ended")
        if self._dead:
            await asyncio.wait(self._dead)

    async def _take_back(self, owner: DeadOwner, died_at: float, first_look: float) -> None:
        await asyncio.sleep(first_look - boottime())
        while True:
            try:
                return await self._reset(owner, died_at)
            except Exception:  # a bug
                self._logger.exception("dead_owner.failed", dead=len(self._dead))
                await asyncio.sleep(_REMIND_SECONDS)

    async def _reset(self, owner: DeadOwner, died_at: float) -> None:
        # Imported when the first child has died: SQLAlchemy would double the memory of every parent. In a
        # thread, because it takes seconds on a busy machine, and the parent has to watch its children.
        with suppress(RuntimeError):  # the system starts no more threads: it is imported below
            await asyncio.to_thread(import_module, "jsworker.worker.recovery.resets")
        from jsworker.ownership.database import Database  # noqa: PLC0415 -- see above
        from jsworker.worker.recovery.resets import report_resets, reset_dead_owner  # noqa: PLC0415 -- see above

        jobs: Counter[str] | None = None  # by their new status
        refused: set[str] = set()

        async def report(taken: "TakenBack") -> None:
            nonlocal jobs
            self.stalls.update((self._labels.label(reset.kind), reset.counted) for reset in taken.resets)
            report_resets(taken.resets, cause="dead", events=self.events)
            if any(reset.status == "queued" for reset in taken.resets):
                self._on_requeued()
            if taken.resets or jobs is None:
                jobs = (jobs or Counter()) + Counter(reset.status for reset in taken.resets)
                facts = {"seconds": round(boottime() - died_at, 3), "jobs": dict(jobs)}
                self._logger.info("dead_owner.reset", worker_id=owner.worker_id, **facts)
            for job_id, error in taken.refused.items():
                if str(job_id) not in refused:
                    refused.add(str(job_id))
                    self._report_refusal(owner, error, job_id=str(job_id))

        dsn, timeout = self._settings.current_database_dsn, self._settings.statement_timeout
        async with Database(dsn, statement_timeout=timeout, pool_size=1) as database:
            unmarked = await reset_dead_owner(
                database,
                owner,
                worker_id=self.worker_id,
                report=report,
                failed=partial(self._complain, owner),
            )
        if unmarked is not None:
            self._report_refusal(owner, unmarked)

    def _report_refusal(self, owner: DeadOwner, reason: object, **job: str) -> None:
        self._logger.warning("dead_owner.row_refused", worker_id=owner.worker_id, **job, reason=str(reason))

    async def _complain(self, owner: DeadOwner, error: JsworkerError) -> None:
        if boottime() >= self._complain_at:  # an outage may last for hours
            self._complain_at = boottime() + _REMIND_SECONDS
            self._logger.warning(
                "dead_owner.waiting", worker_id=owner.worker_id, dead=len(self._dead), reason=str(error)
            )
