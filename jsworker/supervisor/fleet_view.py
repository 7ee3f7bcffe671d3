"""The supervisor and its children as somebody sees them who looks on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

HUNG: Final = "hung"
CONDEMNED: Final = "condemned"
KILLED: Final = "killed"
EXITED: Final = "exited"
DEATHS: Final = (HUNG, CONDEMNED, KILLED, EXITED)
"""How a child may end that was not told to: its event loop hung, a run ignored its stop so that the child had
itself killed, a signal of somebody else's, by itself."""


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One place for a child.

    Attributes:
        number: from 1.
        was_ready: whether any child at this place has worked.
        ready: whether the present one works; False: there is none, or it starts.
        quiet: whether it has announced that its event loop is silent now.
        silent_seconds: since its last tick; 0 before the first, and while it is quiet.
        patience: seconds of silence after which the supervisor kills it; more while it starts.
        report_seconds: since its last report; None: there is none.
        readiness: what it told of itself, as ``observe.figures`` writes it; None: nothing.
        figures: its packed figures; empty: it has not told any.
        figures_seconds: since it told them, or since its start.
    """

    number: int
    was_ready: bool
    ready: bool = False
    quiet: bool = False
    silent_seconds: float = 0.0
    patience: float = 0.0
    report_seconds: float | None = None
    readiness: str | None = None
    figures: str = ""
    figures_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The supervisor at one moment.

    Attributes:
        places: of all children that there should be.
        stopping: whether it was told to stop.
        deaths: how many children ended that were not told to, by ``DEATHS``.
        now: boot time.
        stalls: runs that the supervisor itself has taken back, by their kind's label and whether it counted.
    """

    places: Sequence[PlaceView]
    stopping: bool
    deaths: Mapping[str, int]
    now: float
    stalls: Mapping[tuple[str, bool], int] = field(default_factory=dict)
