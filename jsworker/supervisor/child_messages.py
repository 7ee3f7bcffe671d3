"""What parent and child send each other."""

from typing import Annotated, Final, Literal, TypeAlias
from uuid import UUID

from pydantic import Field, FiniteFloat, TypeAdapter

from jsworker.core.message_link import Message
from jsworker.telemetry.worker_status import MOST_KINDS
from jsworker.worker.supervision import DeadOwner

MOST_CULPRITS: Final = 500
LONGEST_TEXT: Final = 4_000
"""Characters of a reason or of last words."""
LONGEST_READINESS: Final = 12 * 1024
LONGEST_PART: Final = 48 * 1024
"""Characters of packed figures in one line."""
MOST_PARTS: Final = 4


class Tick(Message):
    """The child's event loop has come round."""

    what: Literal["tick"] = "tick"


class Registered(Message):
    """The child owns jobs under this worker id from now on."""

    what: Literal["registered"] = "registered"
    worker_id: str


class Ready(Message):
    """The child's worker works, on these kinds: as many as figures tell apart."""

    what: Literal["ready"] = "ready"
    kinds: Annotated[
        list[Annotated[str, Field(max_length=64)]], Field(max_length=MOST_KINDS, default_factory=list)
    ]


class QuietUntil(Message):
    """The event loop may be silent until then, in seconds of ``core.clock.boottime()``."""

    what: Literal["quiet"] = "quiet"
    boottime: FiniteFloat


class Figures(Message):
    """A part of everything that the child counts, as ``telemetry.figures`` packs it; a report ends it."""

    what: Literal["figures"] = "figures"
    part: Annotated[str, Field(max_length=LONGEST_PART)]


class Report(Message):
    """How the child's worker is, if it has started, behind the parts of its figures if there are new ones."""

    what: Literal["report"] = "report"
    readiness: Annotated[str, Field(max_length=LONGEST_READINESS)] | None


class KillRequest(Message):
    """The child asks to be killed, for runs that ignore their stop."""

    what: Literal["kill"] = "kill"
    culprits: Annotated[list[tuple[UUID, int]], Field(max_length=MOST_CULPRITS)]
    reason: Annotated[str, Field(max_length=LONGEST_TEXT)]


class Stopped(Message):
    """The child's worker has stopped in order; it claims nothing any more, but may still hold jobs."""

    what: Literal["stopped"] = "stopped"
    holds_jobs: bool


class LastWords(Message):
    """The error by which the child is about to end."""

    what: Literal["last words"] = "last words"
    text: Annotated[str, Field(max_length=LONGEST_TEXT)]


class Wake(Message):
    """Publish now what waits to be published."""

    what: Literal["wake"] = "wake"


class TakeBack(Message):
    """A sibling has died: take back what it held."""

    what: Literal["take back"] = "take back"
    dead: DeadOwner


class Sibling(Message):
    """Another child of the same parent, which takes back itself what that one leaves."""

    what: Literal["sibling"] = "sibling"
    worker_id: str


class StopWorker(Message):
    """Stop: drain, or with ``force`` hand every job back at once."""

    what: Literal["stop"] = "stop"
    force: bool


FromChild: TypeAlias = (
    Tick | Registered | Ready | QuietUntil | Figures | Report | KillRequest | Stopped | LastWords
)
FromParent: TypeAlias = Wake | TakeBack | Sibling | StopWorker

FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="what")])
FROM_PARENT: TypeAdapter[FromParent] = TypeAdapter(Annotated[FromParent, Field(discriminator="what")])
