"""How late the event loop is: whatever keeps it busy keeps heartbeats waiting, too."""

import asyncio
import math
from typing import Final

from jsworker.core.clock import boottime

_EVERY_SECONDS: Final = 0.25
_WINDOW_SECONDS: Final = 15.0


class LoopLag:
    """Remembers by how much the loop was late at most: in this window of 15 seconds and the one before.

    Attributes:
        rounds: how often the loop has come round.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self._due_at = math.inf
        self._longest = 0.0
        self._longest_before = 0.0
        self.rounds = 0

    @property
    def seconds(self) -> float:
        """The longest delay of the last half minute; grows while the loop is late."""
        return max(self._longest_before, self._longest, self._present())

    def start(self) -> None:
        """Begin to watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._began_at = boottime()
        self._wait()

    async def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = math.inf

    def _wait(self) -> None:
        self._due_at = boottime() + _EVERY_SECONDS
        self._timer = self._loop.call_later(_EVERY_SECONDS, self._note)

    def _note(self) -> None:
        self.rounds += 1
        self._longest = max(self._longest, self._present())
        if boottime() - self._began_at >= _WINDOW_SECONDS:
            self._longest_before, self._longest = self._longest, 0.0
            self._began_at = boottime()
        self._wait()

    def _present(self) -> float:
        return max(0.0, boottime() - self._due_at)
