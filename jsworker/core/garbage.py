"""The garbage collector's passes, where they would find nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Make many objects, all of which stay, without a pass of the garbage collector in between.

    Each pass would look through all that were made before it, and through what the process has loaded: for
    thousands of jobs that takes as long as to make them. The block must not await: it is the whole process
    that does without passes meanwhile. The next one follows at once.
    """
    if not gc.isenabled():  # by the application, or in another thread, which turns it on again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
