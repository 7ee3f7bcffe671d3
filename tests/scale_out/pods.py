"""Pods: ``jsworker run`` with one worker process each, on hosts of their own."""

import asyncio
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.faults.fleet import ROOT, send, variables
from tests.faults.journal import FOLDER_VARIABLE
from tests.scale_out.jobs import NO_ROW_VARIABLE, TARGETS
from tests.supervisor.parent_process import ParentProcess

SHORT = MappingProxyType(
    {
        "heartbeat_interval": 1.0,
        "statement_timeout": 0.8,
        "crash_threshold": 3.0,
        "stale_threshold": 30.0,
        "scan_interval": 1.0,
        "relay_interval": 0.1,
        "ack_wait": 40.0,
        "watchdog_timeout": 5.0,
        "shutdown_timeout": 3.0,
        "concurrency": 20,
    }
)
"""For tests: thresholds a fleet outlives a promotion with, and sweeps that tests can wait for."""

DEFAULTS = MappingProxyType({"concurrency": 20})
"""For figures: everything that takes time as it is shipped."""


class Pods:
    """The fleet of one scenario."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, no_row_seconds: float | None) -> None:
        """Start nothing yet.

        Args:
            folder: records and logs.
            settings: of every pod.
            no_row_seconds: how long a message waits for its row; None: as shipped.
        """
        self._folder = folder
        self._environment = {
            **variables(settings),
            FOLDER_VARIABLE: str(folder),
            "PYTHONPATH": str(ROOT),
        }
        if no_row_seconds is not None:
            self._environment[NO_ROW_VARIABLE] = str(no_row_seconds)
        self.parents: list[ParentProcess] = []

    async def start(self, count: int) -> None:
        """Start pods and wait until their workers work."""
        for number in range(count):
            hostname = {"JSWORKER_HOSTNAME": f"pod-{number}"}
            environment = self._environment | hostname
            parent = ParentProcess(*TARGETS, folder=self._folder, environment=environment)
            self.parents.append(parent)
        await asyncio.gather(*(parent.ready() for parent in self.parents))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process of every pod."""
        for parent in self.parents:
            for pid in [parent.pid, *(child.pid for child in psutil.Process(parent.pid).children())]:
                send(pid, number)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return what all pods have logged of an event."""
        return [line for parent in self.parents for line in parent.lines(event)]

    @property
    def log(self) -> str:
        """Everything that all pods have logged."""
        return "\n".join(parent.log for parent in self.parents)

    def kill_all(self) -> None:
        """End what is left of it."""
        for parent in self.parents:
            parent.kill_all()


@contextmanager
def pods_of(
    folder: Path, settings: Mapping[str, Any], *, no_row_seconds: float | None = None
) -> Iterator[Pods]:
    """Give a fleet, and end what is left of it."""
    pods = Pods(folder, settings, no_row_seconds=no_row_seconds)
    try:
        yield pods
    finally:
        pods.kill_all()
