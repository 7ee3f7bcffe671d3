"""Copies of a worker's process that a job forks: they have no connections, and none works as the worker."""

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from jsworker.core.own_sockets import drop_in_copy

_loops: list[asyncio.AbstractEventLoop] = []
"""The event loops of workers, whose connections a copy of the process would share."""
_forking = threading.local()


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
    coroutine, frame = None, inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "multiprocessing.popen_fork":
            return
        if frame.f_code.co_flags & inspect.CO_COROUTINE:
            coroutine = frame
        frame = frame.f_back
    if coroutine is not None:
        # Its task is in the middle of a step, at whose end the event loop would call what was ready at the
        # fork, and read from the connections. A trace function sees that end before the loop does.
        coroutine.f_trace, coroutine.f_trace_lines = _trace_coroutine, False
        sys.settrace(_trace_no_other)


def _trace_coroutine(_frame: FrameType, event: str, _value: Any) -> Any:
    if event == "return":  # or it awaits
        _end()
    return _trace_coroutine


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
