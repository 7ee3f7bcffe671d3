"""One child, as its parent sees it."""

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.supervisor.begun_jobs import BegunJobs
from jsworker.supervisor.child_messages import (
    LONGEST_LINE,
    MOST_PARTS,
    Bury,
    Condemn,
    Figures,
    LastWords,
    Lines,
    Message,
    QuietUntil,
    Ready,
    Registered,
    Report,
    Sibling,
    Stop,
    Stopped,
    Tick,
    Wake,
    line_of,
)
from jsworker.supervisor.child_start import ChildStart, signals_held_back
from jsworker.worker.tick_watch import Silence

_READ_BYTES: Final = 65_536
_BYTES_A_ROUND: Final = 4 * _READ_BYTES
_PRICE_OF_NONSENSE: Final = 4_096
"""Bytes: what a line that is no message costs, so that a flood of them keeps the parent from nothing."""
_RANDOM_END: Final = re.compile(r"-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Fate:
    """Why a child was ended by its parent.

    Attributes:
        how: in a word, for figures.
        reason: told to the next runs of its jobs.
        counted: whether its jobs' stalls count.
        culprits: if there are any, only these jobs' stalls count.
    """

    how: str
    reason: str
    counted: bool
    culprits: tuple[UUID, ...] = ()


class Watcher(Protocol):
    """Whoever is told what a child says."""

    def note_ready(self, child: "Child", kinds: Sequence[str]) -> None:
        """Its worker works on these kinds."""
        ...

    def note_registered(self, child: "Child", worker_id: str) -> None:
        """It may hold jobs from now on."""
        ...

    def note_condemned(self, child: "Child", culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """It asks to be killed."""
        ...


class Child:
    """A running child process.

    Attributes:
        number: its place among the children, from 1.
        generation: 1 for the first child at this place.
        worker_id: under which it owns jobs; None: it owns none yet.
        ready: whether its worker has worked.
        stopped: whether its worker has stopped in order.
        holds_jobs: whether it may hold jobs.
        last_words: the error by which it ended.
        fate: why its parent ended it; None: it did not.
        silence: how long it has not ticked.
        readiness: what its worker could do when it told last; None: it has not told yet.
        reported_at: boot time of that; None: it has not told yet.
        figures: what it had counted when it told that last, packed.
        figures_at: boot time of that; of its start until then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        connect_seconds: float | None,
        number: int,
        generation: int,
        name: Callable[[int], str],
        concurrency: int,
        watchdog_timeout: float,
        startup_timeout: float,
        watcher: Watcher,
    ) -> None:
        """Start the process; to be called in the main thread of an event loop.

        Args:
            command: program and arguments; what ``Birth`` holds is put behind them.
            environment: the child's whole environment.
            connect_seconds: for how long it tries to reach its servers; None: for ever.
            number: its place among the children.
            generation: how many children there were at this place, this one included.
            name: returns its worker id without the random end, from its process id.
            concurrency: its job slots.
            watchdog_timeout: seconds without a tick that are too many.
            startup_timeout: the same before it holds jobs, if that is more: a setup may load what is large.
            watcher: told what it says.

        Raises:
            OSError: the system starts no process.
        """
        self.number = number
        self.generation = generation
        self.worker_id: str | None = None
        self.ready = False
        self.stopped = False
        self.holds_jobs = False
        self.last_words: str | None = None
        self.fate: Fate | None = None
        self.silence = Silence(max(watchdog_timeout, startup_timeout))
        self._watchdog_timeout = watchdog_timeout
        self.readiness: str | None = None
        self.figures = ""
        self.reported_at: float | None = None
        self.figures_at = boottime()
        self._figures: list[str] = []
        self._watcher = watcher
        self._lines = Lines()
        self._unsent = b""
        self._sends_later = False
        self._budget = _BYTES_A_ROUND
        self._loop = asyncio.get_running_loop()
        self._born_at = boottime()
        self._begun: BegunJobs | None = None
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, self._shared(concurrency) as begun:
                birth = ChildStart(theirs.fileno(), os.getpid(), connect_seconds, number, begun)
                self._process = _start(command, environment, birth)
        except BaseException:
            self._socket.close()
            raise
        self._pidfd = _pidfd_of(self._process.pid)
        self._name = name(self._process.pid)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self.hear)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, minus the number if by a signal; None while it lives. Reaps it."""
        return self._process.poll()

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return boottime() - self._born_at

    def facts(self) -> dict[str, object]:
        """Return what every log line about it tells."""
        facts: dict[str, object] = {"pid": self.pid, "child": self.number, "generation": self.generation}
        return facts if self.worker_id is None else {**facts, "worker_id": self.worker_id}

    def ending(self) -> str:
        """Return how it ended, in words."""
        code = self._process.returncode
        return f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is dead."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            if self._pidfd is None:
                self._process.send_signal(number)
            else:
                signal.pidfd_send_signal(self._pidfd, number)

    def begun(self) -> tuple[UUID, ...] | None:
        """Return the jobs that it has begun, or had when it died; None: they are not all known."""
        return None if self._begun is None else self._begun.read()

    @property
    def ended(self) -> int:
        """How many runs have ended in it."""
        return 0 if self._begun is None else self._begun.ended

    def stop(self, *, force: bool) -> None:
        """Ask it to stop; said twice over, for its loop may hang, or it may not listen to its link yet."""
        self._tell(line_of(Stop(force=force)))
        self.send(signal.SIGTERM)

    def wake(self) -> None:
        """Tell it that jobs were put back into the queue."""
        if self.ready:
            self._tell(line_of(Wake()))

    def bury(self, sibling: Bury) -> None:
        """Ask it to take back what a dead sibling held."""
        self._tell(line_of(sibling))

    def leave_to_parent(self, worker_id: str) -> None:
        """Tell it of a sibling: what that leaves is taken back by the parent, on its evidence."""
        self._tell(line_of(Sibling(worker_id=worker_id)))

    def hear(self) -> None:
        """Take what it has said so far."""
        while self._budget > 0:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                break
            self._budget -= len(data)
            for message in self._lines.feed(data):
                self._note(message)
        self._loop.remove_reader(self._socket)  # until the next round, or it is dead

    def listen_again(self) -> None:
        """Begin a new round: hear what it has said, be it much."""
        if self._budget <= 0:
            self._loop.add_reader(self._socket, self.hear)
        self._budget = _BYTES_A_ROUND
        self.hear()

    def close(self) -> None:
        """Hear its last words and let the link go; it must have ended."""
        self.listen_again()
        self._let_go()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def abandon(self) -> None:
        """Let the link go, by which it learns that it must end."""
        self._let_go()

    def _note(self, message: Message | None) -> None:
        match message:
            case Tick():
                self.silence.note_tick()
            case QuietUntil(boottime=until):
                self.silence.allow(until)
            case Registered(worker_id=worker_id):
                self._register(worker_id)
            case Ready(kinds=kinds):
                if not self.ready:
                    self.ready = True
                    self._watcher.note_ready(self, kinds)
            case Figures(part=part):
                self._figures.append(part)
                del self._figures[:-MOST_PARTS]
            case Report(readiness=readiness):
                self.readiness, self.reported_at = readiness, boottime()
                if self._figures:
                    self.figures, self._figures = "".join(self._figures), []
                    self.figures_at = self.reported_at
            case Condemn(culprits=culprits, reason=reason):
                self._watcher.note_condemned(self, culprits, reason)
            case Stopped(holds_jobs=holds_jobs):
                self.stopped, self.holds_jobs = True, holds_jobs
            case LastWords(text=text):
                self.last_words = text
            case _:
                self._budget -= _PRICE_OF_NONSENSE

    def _register(self, worker_id: str) -> None:
        """Believe it only an id of its own: the parent will take back whatever that owns."""
        own = worker_id.startswith(self._name) and _RANDOM_END.fullmatch(worker_id[len(self._name) :])
        if own and self.worker_id is None:
            self.worker_id = worker_id
            self.holds_jobs = True
            self.silence.tighten(self._watchdog_timeout)
            self._watcher.note_registered(self, worker_id)

    @contextmanager
    def _shared(self, concurrency: int) -> Iterator[int | None]:
        """Make the memory for what it begins, and keep its file descriptor open for the start."""
        shared = BegunJobs.share(concurrency)
        if shared is None:
            yield None
            return
        self._begun, descriptor = shared
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _let_go(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._unsent, self._sends_later = b"", False
        self._socket.close()

    def _tell(self, line: bytes) -> None:
        # So much unread: the child does not listen; nothing that is told here is needed then.
        if len(self._unsent) < LONGEST_LINE:
            self._unsent += line
            self._send_on()

    def _send_on(self) -> None:
        """Send what the socket takes; of a line that was cut short the rest must come before the next."""
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the child is dead
            self._unsent = b""
        if self._unsent and not self._sends_later:
            self._loop.add_writer(self._socket, self._send_on)
        elif self._sends_later and not self._unsent:
            self._loop.remove_writer(self._socket)
        self._sends_later = bool(self._unsent)


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    birth: ChildStart,
) -> subprocess.Popen[bytes]:
    with signals_held_back():
        return subprocess.Popen(  # noqa: S603 -- the command is the supervisor's caller's
            [*command, *birth.arguments()],
            env=environment,
            pass_fds=[birth.link] if birth.begun is None else [birth.link, birth.begun],
            # Named, so that they are inherited even where they were closed and opened again.
            stdin=0,
            stdout=1,
            stderr=2,
        )


def _pidfd_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, an old kernel, or one that forbids it
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
