"""A copy of a worker's process that a job has made by ``os.fork`` never works as the worker."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_loops: list[asyncio.AbstractEventLoop] = []
"""Event loops that speak for workers, over connections that a copy would share with them."""


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

    # Before the callbacks that were ready when the job forked: they would be called twice.
    asyncio.Handle._run = run_elsewhere  # type: ignore[assignment, method-assign]  # noqa: SLF001 -- see above
    for loop in loops:  # of uvloop, which calls those first
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
