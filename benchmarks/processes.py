"""Processes under measure: started with the variables of their system, watched, stopped by SIGTERM."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.servers import environment_with
from jsworker.embedded import start_with_parent

ROOT = Path(__file__).parents[1]
"""The folder from which ``benchmarks`` can be imported."""

_STOP_SECONDS = 20.0
_SHOWN_CHARACTERS = 300


class SystemFailed(Exception):
    """A system under measure ended early, took too long, or said that it could not do its work."""


class Process:
    """A running process and what it writes to stderr."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start it.

        Args:
            command: program and arguments.
            variables: added to this process's environment without the variables of jsworker.
        """
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by stop()
        self._process = start_with_parent(
            command,
            env=environment_with(dict(variables)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
        )

    @property
    def pid(self) -> int:
        """The id of the process itself, not of one that it started."""
        return self._process.pid

    def check(self) -> None:
        """Do nothing while it runs.

        Raises:
            SystemFailed: it has ended; the message has its last line on stderr.
        """
        code = self._process.poll()
        if code is not None:
            raise SystemFailed(f"exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """End it and wait for its end."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def _last_words(self) -> str:
        self._words.seek(0)
        return last_words(self._words.read())


def last_words(stderr: bytes) -> str:
    """Return the last line with text; the traceback of an exception group ends with a ruler."""
    lines = [line.strip(" |+-") for line in stderr.decode(errors="replace").splitlines()]
    spoken = [line for line in lines if line]
    return spoken[-1][:_SHOWN_CHARACTERS] if spoken else "no word on stderr"


@contextmanager
def running(commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> Iterator[list[Process]]:
    """Run processes and stop them afterwards, the last one first."""
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = Process(command, variables)
            stack.callback(process.stop)
            processes.append(process)
        yield processes


def answer_of(command: Sequence[str], variables: Mapping[str, str], *, seconds: float) -> Any:
    """Run a process to its end and return the JSON that it prints.

    Raises:
        SystemFailed: it failed or took longer than ``seconds``.
    """
    try:
        done = subprocess.run(  # noqa: S603 -- our own commands
            command,
            env=environment_with(dict(variables)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SystemFailed(f"the producer was not done within {seconds:g} s") from None
    if done.returncode != 0:
        raise SystemFailed(f"producer, exit code {done.returncode}: {last_words(done.stderr)}")
    return json.loads(done.stdout)


def module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this project."""
    return [sys.executable, "-m", name, *arguments]


async def wait_until(
    done: Callable[[], Awaitable[bool]],
    processes: Sequence[Process],
    *,
    what: str,
    seconds: float,
    every: float = 0.05,
) -> None:
    """Wait until ``done`` returns true.

    Args:
        done: called again and again.
        processes: those that must not end meanwhile.
        what: the event that is waited for, for the error.
        seconds: how long to wait.
        every: seconds between two calls.

    Raises:
        SystemFailed: ``done`` did not return true in time, or a process has ended.
    """
    deadline = time.monotonic() + seconds
    while not await done():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            raise SystemFailed(f"not in {seconds:g} s: {what}")
        await asyncio.sleep(every)
