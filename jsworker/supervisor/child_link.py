"""The child's end of the link: it ticks, tells, obeys, and ends the child when the parent has died."""

import asyncio
import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.supervisor.begun_jobs import BegunJobs
from jsworker.supervisor.child_messages import (
    LONGEST_PART,
    LONGEST_TEXT,
    MOST_CULPRITS,
    MOST_PARTS,
    Bury,
    Condemn,
    Figures,
    FromChild,
    LastWords,
    Lines,
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
from jsworker.supervisor.child_start import on_sigterm
from jsworker.telemetry.logs import drain_logs, write_line
from jsworker.telemetry.worker_status import MOST_KINDS

TICKS_PER_TIMEOUT: Final = 4
LONGEST_TICK_SECONDS: Final = 1.0

_LAST_RESORT_SECONDS: Final = 5.0
"""For so long beyond its time-out, at least, the watchdog of a living parent gets to act first."""
_ORPHAN_SECONDS: Final = 15.0
"""Beyond two statement time-outs: what an orphan may take to hand its jobs back."""
_LAST_WORDS_SECONDS: Final = 1.0
_READ_BYTES: Final = 65_536
_SHOW_SECONDS: Final = 0.5
"""For so long a reader of stderr may take for the stacks before the process is killed."""


class Link:
    """Ties a worker to the parent of its process. Everything but ``last_words`` belongs to the event loop."""

    def __init__(self, end: socket.socket, *, parent: int, begun: BegunJobs | None) -> None:
        """Take an end of the link; nothing is said or heard yet.

        Args:
            end: the child's end.
            parent: the parent's process id.
            begun: where the parent finds, after the child's death, what it had begun.
        """
        self._begun = begun
        end.setblocking(False)
        self._socket = end
        self._parent = parent
        self._lines = Lines()
        self._unsent = b""
        self._quiet_until = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self._holds_jobs = False
        self._condemned = False
        self._orphaned = False

    def open(
        self,
        *,
        watchdog_timeout: float,
        statement_timeout: float,
        on_stop: Callable[[bool], None],
        on_wake: Callable[[], None],
        on_bury: Callable[[Bury], None],
        on_sibling: Callable[[str], None],
    ) -> None:
        """Listen to the parent from now on.

        Args:
            watchdog_timeout: seconds without a tick after which the parent kills.
            statement_timeout: seconds; an orphan gets two of them, and some more, to hand its jobs back.
            on_stop: called at each word or signal to stop, with whether to hand everything back at once.
            on_wake: called when the parent has put jobs back into the queue.
            on_bury: called when a sibling has died.
            on_sibling: called with the worker id of each child whose jobs the parent takes back itself.
        """
        self._loop = asyncio.get_running_loop()
        self._watchdog_timeout = watchdog_timeout
        self._orphan_seconds = 2 * statement_timeout + _ORPHAN_SECONDS
        self._on_stop, self._on_wake, self._on_bury = on_stop, on_wake, on_bury
        self._on_sibling = on_sibling
        self._loop.add_reader(self._socket, self._hear)
        on_sigterm(self._note_sigterm)
        self._tick()

    def close(self) -> None:
        """Hear, send and tick no more; a SIGTERM is ignored from here on, for the child is leaving."""
        on_sigterm(lambda: None)
        if self._ticking is not None:
            self._ticking.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if not self._orphaned:
            faulthandler.cancel_dump_traceback_later()

    def registered(self, worker_id: str) -> None:
        """Tell the worker's id: from here on jobs may be held, and a silent event loop is soon too silent."""
        self._say(Registered(worker_id=worker_id))
        self._holds_jobs = True
        self._postpone_last_resort()

    def ready(self, kinds: Sequence[str]) -> None:
        """Tell that the worker works, and on what."""
        self._say(Ready(kinds=list(kinds[:MOST_KINDS])))

    def began(self, job_id: UUID) -> None:
        """Note, for the parent to find, that a job's run begins."""
        if self._begun is not None:
            self._begun.add(job_id)

    def ended(self, job_id: UUID) -> None:
        """Note that its outcome is written."""
        if self._begun is not None:
            self._begun.remove(job_id)

    def report(self, readiness: str | None, figures: str | None) -> bool:
        """Tell how the worker is, unless the parent has not read what was told before.

        Args:
            readiness: written by ``observe.figures``.
            figures: packed by it; None: there are no new ones.

        Returns:
            Whether there was room for the figures.
        """
        text = figures or ""
        parts = [text[begin : begin + LONGEST_PART] for begin in range(0, len(text), LONGEST_PART)]
        fits = len(parts) <= MOST_PARTS
        if not self._unsent:
            told = [Figures(part=part) for part in parts] if fits else []
            self._say(*told, Report(readiness=readiness))
        return fits

    def quiet_until(self, boottime: float) -> None:
        """Announce that the event loop may be silent until then."""
        self._quiet_until = boottime
        self._say(QuietUntil(boottime=boottime))
        self._postpone_last_resort()

    def condemn(self, culprits: Sequence[tuple[UUID, int]], reason: str) -> None:
        """Show where all threads are, and ask to be killed; once, however often this is called."""
        if self._condemned:
            return
        self._condemned = True
        if sys.stderr is not None:
            _show_stacks()
        named = list(culprits[:MOST_CULPRITS])
        self._say(Condemn(culprits=named, reason=reason[:LONGEST_TEXT]))

    def stopped(self, *, holds_jobs: bool) -> None:
        """Tell that the worker has stopped in order, and whether it still holds jobs."""
        self._say(Stopped(holds_jobs=holds_jobs))

    def last_words(self, text: str) -> bool:
        """Tell, outside of the event loop, the error by which the process ends; False: nobody listens."""
        try:
            self._socket.settimeout(_LAST_WORDS_SECONDS)
            self._socket.sendall(self._unsent + line_of(LastWords(text=text[:LONGEST_TEXT])))
        except OSError:
            return False
        return True

    def _tick(self) -> None:
        seconds = min(LONGEST_TICK_SECONDS, self._watchdog_timeout / TICKS_PER_TIMEOUT)
        self._ticking = self._loop.call_later(seconds, self._tick)
        if not self._unsent:  # a parent that does not read needs no more of them
            self._say(Tick())
        self._postpone_last_resort()

    def _postpone_last_resort(self) -> None:
        """Have this process end if its loop hangs and no parent is there any more to kill it.

        faulthandler waits in a thread that needs no GIL.
        """
        if self._orphaned or not self._holds_jobs or sys.stderr is None:
            return
        patience = self._watchdog_timeout + max(_LAST_RESORT_SECONDS, self._watchdog_timeout)
        quiet = max(0.0, self._quiet_until - boottime())
        faulthandler.dump_traceback_later(quiet + patience, exit=True)

    def _say(self, *messages: FromChild) -> None:
        self._unsent += b"".join(map(line_of, messages))
        self._send()

    def _send(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the parent is gone, which reading tells
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._socket, self._send)
        else:
            self._loop.remove_writer(self._socket)

    def _hear(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)
            self._be_orphan()
        for message in self._lines.feed(data):
            match message:
                case Stop(force=force):
                    self._on_stop(force)
                case Wake():
                    self._on_wake()
                case Bury():
                    self._on_bury(message)
                case Sibling(worker_id=worker_id):
                    self._on_sibling(worker_id)

    def _note_sigterm(self) -> None:
        if self._parent_is_dead():
            self._limit_orphan()  # here and now: the loop may hang
        with suppress(RuntimeError):  # the loop is closed: the child is leaving
            self._loop.call_soon_threadsafe(self._obey_sigterm)

    def _obey_sigterm(self) -> None:
        if self._parent_is_dead():
            self._be_orphan()
        else:
            self._on_stop(False)

    def _be_orphan(self) -> None:
        self._limit_orphan()
        self._on_stop(True)

    def _limit_orphan(self) -> None:
        if not self._orphaned and sys.stderr is not None:
            faulthandler.dump_traceback_later(self._orphan_seconds, exit=True)
        self._orphaned = True

    def _parent_is_dead(self) -> bool:
        return os.getppid() != self._parent


def _show_stacks() -> None:
    """Write where all threads are to stderr, which nobody may read."""
    try:
        memory = os.memfd_create("stacks")
    except (AttributeError, OSError):  # another system
        faulthandler.dump_traceback(all_threads=True)
        return
    with os.fdopen(memory, "rb") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        write_line(stacks.read().decode(errors="replace").rstrip())
    drain_logs(_SHOW_SECONDS)
