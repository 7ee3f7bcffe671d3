"""The end of a process in which a processor's thread may never end."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final, NoReturn

EXIT_SECONDS = 3.0
"""The event loop, and then the interpreter, may each take so long to end."""
_FLUSH_SECONDS: Final = 1.0

flushes: Final[list[Callable[[float], object]]] = []
"""Functions that ``exit_now`` calls, each in a thread, with the seconds that all of them may take."""


def exit_within(seconds: float, code: int) -> Callable[[], None]:
    """End the process after ``seconds``, unless the returned function is called before.

    The event loop and the interpreter wait at their end for the processors' threads, which may never end. If
    the system starts no thread for the timer, because jobs have left too many, the process ends now.
    """
    timer = threading.Timer(seconds, exit_now, [code])
    timer.daemon = True
    try:
        timer.start()
    except (RuntimeError, MemoryError):
        exit_now(code)
    return timer.cancel


def exit_now(code: int) -> NoReturn:
    """End the process without finalizing the interpreter, which aborts if a thread still writes."""
    from jsworker.telemetry.logs import drain_logs  # noqa: PLC0415 -- a child's first steps load nothing slow

    ends_at = monotonic() + _FLUSH_SECONDS
    with suppress(RuntimeError, MemoryError):  # jobs may have left no thread to start
        flushing = [threading.Thread(target=_flush, args=[each], daemon=True) for each in flushes]
        for thread in flushing:
            thread.start()
        for thread in flushing:
            thread.join(max(0.0, ends_at - monotonic()))
    with suppress(AttributeError, OSError, ValueError):  # a job may have closed or replaced it
        sys.stdout.flush()
    drain_logs()
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def _flush(flush: Callable[[float], object]) -> None:
    with suppress(Exception):  # foreign code; a thread's traceback would be among lines of JSON
        flush(_FLUSH_SECONDS)
