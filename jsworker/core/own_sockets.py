"""The connections of this process that no forked copy of it may keep open."""

import os
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet


class Connected(Protocol):
    """A connection with one socket at a time."""

    def fileno(self) -> int:
        """Return the descriptor of its socket; raises, or returns -1, while it has none."""


_own: Final[WeakSet[Connected]] = WeakSet()


def own(connection: Connected) -> None:
    """Have ``drop_in_copy`` drop the socket of this connection."""
    _own.add(connection)


def drop_in_copy() -> None:
    """Replace these sockets by /dev/null, in a copy of the process only.

    The servers then see the end of this process however long the copy lives, and nothing that the copy's own
    objects of these connections write, such as PostgreSQL's Terminate, reaches a server. The driver tells of
    a connection when it is made: one that was being made at the fork stays open, its session has run nothing.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for connection in _own:
        with suppress(Exception):  # of the driver: it is closed
            os.dup2(nothing, connection.fileno(), inheritable=False)
    os.close(nothing)
