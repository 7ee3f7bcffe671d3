"""Copies of a worker's process that a job forks: they have no connections, and none works as the worker."""

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

from jsworker.core.own_sockets import drop_in_copy

_loops: list[asyncio.AbstractEventLoop] = []
"""The event loops of workers, whose connections a copy of the process would share."""
_forking = threading.local()
_CALLERS: Final = {asyncio.Handle._run.__code__, asyncio.Runner.run.__code__}  # noqa: SLF001 -- in no other way
"""Code of asyncio that calls steps of tasks, and callbacks; uvloop's own has no frames."""


@contextmanager
def ended_in_copies(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """End, with exit code 1, each copy of this process that comes back to this event loop meanwhile.

    A copy that ends within the job, replaces itself by another program, or is a process of
    ``multiprocessing`` goes on, without the connections of this process.
    """
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)


def _note_loop() -> None:
    _forking.loop = None
    with suppress(RuntimeError):
        _forking.loop = asyncio.get_running_loop()  # the copy has none


def _forked() -> None:
    if _loops:
        drop_in_copy()
    if _forking.loop not in _loops:
        return
    outermost = coroutine = None
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 -- CPython's own
    while frame is not None and frame.f_code not in _CALLERS:
        if frame.f_globals.get("__name__") == "multiprocessing.popen_fork":
            return
        if frame.f_code.co_flags & inspect.CO_COROUTINE:
            coroutine = frame
        outermost, frame = frame, frame.f_back
    if frame is None:  # uvloop, run by something else than asyncio.Runner
        outermost = coroutine
    elif outermost is None:  # os.fork itself is the callback
        _end()
    if outermost is not None:
        # A step of a task, or a callback, at whose end the event loop would call what was ready at the fork,
        # and read from the connections. A trace function sees that end before the loop does.
        outermost.f_trace, outermost.f_trace_lines = _trace_outermost, False
        sys.settrace(_trace_no_other)


def _trace_outermost(_frame: FrameType, event: str, _value: Any) -> Any:
    if event == "return":  # or it awaits
        _end()
    return _trace_outermost


def _trace_no_other(*_: Any) -> None:
    """Trace functions are called only while there is one for new frames, too."""


def _end() -> NoReturn:
    line = (
        f"jsworker: a job has forked its worker's process, and the copy, process {os.getpid()}, went on"
        " as the worker; it ends here. Use subprocess or multiprocessing, or end the copy with os._exit\n"
    )
    try:
        os.write(2, line.encode())
    finally:
        os._exit(1)


os.register_at_fork(before=_note_loop, after_in_child=_forked)
