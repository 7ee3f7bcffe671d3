"""Pods: ``jsworker run`` behind proxies of their own, started again by the harness as a StatefulSet would."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from jsworker.core.clock import boottime
from jsworker.core.settings import variable_of
from jsworker.embedded import start_with_parent
from tests.faults.history import Exit
from tests.faults.journal import FOLDER_VARIABLE
from tests.faults.workload import TARGETS
from tests.support.proxy import Proxy, proxied

ROOT = Path(__file__).parents[2]

EVENT_LOOPS = ("asyncio", "uvloop") if find_spec("uvloop") else ("asyncio",)
"""One pod after the other has the next of these: half of the workers run on uvloop where it is installed."""

_RESTART_SECONDS = 0.1
_STOP_SECONDS = 15.0
_LAST_WORDS = 1500


def plain_environment() -> dict[str, str]:
    """Return this process's environment without settings of jsworker, and with compiled modules kept."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JSWORKER_") and name != "PYTHONDONTWRITEBYTECODE"
    }


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as environment variables."""
    return {variable_of(name): str(value) for name, value in settings.items()}


@dataclass
class Pod:
    """One StatefulSet pod: a parent process, its children, and the network between it and the servers.

    Attributes:
        hostname: stable across restarts.
        wanted: whether the harness starts it again when it has ended.
        told: whether it was told to stop, or killed by a fault: its end is nothing to wonder about.
        output: what its present life writes, on its way to the log.
    """

    hostname: str
    settings: Mapping[str, Any]
    folder: Path
    ways: dict[str, list[Proxy]] = field(default_factory=dict)
    wanted: bool = True
    told: bool = False
    started_at: float = 0.0
    exits: list[Exit] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    output: "Output | None" = None

    @property
    def log(self) -> Path:
        """What its processes wrote to stdout and stderr, over all lives."""
        return self.folder / f"pod-{self.hostname}.log"

    @property
    def running(self) -> bool:
        """Whether its parent lives."""
        return self.process is not None and self.process.poll() is None

    def proxies(self, *sides: str) -> list[Proxy]:
        """Return the proxies before ``nats``, ``database`` or both."""
        return [proxy for side in sides for proxy in self.ways[side]]

    def start(self) -> None:
        """Start its parent."""
        environment = {
            **plain_environment(),
            **variables(self.settings),
            "JSWORKER_HOSTNAME": self.hostname,
            "JSWORKER_LOG_FORMAT": "json",
            FOLDER_VARIABLE: str(self.folder),
        }
        self.told = False
        self.started_at = boottime()
        self.output = Output(self.log)
        with self.output.writable() as pipe:
            self.process = start_with_parent(
                [sys.executable, "-m", "jsworker", "run", *TARGETS],
                env=environment,
                cwd=ROOT,
                stdout=pipe,
                stderr=pipe,
                death_signal=signal.SIGKILL,
            )

    async def keep(self) -> None:
        """Start it, and again whenever it has ended, for as long as it is wanted."""
        while True:
            if self.wanted and not self.running:
                self._note_exit()
                self.start()
            elif not self.running:
                self._note_exit()
            await asyncio.sleep(_RESTART_SECONDS)

    def _note_exit(self) -> None:
        if self.process is None:
            return
        code = self.process.returncode
        if not self.told and code != -signal.SIGKILL:
            words = self.log.read_bytes()[-_LAST_WORDS:].decode(errors="replace")
            self.exits.append(Exit(self.hostname, boottime(), code, words))
        self.process = None

    def workers(self) -> list[int]:
        """Return its workers that have recorded their birth, without the processes of jobs that run alone."""
        born = {int(path.name.split("-")[1]) for path in self.folder.glob("run-*.jsonl")}
        return [pid for pid in self._children(recursive=False) if pid in born and is_alive(pid)]

    def tree(self) -> list[int]:
        """Return the parent and all that it has started, the parent first."""
        return [] if self.parent is None else [self.parent, *self._children(recursive=True)]

    def _children(self, *, recursive: bool) -> list[int]:
        if self.parent is None:
            return []
        try:
            return [child.pid for child in psutil.Process(self.parent).children(recursive=recursive)]
        except psutil.NoSuchProcess:
            return []

    @property
    def parent(self) -> int | None:
        """The process id of its parent while it lives."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    async def stop(self) -> None:
        """Let it drain."""
        self.wanted, self.told = False, True
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, _STOP_SECONDS)
        self.kill_all()

    def kill_all(self) -> None:
        """End everything that is left of it."""
        self.told = True
        for pid in self.tree():
            send(pid, signal.SIGKILL)


