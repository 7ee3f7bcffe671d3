"""A child's reports: once a second it sends its parent how it is and what it has counted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from jsworker.core.clock import boottime
from jsworker.supervisor.child_link import ChildLink
from jsworker.telemetry.figures import packed, write_readiness
from jsworker.telemetry.metrics import Metrics
from jsworker.worker.worker import Worker

_SECONDS: Final = 1.0
_REST: Final = 10
"""Times its own duration that packing rests: a tenth of a processor's time at most."""


class Reporter:
    """Belongs to the event loop of a child whose parent serves probes and metrics.

    Figures are packed in a thread: those of many kinds take longer than an event loop may be held up.
    """

    def __init__(self, worker: Worker, link: ChildLink) -> None:
        """Count from now on; nothing is sent before ``start``."""
        self._worker = worker
        self._link = link
        self._registry = CollectorRegistry()
        Metrics(self._registry).watch(worker)
        self._next: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jsworker figures")
        self._packing: asyncio.Future[str] | None = None
        self._rests_until = 0.0
        self._complained = False

    def start(self) -> None:
        """Send a report now, and then once a second, even if the one before failed."""
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(_SECONDS, self.start)
        if self._packing is not None or boottime() < self._rests_until:
            self._send(None)
            return
        self._packing = loop.run_in_executor(self._thread, self._pack)
        self._packing.add_done_callback(self._send_packed)

    def stop(self) -> None:
        """Send nothing more."""
        if self._next is not None:
            self._next.cancel()
        if self._packing is not None:
            self._packing.remove_done_callback(self._send_packed)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pack(self) -> str:
        began = boottime()
        figures = packed(self._registry)
        self._rests_until = began + (_REST + 1) * (boottime() - began)
        return figures

    def _send_packed(self, packing: "asyncio.Future[str]") -> None:
        self._packing = None
        if packing.cancelled():
            return
        error = packing.exception()
        if error is not None:
            self._complain(f"{type(error).__name__}: {error}")
        self._send(None if error is not None else packing.result())

    def _send(self, figures: str | None) -> None:
        try:
            status = self._worker.status()
            readiness = None if status is None else write_readiness(status.readiness)
            if not self._link.report(readiness, figures):
                self._complain("the figures of so many kinds are too long")
        except Exception as error:  # noqa: BLE001 -- the worker must not pay for it; a parent without reports says so
            self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            structlog.get_logger().error("report.failed", reason=reason)
