"""The measures by letter: what ``python -m benchmarks`` can run. Each is imported when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast

from benchmarks.figures import Figure

MODULES = MappingProxyType(
    {
        "a": "throughput",
        "b": "scaling",
        "c": "enqueue",
        "d": "latency",
        "e": "heartbeats",
        "f": "growth",
        "g": "costs",
        "h": "memory",
        "i": "pgbouncer",
        "j": "retention",
        "k": "flow_control",
        "l": "held_rows",
        "m": "pace",
        "n": "isolation",
        "o": "dashboard",
    }
)
"""The modules by their letters; each has its own title."""

DEFAULT = ("a", "c", "d")
"""The measures that run by default, in less than 15 minutes."""


class Measure(Protocol):
    """A module of this package."""

    @property
    def LETTER(self) -> str:  # noqa: N802 -- a constant of a module
        """The letter by which the measure is chosen."""

    @property
    def TITLE(self) -> str:  # noqa: N802 -- a constant of a module
        """What it measures, for a heading."""

    def measure(self, rounds: int, show: Callable[[str], None]) -> list[Figure]:
        """Run everything, on servers of its own.

        Args:
            rounds: how often every system is measured.
            show: called with one short line on what is going on.
        """


def measure_of(letter: str) -> Measure:
    """Import a measure.

    Raises:
        KeyError: no measure has this letter.
        ModuleNotFoundError: its module is not there.
    """
    return cast("Measure", import_module(f"{__name__}.{MODULES[letter]}"))
