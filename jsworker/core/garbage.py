"""The garbage collector's passes, where they would find nothing."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_is_off = False
"""Whether a block has turned the collector off, and is to turn it on again."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Make many objects, all of which stay, without a pass of the garbage collector in between.

    Each pass would look through all that were made before it, and through what the process has loaded: for
    thousands of jobs that takes as long as to make them. The block must not await, and should end within a
    moment: it is the whole process that does without passes meanwhile. The next one follows at once.
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


def _forked() -> None:
    """Turn it on in a process that was forked within a block of another thread, which it does not have."""
    global _is_off  # noqa: PLW0603 -- as above
    if _is_off:
        _is_off = False
        gc.enable()


os.register_at_fork(after_in_child=_forked)
