"""``jsworker run`` as a process with its children, seen from outside."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.polling import eventually

SECONDS = 60.0


class ParentProcess:
    """A supervisor in a session of its own, with all it starts."""

    def __init__(
        self,
        *targets: str,
        folder: Path,
        environment: Mapping[str, str],
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-m", "jsworker", "run"),
        output: int | None = None,
    ) -> None:
        self._log = folder / f"log-{len(list(folder.glob('log-*')))}"
        # Compiled once, modules are loaded in a third of the time by all later processes.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [*prefix, *command, *targets, *options],
                cwd=folder,
                env={**inherited, **environment, "JSWORKER_LOG_FORMAT": "json"},
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=log if output is None else output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines of an event, the first ones first."""
        whole, _, _ = self.log.rpartition("\n")
        found = [json.loads(line) for line in whole.splitlines() if line.startswith('{"timestamp"')]
        return [line for line in found if line["event"] == event]

    async def tells(self, event: str, times: int = 1, seconds: float = SECONDS) -> list[dict[str, Any]]:
        """Wait until the log has told of this so many times."""

        async def told() -> list[dict[str, Any]]:
            lines = self.lines(event)
            assert len(lines) >= times, f"{event}: {len(lines)} of {times}; {self.log}"
            return lines

        return await eventually(told, seconds=seconds)

    async def says(self, words: str, seconds: float = SECONDS) -> None:
        """Wait until the log holds these words."""

        async def said() -> None:
            assert words in self.log, self.log

        await eventually(said, seconds=seconds)

    async def ready(self, children: int = 1) -> list[int]:
        """Wait until so many children work and return their process ids, by their places."""
        started = await self.tells("child.started", children, seconds=60.0)
        return [line["pid"] for line in sorted(started, key=lambda line: line["child"])]

    async def ends(self, seconds: float = SECONDS) -> int:
        """Wait for the parent's end and return its exit code."""

        async def ended() -> int:
            code = self.popen.poll()
            assert code is not None, f"still running after {seconds:g} s: {self.log}"
            return code

        return await eventually(ended, seconds=seconds)

    def send(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to the parent, or to another process."""
        os.kill(self.pid if pid is None else pid, number)

    def kill_all(self) -> None:
        """End whatever is left of it."""
        processes = []
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            parent.suspend()  # it starts no more of them
            processes = parent.children(recursive=True)
            for process in processes:  # nor does one see another's end, and hand its jobs back
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
        self.popen.kill()
        self.popen.wait()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
