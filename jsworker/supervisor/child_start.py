"""The first steps of a child, before anything slow is imported: signals, and the parent's death."""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final, Self

from jsworker.worker.isolation.parent_death_signal import follow_parent, leave_to_parent

DUMP_SIGNAL: Final = signal.SIGUSR1
"""Makes a child write the stacks of its threads to stderr."""

_FOR_THE_PARENT: Final = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a terminal sends to the whole process group; the parent passes it on in its own way."""
_HELD_BACK: Final = _FOR_THE_PARENT | {signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What a parent gives its child on the command line.

    Attributes:
        link, begun: file descriptors of the child's end of the link, and of ``BegunJobs``.
        lifeline: what ``parent_death_signal.lifeline`` returns in the parent.
        connect_seconds: for how long the child tries to reach its servers; None: for ever.
    """

    link: int
    parent: int
    connect_seconds: float | None
    number: int
    begun: int
    lifeline: int

    def argument(self) -> str:
        """Return it as the last argument of a child."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, arguments: Sequence[str]) -> tuple[Self, list[str]]:
        """Return it from the last argument, with the targets before it."""
        *targets, start = arguments
        return cls(**json.loads(start)), targets


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block SIGTERM, SIGINT and SIGHUP in a process started within, until it calls ``start_as_child``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_as_child(start: ChildStart) -> None:
    """Prepare this process to be a child: SIGTERM ends it, Ctrl-C is the parent's business.

    SIGTERM also comes when the parent dies.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    leave_to_parent(_FOR_THE_PARENT)
    if sys.stderr is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    follow_parent(start.parent, signal.SIGTERM, start.lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
