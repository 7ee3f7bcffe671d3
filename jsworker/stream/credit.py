"""How many messages the server still owes a puller."""

from typing import Final

MOST_REQUESTS: Final = 8
"""Requests under way at once: the consumer's ``max_waiting`` is shared by the whole fleet."""


class Outstanding:
    """Counts what was asked for and has not come.

    The sum is exact: a delivery takes one off, and a request that ends early says how many it still owes. A
    delivery does not say which request it serves, so the number of requests under way is an estimate (oldest
    first); it only bounds how many there are, and finds one that the server has forgotten.
    """

    __slots__ = ("_requests", "total")

    def __init__(self) -> None:
        self.total = 0
        self._requests: dict[int, tuple[int, float]] = {}

    def ask(self, request: int, batch: int, deadline: float) -> None:
        """Note a request for ``batch`` messages, which the server ends at ``deadline``."""
        self._forget_served()
        self._requests[request] = (batch, deadline)
        self.total += batch

    def received(self) -> None:
        """Note a delivery."""
        if self.total:
            self.total -= 1

    def ended(self, request: int, owed: int) -> None:
        """Note that a request ended before it was served."""
        self._requests.pop(request, None)
        self.total = max(0, self.total - owed)

    def wanted(self, room: int) -> int:
        """Return how many messages to ask for now; few large requests rather than many small ones."""
        missing = room - self.total
        if missing < 1 or (self.total and missing < room // 4):
            return 0
        self._forget_served()
        return missing if len(self._requests) < MOST_REQUESTS else 0

    def overdue(self, now: float) -> bool:
        """Tell whether a request should have ended by now: the server never took it."""
        self._forget_served()
        return any(deadline < now for _, deadline in self._requests.values())

    def _forget_served(self) -> None:
        owed = sum(batch for batch, _ in self._requests.values())
        for request, (batch, _) in list(self._requests.items()):
            if owed - batch < self.total:
                break
            owed -= batch
            del self._requests[request]
