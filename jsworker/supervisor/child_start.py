"""The first steps of a child, before anything slow is imported: signals, and the parent's death."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from jsworker.worker.isolation.parent_death_signal import follow_parent, leave_to_parent

DUMP_SIGNAL: Final = signal.SIGUSR1
"""Makes a child write the stacks of its threads to stderr."""

_FOREVER: Final = "forever"
_NONE: Final = "none"
_FOR_THE_PARENT: Final = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a terminal sends to the whole process group; the parent passes it on in its own way."""
_HELD_BACK: Final = _FOR_THE_PARENT | {signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What a parent gives its child on the command line.

    Attributes:
        link: the file descriptor of the child's end of the link.
        parent: the parent's process id.
        connect_seconds: for how long the child tries to reach its servers; None: for ever.
        number: its place among the children, from 1.
        begun: the file descriptor of ``BegunJobs``; None: the system has no such memory.
    """

    link: int
    parent: int
    connect_seconds: float | None
    number: int
    begun: int | None

    def arguments(self) -> list[str]:
        """Return it as arguments."""
        seconds = _FOREVER if self.connect_seconds is None else repr(self.connect_seconds)
        begun = _NONE if self.begun is None else str(self.begun)
        return [begun, str(self.link), str(self.parent), seconds, str(self.number)]

    @classmethod
    def read(cls, arguments: Sequence[str]) -> tuple[Self, list[str]]:
        """Return it from the end of arguments, with those before it.

        Raises:
            ValueError: a parent's arguments look different.
        """
        *rest, begun, link, parent, seconds, number = arguments
        limit = None if seconds == _FOREVER else float(seconds)
        known = None if begun == _NONE else int(begun)
        return cls(int(link), int(parent), limit, int(number), known), rest


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Start a process in here: until ``start_as_child`` no signal ends it that a handler should see."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_as_child(parent: int) -> None:
    """Prepare this process to be a child: SIGTERM ends it, Ctrl-C is the parent's business.

    SIGTERM also comes when the parent dies (Linux).
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    leave_to_parent(_FOR_THE_PARENT)
    if sys.stderr is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    follow_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def on_sigterm(call: Callable[[], None]) -> None:
    """Call this at SIGTERM from now on: between two steps of the main thread, whatever its loop does."""
    signal.signal(signal.SIGTERM, lambda *_: call())
