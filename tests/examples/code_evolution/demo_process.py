"""The demo as a process, and a look at what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

EXAMPLES = Path(__file__).parents[3] / "examples"
DEADLINE = 240.0  # for a busy machine; it takes 5 s on an idle one
SECONDS_TO_VANISH = 60.0


@dataclass(frozen=True)
class Result:
    """How a demo ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out.count("\n") == 1, self
        return json.loads(self.out)


class DemoProcess:
    """A running demo."""

    def __init__(self, data: Path, *arguments: object, cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "code_evolution", "--data", data, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
        )
        self._heard = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for(self, words: str) -> Self:
        """Wait until a line of standard error holds these words."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._heard += line
            if words in line:
                return self
        raise AssertionError(f"ended before it printed {words!r}: {self._heard}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def finish(self) -> Result:
        out, err = self._process.communicate(timeout=DEADLINE)
        return Result(self._process.returncode, out, self._heard + err)


def run_demo_process(data: Path, *arguments: object, cwd: Path | None = None) -> Result:
    """Run a demo to its end."""
    with DemoProcess(data, *arguments, cwd=cwd) as demo:
        return demo.finish()


def nothing_is_left_of(*folders: Path) -> bool:
    """Return whether, soon at least, no process has anything to do with these folders."""
    give_up_at = time.monotonic() + SECONDS_TO_VANISH
    while processes_of(*folders):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


def processes_of(*folders: Path) -> list[psutil.Process]:
    """Processes with one of the folders in their command line or a file of it open; not this one."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(str(folder) in _traces(process) for folder in folders)
    ]


def _traces(process: psutil.Process) -> str:
    traces: list[str] = []
    with suppress(psutil.Error, OSError):  # ended meanwhile, or of another user
        traces += process.cmdline()
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                traces.append(str(descriptor.readlink()))
    return "\n".join(traces)
