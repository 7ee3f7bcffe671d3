"""A child's reports: once a second it sends its state and its figures to the parent."""

import asyncio
import threading
from typing import Final

from prometheus_client import CollectorRegistry

from jsworker.core.clock import boottime
from jsworker.supervisor.child_link import ChildLink
from jsworker.telemetry.figures import packed
from jsworker.telemetry.logs import own_logger
from jsworker.telemetry.metrics import Metrics
from jsworker.worker.worker import Worker

_SECONDS: Final = 1.0
_REST: Final = 10
"""Packing rests for so many times its own duration, so that it takes at most a tenth of a core."""

_REMIND_SECONDS: Final = 60.0


class Reporter:
    """Reports from a child whose parent serves probes and metrics.

    Figures are packed in a thread, because those of many kinds would block the event loop for too long.
    """

    def __init__(self, worker: Worker, link: ChildLink) -> None:
        """Begin to count; nothing is sent before ``start``."""
        self._worker = worker
        self._link = link
        self._registry = CollectorRegistry()
        Metrics(self._registry).watch(worker)
        self._over = threading.Event()
        self._complain_at = 0.0

    def start(self) -> None:
        """Send a report now and then once a second, even if one fails."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._pack, name="jsworker figures", daemon=True).start()
        self._report()

    def stop(self) -> None:
        """Send nothing more."""
        self._over.set()
        self._next.cancel()

    def _report(self) -> None:
        self._next = self._loop.call_later(_SECONDS, self._report)
        self._send(None)

    def _pack(self) -> None:
        rest = 0.0
        while not self._over.wait(rest):
            began = boottime()
            try:
                figures = packed(self._registry)
                self._loop.call_soon_threadsafe(self._send, figures)
            except Exception as error:  # noqa: BLE001 -- of a collector; reports go without figures
                self._complain(f"{type(error).__name__}: {error}")
            rest = max(_SECONDS, _REST * (boottime() - began))

    def _send(self, figures: str | None) -> None:
        if self._over.is_set():
            return
        try:
            status = self._worker.status()
            if not self._link.report(None if status is None else status.readiness, figures):
                self._complain("the figures of so many kinds are too long")
        except Exception as error:  # noqa: BLE001 -- the worker must not pay for it; a parent without reports says so
            self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, reason: str) -> None:
        if boottime() >= self._complain_at:
            self._complain_at = boottime() + _REMIND_SECONDS
            own_logger().error("report.failed", reason=reason)
