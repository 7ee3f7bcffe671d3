"""Measured figures: one value a round, compared within the round in which they were taken."""

import statistics
from dataclasses import dataclass

JSWORKER = "jsworker"
RAW = "raw loop"


@dataclass(frozen=True, slots=True)
class Figure:
    """What one system did in one measure.

    Attributes:
        measure: its letter, for example ``a``.
        name: what was measured, for example ``no-op jobs, one worker process``.
        system: who did it.
        unit: of the values: ``jobs/s``, ``ms``, ``MB``, ``%``, …
        values: one a round, in the order of the rounds.
        more_is_better: False for times, sizes and costs.
        note: what a reader must know beside it, for example ``no ownership``.
    """

    measure: str
    name: str
    system: str
    unit: str
    values: tuple[float, ...]
    more_is_better: bool = True
    note: str = ""

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.values)


def ratio(figure: Figure, to: Figure) -> float:
    """Return the median of a figure's ratios to another one's, round by round."""
    return statistics.median(ours / theirs for ours, theirs in zip(figure.values, to.values, strict=True))
