"""Workers of a test: started with one call, watched, and ended with the test."""

from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.worker.processors import Gate
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows


@dataclass
class Running:
    """A worker with a record of its events.

    Attributes:
        may_die: set by tests that kill one of its loops; otherwise a loop that died fails the test.
    """

    worker: Worker
    events: Recorder = field(default_factory=Recorder)
    may_die: bool = False

    def expects_short_runs(self, kind: str) -> None:
        """Make the worker claim jobs of a kind ahead, as it does after many short ones."""
        slots = self.worker._components.pipeline.slots
        slots._mean_seconds[kind] = 0.01
        slots._claim_seconds = 0.0  # however slow claims are on a busy machine: its servers are near

    async def stream_is_empty(self, *, seconds: float = 60.0) -> None:
        """Wait until no message is left, answered or not; within the default, sooner than one comes again."""

        async def empty() -> None:
            assert (await self.worker._stream.state()).messages == 0

        await eventually(empty, seconds=seconds)

    async def end(self) -> None:
        """Close the worker, at once if it still runs."""
        await self.worker.close(force=True)
        if not self.may_die:
            assert self.worker._error is None, self.worker._error


async def lose_job(running: Running, rows: Rows, job_id: UUID, gate: Gate) -> dict[str, Any]:
    """Take back a job that waits at the gate; return its row when its worker knows that the run is lost."""
    await gate.met()
    await running.worker._components.beats.stop()
    await rows.take_back(job_id)
    taken = await rows.job(job_id)
    gate.open()
    await running.events.told("job.lost")
    return taken


class StartWorker(Protocol):
    """Starts a worker with processors; ``with_settings`` replaces the test's settings."""

    async def __call__(
        self, *processors: JobProcessor[Any] | type[JobProcessor[Any]], with_settings: Settings | None = None
    ) -> Running: ...


def new_worker(*processors: JobProcessor[Any] | type[JobProcessor[Any]], settings: Settings) -> Running:
    """Return a worker that is not started yet."""
    running = Running(Worker(processors, settings))
    running.worker.on("*", running.events)
    return running
