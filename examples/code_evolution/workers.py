"""The worker processes: started together, one of them killed, the others stopped; none is left."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from code_evolution.git import shown

SHORT: Mapping[str, float] = {
    "heartbeat_interval": 0.5,
    "statement_timeout": 0.4,
    "crash_threshold": 1.5,
    "stale_threshold": 2.0,
    "scan_interval": 0.5,
    "watchdog_timeout": 1.9,
    "relay_interval": 0.1,
    "ack_wait": 6.0,
    "shutdown_timeout": 2.0,
}
"""Seconds by the setting's name, so short that a recovery takes seconds and not minutes."""

_EXAMPLES = Path(__file__).parents[1]
_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_SHOWN_LINES = 8


class WorkerEnded(Exception):
    """A worker process ended by itself, or did not start."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker process.

    Attributes:
        name: the name that is shown.
        log: the file that its standard error goes to.
        process: the process; it prints its worker id when it has started.
        id: its worker id; None until it has started.
        killed: whether the demo has killed it.
    """

    name: str
    log: Path
    process: asyncio.subprocess.Process
    id: str | None = None
    killed: bool = False

    @property
    def state(self) -> str:
        """``starting``, ``running``, ``stopped``, or ``killed`` by the demo."""
        if self.killed:
            return "killed"
        if self.process.returncode is not None:
            return "stopped"
        return "running" if self.id else "starting"

    async def wait_until_started(self) -> None:
        """Wait until it has started; raise ``WorkerEnded`` if it ends before, or needs more than a minute."""
        if self.process.stdout is None:
            raise RuntimeError("a worker was started without pipes")
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await self.process.stdout.readline()
                if not line:
                    await self.process.wait()
        except TimeoutError:
            raise self._ended(f"did not start within {_START_SECONDS:g} s") from None
        self.check()
        self.id = line.decode().strip()

    def check(self) -> None:
        """Raise ``WorkerEnded``, with the end of its log, if it has ended by itself."""
        if self.state == "stopped":
            raise self._ended(f"ended by itself with exit code {self.process.returncode}")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; a process that has ended is left alone."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.killed = True
        self.send(signal.SIGKILL)

    def _ended(self, how: str) -> WorkerEnded:
        return WorkerEnded(f"{self.name} {how}; {end_of_log(self.log)}")


@asynccontextmanager
async def start_workers(
    count: int, environment: Mapping[str, str], logs: Path
) -> AsyncIterator[Sequence[WorkerProcess]]:
    """Start worker processes for a block, at whose end they are stopped, and killed if they do not end.

    Args:
        count: how many.
        environment: the whole environment of the processes, with the settings ``JSWORKER_…``.
        logs: the folder of their logs, which are overwritten.
    """
    run = f"demo-{secrets.token_hex(3)}"
    workers: list[WorkerProcess] = []
    try:
        for number in range(1, count + 1):
            name = f"worker-{number}"
            own = {"JSWORKER_WORKER_ID": f"{run}-{name}"}
            workers.append(await _start(name, {**environment, **own}, logs / f"{name}.log"))
        yield workers
    finally:
        await _stop(workers)


async def _start(name: str, environment: Mapping[str, str], log: Path) -> WorkerProcess:
    modules = os.pathsep.join(filter(None, [str(_EXAMPLES), environment.get("PYTHONPATH")]))
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            # -P: a file in the current folder must not be imported as a module.
            *[sys.executable, "-P", "-m", "code_evolution.worker"],
            env={**environment, "PYTHONPATH": modules},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            # Because of this group, Ctrl-C in a terminal reaches the demo alone, which stops its workers in
            # order. The group is in the same session: if the demo is killed while a worker is frozen, the
            # kernel sends the worker SIGHUP.
            process_group=0,
        )
    return WorkerProcess(name, log, process)


async def _stop(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.send(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await asyncio.gather(*(worker.process.wait() for worker in workers))
    except TimeoutError:
        pass
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)
        await asyncio.gather(*(worker.process.wait() for worker in workers))


def end_of_log(log: Path) -> str:
    """Return a headline and the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join([f"the end of {shown(log)}:" if lines else f"{shown(log)} is empty", *lines])
