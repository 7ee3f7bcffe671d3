"""What the demo has counted: lines by language, one sample for each commit of a repository."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

OTHER = "other"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """The lines of one commit.

    Attributes:
        date: when it was committed.
        commit: its full object id.
        lines: non-blank lines by language.
    """

    date: datetime
    commit: str
    lines: dict[str, int]

    @property
    def total(self) -> int:
        """Lines of all languages."""
        return sum(self.lines.values())


@dataclass(frozen=True, slots=True)
class RepositoryLines:
    """The samples of one repository.

    Attributes:
        repository: its path.
        name: what people call it.
        samples: in the order of its history.
    """

    repository: str
    name: str
    samples: Sequence[Sample]

    def top_languages(self, most: int | None = None) -> list[str]:
        """Return the languages that had the most lines at their peak, the largest first; None means all."""
        peaks: dict[str, int] = {}
        for sample in self.samples:
            for language, lines in sample.lines.items():
                if lines:
                    peaks[language] = max(lines, peaks.get(language, 0))
        return sorted(peaks, key=lambda language: (-peaks[language], language))[:most]


def other_lines(sample: Sample, named: Sequence[str]) -> int:
    """Return the lines of a sample that belong to none of the named languages."""
    return sample.total - sum(sample.lines.get(language, 0) for language in named)


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items at even distances, always with the first and the last.

    Args:
        items: what to choose from.
        most: 2 or more.
    """
    if len(items) <= most:
        return list(items)
    step = (len(items) - 1) / (most - 1)
    return [items[round(place * step)] for place in range(most)]
