"""What a dead child held goes back to the others, at once, and again for what was on its way when it died."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

import structlog

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable, JsworkerError
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.telemetry.kind_labels import KindLabels

if TYPE_CHECKING:
    from jsworker.ownership.database import Database
    from jsworker.ownership.transitions.reset import InLine

_LOOKS_A_TIMEOUT: Final = 3
_SHORTEST_PAUSE_SECONDS: Final = 0.02
_FIRST_RETRY_SECONDS: Final = 0.1
_LONGEST_RETRY_SECONDS: Final = 2.0
_REMIND_SECONDS: Final = 60.0
_WAKING: Final = "queued"


@dataclass(slots=True, eq=False)
class Dead:
    """A worker that has died.

    Attributes:
        worker_id: the owner of what is to be taken back.
        reason: told to the next runs.
        counted: whether the stalls count.
        culprits: if there are any, only these jobs' stalls count.
        in_flight: seconds after the death in which a claim of its own may still commit.
        died_at: boot time.
        taken: jobs that were taken back, by where they went.
        found: whether the database has answered once.
        refused: jobs that were told because PostgreSQL refuses their rows.
        due: boot time of the next look.
        in_line: which of its jobs had not begun, as the first look at them has told.
    """

    worker_id: str
    reason: str
    counted: bool
    culprits: tuple[UUID, ...]
    in_flight: float
    died_at: float = field(default_factory=boottime)
    taken: Counter[str] = field(default_factory=Counter)
    found: bool = False
    refused: set[UUID] = field(default_factory=set)
    due: float = 0.0
    in_line: "InLine" = field(default_factory=dict)


class Burials:
    """The dead whose jobs are not all taken back yet. Nothing waits for them but the parent's end.

    Attributes:
        stalls: how many runs the parent itself has taken back, by their kind's label and whether it counted.
    """

    def __init__(
        self, settings: Settings, *, worker_id: str, events: Events, on_requeued: Callable[[], None]
    ) -> None:
        """Begin with an empty list.

        Args:
            settings: where the database is, and how long a statement may take.
            worker_id: who takes the jobs back, for the timeline.
            events: told of every job that is taken back.
            on_requeued: called when jobs wait to be published.
        """
        self._settings = settings
        self._worker_id = worker_id
        self._events = events
        self._on_requeued = on_requeued
        self.stalls: Counter[tuple[str, bool]] = Counter()
        self._labels = KindLabels()
        self._dead: list[Dead] = []
        self._digging: asyncio.Task[None] | None = None
        self._added = asyncio.Event()
        self._retry_seconds = 0.0
        self._complain_at = 0.0
        self._logger = structlog.get_logger()

    def add(self, dead: Dead, *, asked_sibling: bool) -> None:
        """Take back what it held.

        Args:
            dead: who has died.
            asked_sibling: whether a sibling does so right now; then this looks once more at the end of the
                time in which a claim of the dead may still commit.
        """
        if asked_sibling:
            dead.due = dead.died_at + dead.in_flight
        self._dead.append(dead)
        self._added.set()
        if self._digging is None or self._digging.done():
            self._digging = asyncio.create_task(self._dig(), name="jsworker burials")
            self._digging.add_done_callback(self._note_end)

    def expect(self, kinds: Iterable[str]) -> None:
        """Show as zero what has not happened yet: Prometheus sees no increase in what was not there."""
        for kind in kinds:
            self.stalls[self._labels.label(kind), True] += 0

    def waiting(self) -> list[str]:
        """Return the dead whose jobs are not all taken back yet."""
        return [dead.worker_id for dead in self._dead]

    async def finish(self, seconds: float) -> None:
        """Wait for the end of all burials, and give up what is not done in time; others find it later."""
        if self._digging is None:
            return
        await asyncio.wait({self._digging}, timeout=seconds)
        self._digging.cancel()
        await asyncio.wait({self._digging})
        for dead in self._dead:
            self._logger.warning("burial.given_up", worker_id=dead.worker_id, reason="the supervisor ended")

    async def _dig(self) -> None:
        await self._pause()
        # Loaded for the first burial: SQLAlchemy would double the memory of every parent that needs none.
        from jsworker.ownership.database import Database  # noqa: PLC0415 -- see above

        database = Database(
            self._settings.database_dsn(),
            statement_timeout=self._settings.statement_timeout,
            pool_size=1,
        )
        try:
            while self._dead:
                self._added.clear()
                await self._look_at_due(database)
                await self._pause()
        finally:
            await database.close()

    def _note_end(self, digging: asyncio.Task[None]) -> None:
        """Tell of an error that nobody expected; the next death tries again."""
        if not digging.cancelled() and (error := digging.exception()) is not None:
            self._logger.error("burial.failed", dead=len(self._dead), exc_info=error)

    async def _look_at_due(self, database: "Database") -> None:
        for dead in [dead for dead in self._dead if dead.due <= boottime()]:
            began = boottime()
            is_last = began - dead.died_at >= dead.in_flight
            try:
                await self._take_back(database, dead)
            except JsworkerError as error:
                self._note_failure(dead, error)
                if isinstance(error, DatabaseUnavailable):
                    return
                continue
            self._retry_seconds = 0.0
            if is_last:
                self._dead.remove(dead)
                await self._note_death(database, dead)
            dead.due = min(boottime() + dead.in_flight / _LOOKS_A_TIMEOUT, dead.died_at + dead.in_flight)

    async def _take_back(self, database: "Database", dead: Dead) -> None:
        from jsworker.ownership.transitions.reset import reset_dead  # noqa: PLC0415 -- with SQLAlchemy, see above
        from jsworker.worker.recovery.reports import tell  # noqa: PLC0415 -- likewise

        taken = await reset_dead(
            database,
            worker_id=self._worker_id,
            owner=dead.worker_id,
            reason=dead.reason,
            counted=dead.counted,
            culprits=dead.culprits,
            in_line=dead.in_line,
        )
        jobs = Counter(reset.status for reset in taken.resets)
        dead.taken += jobs
        self.stalls.update((self._labels.label(reset.kind), reset.counted) for reset in taken.resets)
        tell(taken.resets, cause="dead", events=self._events)
        if jobs[_WAKING]:
            self._on_requeued()
        if jobs or not dead.found:
            self._logger.info(
                "child.buried",
                worker_id=dead.worker_id,
                seconds=round(boottime() - dead.died_at, 3),
                jobs=dict(dead.taken),
            )
        for job_id, error in taken.refused.items():
            if job_id not in dead.refused:
                dead.refused.add(job_id)
                self._logger.warning(
                    "burial.refused", worker_id=dead.worker_id, job_id=str(job_id), reason=str(error)
                )
        dead.found = True

    async def _note_death(self, database: "Database", dead: Dead) -> None:
        from jsworker.ownership.transitions.workers import mark_stopped  # noqa: PLC0415 -- with SQLAlchemy, see above

        try:
            refused = await mark_stopped(database, ids=[dead.worker_id])
        except JsworkerError as error:  # its jobs are taken back, which is what matters
            reason = str(error)
        else:
            if not refused:
                return
            reason = str(refused[0][1])
        self._logger.warning("burial.refused", worker_id=dead.worker_id, reason=reason)

    def _note_failure(self, dead: Dead, error: JsworkerError) -> None:
        self._retry_seconds = min(_LONGEST_RETRY_SECONDS, max(_FIRST_RETRY_SECONDS, 2 * self._retry_seconds))
        dead.due = boottime() + self._retry_seconds
        if time.monotonic() >= self._complain_at:  # an outage may last for hours
            self._complain_at = time.monotonic() + _REMIND_SECONDS
            waiting = len(self._dead)
            self._logger.warning("burial.waiting", worker_id=dead.worker_id, dead=waiting, reason=str(error))

    async def _pause(self) -> None:
        """Wait until somebody is due or has just died."""
        if not self._dead:
            return
        due = min(dead.due for dead in self._dead) - boottime()
        pause = max(_SHORTEST_PAUSE_SECONDS, due, self._retry_seconds)
        try:
            async with asyncio.timeout(pause):
                await self._added.wait()
        except TimeoutError:
            return
