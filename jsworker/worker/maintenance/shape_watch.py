"""Stream and consumers as they must be, also when somebody changes them while workers run."""

from collections.abc import Sequence
from typing import Final

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.stream.jetstream import Stream

LONGEST_INTERVAL_SECONDS: Final = 30.0

_WHAT: Final = "stream settings"


class ShapeWatch:
    """Compares stream and consumers with what the settings ask for, and puts them right.

    With a consumer whose ``ack_wait`` was made too short, say, messages of running jobs come again and again.
    """

    def __init__(self, kinds: Sequence[str], *, stream: Stream, events: Events) -> None:
        """Prepare the watch.

        Args:
            kinds: those whose consumers this worker pulls from.
            stream: told ``stream.changed`` of what it changes.
            events: told when something cannot be put right, and when it can again.
        """
        self._kinds = kinds
        self._stream = stream
        self._events = events
        self._complaint: str | None = None

    async def step(self) -> None:
        """Look once; whoever pulls or publishes tells of a server that does not answer."""
        if not self._stream.connected:
            return
        try:
            await self._stream.keep_in_shape(self._kinds)
        except StreamUnavailable:
            return
        except StreamRefused as refused:
            self._complain(str(refused))
            return
        if self._complaint is not None:
            self._complaint = None
            self._events.emit("worker.restored", what=_WHAT)

    def _complain(self, reason: str) -> None:
        if reason != self._complaint:
            self._complaint = reason
            self._events.emit("worker.degraded", what=_WHAT, reason=reason)
