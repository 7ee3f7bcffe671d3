"""Which jobs a child has begun, in memory that it shares with its parent: known also after SIGKILL."""

import mmap
import os
import tempfile
from typing import Final, Self
from uuid import UUID

_OPEN: Final = 0
"""Where a child that notes what it begins says so."""
_UNPLACED: Final = 8
_ENDED: Final = slice(16, 24)
"""How many runs have ended, lowest byte first."""
_FIRST: Final = 32
_PLACE_BYTES: Final = 16
_FREE: Final = bytes(_PLACE_BYTES)
_SETTLING: Final = 2_500
"""Runs that have ended and wait for the database; beyond some two thousand nothing is claimed."""


class BegunJobs:
    """The jobs of one child from the begin of their run until their outcome is written.

    A job is noted before any of its own code, or its payload, can do harm: one that kills its process at once
    is among them. What the parent does not find here had not begun.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._free = list(range(_FIRST, len(memory), _PLACE_BYTES))
        self._places: dict[UUID, int] = {}
        self._unplaced: set[UUID] = set()
        self._ended = 0

    @classmethod
    def share(cls, concurrency: int) -> tuple[Self, int] | None:
        """Return memory for a child with so many job slots, and its file descriptor; None: there is none."""
        try:
            descriptor = _open_memory()
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, _FIRST + (concurrency + _SETTLING) * _PLACE_BYTES)
            return cls(mmap.mmap(descriptor, 0)), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def take_over(cls, descriptor: int) -> Self:
        """Return the memory in the child; from now on the parent relies on what is noted in it."""
        try:
            begun = cls(mmap.mmap(descriptor, 0))  # which duplicates the descriptor
        finally:
            os.close(descriptor)
        begun._memory[_OPEN] = 1
        return begun

    def add(self, job_id: UUID) -> None:
        """Note that a run begins."""
        if not self._free:
            self._unplaced.add(job_id)
            self._memory[_UNPLACED] = 1
            return
        place = self._places[job_id] = self._free.pop()
        self._memory[place : place + _PLACE_BYTES] = job_id.bytes

    def remove(self, job_id: UUID) -> None:
        """Note that its outcome is written, or the job lost; nothing for one that never began."""
        place = self._places.pop(job_id, None)
        if place is None and job_id not in self._unplaced:
            return
        self._ended += 1
        self._memory[_ENDED] = self._ended.to_bytes(8, "little")
        if place is not None:
            self._memory[place : place + _PLACE_BYTES] = _FREE
            self._free.append(place)
        else:
            self._unplaced.discard(job_id)
            self._memory[_UNPLACED] = bool(self._unplaced)

    def read(self) -> tuple[UUID, ...] | None:
        """Return, in the parent, the jobs that a dead child had begun; None: they are not all known."""
        if not self._memory[_OPEN] or self._memory[_UNPLACED]:
            return None
        content = self._memory[_FIRST:]
        places = (content[at : at + _PLACE_BYTES] for at in range(0, len(content), _PLACE_BYTES))
        return tuple(UUID(bytes=place) for place in places if place != _FREE)

    @property
    def ended(self) -> int:
        """How many runs have ended in the child."""
        return int.from_bytes(self._memory[_ENDED], "little")


def _open_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jsworker begun jobs")
    with tempfile.TemporaryFile() as file:  # another system
        return os.dup(file.fileno())
