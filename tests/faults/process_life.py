"""What every worker process of a fault run does beside its jobs: it ticks, and obeys strikes.

Ticks are written by the event loop and by a thread, so that the history tells a process that was stopped from
one whose loop alone was blocked. A strike is a file by which the harness asks this very process to kill or
stop itself at a fault point of the code under test.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from jsworker.core import fault_points
from jsworker.core.job import Job
from tests.faults.journal import Journal, records_folder

TICK_SECONDS = 0.1


class ProcessLife:
    """The journal of this process, its ticks and its strikes."""

    def __init__(self) -> None:
        self.journal = Journal(records_folder(), "run")
        self._loop_ticks: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        self._users = 0

    def begin(self) -> None:
        """Start to tick; called by every processor, done once."""
        self._users += 1
        if self._loop_ticks is None:
            self.journal.note("born", pod=os.environ.get("JSWORKER_HOSTNAME", ""), parent=os.getppid())
            self._loop_ticks = asyncio.create_task(self._tick(), name="ticks of the fault suite")
            threading.Thread(target=self._tick_in_thread, name="ticks", daemon=True).start()

    async def end(self) -> None:
        """Stop to tick when the last processor is torn down."""
        self._users -= 1
        if not self._users and self._loop_ticks is not None:
            self._ended.set()
            self._loop_ticks.cancel()
            await asyncio.wait({self._loop_ticks})
            self.journal.note("ended")

    @contextmanager
    def run(self, job: Job[Any], **facts: Any) -> Iterator[None]:
        """Record a run from its first to its last moment."""
        which = {"job": str(job.id), "token": job.fencing_token}
        self.journal.note("start", **which, kind=job.kind, key=job.payload.get("key"), **facts)
        try:
            yield
        except BaseException as error:
            self.journal.note("broken", **which, error=type(error).__name__)
            raise
        self.journal.note("finish", **which)

    async def _tick(self) -> None:
        while True:
            self.journal.note("tick")
            self._arm_strike()
            await asyncio.sleep(TICK_SECONDS)

    def _tick_in_thread(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.journal.note("thread")

    def _arm_strike(self) -> None:
        order = records_folder() / f"strike-{os.getpid()}"
        if not order.exists():
            return
        point, number = order.read_text().split()
        order.unlink()
        strike_once(self.journal, point, signal.Signals(int(number)))


def strike_once(journal: Journal, point: str, number: signal.Signals) -> None:
    """Send this process a signal when it passes a fault point the next time, and never again."""
    struck = False

    async def strike() -> None:
        nonlocal struck
        if not struck:
            struck = True
            journal.note("struck", point=point, signal=int(number))
            os.kill(os.getpid(), number)

    fault_points.install(point, strike)


@cache
def process_life() -> ProcessLife:
    """Return the one life of this process."""
    return ProcessLife()
