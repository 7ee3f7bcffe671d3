"""How long a child has not ticked, as far as its parent was awake to hear it."""


class Silence:
    """Counts the seconds between two ticks.

    Only time in which the parent itself came round counts: after it was stopped or suspended, a child gets
    fresh time. Before the first tick nothing counts: a process that imports has no event loop yet.

    Attributes:
        timeout: seconds without a tick that are too many.
        seconds: without a tick so far.
    """

    def __init__(self, timeout: float) -> None:
        """Wait for the first tick."""
        self.timeout = timeout
        self._heard = False
        self._quiet_until = 0.0
        self.seconds = 0.0

    def note_tick(self) -> None:
        """Begin to count from zero."""
        self._heard = True
        self.seconds = 0.0

    def allow(self, quiet_until: float) -> None:
        """Count nothing until then, in seconds of boot time."""
        self._quiet_until = quiet_until

    def tighten(self, timeout: float) -> None:
        """Wait for ticks with another time-out from now on."""
        self.timeout = timeout

    def is_quiet(self, now: float) -> bool:
        """Return whether an announced quiet phase lasts, by boot time."""
        return now < self._quiet_until

    def pass_by(self, seconds: float, *, now: float) -> bool:
        """Let seconds pass in which nothing was heard, and return whether they are too many now.

        Args:
            seconds: time in which the parent listened.
            now: boot time.
        """
        if self.is_quiet(now):
            self.seconds = 0.0
        elif self._heard:
            self.seconds += seconds
        return self.seconds > self.timeout
