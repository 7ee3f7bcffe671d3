"""A clock that a test moves, in place of ``boottime`` of the module under test."""


class Clock:
    """Returns ``now``, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
