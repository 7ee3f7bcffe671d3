"""Calling the command line: in this process, as a process, and on a terminal."""

import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jsworker.cli.app import run_command

DEADLINE = 60.0
COMMAND = (sys.executable, "-m", "jsworker")
PATIENT_COMMAND = (
    sys.executable,
    "-c",
    """import jsworker.client.client_publisher as publisher
for limit in ("_CONNECT_SECONDS", "_PUBLISH_SECONDS", "_RESERVED_SECONDS"):
    setattr(publisher, limit, 60.0)
from jsworker.cli.app import main; main()""",
)
"""The same, for jobs whose messages are to be stored by the command itself, however busy the machine is."""
PATIENT = {
    "JSWORKER_STATEMENT_TIMEOUT": "60",
    "JSWORKER_HEARTBEAT_INTERVAL": "61",
    "JSWORKER_CRASH_THRESHOLD": "none",
}
"""For a process whose statement the test holds up: else it is given up after three seconds."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def errors(self) -> list[str]:
        return self.err.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def ok(self) -> "Result":
        assert (self.code, self.err) == (0, ""), self
        return self

    def ok_unserved(self, kind: str) -> "Result":
        """Check that it is done, and said that no worker is for the kind."""
        remark = f"no live worker serves kind {kind}: is it spelled right?\n"
        assert (self.code, self.err) == (0, remark), self
        return self

    def refused(self, code: int) -> str:
        """Return the one line of a command that failed and wrote nothing else."""
        assert self.code == code, self
        assert self.out == "", self
        assert len(self.errors) == 1, self.err
        return self.errors[0]


class Cli:
    """Calls commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        self._capsys.readouterr()
        code = run_command([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return Result(code, captured.out, captured.err)


class Process:
    """A command that runs."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen

    def wait(self) -> Result:
        out, err = self.popen.communicate(timeout=DEADLINE)
        return Result(self.popen.returncode, out, err)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def read_line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().rstrip("\n")

    def read_errors_until(self, part: str) -> str:
        """Return the first line that holds this."""
        assert self.popen.stderr is not None
        while part not in (line := self.popen.stderr.readline()):
            assert line, f"ended before it wrote {part!r}"
        return line


class Spawn:
    """Starts commands as processes, each in a session of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: object, **variables: str) -> Process:
        popen = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=self._folder,
            env={**os.environ, **self._environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(popen)
        return Process(popen)

    def end(self) -> None:
        for popen in self._started:
            if popen.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
            popen.communicate()


class Terminal:
    """A command on a terminal of 100 columns; what it writes is collected."""

    # A session's leader gets the first terminal that it opens as its controlling one: Ctrl-C works.
    _TAKE_TERMINAL = ': <>"$0"; exec "$@"'

    def __init__(self, *arguments: object, cwd: Path, environment: Mapping[str, str]) -> None:
        self._collected = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        variables = {**environment, "TERM": "xterm-256color"}
        variables.pop("COLUMNS", None)
        self._process = subprocess.Popen(
            ["sh", "-c", self._TAKE_TERMINAL, os.ttyname(slave), *COMMAND, *map(str, arguments)],
            cwd=cwd,
            env=variables,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    @property
    def pid(self) -> int:
        return self._process.pid

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, pattern: str) -> str:
        """Return all that was written so far once it matches; fail when the command ends before."""
        while not re.search(pattern, self.text):
            assert self._read(), f"ended before {pattern!r}: {self.text}"
        return self.text

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(DEADLINE)

    @property
    def text(self) -> str:
        return self._collected.decode().replace("\r\n", "\n")

    @property
    def plain_text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.text)

    def _read(self) -> bool:
        try:
            found = os.read(self._master, 65_536)
        except OSError:  # how Linux says that no process has the terminal open any more
            return False
        self._collected += found
        return bool(found)


class Keyboard(io.StringIO):
    """A terminal as stdin, on which an answer has been typed."""

    def isatty(self) -> bool:
        return True


def wait_until(holds: Callable[[], Any], what: str) -> None:
    """Look again until it holds or a deadline passes."""
    give_up_at = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {DEADLINE:g} s: {what}"
        time.sleep(0.02)


def listens(port: int) -> bool:
    """Return whether a server accepts connections to this port of 127.0.0.1.

    To find that out by listening there could keep the server itself from it.
    """
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def as_if_at_once(text: str) -> str:
    """Return what a command has said, as if no second had passed since its rows were written."""
    return re.sub(r"\b[1-5]?\ds\b", "0s", text)
