"""Taking back the jobs of a sibling whose death the common parent has seen, over a warm connection."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.transitions import reset
from jsworker.worker.context import WorkerContext
from jsworker.worker.recovery.reports import report

_LOOKS: Final = 4
"""In a statement time-out: a row that the dead one's last statement has locked is skipped by the first."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that is proven to have ended.

    Attributes:
        worker_id: the owner of what is to be taken back.
        reason: told to the next runs.
        counted: whether the stalls count.
        culprits: if there are any, only these jobs' stalls count.
    """

    worker_id: str
    reason: str
    counted: bool
    culprits: Collection[UUID]


class Burial:
    """Takes back what the dead hold: at once, and again until their last statements must have ended.

    The parent looks again at the end: what fails here is only later, not lost.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._pause = context.settings.statement_timeout / _LOOKS
        self._digging: set[asyncio.Task[None]] = set()

    def begin(self, death: Death) -> None:
        """Take back without making anybody wait."""
        digging = asyncio.create_task(self._work(death), name=f"bury {death.worker_id}")
        self._digging.add(digging)
        digging.add_done_callback(self._digging.discard)

    async def close(self) -> None:
        """Give up what is not done; the parent does it."""
        for digging in self._digging:
            digging.cancel()
        if self._digging:
            await asyncio.wait(self._digging)

    async def _work(self, death: Death) -> None:
        in_line: reset.InLine = {}
        for _ in range(_LOOKS):
            await self._take_back(death, in_line)
            await asyncio.sleep(self._pause)

    async def _take_back(self, death: Death, in_line: reset.InLine) -> None:
        try:
            taken = await reset.reset_dead(
                self._context.database,
                worker_id=self._context.worker_id,
                owner=death.worker_id,
                reason=death.reason,
                counted=death.counted,
                culprits=death.culprits,
                in_line=in_line,
            )
            await report(
                taken,
                cause="dead",
                events=self._context.events,
                refused_rows=self._context.refused_rows,
                on_requeued=self._context.requeued.notify,
            )
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
