"""When a dead child is started again: at once the first time, ever later after further deaths in a row."""

import random
from typing import Final

_FIRST_SECONDS: Final = 0.5
_LONGEST_SECONDS: Final = 30.0
_LONG_LIFE_SECONDS: Final = 60.0
_DEFAULT_HEARTBEAT: Final = 5.0
_JITTER: Final = 0.2


class Restarts:
    """Back-off of one child's restarts. A fleet with quicker heartbeats than usual restarts quicker too."""

    def __init__(self, heartbeat_interval: float) -> None:
        """Begin without a death.

        Args:
            heartbeat_interval: seconds.
        """
        self._scale = min(1.0, heartbeat_interval / _DEFAULT_HEARTBEAT)
        self._in_a_row = 0

    def delay_after(self, lived: float, *, worked: bool) -> float:
        """Return the seconds to wait after a child that lived for so many, and has worked or has not."""
        if lived >= _LONG_LIFE_SECONDS * self._scale:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row == 1 and worked:
            return 0.0
        delay: float = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(max(0, self._in_a_row - 2), 10))
        return delay * self._scale * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 -- spreads load, hides nothing
