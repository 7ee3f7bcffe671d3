"""Measured figures: one value for each round, compared with others of the same round."""

import statistics
from dataclasses import dataclass

JSWORKER = "jsworker"
RAW = "raw loop"


@dataclass(frozen=True, slots=True)
class Figure:
    """The values of one system in one measure.

    Attributes:
        measure: its letter, for example ``a``.
        name: what was measured, for example ``no-op jobs, one worker process``.
        system: the system that was measured.
        unit: of the values: ``jobs/s``, ``ms``, ``MB``, ``%``, …
        values: one for each round, in the order of the rounds.
        more_is_better: False for times, sizes and costs.
        note: what a reader must know about it, for example ``no ownership``.
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
        """The median of the rounds."""
        return statistics.median(self.values)


def ratio(figure: Figure, to: Figure) -> float:
    """Return the median of the ratios of a figure to another one, taken round by round."""
    return statistics.median(ours / theirs for ours, theirs in zip(figure.values, to.values, strict=True))
