"""When a dead child is started again: at once after a long life, ever later after short ones."""

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
        self._short_lives = 0

    def delay_after(self, lived: float) -> float:
        """Return the seconds to wait after a child that lived for so many."""
        if lived >= _LONG_LIFE_SECONDS * self._scale:
            self._short_lives = 0
            return 0.0
        delay: float = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(self._short_lives, 10))
        self._short_lives += 1
        return delay * self._scale * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 -- spreads load, hides nothing
