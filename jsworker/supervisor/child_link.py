"""The child's end of the link: sends ticks and reports, obeys the parent, ends the child after its death."""

import asyncio
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TextIO
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.exit_codes import FAILED
from jsworker.core.message_link import MessageLink
from jsworker.core.settings import Settings
from jsworker.supervisor import messages
from jsworker.supervisor.begun_jobs import BegunJobs, open_memory
from jsworker.supervisor.child_start import ChildStart
from jsworker.supervisor.process_exit import exit_now
from jsworker.telemetry.line_writer import LineWriter
from jsworker.telemetry.logs import drain_logs, own_logger, stderr_lines
from jsworker.telemetry.worker_status import Readiness

TICKS_PER_TIMEOUT: Final = 4
LONGEST_TICK_SECONDS: Final = 1.0

_LAST_RESORT_SECONDS: Final = 5.0
"""The child's own last resort comes at least so much later than the watchdog of a living parent."""
_ORPHAN_SECONDS: Final = 15.0
"""An orphan may take so long, and two statement time-outs, to hand its jobs back."""
_LAST_WORDS_SECONDS: Final = 1.0
_SHOW_SECONDS: Final = 0.5
"""A reader of stderr may take so long to read the stacks before the process is killed."""


class ChildLink:
    """Connects a worker to the parent of its process. Call all but ``last_words`` on the event loop."""

    def __init__(self, start: ChildStart, end: socket.socket) -> None:
        """Take over the memory for begun jobs; nothing is read yet from ``end``, the child's of the link."""
        end.set_inheritable(False)  # processes that the child starts do not get it
        begun = BegunJobs.take_over(start.begun)
        self.began, self.waits, self.ended = begun.add, begun.forget, begun.remove
        self._parent = start.parent
        # A descriptor of its own, because a job may replace or close sys.stderr.
        self._stderr = _open_stderr()
        self._lines = stderr_lines()
        self._link: MessageLink[messages.FromParent] = MessageLink(
            end,
            messages.FROM_PARENT,
            on_message=self._note,
            on_end=self._note_orphaned,
        )
        self._quiet_until = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self._holds_jobs = False
        self._asked_for_kill = False
        self._orphaned = False
        self._is_to_stop = False

    def open(self, settings: Settings, *, obey: Callable[[messages.FromParent], None]) -> None:
        """Listen to the parent: ``obey`` gets its messages, and StopWorker on SIGTERM or when it has died."""
        self._loop = asyncio.get_running_loop()
        self._watchdog_timeout = settings.watchdog_timeout
        self._orphan_seconds = 2 * settings.statement_timeout + _ORPHAN_SECONDS
        self._obey = obey
        self._link.open()
        # A Python handler runs in the main thread, even if the event loop hangs in Python code.
        signal.signal(signal.SIGTERM, lambda *_: self._note_sigterm())
        self._tick()

    def close(self) -> None:
        """Stop reading, sending and ticking, and ignore SIGTERM: the child ends."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        if self._ticking is not None:
            self._ticking.cancel()
        self._link.detach()
        if not self._orphaned:
            faulthandler.cancel_dump_traceback_later()

    def registered(self, worker_id: str) -> None:
        """Report the worker's id: from now on it may hold jobs, and the watchdog's time-out applies."""
        self._link.send(messages.Registered(worker_id=worker_id))
        self._holds_jobs = True
        self._postpone_last_resort()

    def send(self, message: messages.FromChild) -> None:
        """Send a message that changes nothing on this side."""
        self._link.send(message)

    def report(self, readiness: Readiness | None, figures: str | None) -> bool:
        """Report the worker's state, unless the parent has not yet read the earlier messages.

        ``figures`` are packed; None if there are no new ones. Figures that are too long are left out; returns
        whether they were short enough.
        """
        fits = figures is None or len(figures) <= messages.LONGEST_FIGURES
        if not self._link.unsent:
            self._link.send(messages.Report(readiness=readiness, figures=figures if fits else None))
        return fits

    def quiet_until(self, boottime: float) -> None:
        """Announce that the event loop may be silent until ``boottime``."""
        self._quiet_until = boottime
        self._link.send(messages.Tick(quiet_until=boottime))
        self._postpone_last_resort()

    def request_kill(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """Write the stacks of all threads to stderr and ask to be killed; later calls do nothing."""
        if self._asked_for_kill:
            return
        self._asked_for_kill = True
        if self._lines is not None:
            _show_stacks(self._lines)
        named = list(culprits[: messages.MOST_CULPRITS])
        self._link.send(messages.KillRequest(culprits=named, reason=reason[: messages.LONGEST_TEXT]))

    def stops_runs(self, died_of: JsworkerError | None) -> None:
        """End the process if neither a message of the parent nor its death is why the worker stops."""
        if not (self._is_to_stop or self._orphaned):
            # Handed back uncounted, a job that causes such ends would end one process after another.
            reason = str(died_of or "it got SIGTERM, but not from its parent, and jobs did not end in time")
            cause = None if died_of is None else died_of.__cause__
            own_logger().error("worker.died", reason=reason, exc_info=cause)
            exit_now(FAILED)

    def last_words(self, text: str) -> bool:
        """Send, outside of the event loop, the error that ends the process; False if the parent is gone."""
        words = messages.LastWords(text=text[: messages.LONGEST_TEXT])
        return self._link.send_blocking(words, seconds=_LAST_WORDS_SECONDS)

    def _tick(self) -> None:
        seconds = min(LONGEST_TICK_SECONDS, self._watchdog_timeout / TICKS_PER_TIMEOUT)
        self._ticking = self._loop.call_later(seconds, self._tick)
        if not self._link.unsent:  # else the parent does not read, and more ticks are useless
            self._link.send(messages.Tick(quiet_until=self._quiet_until))
        self._postpone_last_resort()

    def _postpone_last_resort(self) -> None:
        """Let faulthandler end this process later, if its loop hangs and no parent is left to kill it."""
        if self._holds_jobs and not self._orphaned:
            limit = self._watchdog_timeout + max(_LAST_RESORT_SECONDS, self._watchdog_timeout)
            quiet = max(0.0, self._quiet_until - boottime())
            self._end_after(quiet + limit)

    def _note(self, message: messages.FromParent) -> None:
        self._is_to_stop |= isinstance(message, messages.StopWorker)
        self._obey(message)

    def _note_sigterm(self) -> None:
        is_orphan = os.getppid() != self._parent
        if is_orphan:
            self._limit_orphan()  # not on the loop, which may hang
        with suppress(RuntimeError):  # the loop is closed: the child ends
            self._loop.call_soon_threadsafe(self._obey, messages.StopWorker(force=is_orphan))

    def _note_orphaned(self) -> None:
        self._limit_orphan()
        self._obey(messages.StopWorker(force=True))

    def _limit_orphan(self) -> None:
        if not self._orphaned:
            self._end_after(self._orphan_seconds)
        self._orphaned = True

    def _end_after(self, seconds: float) -> None:
        """Let faulthandler show the stacks and end this process after ``seconds``, unless it is called again.

        It waits in a thread that does not need the GIL. Where the system starts no more threads, the process
        goes on without.
        """
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(seconds, file=self._stderr, exit=True)


def _open_stderr() -> int:
    """Return a new descriptor of stderr; without a stderr, one of the null device."""
    try:
        return os.dup(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return os.open(os.devnull, os.O_WRONLY)


def _show_stacks(lines: TextIO | LineWriter) -> None:
    """Write the stacks of all threads; an unread stderr does not block this."""
    with suppress(OSError), open_memory() as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        lines.write(stacks.read().decode(errors="replace"))
    drain_logs(_SHOW_SECONDS)
