"""How often a search may be made that has become slow.

A transaction that somebody leaves open keeps PostgreSQL from removing dead rows. A search through an index of
what is there for a short time only (queued, waiting to be published, owned) then passes all of them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from jsworker.core.clock import boottime

REST: Final = 50
"""Times its own duration that a slow search rests."""
_QUICK_SECONDS: Final = 0.02
"""What no rest is needed after."""
LONGEST_REST_SECONDS: Final = 30.0

RECENT_SECONDS: Final = 10.0
"""How far back a search looks that may not look at everything now: what turns up late stands within it."""


class Pace:
    """Lets a slow search rest, as a rule until it takes a fiftieth of the time; a quick one is always due.

    Of two in a row the quicker one counts: a single slow search tells of a busy machine, not of the table.

    Args:
        rest: times its own duration that a search rests, for another share of the time.
        longest_rest: seconds that it rests at most.
    """

    def __init__(self, rest: int = REST, longest_rest: float = LONGEST_REST_SECONDS) -> None:
        self._rest = rest
        self._longest_rest = longest_rest
        self._rested_at = -math.inf
        self._took = 0.0

    @property
    def is_due(self) -> bool:
        """Whether everything may be searched now."""
        return boottime() >= self._rested_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a search of everything; one that fails rests, whatever the one before took."""
        began = boottime()
        took_before = math.inf
        try:
            yield
            took_before = self._took
        finally:
            ended = boottime()
            self._took = ended - began
            took = min(self._took, took_before)
            rest = min(self._rest * took, self._longest_rest) if took > _QUICK_SECONDS else 0.0
            self._rested_at = max(self._rested_at, ended + rest)

    def hurry(self) -> None:
        """Let the next search follow at once: the last one found as much as it could take."""
        self._rested_at = -math.inf
