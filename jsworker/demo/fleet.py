"""The demo's worker processes: started together, frozen for a moment, killed or stopped; none is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from jsworker.core.errors import JsworkerError
from jsworker.demo.folder import end_of_log
from jsworker.embedded import start_with_parent
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workers import list_workers

_REGISTER_SECONDS = 60.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02
_NEWEST_WORKERS = 100


class WorkerEnded(JsworkerError):
    """A worker process ended by itself, or never began to work."""


class WorkerProcess:
    """One worker process.

    Attributes:
        name: what to call it.
        log: the file that holds what it says.
        id: its worker id, as soon as it has registered.
        killed: whether the demo has killed it.
    """

    def __init__(self, name: str, *, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.log = log
        self.id: str | None = None
        self.killed = False
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it lives."""
        return self._process.poll()

    def freeze(self) -> None:
        """Stop it in its tracks: it neither reads nor writes from here on."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL and wait for its end."""
        self.killed = True
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        """Send SIGTERM, which a frozen process would not see before it thaws."""
        self._process.terminate()
        self.thaw()

    def close(self) -> None:
        """End it at once if it still lives, and let its standard input go."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def ended(self, how: str) -> WorkerEnded:
        """Return the error that says how it ended and what it said last."""
        return WorkerEnded(f"{self.name} {how}; {end_of_log(self.log)}")


class Fleet:
    """Worker processes that live at most as long as this block and the process that runs it.

    Args:
        settings: their settings by environment variable.
        logs: the folder of their logs, which are begun anew.
        size: how many.
        run: a name of this run, which tells its workers from all others.

    Attributes:
        workers: the processes, in the order of their names.
    """

    def __init__(self, settings: Mapping[str, str], *, logs: Path, size: int, run: str) -> None:
        self._settings = settings
        self._logs = logs
        self._size = size
        self._run = run
        self._opened = ExitStack()
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        """Start the processes; they are at work once ``wait_until_registered`` has returned."""
        with ExitStack() as opened:
            for number in range(1, self._size + 1):
                worker = self._start(f"worker-{number}", opened)
                self.workers.append(worker)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def alive(self) -> list[WorkerProcess]:
        """The workers that the demo has not killed."""
        return [worker for worker in self.workers if not worker.killed]

    async def wait_until_registered(self, database: Database) -> None:
        """Wait until every worker has begun to work.

        Raises:
            WorkerEnded: one of them has ended, or needs more than a minute.
        """
        give_up_at = time.monotonic() + _REGISTER_SECONDS
        while waiting := [worker for worker in self.workers if worker.id is None]:
            rows = await list_workers(database, limit=_NEWEST_WORKERS)
            ids = {str(row["id"]).rpartition("-")[0]: str(row["id"]) for row in rows}
            for worker in waiting:
                worker.id = ids.get(self._own_id(worker.name))
            self.check()
            if time.monotonic() > give_up_at:
                raise waiting[0].ended(f"did not register within {_REGISTER_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """See whether all workers live that should.

        Raises:
            WorkerEnded: one does not; with the end of its log.
        """
        for worker in self.alive:
            if worker.exit_code is not None:
                raise worker.ended(f"ended by itself with exit code {worker.exit_code}")

    async def stop(self) -> None:
        """Ask all workers to stop and wait until they have; the block's end kills whoever has not."""
        for worker in self.alive:
            worker.ask_to_stop()
        give_up_at = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < give_up_at:
            if all(worker.exit_code is not None for worker in self.alive):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _start(self, name: str, opened: ExitStack) -> WorkerProcess:
        own = {"JSWORKER_WORKER_ID": self._own_id(name), "JSWORKER_LOG_FORMAT": "console"}
        outside = {key: value for key, value in os.environ.items() if not key.startswith("JSWORKER_")}
        log = self._logs / f"{name}.log"
        with log.open("wb") as file:
            process = start_with_parent(
                # -P: a file of the folder that the demo is run in must not pass for a module.
                [sys.executable, "-P", "-m", "jsworker.demo.worker"],
                env={**outside, **self._settings, **own},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                # Ctrl-C in a terminal reaches the demo alone, which stops its workers in order.
                start_new_session=True,
                death_signal=signal.SIGKILL,
            )
        worker = WorkerProcess(name, log=log, process=process)
        opened.callback(worker.close)
        return worker

    def _own_id(self, name: str) -> str:
        return f"demo-{self._run}-{name}"
