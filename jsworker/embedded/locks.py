"""File locks of the kernel: they end with the process that holds them, whatever ends it."""

import fcntl
import time
from typing import IO

SHARED = fcntl.LOCK_SH
EXCLUSIVE = fcntl.LOCK_EX

_POLL_INTERVAL = 0.02


def try_lock(file: IO[bytes], operation: int) -> bool:
    """Take the lock, or change the one that is held, if that is possible at once."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[bytes], operation: int, *, seconds: float) -> bool:
    """Take the lock within ``seconds``; tell whether it was got."""
    give_up_at = time.monotonic() + seconds
    while not try_lock(file, operation):
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(_POLL_INTERVAL)
    return True


def unlock(file: IO[bytes]) -> None:
    """Let the lock go."""
    fcntl.flock(file, fcntl.LOCK_UN)
