"""One child, as its parent sees it."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.message_link import LONGEST_LINE, SPARING_RATE, MessageLink
from jsworker.core.settings import Settings, variable_of
from jsworker.supervisor.begun_jobs import BegunJobs
from jsworker.supervisor.child_messages import (
    FROM_CHILD,
    MOST_PARTS,
    Figures,
    FromChild,
    FromParent,
    KillRequest,
    LastWords,
    QuietUntil,
    Ready,
    Registered,
    Report,
    Sibling,
    Stopped,
    StopWorker,
    TakeBack,
    Tick,
    Wake,
)
from jsworker.supervisor.child_start import ChildStart, signals_held_back
from jsworker.worker.supervision import DeadOwner, Silence

_RANDOM_END: Final = re.compile(r"-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class KillReason:
    """Why a child is killed by its parent: in a word for figures, and in words for the next runs of its jobs.

    If there are any culprits, only these jobs' stalls count.
    """

    how: str
    reason: str
    counted: bool
    culprits: tuple[UUID, ...] = ()


class ChildListener(Protocol):
    """Called with what a child reports."""

    def note_ready(self, child: "Child", kinds: Sequence[str]) -> None:
        """Its worker works on these kinds."""
        ...

    def note_registered(self, child: "Child", worker_id: str) -> None:
        """It may hold jobs from now on."""
        ...

    def kill_on_request(self, child: "Child", culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """It asks to be killed."""
        ...


class Child:
    """A running child process.

    Attributes:
        number: its place among the children, from 1.
        generation: 1 for the first child at this place.
        worker_id: under which it owns jobs; None: it owns none yet.
        ready, stopped: whether its worker has worked, and has stopped in order.
        readiness, reported_at: what its worker could do by its last report, and the boot time of that.
        figures, figures_at: packed, of the last report that had any, and its boot time.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Settings,
        *,
        environment: Mapping[str, str],
        connect_seconds: float | None,
        number: int,
        generation: int,
        listener: ChildListener,
    ) -> None:
        """Start the process, in the main thread of an event loop; may raise OSError.

        The argument of ``ChildStart`` is put behind the command; WORKER_ID, when it is set in the
        environment, gets this child's number; for ``connect_seconds`` it tries to reach its servers.
        """
        self.number = number
        self.generation = generation
        self.worker_id: str | None = None
        self.ready = False
        self.stopped = False
        self.holds_jobs = False
        self.last_words: str | None = None
        self.kill_reason: KillReason | None = None
        # Before it holds jobs it may be silent for longer: a setup may load what is large.
        self.silence = Silence(max(settings.watchdog_timeout, settings.startup_timeout))
        self._watchdog_timeout = settings.watchdog_timeout
        self.readiness: str | None = None
        self.figures = ""
        self.reported_at: float | None = None
        self.figures_at = self._started_at = boottime()
        self._figures: list[str] = []
        self._listener = listener
        self._begun: BegunJobs | None = None
        if settings.worker_id is not None:
            name = f"{settings.worker_id}-{number}"
            environment = {**environment, variable_of("worker_id"): name}
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._shared(settings.concurrency) as begun:
                start = ChildStart(theirs.fileno(), os.getpid(), connect_seconds, number, begun)
                self._process = _start(command, environment, start)
        except BaseException:
            ours.close()
            raise
        self._pidfd = _pidfd_of(self._process.pid)
        # Its worker id without the random end, as ``identify`` makes it.
        self._name = f"{settings.hostname}-{self.pid}" if settings.worker_id is None else name
        self._link = MessageLink(ours, FROM_CHILD, on_message=self._note, rate=SPARING_RATE)
        self._link.open()

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
        return boottime() - self._started_at

    @property
    def can_take_back(self) -> bool:
        """Whether its worker can reset jobs of others."""
        return self.ready and not self.stopped and self.kill_reason is None

    def facts(self) -> dict[str, object]:
        """Return the fields of every log line about it."""
        facts: dict[str, object] = {"pid": self.pid, "child": self.number, "generation": self.generation}
        return facts if self.worker_id is None else {**facts, "worker_id": self.worker_id}

    def ending(self) -> str:
        """Return how it ended, in words."""
        code = self._process.returncode
        return f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"

    def send_signal(self, number: signal.Signals) -> None:
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
        """Ask it to stop, in both ways: its loop may hang, or it may not read its link yet."""
        self._send(StopWorker(force=force))
        self.send_signal(signal.SIGTERM)

    def wake(self) -> None:
        """Report that jobs were put back into the queue."""
        if self.ready:
            self._send(Wake())

    def take_back(self, sibling: DeadOwner) -> None:
        """Ask it to take back what a dead sibling held."""
        self._send(TakeBack(dead=sibling))

    def leave_to_parent(self, worker_id: str) -> None:
        """Name a sibling: what that one leaves is taken back by the parent, on its evidence."""
        self._send(Sibling(worker_id=worker_id))

    def hear(self) -> None:
        """Take what it has sent so far."""
        self._link.hear()

    def close(self) -> None:
        """Take its last words and close the link; it must have ended."""
        self._link.hear(to_the_end=True)
        self._link.close()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def abandon(self) -> None:
        """Close the link, by which it learns that it must end."""
        self._link.close()

    def _note(self, message: FromChild) -> None:
        match message:
            case Tick():
                self.silence.note_tick()
            case QuietUntil(boottime=until):
                self.silence.quiet_until = until
            case Registered(worker_id=worker_id):
                self._register(worker_id)
            case Ready(kinds=kinds):
                if not self.ready:
                    self.ready = True
                    self._listener.note_ready(self, kinds)
            case Figures(part=part):
                self._figures.append(part)
                del self._figures[:-MOST_PARTS]
            case Report(readiness=readiness):
                self.readiness, self.reported_at = readiness, boottime()
                if self._figures:
                    self.figures, self._figures = "".join(self._figures), []
                    self.figures_at = self.reported_at
            case KillRequest(culprits=culprits, reason=reason):
                self._listener.kill_on_request(self, culprits, reason)
            case Stopped(holds_jobs=holds_jobs):
                self.stopped, self.holds_jobs = True, holds_jobs
            case LastWords(text=text):
                self.last_words = text

    def _register(self, worker_id: str) -> None:
        """Accept an id of its own only: the parent will take back all jobs of that owner."""
        own = worker_id.startswith(self._name) and _RANDOM_END.fullmatch(worker_id[len(self._name) :])
        if own and self.worker_id is None:
            self.worker_id = worker_id
            self.holds_jobs = True
            self.silence.timeout = self._watchdog_timeout
            self._listener.note_registered(self, worker_id)

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

    def _send(self, message: FromParent) -> None:
        # With so much unread the child does not listen, and needs nothing of what is sent here.
        if self._link.unsent < LONGEST_LINE:
            self._link.send(message)


def reap_orphans(known: Container[int]) -> None:
    """Reap dead children but the known ones: process 1 of a container inherits all orphans.

    A known one that is dead hides others behind it: reap those that are known first.
    """
    with suppress(ChildProcessError):  # there are none
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in known:
                return
            os.waitpid(found.si_pid, os.WNOHANG)


def _start(
    command: Sequence[str], environment: Mapping[str, str], start: ChildStart
) -> subprocess.Popen[bytes]:
    with signals_held_back():
        return subprocess.Popen(  # noqa: S603 -- the command is the supervisor's caller's
            [*command, start.argument()],
            env=environment,
            pass_fds=[start.link] if start.begun is None else [start.link, start.begun],
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
