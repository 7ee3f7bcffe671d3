"""A child's reports: once a second it sends its parent how it is and what it has counted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from jsworker.core.clock import boottime
from jsworker.supervisor.child_link import ChildLink
from jsworker.telemetry.figures import packed
from jsworker.telemetry.metrics import Metrics
from jsworker.worker.worker import Worker

_SECONDS: Final = 1.0
_REST: Final = 10
"""Times its own duration that packing rests: a tenth of a processor's time at most."""


class Reporter:
    """Reports from a child whose parent serves probes and metrics.

    Figures are packed in a thread: those of many kinds take longer than an event loop may be held up.
    """

    def __init__(self, worker: Worker, link: ChildLink) -> None:
        """Count from now on; nothing is sent before ``run``."""
        self._worker = worker
        self._link = link
        self._registry = CollectorRegistry()
        Metrics(self._registry).watch(worker)
        self._packing: asyncio.Future[str | None] | None = None
        self._rests_until = 0.0
        self._complained = False

    async def run(self) -> None:
        """Send a report now, and then once a second until cancelled, even if the one before failed."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="jsworker figures")
        try:
            while True:
                next_at = boottime() + _SECONDS
                self._send(await self._new_figures(thread))
                await asyncio.sleep(next_at - boottime())
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _new_figures(self, thread: ThreadPoolExecutor) -> str | None:
        """Wait for new figures, but not longer than until the next report; None: there are none yet."""
        if self._packing is None:
            if boottime() < self._rests_until:
                return None
            self._packing = asyncio.get_running_loop().run_in_executor(thread, self._pack)
        done, _ = await asyncio.wait([self._packing], timeout=_SECONDS)
        if not done:
            return None
        self._packing = None
        return done.pop().result()

    def _pack(self) -> str | None:
        began = boottime()
        try:
            return packed(self._registry)
        except Exception as error:  # noqa: BLE001 -- of a collector; reports go without figures
            self._complain(f"{type(error).__name__}: {error}")
            return None
        finally:
            self._rests_until = began + (_REST + 1) * (boottime() - began)

    def _send(self, figures: str | None) -> None:
        try:
            status = self._worker.status()
            if not self._link.report(None if status is None else status.readiness, figures):
                self._complain("the figures of so many kinds are too long")
        except Exception as error:  # noqa: BLE001 -- the worker must not pay for it; a parent without reports says so
            self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            structlog.get_logger().error("report.failed", reason=reason)
