"""Stream and consumers as they must be, also when somebody changes them while workers run."""

from typing import Final

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.worker.context import WorkerContext

LONGEST_INTERVAL_SECONDS: Final = 30.0

_WHAT: Final = "stream settings"


class ShapeWatch:
    """Compares stream and consumers with what the settings ask for, and puts them right.

    With a consumer whose ``ack_wait`` was made too short, say, messages of running jobs come again and again.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._kinds = list(context.kinds)
        self._complaint: str | None = None

    async def step(self) -> None:
        """Look once; a server that does not answer is reported by pullers and publishers."""
        if not self._context.stream.connected:
            return
        try:
            await self._context.stream.keep_in_shape(self._kinds)
        except StreamUnavailable:
            return
        except StreamRefused as refused:
            self._complain(str(refused))
            return
        if self._complaint is not None:
            self._complaint = None
            self._context.events.emit("worker.restored", what=_WHAT)

    def _complain(self, reason: str) -> None:
        if reason != self._complaint:
            self._complaint = reason
            self._context.events.emit("worker.degraded", what=_WHAT, reason=reason)
