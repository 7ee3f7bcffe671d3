"""What parent and child tell each other: JSON lines, and no harm from lines that are none."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias
from uuid import UUID

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from jsworker.telemetry.worker_status import MOST_KINDS

LONGEST_LINE: Final = 64 * 1024
"""Bytes; a longer line is skipped."""
MOST_CULPRITS: Final = 500
LONGEST_TEXT: Final = 4_000
"""Characters of a reason or of last words."""
LONGEST_READINESS: Final = 12 * 1024
LONGEST_PART: Final = 48 * 1024
"""Characters of packed figures in one line."""
MOST_PARTS: Final = 4


class Tick(BaseModel):
    """The child's event loop has come round."""

    what: Literal["tick"] = "tick"


class Registered(BaseModel):
    """The child owns jobs under this worker id from now on."""

    what: Literal["registered"] = "registered"
    worker_id: str


class Ready(BaseModel):
    """The child's worker works.

    Attributes:
        kinds: on which it does, as many as figures tell apart.
    """

    what: Literal["ready"] = "ready"
    kinds: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MOST_KINDS)] = []


class QuietUntil(BaseModel):
    """The event loop may be silent until then, in seconds of ``runtime.clock.boottime()``."""

    what: Literal["quiet"] = "quiet"
    boottime: FiniteFloat


class Figures(BaseModel):
    """A part of everything that the child counts, as ``observe.figures`` packs it; a report ends it."""

    what: Literal["figures"] = "figures"
    part: Annotated[str, Field(max_length=LONGEST_PART)]


class Report(BaseModel):
    """How the child's worker is, behind the parts of its figures if there are new ones.

    Attributes:
        readiness: as ``observe.figures`` writes it; None: it starts, or has stopped.
    """

    what: Literal["report"] = "report"
    readiness: Annotated[str, Field(max_length=LONGEST_READINESS)] | None


class Condemn(BaseModel):
    """The child asks to be killed, for runs that ignore their stop."""

    what: Literal["condemn"] = "condemn"
    culprits: Annotated[list[tuple[UUID, int]], Field(max_length=MOST_CULPRITS)]
    reason: Annotated[str, Field(max_length=LONGEST_TEXT)]


class Stopped(BaseModel):
    """The child's worker has stopped in order; it claims nothing any more, but may still hold jobs."""

    what: Literal["stopped"] = "stopped"
    holds_jobs: bool


class LastWords(BaseModel):
    """The error by which the child is about to end."""

    what: Literal["last words"] = "last words"
    text: Annotated[str, Field(max_length=LONGEST_TEXT)]


class Wake(BaseModel):
    """Publish now what waits to be published."""

    what: Literal["wake"] = "wake"


class Bury(BaseModel):
    """A sibling has died: take back what it held."""

    what: Literal["bury"] = "bury"
    worker_id: str
    reason: Annotated[str, Field(max_length=LONGEST_TEXT)]
    counted: bool
    culprits: Annotated[list[UUID], Field(max_length=MOST_CULPRITS)]


class Sibling(BaseModel):
    """Another child of the same parent, which takes back itself what that one leaves."""

    what: Literal["sibling"] = "sibling"
    worker_id: str


class Stop(BaseModel):
    """Stop: drain, or with ``force`` hand every job back at once."""

    what: Literal["stop"] = "stop"
    force: bool


FromChild: TypeAlias = (
    Tick | Registered | Ready | QuietUntil | Figures | Report | Condemn | Stopped | LastWords
)
FromParent: TypeAlias = Wake | Bury | Sibling | Stop
Message: TypeAlias = FromChild | FromParent

_ANY: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="what")])


def line_of(message: Message) -> bytes:
    """Return a message as it is sent."""
    return message.model_dump_json().encode() + b"\n"


class Lines:
    """Cuts what arrives into messages; None stands for a line that is none."""

    def __init__(self) -> None:
        self._begun = b""
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[Message | None]:
        """Take bytes and yield the messages that they complete."""
        *lines, rest = (self._begun + data).split(b"\n")
        for line in lines:
            yield None if self._skipping or len(line) > LONGEST_LINE else _read(line)
            self._skipping = False
        self._skipping = self._skipping or len(rest) > LONGEST_LINE
        self._begun = b"" if self._skipping else rest


def _read(line: bytes) -> Message | None:
    try:
        return _ANY.validate_json(line)
    except ValidationError:
        return None