class Output:
    """The pipe that a pod writes to, and the thread that copies it to the log as a container runtime does."""

    def __init__(self, log: Path) -> None:
        """Make the pipe; the thread ends when nobody can write any more."""
        self._reader, self._writer = os.pipe()
        self._reading = threading.Event()
        self._reading.set()
        self._stopped = threading.Event()
        threading.Thread(target=self._copy, args=[log], name=f"output of {log.stem}", daemon=True).start()

    @contextmanager
    def writable(self) -> Iterator[int]:
        """Lend the end that is written to, for the start of a process."""
        try:
            yield self._writer
        finally:
            os.close(self._writer)

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Fill the pipe, and read nothing during the block."""
        self._reading.clear()
        # An open file of its own: the processes' end must go on to block when the pipe is full.
        writer = os.open(f"/proc/self/fd/{self._reader}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(writer, b"\n")
            self._stopped.wait(_STOP_SECONDS)
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, b"\n" * 512)
            yield
        finally:
            os.close(writer)
            self._reading.set()

    def _copy(self, log: Path) -> None:
        with log.open("ab", buffering=0) as file, os.fdopen(self._reader, "rb", buffering=0) as source:
            while data := source.read(65536):
                file.write(data)
                if not self._reading.is_set():
                    self._stopped.set()
                    self._reading.wait()
                    self._stopped.clear()


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and not dead already."""
    return process_state(pid) not in (None, "Z", "X")


def process_state(pid: int) -> str | None:
    """Return the letter of a process's state: ``T`` is stopped, ``Z`` dead; None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; tell whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Fleet:
    """All pods of a run; more may join."""

    settings: Mapping[str, Any]
    folder: Path
    database_url: str
    nats_url: str
    pods: list[Pod] = field(default_factory=list)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def add(self, hostname: str) -> Pod:
        """Start a pod behind proxies of its own."""
        databases, database_url = await self._proxied(self.database_url)
        ways, urls = [], []
        for url in self.nats_url.split(","):
            [proxy], through = await self._proxied(url)
            ways.append(proxy)
            urls.append(through)
        event_loop = EVENT_LOOPS[len(self.pods) % len(EVENT_LOOPS)]
        settings = {
            "event_loop": event_loop,
            **self.settings,
            "database_url": database_url,
            "nats_url": ",".join(urls),
        }
        pod = Pod(hostname, settings, self.folder, {"database": databases, "nats": ways})
        self.pods.append(pod)
        keeping = asyncio.create_task(pod.keep(), name=f"keep {hostname}")
        self._stack.push_async_callback(_end, keeping)
        return pod

    async def _proxied(self, url: str) -> tuple[list[Proxy], str]:
        proxy, through = await self._stack.enter_async_context(proxied(url))
        parts = urlsplit(through)
        return [proxy], f"{parts.scheme}://{parts.netloc}{parts.path}"

    async def stop(self) -> None:
        """Let all pods drain, then end what is left."""
        for pod in self.pods:
            pod.wanted = False
        await asyncio.gather(*(pod.stop() for pod in self.pods))

    async def close(self) -> None:
        """End everything."""
        for pod in self.pods:
            pod.wanted = False
            pod.kill_all()
        await self._stack.aclose()


@asynccontextmanager
async def fleet_of(make: Callable[[], Fleet]) -> AsyncIterator[Fleet]:
    """Give a fleet, and end what is left of it."""
    fleet = make()
    try:
        yield fleet
    finally:
        await fleet.close()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
