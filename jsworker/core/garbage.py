"""Avoids passes of the garbage collector where they would find nothing."""

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Final

_NEW_OBJECTS: Final = 10_000
_COLLECT_SECONDS: Final = 1.0
_is_off = False
"""Whether a block has turned the collector off and has not yet turned it on again."""
_busy = 0
"""The number of open blocks in which the collector runs less often."""
_number_before: int | None = None
"""The collector's threshold before the first of these blocks; None: it was not changed."""
_busy_lock = RLock()  # reentrant: a pass while it is held may end the block of a coroutine that was given up


@contextmanager
def no_collection() -> Iterator[None]:
    """Make many objects, all of which stay, without a pass of the garbage collector in between.

    Each pass would look through all objects that were made before it, and all that the process has loaded:
    for thousands of jobs that takes as long as to make them. The block must not await, and should be short:
    the whole process has no passes meanwhile. The next pass follows at once.
    """
    global _is_off  # noqa: PLW0603 -- as the collector, one for the process
    if not gc.isenabled():  # by the application, or in another thread, which turns it on again
        yield
        return
    try:
        _is_off = True
        gc.disable()
        yield
    finally:
        _is_off = False
        gc.enable()


def collect_less_often() -> int | None:
    """Set the collector's threshold to 10,000 new objects per pass, if it is lower, but not 0.

    Where thousands of jobs wait for a slot or for the database, Python's own threshold is reached hundreds of
    times a second. ``collect_every_second`` must run beside it: few objects may hold much memory. Returns the
    previous threshold; None: nothing was changed.
    """
    first, *others = gc.get_threshold()
    if not 0 < first < _NEW_OBJECTS:
        return None
    gc.set_threshold(_NEW_OBJECTS, *others)
    return first


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect less often until the last of these blocks, in any thread, has ended.

    Passes over the objects of thousands of new jobs take half as long as to enqueue and publish them. The
    process is the application's: its threshold is restored, unless it has set another one meanwhile.
    """
    global _busy, _number_before  # noqa: PLW0603 -- as above
    with _busy_lock:
        if _busy == 0:
            _number_before = collect_less_often()
        _busy += 1
    try:
        yield
    finally:
        with _busy_lock:
            _busy = max(_busy - 1, 0)
            if _busy == 0:
                _collect_as_before()


def _collect_as_before() -> None:
    global _number_before  # noqa: PLW0603 -- as above
    now, *others = gc.get_threshold()
    if _number_before is not None and now == _NEW_OBJECTS:
        gc.set_threshold(_number_before, *others)
    _number_before = None


async def collect_every_second() -> None:
    """Collect recent garbage every second, unless the application has turned the collector off."""
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        if gc.isenabled():
            gc.collect(1)


def _forked() -> None:
    """Undo, in a forked process, the blocks of threads and event loops that do not go on there."""
    global _is_off, _busy, _busy_lock  # noqa: PLW0603 -- as above
    if _is_off:
        _is_off = False
        gc.enable()
    _busy, _busy_lock = 0, RLock()
    _collect_as_before()


os.register_at_fork(after_in_child=_forked)
