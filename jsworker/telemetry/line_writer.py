"""Writes log lines without waiting for their reader: a pipe that is never read must not stop a worker."""

import atexit
import fcntl
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TextIO

MOST_LINES: Final = 10_000
"""The most lines that may wait to be written; further lines are dropped."""
FLUSH_SECONDS: Final = 1.0
"""How long the end of the process waits for a reader."""


class LineWriter:
    """A stream to which a thread writes; ``dropped`` counts lines that were too many or had no reader."""

    def __init__(self, stream: TextIO, *, on_dropped: Callable[[int], None] | None = None) -> None:
        """Take a stream with nothing in its buffer; the thread starts with the first line.

        After lines were dropped, the thread calls ``on_dropped`` with their number as soon as at most half of
        ``MOST_LINES`` wait.
        """
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._on_dropped = on_dropped
        self.dropped = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.drain)

    def write(self, text: str) -> int:
        """Queue text that ends with a newline for the thread to write; returns at once."""
        if self._waiting.qsize() >= MOST_LINES:
            self.dropped += 1
            return 0
        self._waiting.put(text)
        if self._thread is None:
            self._start()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes lines as soon as their reader takes them."""

    def drain(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until the lines queued so far are written; return False if ``seconds`` are not enough."""
        if self._thread is None:
            return True
        written = threading.Event()
        self._waiting.put(written)
        return written.wait(seconds)

    def _begin(self) -> None:
        """Begin without lines and without a thread; a forked process must not use those of its parent."""
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._reported = self.dropped

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="jsworker log", daemon=True)
                thread.start()
                self._thread = thread
                # A process that multiprocessing has forked does not run atexit functions at its end.
                if (ends := sys.modules.get("multiprocessing.util")) is not None:
                    ends.Finalize(None, self.drain, exitpriority=0)

    def _work(self) -> None:
        while True:
            text = self._waiting.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            if not self._write(text.encode(self._encoding, "backslashreplace")):
                self.dropped += 1
                self._reported += 1  # not to be reported: the reader of the report is gone as well
            elif self.dropped > self._reported and self._waiting.qsize() <= MOST_LINES // 2:
                dropped, self._reported = self.dropped - self._reported, self.dropped
                if self._on_dropped is not None:
                    self._on_dropped(dropped)

    def _write(self, data: bytes) -> bool:
        with self._alone_in_pipe():
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another process has made the shared pipe non-blocking
                    room = select.poll()  # unlike select.select, for any descriptor
                    room.register(self._descriptor, select.POLLOUT)
                    room.poll()
                except OSError:
                    return False
        return True

    @contextmanager
    def _alone_in_pipe(self) -> Iterator[None]:
        """Keep other processes' lines out of a pipe meanwhile: a full one takes a long line in parts.

        The kernel ends the lock with the process. While one is stopped in the middle of a line, the others'
        threads wait until it goes on or is killed; without the lock they would split its line.
        """
        locked = False
        with suppress(OSError):  # the stream is closed, or no pipes can be locked here
            if stat.S_ISFIFO(os.fstat(self._descriptor).st_mode):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
                locked = True
        try:
            yield
        finally:
            if locked:
                with suppress(OSError):
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
