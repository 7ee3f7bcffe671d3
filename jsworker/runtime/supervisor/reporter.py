"""A child's reports: once a second it tells its parent how it is and what it has counted."""

import asyncio
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from jsworker.observe.figures import packed, write_readiness
from jsworker.observe.metrics import Metrics
from jsworker.runtime.supervisor.link import Link
from jsworker.runtime.worker import Worker

_SECONDS: Final = 1.0


class Reporter:
    """Belongs to the event loop of a child whose parent serves probes and metrics."""

    def __init__(self, worker: Worker, link: Link) -> None:
        """Count from now on; nothing is told before ``start``."""
        self._worker = worker
        self._link = link
        self._registry = CollectorRegistry()
        Metrics(self._registry).watch(worker)
        self._next: asyncio.TimerHandle | None = None
        self._complained = False

    def start(self) -> None:
        """Tell now, and then once a second, whatever comes of the one before."""
        self._next = asyncio.get_running_loop().call_later(_SECONDS, self.start)
        try:
            self._tell()
        except Exception as error:  # noqa: BLE001 -- the worker must not pay for it; a parent without reports says so
            self._complain(f"{type(error).__name__}: {error}")

    def _tell(self) -> None:
        vitals = self._worker.vitals()
        readiness = None if vitals is None else write_readiness(vitals.readiness)
        if not self._link.report(readiness, packed(self._registry)):
            self._complain("the figures of so many kinds are too long")

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            structlog.get_logger().error("report.failed", reason=reason)

    def stop(self) -> None:
        """Tell nothing more."""
        if self._next is not None:
            self._next.cancel()
