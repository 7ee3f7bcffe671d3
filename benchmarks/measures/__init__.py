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
"""Letter and module; a module tells its title itself."""

DEFAULT = ("a", "c", "d")
"""What runs when nothing else is asked for: under 15 minutes."""


class Measure(Protocol):
    """A module of this package."""

    @property
    def LETTER(self) -> str:  # noqa: N802 -- a constant of a module
        """By which it is asked for."""

    @property
    def TITLE(self) -> str:  # noqa: N802 -- a constant of a module
        """What it measures, for a heading."""

    def measure(self, rounds: int, show: Callable[[str], None]) -> list[Figure]:
        """Run everything, on servers of its own.

        Args:
            rounds: how often every system is measured.
            show: told what is going on, in one short line.
        """


def measure_of(letter: str) -> Measure:
    """Import a measure.

    Raises:
        KeyError: no measure has this letter.
        ModuleNotFoundError: its module is not there.
    """
    return cast("Measure", import_module(f"{__name__}.{MODULES[letter]}"))
