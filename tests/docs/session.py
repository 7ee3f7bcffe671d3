"""A reader's session: the files of pages in an empty folder, and their commands in a shell, in order."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from jsworker.embedded.resources import free_port
from tests.docs.pages import Command

_DEADLINE_SECONDS = 120.0
_PORT = "8000"


class Session:
    """Runs commands as the pages show them, with an empty home, and ends what runs in the background.

    The port that pages use is replaced by a free one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        (home := folder / "home").mkdir()
        scripts = Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("JSWORKER_")},
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "COLUMNS": "100",
        }
        self._port = str(free_port())
        self._background: list[subprocess.Popen[bytes]] = []

    def write(self, files: dict[str, str]) -> None:
        """Write the files of a page."""
        for name, content in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(content)

    def run(self, command: Command) -> str:
        """Run a command and return what it prints; AssertionError: it failed, or printed something else."""
        line = command.line.replace(_PORT, self._port)
        if command.background:
            with (self.folder.parent / f"stderr-{len(self._background)}").open("wb") as errors:
                process = subprocess.Popen(
                    ["/bin/bash", "-c", f"exec {line}"],
                    cwd=self.folder,
                    env=self._environment,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            self._background.append(process)
            return ""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            done = subprocess.run(
                ["/bin/bash", "-c", line],
                cwd=self.folder,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_DEADLINE_SECONDS,
            )
            if command.until in done.stdout and (command.until or done.returncode == 0):
                return done.stdout
            if not command.until or time.monotonic() > deadline:
                raise AssertionError(f"{line}\n{done.stdout}{done.stderr}{self._errors()}")
            time.sleep(0.2)

    def _errors(self) -> str:
        return "".join(path.read_text()[-3000:] for path in sorted(self.folder.parent.glob("stderr-*")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._background):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in reversed(self._background):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder.parent / "home", ignore_errors=True)
