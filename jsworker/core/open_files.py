"""Whether this process may open further files and sockets: jobs that leave theirs open use them up."""

import errno
import os
import resource
from pathlib import Path
from typing import Final

from jsworker.core.clock import boottime

NO_FILES: Final = "this process has as many files and sockets open as it may (ulimit -n)"
_FREE_SHARE: Final = 0.1
_DESCRIPTORS: Final = Path("/dev/fd")


def may_open_no_files() -> bool:
    """Return whether this process or machine has as many files and sockets open as it may."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def are_files_scarce() -> bool:
    """Return whether this process has most of the files and sockets open that it may have."""
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    os.close(lowest_free)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and lowest_free >= (1 - _FREE_SHARE) * most


class OpenFiles:
    """Whether this process could open no further file; True until a tenth of those that it may have is free.

    So much is asked for, because a process that leaves files open now and then closes one by chance.
    """

    def __init__(self) -> None:
        self.are_exhausted = False
        self._since = 0.0

    @property
    def exhausted_seconds(self) -> float:
        """For how long they are exhausted."""
        return boottime() - self._since if self.are_exhausted else 0.0

    def try_one(self) -> None:
        """Try to open a file."""
        if not self.are_exhausted and may_open_no_files():
            self.are_exhausted, self._since = True, boottime()

    def look(self) -> None:
        """Try to open a file, or count how many are open if they are exhausted."""
        self.try_one()
        self.are_exhausted = self.are_exhausted and not _are_enough_free()


def _are_enough_free() -> bool:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:  # to list them takes one more
        return False
    return most == resource.RLIM_INFINITY or count <= (1 - _FREE_SHARE) * most
