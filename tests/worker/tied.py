"""Workers with somebody who supervises them, and keeps what they tell."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.worker import Worker
from tests.worker.running import Running


@dataclass
class RecordedSupervision:
    """Keeps what a worker told whoever supervises it.

    Attributes:
        begun: jobs whose outcome is not written yet.
        condemned: boot time, culprits and reason of each call.
    """

    ids: list[str] = field(default_factory=list)
    begun: list[UUID] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    condemned: list[tuple[float, list[tuple[UUID, int]], str]] = field(default_factory=list)

    def registered(self, worker_id: str) -> None:
        self.ids.append(worker_id)

    def began(self, job_id: UUID) -> None:
        self.begun.append(job_id)

    def waits(self, job_id: UUID) -> None:
        self.begun.remove(job_id)

    def ended(self, job_id: UUID) -> None:
        if job_id in self.begun:
            self.begun.remove(job_id)

    def quiet_until(self, boottime: float) -> None:
        self.quiet.append(boottime)

    def request_kill(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        self.condemned.append((boottime(), list(culprits), reason))

    def stops_runs(self, died_of: JsworkerError | None) -> None: ...


@asynccontextmanager
async def tied(
    *processors: JobProcessor[Any] | type[JobProcessor[Any]], settings: Settings
) -> AsyncIterator[tuple[Running, RecordedSupervision]]:
    """Run a worker that is supervised."""
    supervision = RecordedSupervision()
    running = Running(Worker(processors, settings, supervision=supervision))
    running.worker.on("*", running.events)
    await running.worker.start()
    try:
        yield running, supervision
    finally:
        await running.end()
