"""One child, as its parent sees it."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.message_link import LONGEST_LINE, SPARING_RATE, MessageLink
from jsworker.core.settings import Settings, changed_environment
from jsworker.supervisor import messages
from jsworker.supervisor.begun_jobs import BegunJobs
from jsworker.supervisor.child_start import ChildStart, signals_held_back
from jsworker.telemetry.logs import own_logger
from jsworker.telemetry.worker_status import Readiness
from jsworker.worker.isolation.parent_death_signal import lifeline
from jsworker.worker.supervision import Silence

_RANDOM_END: Final = re.compile(r"-[0-9a-f]{8}")
_SIGNAL_NAMES: Final = {number.value: number.name for number in signal.Signals}

Death: TypeAlias = Literal["hung", "stop_ignored", "killed", "exited"]
"""How a child may end without a request to stop: its event loop hung; a run ignored its stop, so that
the child asked to be killed; a signal of another process; by itself."""


@dataclass(frozen=True, slots=True)
class KillReason:
    """Why the parent kills a child; the next runs of the child's jobs get the ``reason``.

    If there are ``culprits``, stalls are counted for these jobs only.
    """

    how: Death
    reason: str
    counted: bool
    culprits: tuple[UUID, ...] = ()


class Child:
    """A running child process.

    Attributes:
        number: its place among the children, from 1.
        generation: the number of children that this place has had, including this one.
        started_at: the boot time of its start.
        worker_id: the id under which it owns jobs; None: it owns none yet.
        readiness, reported_at: the state of its worker by its last report, and the boot time of that.
        figures, figures_at: the packed figures of the last report that had any, and its boot time.
        link: the connection to the child; when it is closed, the child ends.
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
        on_message: Callable[["Child", messages.FromChild], None],
    ) -> None:
        """Start the process, in the main thread of an event loop; may raise OSError.

        The argument of ``ChildStart`` is appended to the command; if WORKER_ID is set, the child's number is
        appended to it. ``on_message`` is called with each message that this object has accepted and noted.
        """
        self.number = number
        self.generation = generation
        self.worker_id: str | None = None
        self.ready = False
        self.stopped = False
        self.holds_jobs = False
        self.last_words: str | None = None
        self.kill_reason: KillReason | None = None
        # Before it holds jobs it may be silent for longer: a setup may load large models.
        self.silence = Silence(max(settings.watchdog_timeout, settings.startup_timeout))
        self._watchdog_timeout = settings.watchdog_timeout
        self.readiness: Readiness | None = None
        self.figures = ""
        self.reported_at: float | None = None
        self.figures_at = self.started_at = boottime()
        self._on_message = on_message
        # The parent's own, for the host's name may change, and the child's worker id begins with it.
        names = {"hostname": settings.hostname}
        if settings.worker_id is not None:
            names["worker_id"] = f"{settings.worker_id}-{number}"
        ours, theirs = socket.socketpair()
        try:
            with theirs, BegunJobs.shared(settings.concurrency) as (self.begun, begun):
                start = ChildStart(theirs.fileno(), os.getpid(), connect_seconds, number, begun, lifeline())
                with signals_held_back():
                    # The streams are given by number, to be inherited even if they were closed and reopened.
                    self._process = subprocess.Popen(  # noqa: S603 -- the command is the supervisor's caller's
                        [*command, start.argument()],
                        env=changed_environment(environment, names),
                        pass_fds=[each for each in (start.link, begun, start.lifeline) if each >= 0],
                        stdin=0,
                        stdout=1,
                        stderr=2,
                    )
        except BaseException:
            ours.close()
            raise
        self.pid = self._process.pid
        self._pidfd: int | None
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system, an old kernel, or one that forbids it
            self._pidfd = None
        # The worker id that ``identify`` makes, without its random end.
        self._name = names.get("worker_id", f"{settings.hostname}-{self.pid}")
        self.link = MessageLink(
            ours,
            messages.FROM_CHILD,
            on_message=self._note,
            rate=SPARING_RATE,
            longest_line=LONGEST_LINE + messages.LONGEST_FIGURES,
        )
        self.link.open()

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the signal's number; None while the process lives. Reaps the process."""
        return self._process.poll()

    def facts(self) -> dict[str, object]:
        """Return the fields of every log line about this child."""
        facts: dict[str, object] = {"pid": self.pid, "child": self.number, "generation": self.generation}
        return facts if self.worker_id is None else {**facts, "worker_id": self.worker_id}

    def ending(self) -> str:
        """Return in words how the process ended."""
        code = self._process.returncode
        return f"signal {_SIGNAL_NAMES.get(-code, -code)}" if code < 0 else f"exit code {code}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it is dead."""
        if self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            if self._pidfd is None:
                self._process.send_signal(number)
            else:
                signal.pidfd_send_signal(self._pidfd, number)

    def stop(self, *, force: bool) -> None:
        """Ask the child to stop, by message and by SIGTERM: its loop may hang, or not read the link yet."""
        self.send(messages.StopWorker(force=force))
        self.send_signal(signal.SIGTERM)

    def send(self, message: messages.FromParent) -> None:
        """Send a message, unless the child has so much unread that it does not listen."""
        if self.link.unsent < LONGEST_LINE:
            self.link.send(message)

    def close(self) -> None:
        """Read the remaining messages of a child that has ended, and close the link."""
        self.link.hear(to_the_end=True)
        self.link.close()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _note(self, message: messages.FromChild) -> None:
        match message:
            case messages.Tick(quiet_until=until):
                self.silence.note_tick()
                self.silence.quiet_until = until
            case messages.Registered(worker_id=worker_id):
                # Accept only an id of this process: the parent will take back all jobs of that owner.
                own = worker_id.startswith(self._name) and _RANDOM_END.fullmatch(worker_id[len(self._name) :])
                if not own or self.worker_id is not None:
                    return
                self.worker_id, self.holds_jobs = worker_id, True
                self.silence.timeout = self._watchdog_timeout
            case messages.Ready():
                if self.ready:
                    return
                self.ready = True
                if self.worker_id is None:
                    reason = f"no worker id that begins with {self._name}: if it dies its jobs wait"
                    own_logger().warning("child.not_registered", **self.facts(), reason=reason)
            case messages.Report(readiness=readiness, figures=figures):
                self.readiness, self.reported_at = readiness, boottime()
                if figures is not None:
                    self.figures, self.figures_at = figures, self.reported_at
            case messages.Stopped(holds_jobs=holds_jobs):
                self.stopped, self.holds_jobs = True, holds_jobs
            case messages.LastWords(text=text):
                self.last_words = text
        self._on_message(self, message)


def reap_orphans(known: Container[int]) -> None:
    """Reap dead children except those in ``known``: process 1 of a container inherits all orphans.

    A dead child in ``known`` hides others behind it, so reap the known ones first.
    """
    with suppress(ChildProcessError):  # there are no children
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in known:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
