"""The messages between parent and child."""

from typing import Annotated, Final, Literal, TypeAlias
from uuid import UUID

from pydantic import Field, FiniteFloat, TypeAdapter

from jsworker.core.message_link import Message
from jsworker.telemetry.worker_status import Readiness
from jsworker.worker.supervision import DeadOwner

MOST_CULPRITS: Final = 500
LONGEST_TEXT: Final = 4_000
LONGEST_FIGURES: Final = 512 * 1024
"""Characters; ``MOST_KINDS`` kinds with the longest names take up to 450 KiB."""

_Text: TypeAlias = Annotated[str, Field(max_length=LONGEST_TEXT)]


class Tick(Message):
    """The child's event loop runs; it may be silent until ``quiet_until``, in seconds of boot time."""

    what: Literal["tick"] = "tick"
    quiet_until: FiniteFloat = 0.0


class Registered(Message):
    """A child may own jobs under this worker id from now on; if it dies, the parent takes them back."""

    what: Literal["registered"] = "registered"
    worker_id: str


class Ready(Message):
    """The child's worker has started, with these kinds."""

    what: Literal["ready"] = "ready"
    kinds: list[Annotated[str, Field(max_length=64)]]


class Report(Message):
    """The state of the child's worker, if it has started, and its figures, packed, if they are new."""

    what: Literal["report"] = "report"
    readiness: Readiness | None
    figures: Annotated[str, Field(max_length=LONGEST_FIGURES)] | None


class KillRequest(Message):
    """The child asks to be killed, because runs ignore the request to stop."""

    what: Literal["kill"] = "kill"
    culprits: Annotated[list[tuple[UUID, int]], Field(max_length=MOST_CULPRITS)]
    reason: _Text


class Stopped(Message):
    """The child's worker has ended in order, requested or not; it claims nothing, but may still hold jobs."""

    what: Literal["stopped"] = "stopped"
    holds_jobs: bool


class LastWords(Message):
    """The error that is about to end the child."""

    what: Literal["last words"] = "last words"
    text: _Text


class Wake(Message):
    """Publish now the jobs that wait to be published."""

    what: Literal["wake"] = "wake"


class TakeBack(Message):
    """A sibling has died: take its jobs back."""

    what: Literal["take back"] = "take back"
    dead: DeadOwner


class StopWorker(Message):
    """Stop: drain, or with ``force`` hand every job back at once."""

    what: Literal["stop"] = "stop"
    force: bool


FromChild: TypeAlias = Tick | Registered | Ready | Report | KillRequest | Stopped | LastWords
FromParent: TypeAlias = Wake | TakeBack | Registered | StopWorker

FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="what")])
FROM_PARENT: TypeAdapter[FromParent] = TypeAdapter(Annotated[FromParent, Field(discriminator="what")])
