"""How long running jobs have run, been silent or stood still: the choice of listings, and of what acts on them."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Final

_LONGEST_SECONDS: Final = 1e9
"""No run is as old, and PostgreSQL can still subtract it from the present time."""


@dataclass(frozen=True, slots=True)
class RunAge:
    """Which running jobs are meant: those of which all of this holds, by the database's clock.

    Attributes:
        stale_for: seconds for which its owner gave no heartbeat, at least; None: whatever it gave.
        running_for: seconds for which it has run, at least; None: however long it has.
        no_progress_for: seconds, at least, without progress: since its claim, ``update_progress``,
            ``save_checkpoint`` or ``quiet``; None: whatever it did.

    Raises:
        ValueError: one of them is no number of seconds.
    """

    stale_for: float | None = None
    running_for: float | None = None
    no_progress_for: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value!r} must be a number of seconds, 0 or more")

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values().values())

    def values(self) -> dict[str, float | None]:
        """Return the parameters of ``predicates.as_old_as_chosen``."""
        return {
            name: None if seconds is None else min(seconds, _LONGEST_SECONDS)
            for name, seconds in asdict(self).items()
        }


ANY_AGE: Final = RunAge()
"""Every running job is meant, and every job that does not run."""
