"""Which jobs a child has begun, in memory that it shares with its parent: known also after SIGKILL."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, Self
from uuid import UUID

_ALL_NOTED: Final = 0
"""Where a child says that it notes everything it begins."""
_ENDED: Final = slice(16, 24)
"""How many runs have ended, lowest byte first."""
_FIRST: Final = 32
_PLACE_BYTES: Final = 16
_FREE: Final = bytes(_PLACE_BYTES)
BESIDES_SLOTS: Final = 7_000
"""Runs that have ended and wait for the database. Beyond two thousand nothing more is claimed, but what was
claimed by then, four thousand and a batch on its way, begins all the same."""


class BegunJobs:
    """The jobs of one child from the begin of their run until their outcome is written.

    A job is noted before any of its own code, or its payload, can do harm: one that kills its process at once
    is among them. What the parent does not find here had not begun.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._free = list(range(_FIRST, len(memory), _PLACE_BYTES))
        self._places: dict[UUID, int] = {}
        self._ended = 0

    @classmethod
    @contextmanager
    def shared(cls, concurrency: int) -> Iterator[tuple[Self, int]]:
        """Yield memory for a child with so many job slots, and its descriptor; may raise OSError."""
        with open_memory() as file:
            file.truncate(_FIRST + (concurrency + BESIDES_SLOTS) * _PLACE_BYTES)
            yield cls(mmap.mmap(file.fileno(), 0)), file.fileno()

    @classmethod
    def take_over(cls, descriptor: int) -> Self:
        """Return the memory in the child; from now on the parent relies on what is noted in it."""
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            begun = cls(mmap.mmap(file.fileno(), 0))  # which duplicates the descriptor
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
        """Note that its outcome is written, or the job lost; nothing for one that never began."""
        if self.forget(job_id):
            self._ended += 1
            self._memory[_ENDED] = self._ended.to_bytes(8, "little")

    def forget(self, job_id: UUID) -> bool:
        """Note that a run waits until it is added again, and return whether it had been added."""
        place = self._places.pop(job_id, None)
        if place is None:
            return False
        self._memory[place : place + _PLACE_BYTES] = _FREE
        self._free.append(place)
        return True

    def read(self) -> tuple[UUID, ...] | None:
        """Return, in the parent, the jobs that a dead child had begun; None: they are not all known."""
        if not self._memory[_ALL_NOTED]:
            return None
        content = self._memory[_FIRST:]
        places = (content[at : at + _PLACE_BYTES] for at in range(0, len(content), _PLACE_BYTES))
        return tuple(UUID(bytes=place) for place in places if place != _FREE)

    @property
    def ended(self) -> int:
        """How many runs have ended in the child."""
        return int.from_bytes(self._memory[_ENDED], "little")


def open_memory() -> BinaryIO:
    """Return a file that no other process can open; may raise OSError."""
    try:
        return os.fdopen(os.memfd_create("jsworker"), "r+b", buffering=0)
    except (AttributeError, OSError):  # another system, or a sandbox
        return tempfile.TemporaryFile(buffering=0)
