"""Ends copies of a worker's process that a job has made by ``os.fork`` and that would work as the worker."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_loops: list[asyncio.AbstractEventLoop] = []
"""The event loops of workers, whose connections a copy of the process would share."""


@contextmanager
def ended_in_copies(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """End, with exit code 1, each copy of this process that comes back to this event loop meanwhile.

    A copy that ends within the job, replaces itself by another program, or runs a loop of its own, as those
    of ``multiprocessing`` do, is left alone.
    """
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)


def _forked() -> None:
    loops = frozenset(_loops)
    if not loops:
        return
    run = asyncio.Handle._run  # noqa: SLF001 -- what every callback of asyncio's own loops goes through

    def run_elsewhere(handle: asyncio.Handle) -> None:
        if handle._loop in loops:  # type: ignore[attr-defined]  # noqa: SLF001 -- no public name
            _end()
        run(handle)

    # This also stops callbacks that were ready when the job forked: the original process calls them.
    asyncio.Handle._run = run_elsewhere  # type: ignore[assignment, method-assign]  # noqa: SLF001 -- see above
    for loop in loops:  # for uvloop, which calls the ready callbacks before this one
        if not loop.is_closed():
            loop.call_soon(_end)


def _end() -> NoReturn:
    line = (
        f"jsworker: a job has forked its worker's process, and the copy, process {os.getpid()}, went on"
        " as the worker; it ends here. Use subprocess or multiprocessing, or end the copy with os._exit\n"
    )
    try:
        os.write(2, line.encode())
    finally:
        os._exit(1)


os.register_at_fork(after_in_child=_forked)
