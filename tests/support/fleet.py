"""Worker processes: ``Fleet`` starts and signals them, ``main`` is one."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jsworker.core.errors import JsworkerError
from jsworker.core.events import Event, EventName
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, load_settings, variable_of
from jsworker.embedded import start_with_parent
from jsworker.worker.worker import Worker
from tests.support.polling import eventually

_ROOT = Path(__file__).parents[2]
_MAIN = f"""import gc; gc.disable()
from jsworker.telemetry import lean_structlog
from jsworker.stream import lean_nats
from {__name__} import main; main()"""
"""As ``jsworker run`` does it: without garbage collection, rich and aiohttp, modules load a third faster."""
_TOLD: Final[tuple[EventName, ...]] = (
    "worker.started",
    "worker.draining",
    "worker.stopped",
    "job.skipped",
    "job.lost",
    "job.released",
    "job.cancelled",
    "job.failed",
    "stale.recovered",
)

PATIENT = MappingProxyType(
    {
        "statement_timeout": 10.0,
        "heartbeat_interval": 11.0,
        "crash_threshold": 40.0,
        "stale_threshold": 60.0,
        "ack_wait": 120.0,
    }
)
"""Settings for tests that hold locks or send signals: nothing is taken for late meanwhile."""


class Journal:
    """What happens in one process, in a file of its own: one JSON object a line, one write a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def note(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at": time.monotonic(), **facts}
        self._file.write(json.dumps(line, default=str).encode() + b"\n")

    def note_run(self, what: str, job: Job[Any]) -> None:
        self.note(what, job=str(job.id), token=job.fencing_token, reason=job.clear_reason)


class Timed(JobProcessor):
    """Works for the payload's ``seconds``."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.journal.note_run("start", job)
        await asyncio.sleep(job.payload["seconds"])
        self.journal.note_run("finish", job)


class Held(JobProcessor):
    """Works for ever, or for the payload's ``seconds``; a run that follows a reset returns at once."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
        self.journal.note_run("start", job)
        if not job.cleared:
            await asyncio.sleep(job.payload.get("seconds", 3600))
        self.journal.note_run("finish", job)
        return {"token": job.fencing_token, "cleared": job.cleared, "reason": job.clear_reason}

    async def on_lost(self, job: Job[dict[str, Any]]) -> None:
        self.journal.note_run("lost", job)


class Endless(JobProcessor):
    """Never returns."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.journal.note_run("start", job)
        await asyncio.Event().wait()


def processors(journal: Journal) -> list[JobProcessor[Any]]:
    """Return every processor of this module."""
    return [Timed(journal), Held(journal), Endless(journal)]


class WorkerProcess:
    """A running worker, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], journal: Path, errors: Path) -> None:
        self._process = process
        self._journal = journal
        self._errors = errors

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return self._errors.read_text()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def lines(self, what: str) -> list[dict[str, Any]]:
        """Return the lines of its journal that tell of this, the first ones first."""
        if not self._journal.exists():
            return []
        # A killed process may leave half a line behind.
        whole, _, _ = self._journal.read_bytes().rpartition(b"\n")
        told: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        return [line for line in told if line["what"] == what]

    def runs(self) -> list[tuple[str, int]]:
        """Return job and token of every run it has begun."""
        return [(line["job"], line["token"]) for line in self.lines("start")]

    async def tells(self, what: str, times: int = 1, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until its journal has told of this so many times."""

        async def told() -> list[dict[str, Any]]:
            lines = self.lines(what)
            assert len(lines) >= times, f"{what}: {len(lines)} of {times}; {self.errors}"
            return lines

        return await eventually(told, seconds=seconds)

    async def ends(self, seconds: float = 60.0) -> int:
        """Wait for its end and return the exit code."""

        async def ended() -> int:
            code = self._process.poll()
            assert code is not None, f"still running after {seconds} s; {self.errors}"
            return code

        return await eventually(ended, seconds=seconds)

    def kill(self) -> None:
        """End it at once, also when it is stopped."""
        self._process.kill()
        self._process.wait()


class Fleet:
    """Worker processes on one stream and one database."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self.workers: list[WorkerProcess] = []

    def start(self, **changes: Any) -> WorkerProcess:
        """Start one more worker; keyword arguments replace settings."""
        values = {name: getattr(self._settings, name) for name in self._settings.model_fields_set} | changes
        number = len(self.workers)
        journal, errors = self._folder / f"journal-{number}", self._folder / f"errors-{number}"
        own = {variable_of(name): str(value) for name, value in values.items()}
        # Compiled once, modules are loaded in a third of the time by all later processes.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with errors.open("wb") as stderr:
            process = start_with_parent(
                [sys.executable, "-c", _MAIN, journal],
                env={**inherited, **own, "JSWORKER_HOSTNAME": f"host-{number}"},
                cwd=_ROOT,
                stderr=stderr,
                death_signal=signal.SIGKILL,
            )
        worker = WorkerProcess(process, journal, errors)
        self.workers.append(worker)
        return worker

    async def started(self, count: int, **changes: Any) -> list[WorkerProcess]:
        """Start workers and wait until all of them work."""
        workers = [self.start(**changes) for _ in range(count)]
        for worker in workers:
            await worker.tells("worker.started", seconds=60)
        return workers

    def runs(self) -> Counter[tuple[str, int]]:
        """Return how often each job was begun at each token, by anybody."""
        return Counter(run for worker in self.workers for run in worker.runs())


@contextmanager
def fleet_of(settings: Settings, folder: Path) -> Iterator[Fleet]:
    """Give a fleet, and end what is left of it."""
    fleet = Fleet(settings, folder)
    try:
        yield fleet
    finally:
        for worker in fleet.workers:
            worker.kill()


async def work(journal: Journal) -> None:
    """Be a worker until SIGTERM; a second one hands everything back at once."""
    worker = Worker(processors(journal), load_settings())

    def tell(event: Event) -> None:
        journal.note(event.name, **event.fields)

    for name in _TOLD:
        worker.on(name, tell)

    def stop() -> None:
        journal.note("sigterm")
        worker.stop(force=len(sigterms) > 0)
        sigterms.append(None)

    sigterms: list[None] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await worker.run()


def main() -> None:
    gc.freeze()
    gc.enable()
    try:
        asyncio.run(work(Journal(Path(sys.argv[1]))))
    except JsworkerError as error:
        sys.exit(str(error))
