"""The jobs that a child has begun, in memory shared with its parent, which can read it after a SIGKILL."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, Self
from uuid import UUID

_ALL_NOTED: Final = 0
"""The byte that is 1 while the child notes every job that it begins."""
_ENDED: Final = slice(16, 24)
"""The number of runs that have ended, little-endian."""
_FIRST: Final = 32
_PLACE_BYTES: Final = 16
_FREE: Final = bytes(_PLACE_BYTES)
BESIDES_SLOTS: Final = 7_000
"""Room for runs that have ended and wait for the database. From two thousand such runs on nothing is claimed,
but jobs that are claimed by then, four thousand and a batch under way, still begin."""


class BegunJobs:
    """The jobs of one child from the beginning of their run until their outcome is written.

    A job is noted before its payload is read and before its code runs: a job that kills its process at once
    is noted. A job that is not noted had not begun.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._free = list(range(_FIRST, len(memory), _PLACE_BYTES))
        self._places: dict[UUID, int] = {}
        self._ended = 0

    @classmethod
    @contextmanager
    def shared(cls, concurrency: int) -> Iterator[tuple[Self, int]]:
        """Yield memory for a child with ``concurrency`` job slots, and its descriptor; may raise OSError."""
        with open_memory() as file:
            file.truncate(_FIRST + (concurrency + BESIDES_SLOTS) * _PLACE_BYTES)
            yield cls(mmap.mmap(file.fileno(), 0)), file.fileno()

    @classmethod
    def take_over(cls, descriptor: int) -> Self:
        """Return the memory, in the child; from now on the parent relies on it."""
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            begun = cls(mmap.mmap(file.fileno(), 0))  # mmap duplicates the descriptor
        begun._memory[_ALL_NOTED] = 1
        return begun

    def add(self, job_id: UUID) -> None:
        """Note that a run begins."""
        if not self._free:
            self._memory[_ALL_NOTED] = 0
            return
        place = self._places[job_id] = self._free.pop()
        self._memory[place : place + _PLACE_BYTES] = job_id.bytes

    def remove(self, job_id: UUID) -> None:
        """Note that a job's outcome is written, or that the job is lost; does nothing if it never began."""
        if self.forget(job_id):
            self._ended += 1
            self._memory[_ENDED] = self._ended.to_bytes(8, "little")

    def forget(self, job_id: UUID) -> bool:
        """Remove a run that waits again and has not executed anything; return whether it had been added."""
        place = self._places.pop(job_id, None)
        if place is None:
            return False
        self._memory[place : place + _PLACE_BYTES] = _FREE
        self._free.append(place)
        return True

    def read(self) -> tuple[UUID, ...] | None:
        """Return, in the parent, the jobs that the child has begun and not ended; None: not all are known."""
        if not self._memory[_ALL_NOTED]:
            return None
        content = self._memory[_FIRST:]
        places = (content[at : at + _PLACE_BYTES] for at in range(0, len(content), _PLACE_BYTES))
        return tuple(UUID(bytes=place) for place in places if place != _FREE)

    @property
    def ended(self) -> int:
        """The number of runs that have ended in the child."""
        return int.from_bytes(self._memory[_ENDED], "little")


def open_memory() -> BinaryIO:
    """Return a file that no other process can open; may raise OSError."""
    try:
        return os.fdopen(os.memfd_create("jsworker"), "r+b", buffering=0)
    except (AttributeError, OSError):  # another system, or a sandbox
        return tempfile.TemporaryFile(buffering=0)
