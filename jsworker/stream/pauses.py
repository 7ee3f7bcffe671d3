"""Pauses between attempts: longer after every failure, short again once something works."""

import random
import time
from typing import Final

_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 5.0


class Pauses:
    """When the next attempt may be made."""

    __slots__ = ("_failures", "_until")

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def seconds_left(self) -> float:
        """Return how long the pause still lasts; not above 0 when there is none."""
        return self._until - time.monotonic()

    def failed(self) -> None:
        """Begin a pause; what fails during a pause fails for the same cause."""
        if self.seconds_left() <= 0:
            pause = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(self._failures, 10))
            self._until = time.monotonic() + pause * random.uniform(0.8, 1.2)  # noqa: S311 -- spreads a fleet
            self._failures += 1

    def worked(self) -> None:
        """Begin with a short pause next time."""
        self._failures = 0

    def end(self) -> None:
        """The cause is gone: go on at once."""
        self._failures = 0
        self._until = 0.0
